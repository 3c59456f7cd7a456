"""Compressed weights: every width, form and axis, against what coremltools says that they hold.

A weight is added to an input of one zero. Parts that are results of other decompressions have no value in coremltools;
numpy computes them here, one after the other.
"""

import sys
from pathlib import Path

import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types
from harness import F16, F32, case, rng

sys.path.append(str(Path(__file__).parent.parent))

from codes import codes, mask, pack

WIDTHS = {"uint1": 1, "uint2": 2, "uint3": 3, "uint4": 4, "uint6": 6, "uint8": 8}


def weight(op, name, make, only, dtype=F16, want=None, fails=None, edit=()):
    """`make` takes a source of random numbers and builds a weight of the type `dtype`."""
    held = []

    def build(x):
        made = make(rng(op, name))
        if want is None and fails is None:
            held.append(made.op.materialized_val_inference())
        return mb.add(x=x, y=made)

    values = lambda x: held[-1] if want is None else want(rng(op, name))
    oracle = "coremltools" if want is None and fails is None else "numpy"
    zero = np.zeros(1, dtype)
    case(op, name, build, zero, want=values, only=only, oracle=oracle, fails=fails, edit=edit)


def weight_of_integers(op, name, make, edit=(), fails=None):
    """Opsets before iOS 18 have no decompression that takes them: they are cast like other values."""
    held = []

    def build(x):
        made = make(rng(op, name))
        held.append(made.op.materialized_val_inference())
        return mb.add(x=x, y=mb.cast(x=made, dtype="fp16"))

    # Both fit: cast of iOS 17 takes small integers.
    case(
        op,
        name,
        build,
        np.zeros(1, F16),
        want=lambda x: held[-1].astype(F16),
        only=[17],
        oracle="coremltools",
        edit=edit,
        fails=fails,
    )


def halves(random, *shape):
    return random.standard_normal(shape).astype(F16)


def singles(random, *shape):
    return random.standard_normal(shape).astype(F32)


def shape_name(shape):
    return "x".join(map(str, shape))


def shifts():
    op = "constexpr_blockwise_shift_scale"
    shapes = [
        ((4, 32), (1, 1)),
        ((4, 32), (4, 1)),
        ((4, 32), (4, 2)),
        ((4, 32), (2, 32)),
        ((3, 5), (3, 5)),
        ((7,), (1,)),
        ((2, 3, 4), (1, 3, 2)),
        ((2, 3, 2, 2), (2, 3, 1, 1)),
        ((1, 2, 1, 3, 2), (1, 2, 1, 1, 1)),
    ]
    for kind in ("int4", "uint4", "int8", "uint8"):
        for number, (shape, coarse) in enumerate(shapes):
            offset = ("none", "codes", "half")[number % 3]

            def make(random, kind=kind, shape=shape, coarse=coarse, offset=offset):
                by = {"none": None, "codes": codes(random, kind, *coarse), "half": halves(random, *coarse)}
                data, scale = codes(random, kind, *shape), halves(random, *coarse)
                return mb.constexpr_blockwise_shift_scale(data=data, scale=scale, offset=by[offset])

            named = f"{kind}_{shape_name(shape)}_by_{shape_name(coarse)}_offset_{offset}"
            weight(op, named, make, [18])
    for name, data, dtype in (("f16", halves, F16), ("f32", singles, F32)):
        make = lambda r, data=data: mb.constexpr_blockwise_shift_scale(
            data=data(r, 3, 4), scale=data(r, 3, 2), offset=data(r, 3, 2)
        )
        weight(op, f"of_{name}", make, [18], dtype)
    single = lambda r: mb.constexpr_blockwise_shift_scale(
        data=codes(r, "int8", 4, 5), scale=singles(r, 4, 1), offset=singles(r, 4, 1)
    )
    weight(op, "scale_f32", single, [18], F32)

    def looked_up(random):
        return codes(random, "uint4", 4, 6), codes(random, "int8", 2, 1, 16, 1), halves(random, 4, 1)

    def shift_of_lut(random):
        indices, lut, scale = looked_up(random)
        return mb.constexpr_blockwise_shift_scale(
            data=mb.constexpr_lut_to_dense(indices=indices, lut=lut), scale=scale
        )

    def value_of_lut(random):
        indices, lut, scale = looked_up(random)
        return (
            np.take_along_axis(np.repeat(lut[:, 0, :, 0], 2, 0), indices.astype(int), 1).astype(F16) * scale
        )

    weight(op, "of_lut", shift_of_lut, [18], want=value_of_lut)
    for kind in ("int4", "uint4", "int8", "uint8"):

        def stored(random, kind=kind):
            bits = mask(random, 0.4, 3, 7)
            return bits, codes(random, kind, int(bits.sum())), halves(random, 3, 1)

        def shift_of_sparse(random, stored=stored):
            bits, kept, scale = stored(random)
            return mb.constexpr_blockwise_shift_scale(
                data=mb.constexpr_sparse_to_dense(mask=bits, nonzero_data=kept), scale=scale
            )

        def value_of_sparse(random, stored=stored):
            bits, kept, scale = stored(random)
            return spread(bits, kept).astype(F16) * scale

        for kept in (op, "constexpr_sparse_to_dense"):
            weight(
                kept,
                f"of_sparse_{kind}" if kept == op else f"{kind}_scaled",
                shift_of_sparse,
                [18],
                want=value_of_sparse,
            )
    plain = lambda r: mb.constexpr_blockwise_shift_scale(
        data=codes(r, "int8", 2, 4), scale=np.ones((2, 2), F16), offset=np.zeros((2, 2), np.int8)
    )
    scale, offset = "scale = fp16[2, 2](1.0, 1.0, 1.0, 1.0)", "offset = int8[2, 2](0, 0, 0, 0)"
    for name, edit, fails in (
        (
            "scale_that_does_not_divide",
            (scale, "scale = fp16[2, 3](1, 1, 1, 1, 1, 1)"),
            "blocks [2, 3] of a tensor",
        ),
        ("scale_of_another_rank", (scale, "scale = fp16[2](1, 1)"), "blocks [2] of a tensor of shape [2, 4]"),
        (
            "offset_of_another_shape",
            (offset, "offset = int8[1, 2](0, 0)"),
            "offsets of shape [1, 2] and scales",
        ),
        ("integer_scale", (scale, "scale = int8[2, 2](1, 1, 1, 1)"), "scales of type int8"),
        (
            "declared_another_shape",
            ("v0: fp16[2, 4]", "v0: fp16[4, 2]"),
            "comes out as [2, 4], declared fp16[4, 2]",
        ),
        ("declared_another_type", ("v0: fp16[2, 4]", "v0: fp32[2, 4]"), "comes out as fp16, declared fp32"),
    ):
        weight(op, name, plain, [18], fails=fails, edit=(edit,))


def spread(bits, kept):
    dense = np.zeros(bits.shape, kept.dtype)
    dense[bits != 0] = kept
    return dense


def lookups():
    op = "constexpr_lut_to_dense"
    for kind, bits in WIDTHS.items():
        for dtype, values in ((F16, halves), (F32, singles)):
            make = lambda r, kind=kind, bits=bits, values=values: mb.constexpr_lut_to_dense(
                indices=codes(r, kind, 3, 7), lut=values(r, 1, 1, 1 << bits, 1)
            )
            if bits < 8 or dtype is F16:
                weight(op, f"{kind}_{np.dtype(dtype)}", make, [18], dtype)
        groups = lambda r, kind=kind, bits=bits: mb.constexpr_lut_to_dense(
            indices=codes(r, kind, 4, 5), lut=halves(r, 2, 1, 1 << bits, 1)
        )
        weight(op, f"{kind}_groups_of_rows", groups, [18])
    for shape, coarse in (
        ((9,), (1,)),
        ((4, 6), (2, 3)),
        ((2, 4, 3), (2, 2, 1)),
        ((2, 1, 3, 2), (1, 1, 3, 1)),
        ((2, 1, 2, 1, 3), (1, 1, 2, 1, 1)),
    ):
        make = lambda r, shape=shape, coarse=coarse: mb.constexpr_lut_to_dense(
            indices=codes(r, "uint2", *shape), lut=halves(r, *coarse, 4, 1)
        )
        weight(op, f"{shape_name(shape)}_by_{shape_name(coarse)}", make, [18])
    for axis, lanes in ((0, 2), (1, 3), (2, 4), (-1, 2), (-3, 4)):
        make = lambda r, axis=axis, lanes=lanes: mb.constexpr_lut_to_dense(
            indices=codes(r, "uint3", 2, 3, 4), lut=halves(r, 1, 1, 2, 8, lanes), vector_axis=np.int32(axis)
        )
        weight(op, f"vectors_of_{lanes}_axis_{axis}".replace("-", "m"), make, [18])
    for kind in ("int8", "uint8"):
        make = lambda r, kind=kind: mb.constexpr_blockwise_shift_scale(
            data=mb.constexpr_lut_to_dense(indices=codes(r, "uint2", 2, 5), lut=codes(r, kind, 1, 1, 4, 1)),
            scale=np.ones((1, 1), F16),
        )
        value = lambda r, kind=kind: picked(codes(r, "uint2", 2, 5), codes(r, kind, 1, 1, 4, 1)).astype(F16)
        weight(op, f"{kind}_entries_scaled", make, [18], want=value)
    for name, edit, fails in (
        (
            "palette_of_another_size",
            ("fp16[1, 1, 4, 1](0.0, 1.0, 2.0, 3.0)", "fp16[1, 1, 2, 1](0, 1)"),
            "indices of type uint2 into palettes of 2 entries",
        ),
        (
            "vectors_without_axis",
            ("fp16[1, 1, 4, 1](0.0, 1.0, 2.0, 3.0)", "fp16[1, 1, 4, 2](0, 1, 2, 3, 0, 1, 2, 3)"),
            "palettes of vectors of 2, and no `vector_axis`",
        ),
    ):
        make = lambda r: mb.constexpr_lut_to_dense(
            indices=codes(r, "uint2", 2, 4), lut=np.arange(4, dtype=F16).reshape(1, 1, 4, 1)
        )
        weight(op, name, make, [18], fails=fails, edit=(edit,))
    for bits in (1, 2, 4, 6, 8):
        for dtype, values, shape in ((F16, halves, (3, 5)), (F32, singles, (2, 1, 3, 1, 2))):
            make = lambda r, bits=bits, values=values, shape=shape: mb.constexpr_lut_to_dense(
                indices=pack(r.integers(0, 1 << bits, shape), bits),
                lut=values(r, 1 << bits),
                shape=np.array(shape, np.uint32),
            )
            if bits < 8 or dtype is F16:
                weight(op, f"packed_{bits}_bits_{np.dtype(dtype)}", make, [16], dtype)
    line = lambda r: mb.constexpr_lut_to_dense(
        indices=pack(r.integers(0, 4, 9), 2), lut=halves(r, 4), shape=np.array([9], np.uint32)
    )
    weight(op, "packed_rank_1", line, [16])
    for kind in ("int8", "uint8"):
        bare = lambda r, kind=kind: mb.constexpr_lut_to_dense(
            indices=pack(r.integers(0, 4, 8), 2), lut=codes(r, kind, 4), shape=np.array([2, 4], np.uint32)
        )
        weight_of_integers(op, f"packed_{kind}_entries", bare)
    few = ("lut = fp16[4](0.0, 1.0, 2.0, 3.0)", "lut = fp16[3](0, 1, 2)")
    ordered = lambda r: mb.constexpr_lut_to_dense(
        indices=pack(r.integers(0, 4, 8), 2), lut=np.arange(4, dtype=F16), shape=np.array([2, 4], np.uint32)
    )
    weight(op, "palette_of_3", ordered, [16], fails="a palette of 3 values", edit=(few,))
    short = ("shape = uint32[2](2, 4)", "shape = uint32[2](2, 5)")
    weight(op, "too_few_indices", ordered, [16], fails="10 indices of 2 bits in uint8[2]", edit=(short,))


def picked(indices, lut):
    return lut.reshape(-1)[indices.astype(int)]


def sparse():
    op = "constexpr_sparse_to_dense"
    for name, dtype, values in (("f16", F16, halves), ("f32", F32, singles)):
        for share in (0.0, 0.4, 1.0):

            def make(random, values=values, share=share):
                bits = mask(random, share, 5, 7)
                return mb.constexpr_sparse_to_dense(mask=bits, nonzero_data=values(random, int(bits.sum())))

            if share > 0:
                weight(op, f"{name}_{share:.1f}_stored", make, [18], dtype)

        def packed(random, values=values):
            bits = random.random((3, 11)) < 0.3
            return mb.constexpr_sparse_to_dense(
                nonzero_data=values(random, int(bits.sum())),
                mask=np.packbits(bits.ravel(), bitorder="little"),
                shape=np.array([3, 11], np.uint32),
            )

        weight(op, f"packed_{name}", packed, [16], dtype)
    for kind in ("int8", "uint8"):
        bare = lambda r, kind=kind: mb.constexpr_sparse_to_dense(
            nonzero_data=codes(r, kind, 3),
            mask=np.array([0b10110], np.uint8),
            shape=np.array([2, 4], np.uint32),
        )
        weight_of_integers(op, f"packed_{kind}", bare)
    narrow = (("nonzero_data = int8", "nonzero_data = int4"), ("v0: int8", "v0: int4"))
    few_bits = lambda r: mb.constexpr_sparse_to_dense(
        nonzero_data=np.ones(3, np.int8),
        mask=np.array([0b10110], np.uint8),
        shape=np.array([2, 4], np.uint32),
    )
    weight_of_integers(
        op, "packed_int4_alone", few_bits, narrow, "`x` is a part of a compressed weight, not a weight"
    )
    for shape in ((19,), (2, 3, 4), (1, 2, 3, 1, 4)):

        def ranked(random, shape=shape):
            bits = mask(random, 0.5, *shape)
            return mb.constexpr_sparse_to_dense(mask=bits, nonzero_data=halves(random, int(bits.sum())))

        weight(op, f"rank_{len(shape)}", ranked, [18])
    few = lambda r: mb.constexpr_sparse_to_dense(
        mask=np.array([[0, 1, 1, 0]]).astype(types.np_uint1_dtype), nonzero_data=np.array([1, 2], F16)
    )
    edit = (("uint1[1, 4](0, 1, 1, 0)", "uint1[1, 4](0, 1, 1, 1)"),)
    weight(op, "too_few_stored", few, [18], fails="the mask 3 elements that are set", edit=edit)

    op = "constexpr_sparse_blockwise_shift_scale"
    for kind in ("int4", "uint4", "int8", "uint8"):
        for shape, coarse, offset in (
            ((4, 9), (4, 1), "codes"),
            ((4, 8), (2, 4), "none"),
            ((3, 2, 4), (1, 2, 2), "half"),
            ((11,), (1,), "none"),
        ):

            def scaled(random, kind=kind, shape=shape, coarse=coarse, offset=offset):
                bits = mask(random, 0.4, *shape)
                by = {"none": None, "codes": codes(random, kind, *coarse), "half": halves(random, *coarse)}
                pair = mb.constexpr_sparse_blockwise_shift_scale(
                    data_mask=bits,
                    nonzero_data=codes(random, kind, int(bits.sum())),
                    scale=halves(random, *coarse),
                    offset=by[offset],
                )
                return mb.constexpr_sparse_to_dense(mask=pair[0], nonzero_data=pair[1])

            weight(op, f"{kind}_{shape_name(shape)}_offset_{offset}", scaled, [18])
    for name, values, dtype in (("f16", halves, F16), ("f32", singles, F32)):

        def floats(random, values=values):
            bits = mask(random, 0.4, 4, 6)
            pair = mb.constexpr_sparse_blockwise_shift_scale(
                data_mask=bits, nonzero_data=values(random, int(bits.sum())), scale=values(random, 4, 1)
            )
            return mb.constexpr_sparse_to_dense(mask=pair[0], nonzero_data=pair[1])

        weight(op, f"of_{name}", floats, [18], dtype)
    single = lambda r: of_sparse(r, singles(r, 4, 1), singles(r, 4, 1))
    weight(op, "offset_f32", single, [18], F32)
    for kind in ("int8", "uint8"):

        def parts(random, kind=kind):
            bits = mask(random, 0.4, 4, 6)
            return (
                bits,
                codes(random, "uint4", int(bits.sum())),
                codes(random, kind, 1, 1, 16, 1),
                halves(random, 4, 1),
            )

        def joint(random, parts=parts):
            bits, indices, lut, scale = parts(random)
            pair = mb.constexpr_lut_to_sparse(indices_mask=bits, indices_nonzero_data=indices, lut=lut)
            pair = mb.constexpr_sparse_blockwise_shift_scale(
                data_mask=pair[0], nonzero_data=pair[1], scale=scale
            )
            return mb.constexpr_sparse_to_dense(mask=pair[0], nonzero_data=pair[1])

        def value(random, parts=parts):
            bits, indices, lut, scale = parts(random)
            return spread(bits, picked(indices, lut)).astype(F16) * scale

        weight(op, f"of_{kind}_lut", joint, [18], want=value)
        weight("constexpr_lut_to_sparse", f"{kind}_entries_scaled", joint, [18], want=value)

    op = "constexpr_lut_to_sparse"
    for kind, bits in WIDTHS.items():
        for dtype, values in ((F16, halves), (F32, singles)):

            def looked_up(random, kind=kind, bits=bits, values=values):
                stored = mask(random, 0.4, 4, 7)
                pair = mb.constexpr_lut_to_sparse(
                    indices_mask=stored,
                    indices_nonzero_data=codes(random, kind, int(stored.sum())),
                    lut=values(random, 2, 1, 1 << bits, 1),
                )
                return mb.constexpr_sparse_to_dense(mask=pair[0], nonzero_data=pair[1])

            if bits < 6 or dtype is F16:
                weight(op, f"{kind}_{np.dtype(dtype)}", looked_up, [18], dtype)
    for axis, lanes in ((0, 2), (1, 3), (-1, 2)):

        def vectors(random, axis=axis, lanes=lanes):
            stored = mask(random, 0.4, 4, 6)
            pair = mb.constexpr_lut_to_sparse(
                indices_mask=stored,
                indices_nonzero_data=codes(random, "uint3", int(stored.sum())),
                lut=halves(random, 2, 1, 8, lanes),
                vector_axis=np.int32(axis),
            )
            return mb.constexpr_sparse_to_dense(mask=pair[0], nonzero_data=pair[1])

        weight(op, f"vectors_of_{lanes}_axis_{axis}".replace("-", "m"), vectors, [18])


def of_sparse(random, scale, offset):
    bits = mask(random, 0.4, 4, 6)
    pair = mb.constexpr_sparse_blockwise_shift_scale(
        data_mask=bits, nonzero_data=codes(random, "int8", int(bits.sum())), scale=scale, offset=offset
    )
    return mb.constexpr_sparse_to_dense(mask=pair[0], nonzero_data=pair[1])


def affine():
    op = "constexpr_affine_dequantize"
    for kind in ("int8", "uint8"):
        for axis, size in ((0, 2), (1, 3), (-1, 4)):
            make = lambda r, kind=kind, axis=axis, size=size: mb.constexpr_affine_dequantize(
                quantized_data=codes(r, kind, 2, 3, 4),
                zero_point=codes(r, kind, size),
                scale=halves(r, size),
                axis=axis,
            )
            weight(op, f"{kind}_axis_{axis}".replace("-", "m"), make, [16])
        scalars = lambda r, kind=kind: mb.constexpr_affine_dequantize(
            quantized_data=codes(r, kind, 3, 5),
            zero_point=codes(r, kind, 1)[0],
            scale=singles(r, 1)[0],
            axis=0,
        )
        weight(op, f"{kind}_scalars_f32", scalars, [16], F32)
        mixed = lambda r, kind=kind: mb.constexpr_affine_dequantize(
            quantized_data=codes(r, kind, 4, 5), zero_point=codes(r, kind, 1)[0], scale=halves(r, 5), axis=1
        )
        weight(op, f"{kind}_one_zero_point", mixed, [16])
        points = lambda r, kind=kind: mb.constexpr_affine_dequantize(
            quantized_data=codes(r, kind, 4, 5), zero_point=singles(r, 4), scale=singles(r, 1)[0], axis=0
        )
        weight(op, f"{kind}_zero_point_f32", points, [16], F32)
    for shape, axis in (((6,), 0), ((2, 1, 3, 1, 2), 2)):
        make = lambda r, shape=shape, axis=axis: mb.constexpr_affine_dequantize(
            quantized_data=codes(r, "int8", *shape),
            zero_point=codes(r, "int8", shape[axis]),
            scale=halves(r, shape[axis]),
            axis=axis,
        )
        weight(op, f"rank_{len(shape)}", make, [16])
    plain = lambda r: mb.constexpr_affine_dequantize(
        quantized_data=codes(r, "int8", 2, 3), zero_point=np.zeros(2, np.int8), scale=np.ones(2, F16), axis=0
    )
    for name, edit, fails in (
        (
            "scale_of_another_size",
            ("fp16[2](1.0, 1.0)", "fp16[3](1, 1, 1)"),
            "3 values of `scale` along an axis of size 2",
        ),
        ("no_such_axis", ("axis = int32(0)", "axis = int32(2)"), "axis"),
    ):
        weight(op, name, plain, [16], fails=fails, edit=(edit,))


def casts():
    for shape in ((3, 7), (5,), (1, 2, 1, 2, 2)):
        make = lambda r, shape=shape: mb.constexpr_cast(source_val=halves(r, *shape), output_dtype="fp32")
        weight("constexpr_cast", f"rank_{len(shape)}", make, None, F32)
    edges = np.array([0, -0.0, 65504, -65504, 6e-8, np.inf, -np.inf], F16)
    weight(
        "constexpr_cast",
        "edges",
        lambda r: mb.constexpr_cast(source_val=edges, output_dtype="fp32"),
        None,
        F32,
    )


def weights():
    for group in (shifts, lookups, sparse, affine, casts):
        group()

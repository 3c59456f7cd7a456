"""Writes packages with compressed weights in every form that coremltools writes, and what it says they hold.

Run by hand:  python constexpr.py   (coremltools 9.0, numpy)

`constexpr18.mlpackage` has the operations of iOS 18, with their parts in inputs, `constexpr16.mlpackage` those of iOS 16,
with their parts in attributes. Every output is `x + weight` for an fp16 or fp32 input `x` of one element, which the tests
set to 0; `constexpr.json` has the values of each weight from coremltools' own decompression. `products.mlpackage` uses
compressed weights in `linear`, `gather`, `matmul` and `softmax`, for tests of streamed weights.
"""

import json
import logging
import shutil
import tempfile
import warnings
from functools import partial
from pathlib import Path

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")

import coremltools as ct
import numpy as np
from codes import codes as of_codes
from codes import mask as of_bits
from codes import pack
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

HERE = Path(__file__).parent
RNG = np.random.default_rng(3)
codes = partial(of_codes, RNG)


def save(program, name, target):
    model = ct.convert(
        program,
        minimum_deployment_target=target,
        compute_precision=ct.precision.FLOAT32,
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.mlpackage"
        model.save(str(path))
        shutil.rmtree(HERE / path.name, ignore_errors=True)
        shutil.copytree(path, HERE / path.name)


def f16(*shape):
    return RNG.standard_normal(shape).astype(np.float16)


def f32(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def mask(*shape):
    return of_bits(RNG, 0.4, *shape)


EXPECTED = {}


def weight(name, value):
    """Notes what a weight holds and returns it."""
    held = value.op.materialized_val_inference()
    EXPECTED[name] = {
        "dtype": str(held.dtype),
        "shape": list(held.shape),
        "values": [float(v) for v in held.ravel()],
    }
    return value


def output(name, value, half, single):
    x = half if value.dtype == types.fp16 else single
    return mb.add(x=x, y=weight(name, value), name=name)


def shifts18():
    """Every width, per tensor, per channel, per block of either dimension, with and without offsets."""
    for kind in ("int4", "uint4", "int8", "uint8"):
        for shape, coarse in [
            ((6, 64), (1, 1)),
            ((6, 64), (6, 1)),
            ((6, 64), (6, 2)),
            ((6, 64), (3, 64)),
            ((6, 5, 3, 3), (6, 5, 1, 1)),
        ]:
            for offset in (None, "codes", "half"):
                scale = f16(*coarse)
                by = {None: None, "codes": codes(kind, *coarse), "half": f16(*coarse)}[offset]
                name = f"shift_{kind}_{'x'.join(map(str, shape))}_by_{'x'.join(map(str, coarse))}_{offset}"
                yield (
                    name,
                    mb.constexpr_blockwise_shift_scale(data=codes(kind, *shape), scale=scale, offset=by),
                )
    yield (
        "shift_f32",
        mb.constexpr_blockwise_shift_scale(data=codes("int8", 4, 37), scale=f32(4, 37), offset=f32(4, 37)),
    )
    yield "shift_of_halves", mb.constexpr_blockwise_shift_scale(data=f16(3, 20), scale=f16(3, 2))


def lookups18():
    for kind, entries in [
        ("uint1", 2),
        ("uint2", 4),
        ("uint3", 8),
        ("uint4", 16),
        ("uint6", 64),
        ("uint8", 256),
    ]:
        yield f"lut_{kind}", mb.constexpr_lut_to_dense(indices=codes(kind, 5, 29), lut=f16(1, 1, entries, 1))
        yield (
            f"lut_{kind}_grouped",
            mb.constexpr_lut_to_dense(indices=codes(kind, 6, 28), lut=f16(3, 1, entries, 1)),
        )
    for axis, lanes in [(0, 2), (1, 3), (-1, 4)]:
        yield (
            f"lut_vectors_axis_{axis % 3}_of_{lanes}",
            mb.constexpr_lut_to_dense(
                indices=codes("uint4", 6, 5, 8),
                lut=f16(2, 1, 1, 16, lanes),
                vector_axis=np.int32(axis),
            ),
        )
    yield (
        "lut_blocks_of_columns",
        mb.constexpr_lut_to_dense(indices=codes("uint2", 4, 24), lut=f32(2, 3, 4, 1)),
    )
    quantised = mb.constexpr_lut_to_dense(
        indices=codes("uint4", 8, 32), lut=codes("int8", 2, 1, 16, 1), name="quantised_palette"
    )
    yield "shift_of_lut", mb.constexpr_blockwise_shift_scale(data=quantised, scale=f16(8, 1))


def sparse18():
    for kind in ("int4", "int8", "uint8"):
        bits = mask(7, 33)
        pair = mb.constexpr_sparse_blockwise_shift_scale(
            data_mask=bits,
            nonzero_data=codes(kind, int(bits.sum())),
            scale=f16(7, 1),
            offset=codes(kind, 7, 1),
        )
        yield f"sparse_shift_{kind}", mb.constexpr_sparse_to_dense(mask=pair[0], nonzero_data=pair[1])
    for dtype in (np.float16, np.float32):
        bits = mask(5, 100)
        kept = RNG.standard_normal(int(bits.sum())).astype(dtype)
        yield f"sparse_{np.dtype(dtype)}", mb.constexpr_sparse_to_dense(mask=bits, nonzero_data=kept)
    for lanes, axis in [(1, None), (2, 0), (3, 1)]:
        bits = mask(4, 18)
        pair = mb.constexpr_lut_to_sparse(
            indices_mask=bits,
            indices_nonzero_data=codes("uint3", int(bits.sum())),
            lut=f16(2, 1, 8, lanes),
            vector_axis=None if axis is None else np.int32(axis),
        )
        yield f"sparse_lut_{lanes}", mb.constexpr_sparse_to_dense(mask=pair[0], nonzero_data=pair[1])
    # Joint: a sparse palette of integers, which are then scaled.
    bits = mask(6, 40)
    pair = mb.constexpr_lut_to_sparse(
        indices_mask=bits,
        indices_nonzero_data=codes("uint4", int(bits.sum())),
        lut=codes("int8", 1, 1, 16, 1),
    )
    shift_scale = mb.constexpr_sparse_blockwise_shift_scale(
        data_mask=pair[0], nonzero_data=pair[1], scale=f16(6, 1)
    )
    joint = mb.constexpr_sparse_to_dense(mask=shift_scale[0], nonzero_data=shift_scale[1])
    # coremltools has no definition for parts that are results: in its words, one after the other.
    values = pair[1].op.materialized_val_inference()[1]
    dense = np.zeros((6, 40), np.int8)
    dense[bits != 0] = values
    scaled = (dense.astype(np.float16) * shift_scale[1].op.scale.val).astype(np.float16)
    joint.op.materialized_val_inference = lambda: np.where(bits != 0, scaled, np.float16(0))
    yield "sparse_shift_of_lut", joint


def build18():
    @mb.program(
        input_specs=[mb.TensorSpec((1,), dtype=types.fp16), mb.TensorSpec((1,), dtype=types.fp32)],
        opset_version=ct.target.iOS18,
    )
    def program(half, single):
        made = [*shifts18(), *lookups18(), *sparse18()]
        made.append(("cast18", mb.constexpr_cast(source_val=f16(3, 7), output_dtype="fp32")))
        return tuple(output(name, value, half, single) for name, value in made)

    save(program, "constexpr18", ct.target.iOS18)


def build16():
    @mb.program(
        input_specs=[mb.TensorSpec((1,), dtype=types.fp16), mb.TensorSpec((1,), dtype=types.fp32)],
        opset_version=ct.target.iOS16,
    )
    def program(half, single):
        made = []
        for kind in ("int8", "uint8"):
            for axis, size in [(0, 5), (1, 6), (-1, 7)]:
                made.append(
                    (
                        f"affine_{kind}_axis_{axis % 3}",
                        mb.constexpr_affine_dequantize(
                            quantized_data=codes(kind, 5, 6, 7),
                            zero_point=codes(kind, size),
                            scale=f16(size),
                            axis=axis,
                        ),
                    )
                )
            made.append(
                (
                    f"affine_{kind}_scalars",
                    mb.constexpr_affine_dequantize(
                        quantized_data=codes(kind, 3, 41),
                        zero_point=codes(kind, 1)[0],
                        scale=f32(1)[0],
                        axis=0,
                    ),
                )
            )
        made.append(
            (
                "affine_mixed",
                mb.constexpr_affine_dequantize(
                    quantized_data=codes("int8", 4, 9), zero_point=codes("int8", 1)[0], scale=f16(9), axis=1
                ),
            )
        )
        for bits in (1, 2, 4, 6, 8):
            picked = RNG.integers(0, 1 << bits, (3, 5, 7))
            made.append(
                (
                    f"old_lut_{bits}",
                    mb.constexpr_lut_to_dense(
                        indices=pack(picked, bits), lut=f16(1 << bits), shape=np.array([3, 5, 7], np.uint32)
                    ),
                )
            )
        bits = RNG.random((3, 43)) < 0.3
        made.append(
            (
                "old_sparse",
                mb.constexpr_sparse_to_dense(
                    nonzero_data=f16(int(bits.sum())),
                    mask=np.packbits(bits.ravel(), bitorder="little"),
                    shape=np.array([3, 43], np.uint32),
                ),
            )
        )
        made.append(("cast16", mb.constexpr_cast(source_val=f16(3, 7), output_dtype="fp32")))
        return tuple(output(name, value, half, single) for name, value in made)

    save(program, "constexpr16", ct.target.iOS16)


def build_products():
    @mb.program(
        input_specs=[mb.TensorSpec((9, 64), dtype=types.fp16), mb.TensorSpec((4,), dtype=types.int32)],
        opset_version=ct.target.iOS18,
    )
    def program(x, ids):
        outputs = []
        for name, value in [
            ("int4", mb.constexpr_blockwise_shift_scale(data=codes("int4", 96, 64), scale=f16(96, 2))),
            ("lut6", mb.constexpr_lut_to_dense(indices=codes("uint6", 96, 64), lut=f16(12, 1, 64, 1))),
        ]:
            outputs.append(mb.linear(x=x, weight=value, bias=f16(96), name=f"{name}_linear"))
            outputs.append(mb.gather(x=value, indices=ids, axis=0, name=f"{name}_rows"))
            outputs.append(mb.gather(x=value, indices=ids, axis=1, name=f"{name}_columns"))
            outputs.append(mb.matmul(x=x, y=value, transpose_y=True, name=f"{name}_matmul"))
            outputs.append(mb.softmax(x=mb.mul(x=value, y=np.float16(0.5)), axis=-1, name=f"{name}_softmax"))
        return tuple(outputs)

    save(program, "products", ct.target.iOS18)


build18()
build16()
build_products()
(HERE / "constexpr.json").write_text(json.dumps(EXPECTED) + "\n")

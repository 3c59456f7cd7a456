"""Elements moved about: shapes, slices, joins, padding, orders and sums along an axis."""

import numpy as np
from coremltools.converters.mil import Builder as mb
from harness import F16, F32, I32, case, f32, ints, op


def moves():
    for label, dtype in (("f16", F16), ("f32", F32), ("int32", I32), ("bool", bool)):
        four = (dtype, 2, 3, 4, 5)
        case("transpose", label, op("transpose", perm=[0, 2, 1, 3]), four)
        case("transpose", f"negative_{label}", op("transpose", perm=[-1, 1, -2, 0]), four)
        case("reshape", label, op("reshape", shape=[6, -1]), four)
        case(
            "reshape",
            f"transposed_{label}",
            lambda x: mb.reshape(x=mb.transpose(x=x, perm=[1, 0]), shape=[12]),
            (dtype, 3, 4),
        )
        case("expand_dims", label, op("expand_dims", axes=[0, -1, 2]), (dtype, 3, 4))
        case("squeeze", label, op("squeeze", axes=[0, -1]), (dtype, 1, 3, 1))
        case("squeeze", f"all_{label}", op("squeeze"), (dtype, 1, 3, 1, 2))
        case("tile", label, op("tile", reps=[2, 1, 3]), (dtype, 2, 3, 4))
        case("reverse", label, op("reverse", axes=[0, -1]), (dtype, 2, 3, 4))
        case("flatten2d", label, op("flatten2d", axis=2), four)
        case("slice_by_index", label, op("slice_by_index", begin=[0, 1, -3, 0], end=[2, 3, -1, 5]), four)
        strides = op("slice_by_index", begin=[1, 0, 3, 0], end=[0, 3, 0, 5], stride=[-1, 2, -2, 3])
        case("slice_by_index", f"stride_{label}", strides, four)
        case("slice_by_size", label, op("slice_by_size", begin=[0, 1, -2, 0], size=[1, 2, 1, -1]), four)
        case("split", label, op("split", num_splits=2, axis=-1), (dtype, 3, 8))
        case("split", f"sizes_{label}", op("split", split_sizes=[1, 2, 3], axis=0), (dtype, 6, 2))
        for axis in (0, 1, -1):
            pair = lambda x, y, axis=axis: mb.concat(values=[x, y, x], axis=axis)
            case("concat", f"axis_{axis % 3}_{label}", pair, (dtype, 2, 3, 4), (dtype, 2, 3, 4))
            stack = lambda x, y, axis=axis: mb.stack(values=[x, y], axis=axis)
            case("stack", f"axis_{axis % 3}_{label}", stack, (dtype, 2, 3), (dtype, 2, 3))
        mixed = lambda x, y: mb.concat(values=[x, y], axis=1, interleave=True)
        braid = lambda x, y: np.stack([x, y], 2).reshape(2, 6, 2)
        case("concat", f"interleave_{label}", mixed, (dtype, 2, 3, 2), (dtype, 2, 3, 2), want=braid)
        condition = np.array([True, False, True])
        case("select", label, op("select"), condition, (dtype, 2, 3), (dtype, 3))
        case("shape", label, op("shape"), (dtype, 2, 3, 4))
        case("band_part", label, op("band_part", lower=1, upper=0), (dtype, 2, 4, 5))
        case(
            "non_zero",
            label,
            op("non_zero"),
            np.array([[1, 0, 2], [0, 0, 3]]).astype(dtype),
            want=lambda x: np.argwhere(x).astype(I32),
        )
    masks = dict(begin_mask=[True, False, False, False], end_mask=[False, True, False, False])
    case(
        "slice_by_index",
        "masks",
        op("slice_by_index", begin=[1, 1, 0, 2], end=[1, 2, 4, 4], **masks),
        (F16, 2, 3, 4, 5),
    )
    squeeze = dict(squeeze_mask=[False, True, False, True])
    case(
        "slice_by_index",
        "squeeze",
        op("slice_by_index", begin=[0, -1, 0, 2], end=[2, 0, 4, 3], **squeeze),
        (F16, 2, 3, 4, 5),
    )
    backwards = dict(stride=[-1, 1], begin_mask=[True, False], end_mask=[True, False])
    case(
        "slice_by_index",
        "backwards",
        op("slice_by_index", begin=[0, 0], end=[0, 3], **backwards),
        (F32, 4, 3),
    )
    case("slice_by_index", "beyond", op("slice_by_index", begin=[-9, 1], end=[9, 99]), (F32, 3, 4))
    case(
        "slice_by_index",
        "empty",
        op("slice_by_index", begin=[2, 0], end=[2, 4]),
        (F32, 3, 4),
        want=lambda x: x[2:2],
    )
    case("slice_by_index", "computed", op("slice_by_index"), (F16, 3, 4), ints(1, 0), ints(3, 2))
    case("slice_by_size", "computed", op("slice_by_size"), (F16, 3, 4), ints(1, 0), ints(2, -1))
    case(
        "slice_by_size",
        "outside",
        op("slice_by_size"),
        (F16, 3, 4),
        ints(2, 0),
        ints(2, 4),
        fails="begin [2, 0] and size [2, 4]",
    )
    case("tile", "computed", op("tile"), (F16, 2, 3), ints(2, 2))
    case("tile", "rank_5", op("tile", reps=[1, 2, 1, 1, 2]), (F32, 1, 2, 1, 2, 3))
    case("reshape", "computed", op("reshape"), (F16, 2, 6), ints(3, -1))
    case("reshape", "zeros", op("reshape", shape=[0, 0, 20, 1]), (F16, 2, 3, 4, 5), only=[16])
    case("reshape", "zeros_from_end", op("reshape", shape=[3, 2, 0, 0]), (F16, 6, 4, 5), only=[17])
    case(
        "reshape",
        "scalar",
        lambda x: mb.squeeze(x=mb.reshape(x=x, shape=[1, 1])),
        f32(3),
        want=lambda x: x[0],
    )
    case(
        "reshape", "empty", op("reshape", shape=[-1, 1, 3]), np.zeros((0, 3), F32), want=lambda x: x[:, None]
    )
    like = lambda x, y, z: mb.reshape_like(
        x=x, ref_tensors=(y, z), begins=(0, 1), ends=(2, 0), end_masks=(False, True)
    )
    case(
        "reshape_like",
        "two",
        like,
        (F16, 12, 5),
        (F16, 3, 4, 2),
        (F16, 2, 5),
        want=lambda x, y, z: x.reshape(3, 4, 5),
    )
    case("squeeze", "longer", op("squeeze", axes=[0, 1]), (F32, 1, 3), want=lambda x: x[0])
    case("reverse", "every_axis", op("reverse"), (F16, 2, 3))
    case("transpose", "rank_5", op("transpose", perm=[4, 0, 3, 1, 2]), (F16, 2, 1, 3, 2, 2))
    case("concat", "uneven", lambda x, y: mb.concat(values=[x, y], axis=1), (F16, 2, 1, 4), (F16, 2, 3, 4))
    case("concat", "empty", lambda x, y: mb.concat(values=[x, y], axis=0), np.zeros((0, 2), F32), (F32, 1, 2))
    case("select", "broadcast", op("select"), np.array([[True], [False]]), (F32, 1, 3), (F32, 2, 1))
    for lower, upper in ((-1, 0), (0, -1), (0, 0), (2, 1)):
        case(
            "band_part",
            f"{lower}_{upper}".replace("-", "m"),
            op("band_part", lower=lower, upper=upper),
            (F32, 4, 4),
        )
    for label, dtype in (("f16", F16), ("f32", F32), ("int32", I32)):
        case("fill", label, op("fill", value=dtype(3)), ints(2, 3), want=lambda s, d=dtype: np.full(s, 3, d))
        case(
            "fill",
            f"known_{label}",
            lambda x, d=dtype: mb.fill(shape=[2, 2], value=d(-1)),
            ints(0),
            want=lambda x, d=dtype: np.full((2, 2), -1, d),
        )
        case(
            "fill_like",
            label,
            op("fill_like", value=dtype(4)),
            (F16, 2, 3),
            want=lambda x, d=dtype: np.full((2, 3), 4, d),
        )
        on = dict(on_value=dtype(2), off_value=dtype(-1))
        hot = lambda i, d=dtype: np.where(np.eye(4)[i] > 0, 2, -1).astype(d)
        case("one_hot", label, op("one_hot", one_hot_vector_size=4, **on), ints(0, 3, 1), want=hot)
    case("fill", "bool", op("fill", value=True), ints(3), want=lambda s: np.full(s, True))
    case("fill", "negative", op("fill", value=F32(1)), ints(2, -1), fails="shape [2, -1]")
    front = lambda i: np.moveaxis(np.eye(3)[i], -1, 0).astype(F32)
    case(
        "one_hot",
        "axis_0",
        op("one_hot", one_hot_vector_size=3, axis=0, on_value=F32(1), off_value=F32(0)),
        ints(2, 0),
        want=front,
    )
    middle = lambda i: np.moveaxis(np.eye(3)[i], -1, 1).astype(F32)
    fixed = dict(one_hot_vector_size=3, axis=1, on_value=F32(1), off_value=F32(0))
    case("one_hot", "axis_1", op("one_hot", **fixed), ints(2, 0, 1, 1).reshape(2, 2), want=middle)
    case("one_hot", "outside", op("one_hot", one_hot_vector_size=3), ints(3), fails="index 3 along axis")
    scalars = lambda x, y, z: mb.range_1d(start=mb.squeeze(x=x), end=mb.squeeze(x=y), step=mb.squeeze(x=z))
    for label, dtype in (("f16", F16), ("f32", F32), ("int32", I32)):
        steps = {"up": (2, 11, 3), "down": (5, -1, -2), "nothing": (5, 5, 1), "uneven": (0, 1, 2)}
        for named, bounds in steps.items():
            case("range_1d", f"{named}_{label}", scalars, *(np.array([b], dtype) for b in bounds))
    case("range_1d", "step_0", scalars, ints(5), ints(6), ints(0), fails="from 5 to 6 by 0")


def padding():
    for label, dtype in (("f16", F16), ("f32", F32)):
        case(
            "pad", label, op("pad", pad=[1, 2, 0, 3], mode="constant", constant_val=dtype(0.5)), (dtype, 2, 3)
        )
        case(
            "pad",
            f"last_{label}",
            op("pad", pad=[2, 1], mode="constant", constant_val=dtype(0)),
            (dtype, 2, 3),
        )
        case("pad", f"outer_{label}", op("pad", pad=[1, 1, 0, 0, 0, 0], mode="constant"), (dtype, 1, 2, 3))
        case("pad", f"reflect_{label}", op("pad", pad=[1, 1, 2, 1], mode="reflect"), (dtype, 2, 3, 4))
        case("pad", f"replicate_{label}", op("pad", pad=[1, 0, 2, 3], mode="replicate"), (dtype, 2, 3, 4))
    case("pad", "computed", op("pad", mode="constant", constant_val=F32(-1)), (F32, 2, 2), ints(0, 1, 1, 0))
    case(
        "pad",
        "too_far",
        op("pad", pad=[3, 0], mode="reflect"),
        (F32, 2, 3),
        fails="pad [3, 0] of a tensor of shape [2, 3]",
    )


def orders():
    for label, dtype in (("f16", F16), ("f32", F32), ("int32", I32)):
        x = np.random.default_rng(9).permutation(24).reshape(2, 3, 4).astype(dtype)
        for axis in (0, 1, -1):
            case("topk", f"axis_{axis % 3}_{label}", op("topk", k=2, axis=axis), x)
            case("topk", f"ascending_{axis % 3}_{label}", op("topk", k=1, axis=axis, ascending=True), x)
            case("argsort", f"axis_{axis % 3}_{label}", op("argsort", axis=axis, ascending=True), x)
            case("argsort", f"descending_{axis % 3}_{label}", op("argsort", axis=axis), x)
        for axis in (0, -1):
            for exclusive, reverse in ((False, False), (True, False), (False, True), (True, True)):
                named = f"axis_{axis % 3}" + "_exclusive" * exclusive + "_reverse" * reverse
                fixed = op("cumsum", axis=axis, exclusive=exclusive, reverse=reverse)
                small = np.random.default_rng(4).integers(-4, 5, (2, 3, 4)).astype(dtype)
                case("cumsum", f"{named}_{label}", fixed, small, want=summed(axis, exclusive, reverse))
    case("topk", "all", op("topk", k=4, axis=0), f32(3, 1, 2, 0))
    # Equal values stay in their order, and NaN comes last: numpy's stable order.
    case(
        "topk", "ties", op("topk", k=4, axis=0), f32(1, 2, 2, 1, np.nan, np.nan), want=lambda x: ordered(x, 4)
    )
    alone = op("topk", k=2, axis=0, return_indices=False)
    case("topk", "values_alone", alone, f32(3, 1, 2), only=[16, 17])
    case(
        "topk",
        "uint16_indices",
        op("topk", k=2, axis=0, output_indices_dtype="uint16"),
        f32(3, 1, 2),
        only=[17],
    )
    case("topk", "unsorted", op("topk", k=2, axis=0, sort=False), f32(3, 1, 2), only=[16, 17])


def ordered(x, k):
    order = np.argsort(-x, kind="stable")[:k]
    return x[order], order.astype(I32)


def summed(axis, exclusive, reverse):
    """coremltools' own definition of the exclusive sum fails."""
    if not exclusive:
        return None

    def apply(x):
        x = np.flip(x, axis) if reverse else x
        sums = np.cumsum(x, axis) - x
        return (np.flip(sums, axis) if reverse else sums).astype(x.dtype)

    return apply

"""Shapes at the edge of what MIL allows: scalars, no elements, one dimension and five; and the types of iOS 17 and 18 that
hold small integers."""

import numpy as np
from coremltools.converters.mil import Builder as mb
from harness import CLOSE, F16, F32, I32, case, f16, f32, ints, op

SMALL = {"int8": np.int8, "uint8": np.uint8, "int16": np.int16, "uint16": np.uint16}
FUNCTIONS = [
    "abs",
    "acos",
    "asin",
    "atan",
    "atanh",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "exp",
    "exp2",
    "floor",
    "relu",
    "relu6",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "sinh",
    "softplus",
    "softsign",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "log",
    "inverse",
    "gelu",
    "clip",
    "identity",
]
BINARY = ["add", "sub", "mul", "real_div", "maximum", "minimum", "pow", "floor_div", "mod"]
COMPARISONS = ["equal", "not_equal", "greater", "greater_equal", "less", "less_equal"]
EXACT = ["abs", "ceil", "floor", "relu", "relu6", "round", "sign", "square", "sqrt", "clip", "identity"]
FIXED = {"clip": dict(alpha=F32(0.2), beta=F32(0.5)), "gelu": dict(mode="EXACT")}


def functions():
    """Every function of one value on a scalar, on nothing and on five dimensions."""
    numpys = {
        "silu": lambda x: (x / (1 + np.exp(-x.astype(np.float64)))).astype(F32),
        "identity": lambda x: x,
    }
    for name in FUNCTIONS:
        want, fixed = numpys.get(name), FIXED.get(name, {})
        within = 0.0 if name in EXACT else CLOSE
        x = np.linspace(0.05, 0.95, 12).astype(F32).reshape(1, 2, 1, 3, 2)
        case(name, "five_dimensions", op(name, **fixed), x, want=want, within=within, only=[16])
        none = np.zeros((0, 2), F32)
        case(name, "no_elements", op(name, **fixed), none, want=lambda x: x, only=[16])
        scalar = lambda x, name=name, fixed=fixed: getattr(mb, name)(x=mb.squeeze(x=x), **fixed)
        wanted = None if want is None else lambda x, want=want: want(x[0])
        case(name, "scalar", scalar, f32(0.25), want=wanted, within=within, only=[16])


def pairs():
    for name in BINARY:
        both = lambda x, y, name=name: getattr(mb, name)(x=mb.squeeze(x=x), y=mb.squeeze(x=y))
        case(name, "scalars", both, f32(7.5), f32(2), within=CLOSE)
        one = lambda x, y, name=name: getattr(mb, name)(x=mb.squeeze(x=x), y=y)
        case(name, "scalar_and_matrix", one, f32(7.5), f32(2, 3, 4, 0.5).reshape(2, 2), within=CLOSE)
        case(
            name,
            "no_elements_broadcast",
            op(name),
            np.zeros((2, 1, 0), F32),
            f32(1, 2, 3)[:, None],
            want=nothing(2, 3, 0),
        )
    for name in COMPARISONS:
        x, y = np.arange(6, dtype=F16).reshape(1, 2, 1, 3, 1), np.arange(4, dtype=F16).reshape(2, 1, 1, 1, 2)
        case(name, "five_dimensions", op(name), x, y)
        case(
            name,
            "no_elements",
            op(name),
            np.zeros((0, 3), F32),
            f32(1, 2, 3),
            want=lambda x, y: np.zeros((0, 3), bool),
        )
        both = lambda x, y, name=name: getattr(mb, name)(x=mb.squeeze(x=x), y=mb.squeeze(x=y))
        case(name, "scalars", both, ints(3), ints(3))
        case(
            name,
            "large_int32",
            op(name),
            ints(16777217, -16777217, 2**31 - 1),
            ints(16777216, -16777216, -(2**31)),
        )
    for name in ("add", "sub", "mul", "maximum", "minimum"):
        # Beyond what fp32 holds exactly, and no wrap.
        case(name, "large_int32", op(name), ints(16777217, -16777219, 33554433), ints(2, 4, -3))
    for name in ("logical_and", "logical_or", "logical_xor"):
        rng = np.random.default_rng(1)
        case(
            name,
            "five_dimensions",
            op(name),
            rng.random((1, 2, 1, 3, 1)) > 0.5,
            rng.random((2, 1, 1, 1, 2)) > 0.5,
        )
        case(
            name,
            "no_elements",
            op(name),
            np.zeros((0, 1), bool),
            np.array([True, False]),
            want=lambda x, y: np.zeros((0, 2), bool),
        )
    case("logical_not", "five_dimensions", op("logical_not"), (bool, 1, 2, 1, 2, 3))
    case("logical_not", "no_elements", op("logical_not"), np.zeros((2, 0), bool))
    scalar = lambda x, y, z: mb.select(cond=mb.squeeze(x=x), a=y, b=z)
    case(
        "select",
        "scalar_condition",
        scalar,
        np.array([True]),
        (F16, 2, 3),
        (F16, 2, 3),
        want=lambda c, a, b: a,
    )
    case(
        "select",
        "nan_is_left",
        op("select"),
        np.array([True, False]),
        f32(1, np.nan),
        f32(np.inf, 2),
        want=lambda c, a, b: f32(1, 2),
    )
    case(
        "select", "no_elements", op("select"), np.zeros((0,), bool), np.zeros((0,), F32), np.zeros((0,), F32)
    )
    rank5 = np.random.default_rng(2).random((2, 1, 2, 1, 3)) > 0.5
    case(
        "select",
        "five_dimensions",
        op("select"),
        rank5,
        (F16, 2, 3, 2, 1, 3),
        (F16, 1, 3, 1, 2, 3),
        want=lambda c, a, b: np.where(c, a, b),
    )


def nothing(*shape, dtype=F32):
    return lambda *inputs: np.zeros(shape, dtype)


def moves():
    seven = f32(*range(7))
    five = (F16, 2, 1, 3, 2, 2)
    for name, perm, x in (
        ("rank_1", [0], seven),
        ("rank_2", [1, 0], (F32, 2, 3)),
        ("rank_3", [2, 0, 1], (F32, 2, 3, 4)),
    ):
        case("transpose", name, op("transpose", perm=perm), x, only=[16])
    case("transpose", "no_elements", op("transpose", perm=[1, 2, 0]), np.zeros((2, 0, 3), F32), only=[16])
    case("reshape", "rank_5", op("reshape", shape=[2, -1, 1, 3, 1]), (F32, 4, 6), only=[17])
    case("reshape", "flat", op("reshape", shape=[-1]), five, only=[17])
    case("reshape", "one_dimension_to_five", op("reshape", shape=[1, 7, 1, 1, 1]), seven, only=[16])
    case("expand_dims", "scalar", lambda x: mb.expand_dims(x=mb.squeeze(x=x), axes=[0]), f32(3), only=[16])
    case("expand_dims", "rank_1_to_5", op("expand_dims", axes=[0, 2, 3, -1]), seven, only=[17])
    case(
        "expand_dims",
        "no_elements",
        op("expand_dims", axes=[1]),
        np.zeros((0, 2), F32),
        want=nothing(0, 1, 2),
        only=[16],
    )
    case("squeeze", "rank_5", op("squeeze", axes=[1]), five, only=[16])
    case(
        "squeeze",
        "no_elements",
        op("squeeze", axes=[1]),
        np.zeros((0, 1, 2), F32),
        want=nothing(0, 2),
        only=[16],
    )
    case("flatten2d", "axis_0", op("flatten2d", axis=0), (F32, 2, 3), want=lambda x: x.reshape(1, 6))
    case("flatten2d", "axis_negative", op("flatten2d", axis=-1), (F32, 2, 3, 4))
    case("tile", "rank_1", op("tile", reps=[3]), seven)
    case("tile", "no_elements", op("tile", reps=[2, 3]), np.zeros((0, 2), F32), want=nothing(0, 6))
    case("reverse", "rank_1", op("reverse", axes=[0]), seven, only=[16])
    case("reverse", "rank_5", op("reverse", axes=[2, -1]), five, only=[16])
    for axis in (0, 2, 4):
        five_ways = lambda x, y, axis=axis: mb.concat(values=[x, y], axis=axis)
        case("concat", f"rank_5_axis_{axis}", five_ways, five, five)
    case("concat", "rank_1", lambda x, y: mb.concat(values=[x, y, x], axis=0), f16(1, 2), f16(3))
    case("concat", "one_value", lambda x: mb.concat(values=[x], axis=0), f16(1, 2))
    case(
        "concat",
        "nothing_at_all",
        lambda x, y: mb.concat(values=[x, y], axis=1),
        np.zeros((0, 2), F32),
        np.zeros((0, 1), F32),
        want=nothing(0, 3),
    )
    case(
        "stack", "rank_4", lambda x, y: mb.stack(values=[x, y], axis=2), (F16, 1, 2, 3, 2), (F16, 1, 2, 3, 2)
    )
    case(
        "stack",
        "scalars",
        lambda x, y: mb.stack(values=[mb.squeeze(x=x), mb.squeeze(x=y)], axis=0),
        ints(4),
        ints(5),
    )
    case("split", "rank_1", op("split", num_splits=7, axis=0), seven)
    case("split", "rank_5", op("split", split_sizes=[1, 2], axis=2), five)
    case("shape", "scalar", lambda x: mb.shape(x=mb.squeeze(x=x)), f32(1), want=nothing(0, dtype=I32))
    case("shape", "no_elements", op("shape"), np.zeros((2, 0, 3), F32))
    case("shape", "rank_5", op("shape"), five)
    case("identity", "f32", op("identity"), (F32, 2, 3))
    case("band_part", "rank_4", op("band_part", lower=1, upper=1), (F16, 1, 2, 3, 4))
    case("band_part", "rank_5", op("band_part", lower=0, upper=-1), (F32, 1, 2, 1, 3, 3))
    case("slice_by_index", "rank_1", op("slice_by_index", begin=[1], end=[7], stride=[3]), seven, only=[16])
    begin, end = [0, 0, 2, -1, 0], [2, 1, 0, 2, 2]
    case(
        "slice_by_index",
        "rank_5",
        op("slice_by_index", begin=begin, end=end, stride=[1, 1, -1, 1, 2]),
        five,
        only=[16],
    )
    case(
        "slice_by_index",
        "no_elements",
        op("slice_by_index", begin=[0, 1], end=[0, 2]),
        np.zeros((0, 3), F32),
        want=nothing(0, 1),
        only=[16],
    )
    case("slice_by_size", "rank_1", op("slice_by_size", begin=[2], size=[-1]), seven, only=[16])
    case(
        "slice_by_size",
        "rank_5",
        op("slice_by_size", begin=[0, 0, 1, 0, 1], size=[2, 1, -1, 1, 1]),
        five,
        only=[16],
    )
    case("slice_update", "rank_1", op("slice_update", begin=[2], end=[5]), seven, f32(-1, -2, -3))
    case(
        "slice_update",
        "rank_4",
        op("slice_update", begin=[0, 1, 0, 2], end=[1, 2, 3, 4]),
        (F16, 1, 2, 3, 4),
        (F16, 1, 1, 3, 2),
    )
    case(
        "slice_update",
        "rank_5",
        op("slice_update", begin=[0, 0, 1, 0, -1], end=[2, 1, 3, 1, 2]),
        five,
        (F16, 2, 1, 2, 1, 1),
    )
    masks = dict(begin_mask=[True, False], end_mask=[False, True])
    case(
        "slice_update",
        "masks",
        op("slice_update", begin=[2, 1], end=[2, 2], **masks),
        (F16, 3, 4),
        (F16, 2, 3),
    )
    case(
        "slice_update",
        "no_elements",
        op("slice_update", begin=[1, 0], end=[1, 4]),
        (F16, 3, 4),
        np.zeros((0, 4), F16),
        want=lambda x, u: x,
    )
    case(
        "slice_update",
        "everything",
        op("slice_update", begin=[0, 0], end=[3, 4]),
        (F16, 3, 4),
        (F16, 3, 4),
        want=lambda x, u: u,
    )
    for mode in ("constant", "reflect", "replicate"):
        case("pad", f"rank_1_{mode}", op("pad", pad=[2, 1], mode=mode), seven)
        four = op("pad", pad=[1, 0, 2, 1], mode=mode)
        case("pad", f"rank_4_{mode}", four, (F16, 1, 2, 3, 4))
    case("pad", "rank_5_constant", op("pad", pad=[0, 1, 0, 0, 1, 0, 0, 2, 0, 0], mode="constant"), five)
    case(
        "pad",
        "no_elements",
        op("pad", pad=[1, 1, 0, 0], mode="constant", constant_val=F32(2)),
        np.zeros((0, 2), F32),
        want=lambda x: np.full((2, 2), 2, F32),
    )
    case("fill", "no_elements", op("fill", value=F32(3)), ints(2, 0), want=nothing(2, 0))
    case("fill", "rank_5", op("fill", value=F16(3)), ints(1, 2, 1, 2, 1), want=lambda s: np.full(s, 3, F16))
    steps = lambda x, y, z: mb.range_1d(start=mb.squeeze(x=x), end=mb.squeeze(x=y), step=mb.squeeze(x=z))
    case("range_1d", "fractions", steps, f32(0.5), f32(2), f32(0.25))


def indexed():
    five = (F16, 2, 1, 3, 2, 2)
    rank1 = f32(5, 6, 7, 8)
    picked = lambda x, y: mb.gather(x=x, indices=mb.squeeze(x=y), axis=0)
    case("gather", "scalar_index", picked, (F16, 3, 2), ints(1), want=lambda x, i: x[i[0]])
    case("gather", "scalar_of_rank_1", picked, rank1, ints(-1), want=lambda x, i: x[i[0]])
    case("gather", "rank_1", op("gather", axis=0), rank1, ints(3, 3, 0), only=[16])
    case("gather", "rank_5", op("gather", axis=2), five, ints(2, 0), only=[16])
    case(
        "gather",
        "no_elements_each",
        op("gather", axis=0),
        np.zeros((3, 0), F32),
        ints(0, 2),
        want=nothing(2, 0),
        only=[16],
    )
    case("gather_along_axis", "rank_1", op("gather_along_axis", axis=0), rank1, ints(3, 0, 0), only=[16])
    case(
        "gather_along_axis",
        "rank_3",
        op("gather_along_axis", axis=1),
        (F16, 2, 3, 2),
        np.array([[[0, 2]], [[1, 1]]], I32),
        only=[16],
    )
    case(
        "gather_along_axis",
        "negative",
        op("gather_along_axis", axis=-1),
        (F16, 2, 3),
        ints(-1, -3, -2, 0).reshape(2, 2),
        want=lambda x, i: np.take_along_axis(x, i, -1),
        only=[16],
    )
    case(
        "gather_nd",
        "rank_1",
        op("gather_nd"),
        rank1,
        ints(3, 0).reshape(2, 1),
        want=lambda x, i: x[i[:, 0]],
        only=[16],
    )
    case(
        "gather_nd",
        "every_index",
        op("gather_nd"),
        (F16, 2, 3, 2),
        ints(1, 2, 0, 0, 0, 1).reshape(2, 3),
        want=lambda x, i: x[tuple(i.T)],
        only=[16],
    )
    case(
        "gather_nd",
        "negative",
        op("gather_nd"),
        (F16, 2, 3),
        ints(-1, -2).reshape(1, 2),
        want=lambda x, i: x[-1:, -2],
        only=[16],
    )
    case(
        "gather_nd",
        "matrix_of_indices",
        op("gather_nd"),
        (F16, 3, 2),
        ints(2, 0, 1, 1).reshape(2, 2, 1),
        want=lambda x, i: x[i[..., 0]],
        only=[16],
    )
    set_ = lambda axis: op("scatter", axis=axis, mode="update")

    def placed(axis):
        def apply(data, i, u):
            result = data.copy()
            result[(slice(None),) * (axis % data.ndim) + (i,)] = u
            return result

        return apply

    case("scatter", "rank_1", set_(0), rank1, ints(2, 0), f32(-1, -2), want=placed(0), only=[16])
    case("scatter", "negative", set_(-1), (F16, 2, 3), ints(-1, 0), (F16, 2, 2), want=placed(-1), only=[16])
    case("scatter", "rank_3", set_(1), (F16, 2, 3, 2), ints(2), (F16, 2, 1, 2), want=placed(1), only=[16])
    case(
        "scatter",
        "matrix_of_indices",
        set_(0),
        (F16, 5, 2),
        ints(4, 0, 1, 2).reshape(2, 2),
        (F16, 2, 2, 2),
        want=placed(0),
        only=[16],
    )
    case(
        "scatter",
        "no_indices",
        set_(0),
        (F16, 3, 2),
        np.zeros((0,), I32),
        np.zeros((0, 2), F16),
        want=lambda d, i, u: d,
        only=[16],
    )

    def put_along(axis):
        def apply(data, i, u):
            result = data.copy()
            np.put_along_axis(result, i, u, axis)
            return result

        return apply

    along = lambda axis: op("scatter_along_axis", axis=axis, mode="update")
    case(
        "scatter_along_axis", "rank_1", along(0), rank1, ints(2, 0), f32(-1, -2), want=put_along(0), only=[16]
    )
    case(
        "scatter_along_axis",
        "negative",
        along(-1),
        (F16, 2, 3),
        ints(-1, 0, 1, -3).reshape(2, 2),
        (F16, 2, 2),
        want=put_along(-1),
        only=[16],
    )
    case(
        "scatter_along_axis",
        "rank_3",
        along(1),
        (F16, 2, 3, 2),
        ints(0, 2, 1, 1).reshape(2, 1, 2),
        (F16, 2, 1, 2),
        want=put_along(1),
        only=[16],
    )
    nd = op("scatter_nd", mode="update")

    def at_indices(data, i, u):
        result = data.copy()
        result[tuple(np.moveaxis(i, -1, 0))] = u
        return result

    case("scatter_nd", "rank_1", nd, rank1, ints(2, 0).reshape(2, 1), f32(-1, -2), want=at_indices, only=[16])
    case(
        "scatter_nd",
        "negative",
        nd,
        (F16, 2, 3),
        ints(-1, -3).reshape(1, 2),
        f16(9),
        want=at_indices,
        only=[16],
    )
    case(
        "scatter_nd",
        "rank_3",
        nd,
        (F16, 2, 3, 2),
        ints(1, 2, 0, 0).reshape(2, 2),
        (F16, 2, 2),
        want=at_indices,
        only=[16],
    )


def sorts():
    five = np.random.default_rng(3).permutation(24).reshape(2, 1, 3, 2, 2).astype(F16)
    for name, x, axis in (
        ("rank_1", f32(3, 1, 2), 0),
        ("rank_2", f16(4, 1, 2, 9, 3, 5).reshape(2, 3), -1),
        ("rank_5", five, 2),
    ):
        case("argsort", name, op("argsort", axis=axis, ascending=True), x)
        case("topk", name, op("topk", k=2, axis=axis), x, only=[16])
        case("cumsum", name, op("cumsum", axis=axis), x)
    # MIL's topk of a descending order has infinities first.
    case("topk", "infinities", op("topk", k=3, axis=0), f32(-np.inf, 1, np.inf, 0), only=[16])
    for name in ("reduce_argmax", "reduce_argmin"):
        case(name, "ties", op(name, axis=0), f32(2, 7, 7, 2), only=[16])
        case(name, "rank_5", op(name, axis=2, keep_dims=True), five, only=[16])
        case(name, "infinities", op(name, axis=0), f32(-np.inf, np.inf, np.inf, -np.inf), only=[16])
    case(
        "reduce_sum",
        "no_elements_left",
        op("reduce_sum", axes=[1], keep_dims=True),
        np.zeros((0, 2), F32),
        want=nothing(0, 1),
    )
    case(
        "reduce_max",
        "no_elements_left",
        op("reduce_max", axes=[1], keep_dims=False),
        np.zeros((0, 2), F32),
        want=nothing(0),
    )
    case("reduce_min", "nan", op("reduce_min", axes=[0], keep_dims=False), f32(1, np.nan, 2))
    case(
        "reduce_sum", "large_int32", op("reduce_sum", axes=[0], keep_dims=False), ints(16777217, 16777217, 1)
    )
    for name in ("sum", "max", "min", "prod", "mean"):
        wide = np.random.default_rng(4).standard_normal((3, 70)).astype(F32)
        case(
            f"reduce_{name}",
            "two_axes_back",
            op(f"reduce_{name}", axes=[-1, -2], keep_dims=True),
            wide,
            within=1e-5,
        )


def norms():
    for rank, shape, axes in (
        (1, (9,), [0]),
        (2, (3, 9), [-1]),
        (4, (2, 1, 3, 5), [-1]),
        (5, (1, 2, 1, 3, 4), [2, 4]),
    ):
        x = np.random.default_rng(rank).standard_normal(shape).astype(F32)
        case(
            "layer_norm",
            f"rank_{rank}",
            op("layer_norm", axes=axes, epsilon=F32(1e-3)),
            x,
            within=1e-5,
            only=[16],
        )
    case(
        "layer_norm",
        "constant_row",
        op("layer_norm", axes=[-1], epsilon=F32(1e-3)),
        np.full((2, 4), 3, F32),
        within=1e-5,
        only=[16],
    )
    for axis in (0, -2, -1):
        case("softmax", f"rank_4_axis_{axis % 4}", op("softmax", axis=axis), (F32, 2, 3, 2, 5), within=CLOSE)
    case("softmax", "one_value", op("softmax", axis=-1), (F32, 3, 1), within=CLOSE)
    case("softmax", "large", op("softmax", axis=-1), f32(1e4, 1e4 - 1, -1e4, 88).reshape(1, 4), within=CLOSE)
    case("softmax", "no_elements", op("softmax", axis=-1), np.zeros((0, 3), F32), want=lambda x: x)


def products():
    for dtype, within in ((F32, CLOSE), (F16, 2e-3)):
        label = np.dtype(dtype).name
        for name, turned, x, y in (
            ("x_transposed", dict(transpose_x=True), (5, 3), (5, 4)),
            ("y_transposed", dict(transpose_y=True), (2, 3, 5), (4, 5)),
        ):
            build = lambda x, y, turned=turned: mb.matmul(x=x, y=y, **turned)
            want = lambda x, y, turned=turned: (
                (x.T if "transpose_x" in turned else x).astype(np.float64)
                @ (y.T if "transpose_y" in turned else y)
            ).astype(x.dtype)
            case(
                "matmul",
                f"{name}_{label}",
                build,
                (dtype, *x),
                (dtype, *y),
                want=want,
                within=within,
                only=[16],
            )
    product = lambda x, y: mb.matmul(x=x, y=y)
    case("matmul", "no_rows", product, np.zeros((0, 5), F32), (F32, 5, 4), want=nothing(0, 4), only=[16])
    case(
        "matmul", "no_batch", product, np.zeros((0, 2, 3), F32), (F32, 3, 4), want=nothing(0, 2, 4), only=[16]
    )
    case("matmul", "int32", product, ints(1, -2, 3, 4).reshape(2, 2), ints(5, 6, -7, 8).reshape(2, 2))
    batch = np.arange(12, dtype=I32).reshape(2, 1, 2, 3) - 5
    turned = lambda x, y: mb.matmul(x=x, y=y, transpose_x=True)
    case(
        "matmul",
        "int32_batch",
        turned,
        batch,
        np.arange(12, dtype=I32).reshape(3, 2, 2),
        want=lambda x, y: x.swapaxes(2, 3) @ y,
        only=[16],
    )
    weight, bias = ints(1, 2, -3, 4, 5, 6).reshape(3, 2), ints(10, -20, 30)
    case(
        "linear",
        "int32",
        lambda x: mb.linear(x=x, weight=weight, bias=bias),
        ints(7, -8, 9, 1).reshape(2, 2),
        want=lambda x: x @ weight.T + bias,
    )
    case(
        "linear",
        "no_rows",
        lambda x: mb.linear(x=x, weight=np.ones((3, 2), F32)),
        np.zeros((0, 2), F32),
        want=nothing(0, 3),
        only=[16],
    )


def control_flow():
    chosen = lambda x, y: mb.cond(
        pred=mb.squeeze(x=x), _true_fn=lambda: mb.add(x=y, y=y), _false_fn=lambda: mb.mul(x=y, y=I32(-1))
    )
    for name, flag in (("bool_true", True), ("bool_false", False)):
        case("cond", name, chosen, np.array([flag]), ints(3, 4), want=lambda x, y: y + y if x[0] else -y)


def small_integers():
    """What iOS 17 and 18 added."""
    for label, dtype in SMALL.items():
        low = 0 if label[0] == "u" else -60
        values = np.random.default_rng(8).integers(low, 60, 24).astype(dtype)
        four, two = values.reshape(1, 2, 3, 4), values.reshape(6, 4)
        only = dict(only=[17])
        case("transpose", label, op("transpose", perm=[0, 2, 1, 3]), four, **only)
        case("reshape", label, op("reshape", shape=[4, -1]), four, **only)
        like = lambda x, y: mb.reshape_like(x=x, ref_tensors=(y,), begins=(0,), ends=(0,), end_masks=(True,))
        case("reshape_like", label, like, two, (F16, 4, 6), want=lambda x, y: x.reshape(4, 6), **only)
        case("expand_dims", label, op("expand_dims", axes=[1]), two, **only)
        case("squeeze", label, op("squeeze", axes=[0]), four, **only)
        case("reverse", label, op("reverse", axes=[1]), two, **only)
        case(
            "slice_by_index",
            label,
            op("slice_by_index", begin=[1, 0], end=[5, 4], stride=[2, 3]),
            two,
            **only,
        )
        case("slice_by_size", label, op("slice_by_size", begin=[1, 0], size=[2, -1]), two, **only)
        case("gather", label, op("gather", axis=0), two, ints(5, 0), **only)
        case(
            "gather_along_axis",
            label,
            op("gather_along_axis", axis=0),
            two,
            ints(5, 0, 1, 2).reshape(1, 4),
            **only,
        )
        case(
            "gather_nd",
            label,
            op("gather_nd"),
            two,
            ints(5, 0, 1, 3).reshape(2, 2),
            want=lambda x, i: x[i[:, 0], i[:, 1]],
            **only,
        )
        distinct = (np.random.default_rng(9).permutation(12) + low // 10).astype(dtype).reshape(3, 4)
        # coremltools negates values to sort them, and those without a sign wrap.
        largest = lambda x: (np.sort(x, 1)[:, :1:-1], np.argsort(x, 1)[:, :1:-1].astype(I32))
        case("topk", label, op("topk", k=2, axis=1), distinct, want=largest, **only)
        case(
            "slice_update",
            label,
            op("slice_update", begin=[1, 0], end=[3, 2]),
            two,
            values[:4].reshape(2, 2),
            only=[18],
        )
    for label in ("int8", "uint8", "int16", "uint16"):
        index = np.array([2, 0], SMALL[label])
        case(
            "gather",
            f"indices_{label}",
            op("gather", axis=0),
            (F16, 4, 2),
            index,
            want=lambda x, i: x[i],
            only=[17],
        )
        along = op("gather_along_axis", axis=0)
        case(
            "gather_along_axis",
            f"indices_{label}",
            along,
            (F16, 4, 2),
            index.reshape(1, 2),
            want=lambda x, i: np.take_along_axis(x, i.astype(int), 0),
            only=[17],
        )
        case(
            "gather_nd",
            f"indices_{label}",
            op("gather_nd"),
            (F16, 4, 2),
            index.reshape(2, 1),
            want=lambda x, i: x[i[:, 0]],
            only=[17],
        )
    for label in ("int16", "uint16"):
        index = np.array([2, 0], SMALL[label])
        case(
            "gather",
            f"indices_{label}_ios16",
            op("gather", axis=0),
            (F16, 4, 2),
            index,
            want=lambda x, i: x[i],
            only=[16],
        )
        case(
            "gather_along_axis",
            f"indices_{label}_ios16",
            op("gather_along_axis", axis=0),
            (F16, 4, 2),
            index.reshape(1, 2),
            want=lambda x, i: np.take_along_axis(x, i.astype(int), 0),
            only=[16],
        )
        case(
            "gather_nd",
            f"indices_{label}_ios16",
            op("gather_nd"),
            (F16, 4, 2),
            index.reshape(2, 1),
            want=lambda x, i: x[i[:, 0]],
            only=[16],
        )
    for label in ("int8", "int16"):
        n = lambda *v, label=label: np.array(v, SMALL[label])
        case(
            "reshape",
            f"shape_{label}",
            op("reshape"),
            (F16, 2, 6),
            n(3, 4),
            want=lambda x, s: x.reshape(3, 4),
            only=[17],
        )
        cut = lambda x, y, z, n=n: mb.slice_by_index(x=x, begin=y, end=z, stride=n(2, -1))
        case(
            "slice_by_index",
            f"bounds_{label}",
            cut,
            (F16, 4, 5),
            n(1, 4),
            n(4, 0),
            want=lambda x, b, e: x[1:4:2, 4:0:-1],
            only=[17],
        )
        case(
            "slice_by_size",
            f"bounds_{label}",
            op("slice_by_size"),
            (F16, 4, 5),
            n(1, 0),
            n(2, 3),
            want=lambda x, b, s: x[1:3, :3],
            only=[17],
        )
        step = lambda x, y, z, w, n=n: mb.slice_update(x=x, update=y, begin=z, end=w, stride=n(1, 2))

        def strided(x, u, b, e):
            x = x.copy()
            x[1:3, 0:3:2] = u
            return x

        case(
            "slice_update",
            f"bounds_{label}",
            step,
            (F16, 4, 5),
            (F16, 2, 2),
            n(1, 0),
            n(3, 3),
            want=strided,
            only=[18],
        )
        case("topk", f"k_{label}", op("topk", k=n(2)[0], axis=0), f32(3, 1, 2), only=[17])
    for name in ("reduce_l2_norm", "reduce_log_sum", "reduce_log_sum_exp"):
        case(name, "int32", op(name, axes=[1], keep_dims=False), ints(3, 4, 1, 2).reshape(2, 2))
    case("exp2", "int32", op("exp2"), ints(0, 3, 10))
    for label, dtype in (("f32", F32), ("int32", I32), ("bool", bool)):
        like = op("fill_like", value=F16(4))
        case("fill_like", f"of_{label}", like, (dtype, 2, 3), want=lambda x: np.full((2, 3), 4, F16))
        for version in (16, 17):
            like = lambda x, y: mb.reshape_like(
                x=x, ref_tensors=(y,), begins=(0,), ends=(0,), end_masks=(True,)
            )
            case(
                "reshape_like",
                f"{label}_ios{version}",
                like,
                (dtype, 2, 6),
                (F16, 4, 3),
                want=lambda x, y: x.reshape(4, 3),
                only=[version],
            )
    case("fill_like", "bool", op("fill_like", value=True), (F16, 2), want=lambda x: np.array([True, True]))
    hot = op("one_hot", one_hot_vector_size=3, on_value=True, off_value=False)
    case("one_hot", "bool", hot, ints(2, 0), want=lambda i: np.eye(3)[i] > 0)


def shapes():
    for group in (functions, pairs, moves, indexed, sorts, norms, products, control_flow, small_integers):
        group()

"""Writes `ops/*.mil`: for each operation of MIL that the executor runs, programs, inputs and expected values.

Run by hand:  python conformance.py   (coremltools 9.0, numpy)
"""

import numpy as np
from coremltools.converters.mil import Builder as mb
from harness import CLOSE, F16, F32, HALF, I32, case, write

FLOATS = (("f16", F16, HALF), ("f32", F32, CLOSE))


def ints(*values):
    return np.array(values, I32)


def f16(*values):
    return np.array(values, F16)


def f32(*values):
    return np.array(values, F32)


def op(name, **fixed):
    """A builder of the one operation `name` on as many operands as it has."""

    def build(*operands):
        return getattr(mb, name)(**dict(zip(OPERANDS.get(name, "xy"), operands)), **fixed)

    return build


OPERANDS = {
    "select": ("cond", "a", "b"),
    "scatter": ("data", "indices", "updates"),
    "scatter_along_axis": ("data", "indices", "updates"),
    "scatter_nd": ("data", "indices", "updates"),
    "gather": ("x", "indices"),
    "gather_along_axis": ("x", "indices"),
    "gather_nd": ("x", "indices"),
    "one_hot": ("indices", "one_hot_vector_size"),
    "fill": ("shape",),
    "fill_like": ("ref_tensor",),
    "conv": ("x", "weight"),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask"),
    "slice_update": ("x", "update", "begin", "end"),
    "slice_by_index": ("x", "begin", "end"),
    "slice_by_size": ("x", "begin", "size"),
    "range_1d": ("start", "end", "step"),
    "pad": ("x", "pad"),
    "tile": ("x", "reps"),
    "reshape": ("x", "shape"),
}

# Special values that every function must treat as numpy does.
EDGES = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan]


def elementwise():
    for name in ("add", "sub", "mul", "real_div", "maximum", "minimum", "pow", "floor_div", "mod"):
        positive = name == "pow"
        for label, dtype, near in FLOATS:
            noise = np.random.default_rng(7).standard_normal
            x, y = noise((2, 3, 5)).astype(dtype), noise((3, 1)).astype(dtype)
            x = np.abs(x) if positive else x
            # The quotient decides; two roundings of it may differ.
            within = near if name in ("pow", "mod") else 0.0
            case(name, f"broadcast_{label}", op(name), x, y, within=within)
            case(name, f"outer_{label}", op(name), x[0, 0], y[None, None], within=within)
        rank5 = lambda *shape: np.abs(np.random.default_rng(3).standard_normal(shape)).astype(F32) + F32(0.5)
        case(name, "rank_5", op(name), rank5(1, 2, 1, 2, 3), rank5(2, 1, 3, 1, 1), within=CLOSE)
        if name != "pow":
            case(name, "int32", op(name), ints(7, -7, 6, -6, 0), ints(3), want=int_oracle(name))
            case(name, "int32_negative", op(name), ints(7, -7, 6, -6, 0), ints(-3), want=int_oracle(name))
            case(name, "empty", op(name), np.zeros((0, 3), F32), f32(1, 2, 3), want=lambda x, y: x)
    case("maximum", "nan", op("maximum"), f32(*EDGES), f32(0.5))
    case("minimum", "nan", op("minimum"), f32(*EDGES), f32(0.5))
    case("pow", "square", op("pow", y=F16(2)), (F16, 3, 7))
    case("pow", "int32", op("pow"), ints(2, -3, 5), ints(3, 2, 0))
    for name in ("floor_div", "mod"):
        case(name, "zero", op(name), ints(1), ints(0), fails="1 divided by 0")
    for name in ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal"):
        case(name, "int32", op(name), ints(1, 2, 3), ints(2))
        case(name, "f16", op(name), f16(-1, 0, 1, np.nan), f16(0))
        case(name, "f32", op(name), f32(*EDGES)[:, None], f32(*EDGES))
    for name in ("logical_and", "logical_or", "logical_xor"):
        case(name, "table", op(name), np.array([[True], [False]]), np.array([True, False]))
    case("logical_not", "bool", op("logical_not"), np.array([[True, False]]))


def int_oracle(name):
    """Integers divide as numpy's floor division, except `real_div`, whose result MIL types as an integer."""
    if name == "real_div":
        return lambda x, y: np.trunc(x / y).astype(I32)
    return None


def functions():
    exact = ("abs", "ceil", "floor", "round", "sign", "relu", "relu6", "square", "sqrt", "softsign")
    domains = {
        "acos": np.linspace(-1, 1, 21),
        "asin": np.linspace(-1, 1, 21),
        "atanh": np.linspace(-0.95, 0.95, 21),
        "sqrt": np.linspace(0, 30, 21),
    }
    names = "abs acos asin atan atanh ceil cos cosh erf exp exp2 floor relu relu6 round sigmoid sign silu sin sinh"
    for name in (*names.split(), "softplus", "softsign", "sqrt", "square", "tan", "tanh"):
        want = (lambda x: x / (1 + np.exp(-x.astype(np.float64)))) if name == "silu" else None
        for label, dtype, near in FLOATS:
            x = np.append(domains.get(name, np.linspace(-4.3, 4.4, 37)), 0.0).astype(dtype)
            within = 0.0 if name in exact and name != "softsign" else 2 * near
            case(name, label, op(name), x, want=want, within=within)
    for name in ("abs", "floor", "ceil", "round", "sign", "relu", "square"):
        case(name, "edges", op(name), f32(*EDGES))
        case(name, "halves", op(name), f16(0.5, 1.5, 2.5, -0.5, -1.5, -2.5))
    for name in ("abs", "sign", "square"):
        case(name, "int32", op(name), ints(-3, 0, 4))
    case("exp", "rank_5", op("exp"), (F32, 1, 2, 1, 2, 3), within=CLOSE)
    case("exp", "edges", op("exp"), f32(*EDGES, 88.0, -100.0), within=CLOSE)
    case("exp", "empty", op("exp"), np.zeros((2, 0), F16))
    for label, dtype, near in FLOATS:
        positive = np.linspace(0.1, 9, 13).astype(dtype)
        case("log", label, op("log"), positive, within=near)
        case("log", f"epsilon_{label}", op("log", epsilon=dtype(0.5)), positive, within=near)
        case("rsqrt", label, op("rsqrt"), positive, within=near)
        case("rsqrt", f"epsilon_{label}", op("rsqrt", epsilon=dtype(1e-3)), positive, within=near)
        case("inverse", label, op("inverse"), positive, within=near)
        case("inverse", f"epsilon_{label}", op("inverse", epsilon=dtype(0.25)), positive, within=near)
        case("clip", label, op("clip", alpha=dtype(-0.5), beta=dtype(0.75)), (dtype, 3, 5))
        case("threshold", label, op("threshold", alpha=dtype(0.25)), (dtype, 3, 5))
        case("leaky_relu", label, op("leaky_relu", alpha=dtype(0.1)), (dtype, 3, 5), within=near)
        case("elu", label, op("elu", alpha=dtype(0.7)), (dtype, 3, 5), within=near)
        case("thresholded_relu", label, op("thresholded_relu", alpha=dtype(0.3)), (dtype, 3, 5))
        for name in ("clamped_relu", "linear_activation", "scaled_tanh", "sigmoid_hard"):
            two = op(name, alpha=dtype(0.3), beta=dtype(0.6))
            case(name, label, two, (dtype, 3, 5), within=near)
        for mode in ("EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION"):
            case("gelu", f"{mode.lower()}_{label}", op("gelu", mode=mode), (dtype, 3, 11), within=2 * near)
        case(
            "prelu",
            label,
            op("prelu", alpha=np.array([0.1, 0.2, 0.3], dtype)),
            (dtype, 1, 3, 2, 2),
            within=near,
        )
        parametric = op("softplus_parametric", alpha=np.array([1, 2], dtype), beta=np.array([0.5, 3], dtype))
        case("softplus_parametric", label, parametric, (dtype, 1, 2, 5), within=2 * near)
    case("clip", "nan", op("clip", alpha=F32(-1), beta=F32(1)), f32(*EDGES))
    case("threshold", "int32", op("threshold", alpha=I32(2)), ints(-1, 2, 5))
    case("identity", "f16", op("identity"), (F16, 2, 3))
    case("identity", "int32", op("identity"), ints(1, 2))
    case("identity", "bool", op("identity"), np.array([True, False]))


def casts():
    for source, x in (
        ("f16", f16(1.5, -1.5, 0, 300, 1e-4)),
        ("f32", f32(1.5, -1.5, 0, 70000.5, 1e-9)),
        ("int32", ints(1, -3, 0, 4097, 40000)),
        ("bool", np.array([True, False])),
    ):
        for dtype in ("fp16", "fp32", "int32", "bool"):
            case("cast", f"{source}_to_{dtype}", op("cast", dtype=dtype), x)
    small = {"int8": np.int8, "uint8": np.uint8, "int16": np.int16, "uint16": np.uint16}
    for name, dtype in small.items():
        x = np.array([0, 1, 100, np.iinfo(dtype).max, np.iinfo(dtype).min], dtype)
        case("cast", f"{name}_to_f32", op("cast", dtype="fp32"), x, only=[17])
        case("cast", f"{name}_to_int32", op("cast", dtype="int32"), x, only=[17])
        case("cast", f"int32_to_{name}", op("cast", dtype=name), ints(0, 1, 100, -100, 255), only=[17])


def reductions():
    names = "sum mean max min prod sum_square l1_norm l2_norm log_sum log_sum_exp"
    for name in (f"reduce_{n}" for n in names.split()):
        for label, dtype, _near in FLOATS:
            x = np.abs(np.random.default_rng(5).standard_normal((2, 3, 4, 5))).astype(dtype) + dtype(0.1)
            for axes, keep in (([-1], True), ([0], False), ([1, -1], True), ([0, 2], False), (None, False)):
                named = "all" if axes is None else "_".join(str(a) for a in axes).replace("-", "m")
                fixed = {"keep_dims": keep} | ({} if axes is None else {"axes": axes})
                # numpy adds fp16 values in fp16; here they are added in fp32.
                within = 1e-2 if dtype is F16 else 1e-5
                case(name, f"{named}_{label}", op(name, **fixed), x, within=within)
        case(name, "rank_1", op(name, axes=[0], keep_dims=False), f32(0.5, 2.5, 1.5), within=1e-6)
        case(
            name, "rank_5", op(name, axes=[1, 3], keep_dims=True), np.ones((2, 3, 1, 2, 2), F32), within=1e-6
        )
    for name in ("sum", "max", "min", "prod", "sum_square", "l1_norm", "mean"):
        x = ints(1, -2, 3, 4, -5, 7).reshape(2, 3)
        case(f"reduce_{name}", "int32", op(f"reduce_{name}", axes=[1], keep_dims=False), x)
    case("reduce_sum", "empty", op("reduce_sum", axes=[0], keep_dims=False), np.zeros((0, 2), F32))
    case("reduce_max", "nan", op("reduce_max", axes=[0], keep_dims=False), f32(1, np.nan, 2))
    case(
        "reduce_max",
        "infinite",
        op("reduce_max", axes=[1], keep_dims=True),
        f32(-np.inf, -np.inf, 1, np.inf).reshape(2, 2),
    )
    for name in ("reduce_argmax", "reduce_argmin"):
        x = np.random.default_rng(2).integers(0, 4, (2, 3, 4))
        for axis, keep in ((-1, False), (0, True), (1, False)):
            for label, dtype in (("f16", F16), ("f32", F32), ("int32", I32)):
                fixed = op(name, axis=axis, keep_dims=keep)
                case(name, f"axis_{axis % 3}_{label}", fixed, x.astype(dtype))
        case(name, "uint16", op(name, axis=1, output_dtype="uint16"), x[0].astype(F16), only=[17])
        case(name, "nan", op(name, axis=0), f32(1, np.nan, 2, np.nan))


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


def indexed():
    for label, dtype in (("f16", F16), ("f32", F32), ("int32", I32)):
        table = (dtype, 5, 4)
        case("gather", label, op("gather", axis=0), table, ints(3, 0, 4))
        case("gather", f"matrix_{label}", op("gather", axis=0), table, ints(1, 2, 3, 4).reshape(2, 2))
        case("gather", f"axis_{label}", op("gather", axis=-1), (dtype, 2, 3, 5), ints(4, 4, 0))
        case(
            "gather",
            f"batch_{label}",
            op("gather", axis=1, batch_dims=1),
            (dtype, 2, 4, 3),
            ints(3, 0, 1, 2).reshape(2, 2),
            only=[16, 17],
        )
        between = op("gather", axis=2, batch_dims=1)
        case(
            "gather",
            f"batch_between_{label}",
            between,
            (dtype, 2, 2, 4),
            ints(3, 0, 1, 2).reshape(2, 2),
            only=[16, 17],
        )
        along = ints(3, 0, 1, 2, 2, 1).reshape(2, 3)
        case("gather_along_axis", label, op("gather_along_axis", axis=0), (dtype, 4, 3), along)
        case("gather_along_axis", f"last_{label}", op("gather_along_axis", axis=-1), (dtype, 2, 4), along)
        pairs = ints(1, 0, 0, 2).reshape(2, 2)
        case(
            "gather_nd",
            label,
            op("gather_nd"),
            (dtype, 2, 3, 4),
            pairs,
            want=lambda x, i: x[i[:, 0], i[:, 1]],
        )
        batch = lambda x, i: np.stack([x[b][i[b, :, 0]] for b in range(2)])
        case(
            "gather_nd",
            f"batch_{label}",
            op("gather_nd", batch_dims=1),
            (dtype, 2, 3, 4),
            ints(2, 0, 1, 1).reshape(2, 2, 1),
            want=batch,
        )
        for mode in ("update", "add", "sub", "mul", "div", "max", "min"):
            within = HALF if dtype is F16 else CLOSE
            data, indices, updates = (dtype, 4, 3), ints(2, 0), np.array([[1, 2, 3], [4, 5, 6]]).astype(dtype)
            case(
                "scatter",
                f"{mode}_{label}",
                op("scatter", axis=0, mode=mode),
                data,
                indices,
                updates,
                want=scattered(mode, 0),
                within=within,
            )
            tall = np.array([[1, 2], [3, 4], [5, 6], [7, 8]]).astype(dtype)
            case(
                "scatter",
                f"{mode}_axis_{label}",
                op("scatter", axis=1, mode=mode),
                data,
                ints(2, 0),
                tall,
                want=scattered(mode, 1),
                within=within,
            )
            case(
                "scatter_nd",
                f"{mode}_{label}",
                op("scatter_nd", mode=mode),
                data,
                ints(0, 1, 3, 2).reshape(2, 2),
                np.array([2, 3]).astype(dtype),
                want=scattered(mode, None),
                within=within,
            )
            case(
                "scatter_along_axis",
                f"{mode}_{label}",
                op("scatter_along_axis", axis=0, mode=mode),
                data,
                ints(1, 2, 3, 0, 1, 2).reshape(2, 3),
                updates,
                want=along_axis(mode),
                within=within,
            )
        twice = op("scatter", axis=0, mode="add")
        case(
            "scatter",
            f"twice_{label}",
            twice,
            (dtype, 3, 2),
            ints(1, 1),
            np.array([[1, 2], [3, 4]]).astype(dtype),
            want=scattered("add", 0),
            within=HALF,
        )
        rows = op("scatter_nd", mode="update")
        case(
            "scatter_nd",
            f"rows_{label}",
            rows,
            (dtype, 3, 2),
            ints(2, 0).reshape(2, 1),
            np.array([[1, 2], [3, 4]]).astype(dtype),
            want=scattered("update", None),
        )
    case("gather", "negative", op("gather", axis=0), (F16, 5, 2), ints(-1, -5), want=lambda x, i: x[i])
    case(
        "gather",
        "outside",
        op("gather", axis=1),
        (F16, 5, 2),
        ints(0, 2),
        fails="index 2 along axis 1 of size 2",
    )
    case(
        "gather",
        "validated",
        op("gather", axis=0, validate_indices=True),
        (F16, 5, 2),
        ints(-1),
        only=[17],
        fails="index -1 along axis 0 of size 5",
    )
    case("gather", "empty", op("gather", axis=0), (F16, 5, 2), np.zeros((0,), I32), want=lambda x, i: x[i])
    case("gather", "uint16", op("gather", axis=0), (F32, 5, 2), np.array([4, 1], np.uint16))
    case(
        "gather",
        "int8_table",
        op("gather", axis=0),
        np.arange(6, dtype=np.int8).reshape(3, 2) - 3,
        ints(2, 0),
        only=[17],
    )
    case(
        "gather_along_axis",
        "outside",
        op("gather_along_axis", axis=0),
        (F16, 2, 2),
        ints(0, 2).reshape(1, 2),
        fails="index 2 along axis 0 of size 2",
    )
    case(
        "gather_nd",
        "outside",
        op("gather_nd"),
        (F16, 2, 2),
        ints(1, -3).reshape(1, 2),
        fails="index -3 along axis 1 of size 2",
    )
    case(
        "scatter",
        "outside",
        op("scatter", axis=0, mode="add"),
        (F16, 2, 2),
        ints(2),
        (F16, 1, 2),
        fails="index 2 along axis 0 of size 2",
    )
    case(
        "scatter_nd",
        "validated",
        op("scatter_nd", mode="add", validate_indices=True),
        (F16, 2),
        ints(-1).reshape(1, 1),
        (F16, 1),
        only=[17],
        fails="index -1 along axis 0 of size 2",
    )


COMBINE = {
    "update": lambda a, b: b,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": lambda a, b: np.trunc(a / b) if a.dtype == I32 else a / b,
    "max": np.maximum,
    "min": np.minimum,
}


def scattered(mode, axis):
    """Updates one after the other, along an axis or by several indices."""

    def apply(data, indices, updates):
        result = data.copy()
        if axis is not None:
            for at, i in enumerate(indices):
                place = (slice(None),) * axis + (i,)
                result[place] = COMBINE[mode](result[place], np.take(updates, at, axis))
        else:
            for i, update in zip(indices, updates):
                result[tuple(i)] = COMBINE[mode](result[tuple(i)], update)
        return result

    return apply


def along_axis(mode):
    def apply(data, indices, updates):
        result = data.copy()
        for r, c in np.ndindex(*indices.shape):
            i = indices[r, c]
            result[i, c] = COMBINE[mode](result[i, c], updates[r, c])
        return result

    return apply


def updates():
    for label, dtype in (("f16", F16), ("f32", F32), ("int32", I32), ("bool", bool)):
        part = op("slice_update", begin=[0, 1, 2], end=[2, 3, 4])
        case("slice_update", label, part, (dtype, 2, 4, 5), (dtype, 2, 2, 2))
        strides = op(
            "slice_update", begin=[1, 0, 4], end=[0, 4, 0], stride=[-1, 2, -2], end_mask=[True, False, False]
        )
        case(
            "slice_update",
            f"stride_{label}",
            strides,
            (dtype, 2, 4, 5),
            (dtype, 2, 2, 2),
            want=lambda x, u: strided(x, u),
        )
        squeeze = op("slice_update", begin=[1, 0, 0], end=[2, 4, 5], squeeze_mask=[True, False, False])
        case("slice_update", f"squeeze_{label}", squeeze, (dtype, 2, 4, 5), (dtype, 4, 5))
    case("slice_update", "computed", op("slice_update"), (F16, 3, 4), (F16, 1, 2), ints(1, 1), ints(2, 3))
    case(
        "slice_update",
        "outside",
        op("slice_update"),
        (F16, 3, 4),
        (F16, 1, 2),
        ints(3, 1),
        ints(4, 3),
        fails="an update [1, 2] of a slice [0, 2]",
    )


def strided(x, update):
    result = x.copy()
    result[1::-1, 0:4:2, 4:0:-2] = update
    return result


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


def norms():
    for label, dtype, _near in FLOATS:
        within = 2e-3 if dtype is F16 else 1e-5
        for axes in ([-1], [1], [0, 2], [1, 2], [0, 1, 2]):
            shape = [(2, 5, 6)[a] for a in axes]
            rng = np.random.default_rng(1)
            gain = dict(
                gamma=rng.standard_normal(shape).astype(dtype), beta=rng.standard_normal(shape).astype(dtype)
            )
            named = "_".join(str(a % 3) for a in axes)
            case(
                "layer_norm",
                f"axes_{named}_{label}",
                op("layer_norm", axes=axes, epsilon=dtype(1e-3)),
                (dtype, 2, 5, 6),
                within=within,
            )
            case(
                "layer_norm",
                f"gain_{named}_{label}",
                op("layer_norm", axes=axes, epsilon=dtype(1e-3), **gain),
                (dtype, 2, 5, 6),
                within=within,
            )
        for shape in ((2, 3, 4), (2, 2, 3, 4), (2, 1, 2, 3, 4)):
            case(
                "l2_norm",
                f"rank_{len(shape)}_{label}",
                op("l2_norm", epsilon=dtype(1e-3)),
                (dtype, *shape),
                within=within,
            )
        v = lambda *values, d=dtype: np.array(values, d)
        moments = dict(mean=v(0.1, -0.2, 0.3), variance=v(1, 0.5, 2), epsilon=dtype(1e-3))
        gain = dict(gamma=v(1, 2, 0.5), beta=v(0, 0.1, -1))
        for shape in ((2, 3, 4), (2, 3, 2, 2), (1, 3, 2, 1, 2)):
            r = len(shape)
            case(
                "batch_norm",
                f"rank_{r}_{label}",
                op("batch_norm", **moments),
                (dtype, *shape),
                want=batch_norm(**moments),
                within=within,
            )
            case(
                "batch_norm",
                f"gain_rank_{r}_{label}",
                op("batch_norm", **moments, **gain),
                (dtype, *shape),
                want=batch_norm(**moments, **gain),
                within=within,
            )
        case(
            "instance_norm",
            label,
            op("instance_norm", epsilon=dtype(1e-3), **gain),
            (dtype, 2, 3, 4, 2),
            want=instance_norm(**gain),
            within=within,
        )
        for axis in (0, 1, -1):
            case(
                "softmax",
                f"axis_{axis % 3}_{label}",
                op("softmax", axis=axis),
                (dtype, 3, 4, 7),
                within=within / 2,
            )
        case("softmax", f"rank_1_{label}", op("softmax", axis=0), (dtype, 5), within=within / 2)
        case("softmax", f"rank_5_{label}", op("softmax", axis=2), (dtype, 1, 2, 3, 1, 2), within=within / 2)
    case("softmax", "masked", op("softmax", axis=-1), f32(0, -np.inf, 1, -np.inf).reshape(2, 2), within=CLOSE)


def channels(values, x):
    return np.asarray(values, np.float64).reshape(1, -1, *[1] * (x.ndim - 2))


def batch_norm(mean, variance, epsilon, gamma=(1, 1, 1), beta=(0, 0, 0)):
    c = channels
    return lambda x: (
        (x - c(mean, x)) / np.sqrt(c(variance, x) + float(epsilon)) * c(gamma, x) + c(beta, x)
    ).astype(x.dtype)


def instance_norm(gamma, beta):
    def apply(x):
        wide, axes = x.astype(np.float64), tuple(range(2, x.ndim))
        centred = wide - wide.mean(axes, keepdims=True)
        scale = np.sqrt((centred**2).mean(axes, keepdims=True) + float(x.dtype.type(1e-3)))
        return (centred / scale * channels(gamma, x) + channels(beta, x)).astype(x.dtype)

    return apply


if __name__ == "__main__":
    from conformance_products import products

    for group in (
        elementwise,
        functions,
        casts,
        reductions,
        moves,
        padding,
        indexed,
        updates,
        orders,
        norms,
        products,
    ):
        group()
    write()

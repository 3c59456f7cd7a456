"""Functions of one and of two values, casts, reductions."""

import numpy as np
from harness import CLOSE, EDGES, F16, F32, FLOATS, I32, case, f16, f32, ints, op


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

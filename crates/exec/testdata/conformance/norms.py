"""Norms and softmax."""

import numpy as np
from harness import CLOSE, F16, FLOATS, case, f32, op


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

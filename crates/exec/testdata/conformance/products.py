"""Products, attention and control flow."""

import itertools

import numpy as np
from coremltools.converters.mil import Builder as mb
from harness import F16, F32, I32, case


def wide(x):
    return x.astype(np.float64)


def linear():
    for label, dtype, within in (("f16", F16, 1e-3), ("f32", F32, 1e-6)):
        rng = np.random.default_rng(6)
        weight, bias = rng.standard_normal((7, 5)).astype(dtype), rng.standard_normal(7).astype(dtype)
        for shape in ((5,), (1, 5), (3, 5), (2, 3, 5), (1, 1, 1, 5), (2, 1, 1, 2, 5)):
            want = lambda x, w=weight, b=bias: (wide(x) @ wide(w).T + b).astype(x.dtype)
            build = lambda x, w=weight, b=bias: mb.linear(x=x, weight=w, bias=b)
            case(
                "linear",
                f"rank_{len(shape)}_{shape[0]}_{label}",
                build,
                (dtype, *shape),
                want=want,
                within=within,
            )
        plain = lambda x, w=weight: mb.linear(x=x, weight=w)
        case(
            "linear",
            f"no_bias_{label}",
            plain,
            (dtype, 2, 5),
            want=lambda x, w=weight: (wide(x) @ wide(w).T).astype(x.dtype),
            within=within,
        )


def matmul():
    shapes = [
        ((3, 5), (5, 4)),
        ((5,), (5, 4)),
        ((2, 3, 5), (2, 5, 4)),
        ((2, 3, 5), (5, 4)),
        ((1, 2, 3, 5), (3, 1, 5, 4)),
        ((1, 2, 1, 3, 5), (1, 1, 2, 5, 4)),
    ]
    for label, dtype, within in (("f16", F16, 2e-3), ("f32", F32, 1e-6)):
        want = lambda x, y: (wide(x) @ wide(y)).astype(x.dtype)
        for x, y in shapes:
            named = f"rank_{len(x)}_{len(y)}_{label}"
            case(
                "matmul",
                named,
                lambda x, y: mb.matmul(x=x, y=y),
                (dtype, *x),
                (dtype, *y),
                want=want,
                within=within,
            )
        turned = lambda x, y: mb.matmul(x=x, y=y, transpose_x=True, transpose_y=True)
        both = lambda x, y: (wide(x).swapaxes(-1, -2) @ wide(y).swapaxes(-1, -2)).astype(x.dtype)
        case(
            "matmul",
            f"transposed_{label}",
            turned,
            (dtype, 2, 5, 3),
            (dtype, 2, 4, 5),
            want=both,
            within=within,
        )
    nothing = lambda x, y: mb.matmul(x=x, y=y)
    case(
        "matmul",
        "empty_depth",
        nothing,
        np.zeros((2, 0), F32),
        np.zeros((0, 3), F32),
        want=lambda x, y: x @ y,
    )


def einsum():
    for label, dtype, within in (("f16", F16, 2e-3), ("f32", F32, 1e-6)):
        for equation, x, y in (
            ("nchw,nwhr->nchr", (2, 3, 4, 5), (2, 5, 4, 6)),
            ("nchw,nwhr->nchr", (2, 3, 1, 5), (1, 5, 4, 6)),
            ("chw,whr->chr", (3, 4, 5), (5, 4, 6)),
            ("bqhd,bdhk->bqhk", (1, 3, 2, 4), (1, 4, 2, 3)),
        ):
            build = lambda x, y, e=equation: mb.einsum(values=(x, y), equation=e)
            named = f"{equation.split(',')[0]}_{x[-2]}_{label}"
            case("einsum", named, build, (dtype, *x), (dtype, *y), within=within)


def unfolded(x, weight, bias, strides, before, after, dilations, groups):
    """A convolution by its definition."""
    dims = x.ndim - 2
    x = np.pad(wide(x), [(0, 0), (0, 0), *zip(before, after)])
    reach = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilations)]
    size = [(n - r) // s + 1 for n, r, s in zip(x.shape[2:], reach, strides)]
    outputs, depth = weight.shape[:2]
    result = np.zeros((x.shape[0], outputs, *size))
    for n, o in itertools.product(range(x.shape[0]), range(outputs)):
        group = o // (outputs // groups) * depth
        for at in np.ndindex(*size):
            window = tuple(slice(a * s, a * s + r, d) for a, s, r, d in zip(at, strides, reach, dilations))
            result[(n, o, *at)] = (
                x[(n, slice(group, group + depth), *window)] * wide(weight[o])
            ).sum() + bias[o]
    assert len(size) == dims
    return result


def conv():
    cases = [
        # name, x, weight, strides, (before, after), dilations, groups
        ("pointwise_1d", (2, 3, 5), (4, 3, 1), [1], ([0], [0]), [1], 1),
        ("pointwise_2d", (1, 6, 1, 20), (70, 6, 1, 1), [1, 1], ([0, 0], [0, 0]), [1, 1], 1),
        ("one_position", (1, 6, 1, 1), (9, 6, 1, 1), [1, 1], ([0, 0], [0, 0]), [1, 1], 1),
        ("kernel_1d", (1, 3, 9), (4, 3, 3), [1], ([0], [0]), [1], 1),
        ("causal_depthwise_1d", (1, 4, 6), (4, 1, 4), [1], ([3], [0]), [1], 4),
        ("kernel_2d", (2, 3, 6, 7), (4, 3, 3, 2), [1, 1], ([1, 0], [1, 1]), [1, 1], 1),
        ("strides_2d", (1, 2, 7, 8), (3, 2, 3, 3), [2, 3], ([1, 1], [1, 1]), [1, 1], 1),
        ("dilations_2d", (1, 2, 8, 8), (3, 2, 3, 3), [1, 1], ([0, 0], [0, 0]), [2, 3], 1),
        ("groups_2d", (1, 4, 5, 5), (6, 2, 2, 2), [1, 1], ([0, 0], [0, 0]), [1, 1], 2),
        ("kernel_3d", (1, 2, 4, 3, 5), (3, 2, 2, 2, 2), [1, 1, 1], ([0, 0, 1], [0, 0, 0]), [1, 1, 1], 1),
        ("strided_pointwise", (1, 3, 5, 6), (2, 3, 1, 1), [2, 2], ([0, 0], [0, 0]), [1, 1], 1),
    ]
    for label, dtype, within in (("f16", F16, 2e-3), ("f32", F32, 1e-6)):
        for name, x, weight, strides, (before, after), dilations, groups in cases:
            rng = np.random.default_rng(8)
            w, b = rng.standard_normal(weight).astype(dtype), rng.standard_normal(weight[0]).astype(dtype)
            pad = [v for pair in zip(before, after) for v in pair]
            rest = dict(strides=strides, dilations=dilations, groups=groups)
            build = lambda x, w=w, b=b, pad=pad, rest=rest: mb.conv(
                x=x, weight=w, bias=b, pad_type="custom", pad=pad, **rest
            )
            args = (strides, before, after, dilations, groups)
            want = lambda x, w=w, b=b, args=args: unfolded(x, w, b, *args).astype(x.dtype)
            case("conv", f"{name}_{label}", build, (dtype, *x), want=want, within=within)
    w = np.random.default_rng(8).standard_normal((2, 1, 2)).astype(F32)
    for pad_type, before, after in (("same", 0, 1), ("same_lower", 1, 0), ("valid", 0, 0)):
        build = lambda x, t=pad_type: mb.conv(x=x, weight=w, pad_type=t)
        want = lambda x, b=before, a=after: unfolded(x, w, [0, 0], [1], [b], [a], [1], 1).astype(F32)
        case("conv", pad_type, build, (F32, 1, 1, 5), want=want, within=1e-6)
    same = lambda x: mb.conv(x=x, weight=w, pad_type="same", strides=[2])
    case(
        "conv",
        "same_strided",
        same,
        (F32, 1, 1, 5),
        want=lambda x: unfolded(x, w, [0, 0], [2], [0], [1], [1], 1).astype(F32),
        within=1e-6,
    )
    computed = lambda x, y: mb.conv(x=x, weight=y)
    case(
        "conv",
        "computed_weight",
        computed,
        (F32, 1, 2, 20),
        (F32, 3, 2, 2),
        want=lambda x, y: unfolded(x, y, [0] * 3, [1], [0], [0], [1], 1).astype(F32),
        within=1e-6,
    )


def attended(q, k, v, mask=0.0):
    if np.asarray(mask).dtype == bool:
        mask = np.where(mask, 0, -np.inf)
    scores = wide(q) @ wide(k).swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + mask
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return ((e / e.sum(-1, keepdims=True)) @ wide(v)).astype(q.dtype)


def attention():
    def build(x, y, z, w=None):
        mask = {} if w is None else {"attn_mask": w}
        return mb.scaled_dot_product_attention(query=x, key=y, value=z, **mask)

    rng = np.random.default_rng(12)
    for label, dtype, within in (("f16", F16, 2e-3), ("f32", F32, 2e-6)):
        for batch in ((1,), (2, 3), (1, 2, 2)):
            q, k, v = (dtype, *batch, 4, 8), (dtype, *batch, 5, 8), (dtype, *batch, 5, 6)
            named = f"rank_{len(batch) + 2}_{label}"
            case("scaled_dot_product_attention", named, build, q, k, v, want=attended, within=within)
        q, k, v = (dtype, 1, 2, 4, 8), (dtype, 1, 2, 5, 8), (dtype, 1, 2, 5, 6)
        mask = np.where(rng.random((1, 1, 4, 5)) > 0.6, -1e4, 0).astype(dtype)
        case(
            "scaled_dot_product_attention",
            f"mask_{label}",
            build,
            q,
            k,
            v,
            mask,
            want=attended,
            within=within,
        )
        truth = np.array([[True, False, True, True, False]] * 4)
        case(
            "scaled_dot_product_attention",
            f"bool_mask_{label}",
            build,
            q,
            k,
            v,
            truth,
            want=attended,
            within=within,
        )
        fixed = lambda x, y, z, m=mask: build(x, y, z, m)
        case(
            "scaled_dot_product_attention",
            f"known_mask_{label}",
            fixed,
            q,
            k,
            v,
            want=lambda q, k, v, m=mask: attended(q, k, v, m),
            within=within,
        )
        known = lambda x, y, z: build(x, y, z, truth)
        case(
            "scaled_dot_product_attention",
            f"known_bool_mask_{label}",
            known,
            q,
            k,
            v,
            want=lambda q, k, v: attended(q, k, v, truth),
            within=within,
        )
        one = (dtype, 1, 2, 1, 8)
        case(
            "scaled_dot_product_attention",
            f"one_query_{label}",
            build,
            one,
            k,
            v,
            want=attended,
            within=within,
        )


def control_flow():
    def branch(x, y):
        return mb.cond(
            pred=mb.squeeze(x=mb.less(x=x, y=I32(3))),
            _true_fn=lambda: (mb.add(x=y, y=y), mb.sub(x=y, y=F32(1))),
            _false_fn=lambda: (mb.mul(x=y, y=F32(10)), y),
        )

    for name, x in (("true", 1), ("false", 5)):
        want = lambda x, y: (y + y, y - 1) if x < 3 else (y * 10, y)
        case("cond", name, branch, np.array([x], I32), (F32, 2, 3), want=want)

    def nested(x, y):
        positive = lambda: mb.cond(
            pred=mb.squeeze(x=mb.less(x=x, y=I32(5))),
            _true_fn=lambda: mb.add(x=y, y=y),
            _false_fn=lambda: mb.exp(x=y),
        )
        return mb.cond(
            pred=mb.squeeze(x=mb.greater(x=x, y=I32(0))),
            _true_fn=positive,
            _false_fn=lambda: mb.mul(x=y, y=F32(-1)),
        )

    for x in (-1, 2, 7):
        want = lambda x, y: -y if x <= 0 else y + y if x < 5 else np.exp(y)
        case(
            "cond",
            f"nested_{x}".replace("-", "m"),
            nested,
            np.array([x], I32),
            (F32, 3),
            want=want,
            within=1e-6,
        )

    def powers(x, y):
        """y added to itself x times, and the number of rounds."""
        x = mb.squeeze(x=x)

        def body(i, total):
            return mb.add(x=i, y=I32(1)), mb.add(x=total, y=y)

        return mb.while_loop(
            _cond=lambda i, total: mb.less(x=i, y=x), _body=body, loop_vars=(I32(0), mb.mul(x=y, y=F32(0)))
        )

    for x in (0, 1, 4):
        want = lambda x, y: (x[0], y * x)
        case("while_loop", f"rounds_{x}", powers, np.array([x], I32), (F32, 2, 2), want=want, within=1e-6)

    def inner(x):
        """A loop in a loop: i·j summed for j < i < x."""
        x = mb.squeeze(x=x)
        # Start values that coremltools does not take for constants of the loop, each with its own name.
        one, two = mb.sub(x=x, y=x), mb.mul(x=x, y=I32(0))

        def outer_body(i, total):
            def inner_body(j, sum):
                return mb.add(x=j, y=I32(1)), mb.add(x=sum, y=mb.mul(x=i, y=j))

            _, total = mb.while_loop(
                _cond=lambda j, sum: mb.less(x=j, y=i), _body=inner_body, loop_vars=(mb.sub(x=i, y=i), total)
            )
            return mb.add(x=i, y=I32(1)), total

        return mb.while_loop(_cond=lambda i, total: mb.less(x=i, y=x), _body=outer_body, loop_vars=(one, two))

    want = lambda x: (x[0], I32(sum(i * j for i in range(x[0]) for j in range(i))))
    case("while_loop", "nested", inner, np.array([5], I32), want=want)

    def filled(x):
        """Rows written one by one."""

        def body(i, rows):
            row = mb.expand_dims(x=mb.cast(x=mb.fill(shape=[3], value=F32(2)), dtype="fp32"), axes=[0])
            begin = mb.stack(values=(i, I32(0)), axis=0)
            end = mb.stack(values=(mb.add(x=i, y=I32(1)), I32(3)), axis=0)
            return mb.add(x=i, y=I32(1)), mb.slice_update(x=rows, update=row, begin=begin, end=end)

        return mb.while_loop(_cond=lambda i, rows: mb.less(x=i, y=I32(2)), _body=body, loop_vars=(I32(0), x))[
            1
        ]

    want = lambda x: np.concatenate([np.full((2, 3), 2, F32), x[2:]])
    case("while_loop", "in_place", filled, (F32, 4, 3), want=want, only=[18])


def products():
    for group in (linear, matmul, einsum, conv, attention, control_flow):
        group()

"""Writes the packages that the tests of `kvbaton-exec` run, and what coremltools or numpy says they give.

Run by hand:  python generate.py   (coremltools 9.0, numpy)

`ops.mlpackage` holds one operation a case, each with its own inputs and output; `ops.json` the inputs and the expected
values, from coremltools' `value_inference` (Apple's numpy definition of the operation) where there is one, else from a
numpy expression given with the case. `attention.mlpackage` holds a small transformer layer for each way in which
exporters write attention; its results are compared between runs, not with numbers. `stateful.mlpackage` is two layers
that keep keys and values in states, run over three chunks, and `stateful.json` what numpy says. `past.mlpackage` is
attention of a chunk over its own rows and a past of which `position` rows are there; its runs are compared, too.
`blocks.mlpackage` has a `cond` of which one block needs far more memory than the other, and a loop. `missing.mlpackage` uses an
operation that the executor does not have.
"""

import json
import logging
import shutil
import tempfile
import warnings
from pathlib import Path

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

HERE = Path(__file__).parent
RNG = np.random.default_rng(11)
TYPES = {np.dtype("float16"): types.fp16, np.dtype("float32"): types.fp32, np.dtype("int32"): types.int32}


def save(program, name):
    model = ct.convert(
        program,
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT32,
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.mlpackage"
        model.save(str(path))
        shutil.rmtree(HERE / path.name, ignore_errors=True)
        shutil.copytree(path, HERE / path.name)


def f16(*shape, scale=1.0):
    return (RNG.standard_normal(shape) * scale).astype(np.float16)


def f32(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def i32(*values):
    return np.array(values, np.int32)


CASES = []


def case(name, build, *inputs, expect=None, tolerance=0.0):
    """`tolerance`: of the largest expected value; 0 means the same bits."""
    CASES.append((name, build, inputs, expect, tolerance))


def integer(v):
    return mb.cast(x=v, dtype="int32")


a, b = f16(2, 3, 5), f16(3, 5)
for op in ("add", "sub", "mul", "real_div", "maximum", "minimum"):
    case(op, lambda x, y, op=op: getattr(mb, op)(x=x, y=y), a, b)
case("add_outer", lambda x, y: mb.add(x=x, y=y), f16(4, 1, 3), f16(2, 1))
case("mul_rows", lambda x, y: mb.mul(x=x, y=y), f16(3, 20), f16(3, 1))
case("mul_f32", lambda x, y: mb.mul(x=x, y=y), f32(3, 20), f32(20))
case("add_int", lambda x, y: mb.add(x=x, y=y), i32(1, -2, 3), i32(7))
case("floor_div_int", lambda x, y: mb.floor_div(x=x, y=y), i32(7, -7, 6, -6), i32(3))
case("mod_int", lambda x, y: mb.mod(x=x, y=y), i32(7, -7, 6, -6), i32(3))
case("pow_square", lambda x: mb.pow(x=x, y=np.float16(2)), f16(3, 7))
case("pow_cube", lambda x: mb.pow(x=x, y=np.float32(3)), f32(3, 7), tolerance=1e-6)
for op in ("exp", "tanh", "sigmoid", "square", "cos", "sin", "abs", "erf"):
    case(op, lambda x, op=op: getattr(mb, op)(x=x), f16(3, 37), tolerance=1e-3)
    case(f"{op}_f32", lambda x, op=op: getattr(mb, op)(x=x), f32(3, 37), tolerance=2e-6)
positive = np.abs(f16(3, 9)) + np.float16(0.1)
case("sqrt", lambda x: mb.sqrt(x=x), positive)
case("rsqrt", lambda x: mb.rsqrt(x=x, epsilon=np.float16(1e-5)), positive, tolerance=1e-3)
case("inverse", lambda x: mb.inverse(x=x, epsilon=np.float16(1e-4)), positive, tolerance=1e-3)
case("log", lambda x: mb.log(x=x), positive, tolerance=1e-3)
case("relu", lambda x: mb.relu(x=x), f16(3, 9))
silu = lambda x: x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
case("silu", lambda x: mb.silu(x=x), f16(3, 37, scale=3), expect=silu, tolerance=1e-3)
for mode in ("EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION"):
    case(f"gelu_{mode.lower()}", lambda x, mode=mode: mb.gelu(x=x, mode=mode), f16(3, 37), tolerance=1e-3)
for op in ("equal", "not_equal", "greater", "greater_equal", "less", "less_equal"):
    case(op, lambda x, y, op=op: integer(getattr(mb, op)(x=x, y=y)), i32(1, 2, 3), i32(2))
    case(
        f"{op}_f16",
        lambda x, y, op=op: integer(getattr(mb, op)(x=x, y=y)),
        f16(3, 4),
        np.zeros(4, np.float16),
    )
less = lambda x: mb.less(x=x, y=np.int32(3))
even = lambda x: mb.equal(x=mb.mod(x=x, y=np.int32(2)), y=np.int32(0))
case("logical_and", lambda x: integer(mb.logical_and(x=less(x), y=even(x))), i32(1, 2, 3, 4))
case("logical_or", lambda x: integer(mb.logical_or(x=less(x), y=even(x))), i32(1, 2, 3, 5))
case("logical_not", lambda x: integer(mb.logical_not(x=less(x))), i32(1, 2, 3, 4))
case("select", lambda x, p, q: mb.select(cond=less(x), a=p, b=q), i32(1, 5, 2), f16(2, 3), f16(2, 3))
case(
    "select_int", lambda x, p, q: mb.select(cond=less(x), a=p, b=q), i32(1, 5, 2), i32(7, 8, 9), i32(0, 1, 2)
)
case("cast_f16_f32", lambda x: mb.cast(x=x, dtype="fp32"), f16(3, 4))
case("cast_f32_f16", lambda x: mb.cast(x=x, dtype="fp16"), f32(3, 4))
case("cast_f32_int", lambda x: mb.cast(x=x, dtype="int32"), f32(3, 4) * 5)
case("cast_int_f16", lambda x: mb.cast(x=x, dtype="fp16"), i32(1, -3, 4097))
case("identity", lambda x: mb.identity(x=x), f16(3, 4))
t = f16(2, 3, 4, 5)
case("transpose", lambda x: mb.transpose(x=x, perm=[0, 2, 1, 3]), t)
case("transpose_last", lambda x: mb.transpose(x=x, perm=[3, 1, -2, 0]), t)
case("transpose_reshape", lambda x: mb.reshape(x=mb.transpose(x=x, perm=[0, 2, 1, 3]), shape=[2, 4, 15]), t)
case("reshape", lambda x: mb.reshape(x=x, shape=[6, -1]), t)
case("reshape_zero", lambda x: mb.reshape(x=x, shape=[0, 0, 20, 1]), t)
case("expand_dims", lambda x: mb.expand_dims(x=x, axes=[0, -1, 2]), f16(3, 4))
case("squeeze", lambda x: mb.squeeze(x=x, axes=[0, -1]), f16(1, 3, 1))
case("squeeze_all", lambda x: mb.squeeze(x=x), f16(1, 3, 1, 2))
case("tile", lambda x: mb.tile(x=x, reps=[2, 1, 3]), f16(2, 3, 4))
for axis in (0, 1, -1):
    case(
        f"concat_{axis % 3}",
        lambda x, y, axis=axis: mb.concat(values=[x, y, x], axis=axis),
        f16(2, 3, 4),
        f16(2, 3, 4),
    )
case("concat_uneven", lambda x, y: mb.concat(values=[x, y], axis=1), f16(2, 1, 4), f16(2, 3, 4))
case("concat_int", lambda x, y: mb.concat(values=[x, y], axis=0), i32(1, 2), i32(3))
case("split", lambda x: mb.split(x=x, num_splits=2, axis=-1)[1], f16(3, 8))
case("split_sizes", lambda x: mb.split(x=x, split_sizes=[1, 2, 3], axis=0)[2], f16(6, 2))
case("slice", lambda x: mb.slice_by_index(x=x, begin=[0, 1, -3, 0], end=[2, 3, -1, 5]), t)
case(
    "slice_stride",
    lambda x: mb.slice_by_index(x=x, begin=[0, 0, 0, 0], end=[2, 3, 4, 5], stride=[1, 2, 1, 3]),
    t,
)
masks = dict(begin_mask=[True, False, False, False], end_mask=[False, True, False, False])
case("slice_masks", lambda x: mb.slice_by_index(x=x, begin=[1, 1, 0, 2], end=[1, 2, 4, 4], **masks), t)
squeeze = [False, True, False, False]
case(
    "slice_squeeze",
    lambda x: mb.slice_by_index(x=x, begin=[0, -1, 0, 0], end=[2, 0, 4, 5], squeeze_mask=squeeze),
    t,
)
case("slice_back", lambda x: mb.slice_by_index(x=x, begin=[4, 0], end=[1, 3], stride=[-2, 1]), f16(6, 3))
case(
    "slice_back_mask",
    lambda x: mb.slice_by_index(
        x=x, begin=[0, 0], end=[0, 3], stride=[-1, 1], begin_mask=[True, False], end_mask=[True, False]
    ),
    f16(4, 3),
)
case("shape", lambda x: mb.shape(x=x), f16(2, 3, 4))
case("softmax", lambda x: mb.softmax(x=x, axis=-1), f32(3, 4, 37), tolerance=1e-6)
case("softmax_f16", lambda x: mb.softmax(x=x, axis=-1), f16(3, 4, 37), tolerance=2e-3)
case("softmax_axis", lambda x: mb.softmax(x=x, axis=1), f32(3, 4, 37), tolerance=1e-6)
norm = dict(gamma=f32(6), beta=f32(6), epsilon=np.float32(1e-3))
case("layer_norm", lambda x: mb.layer_norm(x=x, axes=[-1], **norm), f32(2, 5, 6), tolerance=1e-5)
case(
    "layer_norm_two",
    lambda x: mb.layer_norm(x=x, axes=[1, 2], epsilon=np.float32(1e-3)),
    f32(2, 5, 6),
    tolerance=1e-5,
)
case(
    "layer_norm_f16",
    lambda x: mb.layer_norm(x=x, axes=[-1], epsilon=np.float16(1e-3)),
    f16(2, 5, 40),
    tolerance=2e-3,
)
for op in ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_sum_square"):
    for axes, keep in (([-1], True), ([0], False), ([0, 2], True), ([1, 2], False)):
        name = f"{op}_{'_'.join(str(x) for x in axes)}".replace("-", "m")
        case(
            name,
            lambda x, op=op, axes=axes, keep=keep: getattr(mb, op)(x=x, axes=axes, keep_dims=keep),
            f32(3, 4, 19),
            tolerance=1e-5,
        )
table = f16(7, 4)
case("gather", lambda x, i: mb.gather(x=x, indices=i, axis=0), table, i32(3, 0, 6))
case(
    "gather_matrix",
    lambda x, i: mb.gather(x=x, indices=i, axis=0),
    table,
    np.array([[1, 2], [3, 4]], np.int32),
)
case("gather_axis", lambda x, i: mb.gather(x=x, indices=i, axis=1), f16(2, 5, 3), i32(4, 4, 0))
case(
    "gather_negative",
    lambda x, i: mb.gather(x=x, indices=i, axis=0),
    table,
    i32(-1, -7),
    expect=lambda x, i: x[i],
)
W, B = f16(33, 20), f16(33)
dot = lambda x, y: x.astype(np.float64) @ y.astype(np.float64)
case(
    "linear", lambda x: mb.linear(x=x, weight=W), f16(2, 5, 20), expect=lambda x: dot(x, W.T), tolerance=1e-3
)
case(
    "linear_bias",
    lambda x: mb.linear(x=x, weight=W, bias=B),
    f16(5, 20),
    expect=lambda x: dot(x, W.T) + B,
    tolerance=1e-3,
)
case(
    "linear_row",
    lambda x: mb.linear(x=x, weight=W, bias=B),
    f16(1, 20),
    expect=lambda x: dot(x, W.T) + B,
    tolerance=1e-3,
)
swap = lambda x: np.swapaxes(x, -1, -2)
case("matmul", lambda x, y: mb.matmul(x=x, y=y), f32(2, 3, 7, 5), f32(2, 3, 5, 6), tolerance=1e-6)
case(
    "matmul_y", lambda x, y: mb.matmul(x=x, y=y, transpose_y=True), f32(3, 7, 5), f32(3, 6, 5), tolerance=1e-6
)
case(
    "matmul_x", lambda x, y: mb.matmul(x=x, y=y, transpose_x=True), f32(3, 5, 7), f32(3, 5, 6), tolerance=1e-6
)
case("matmul_broadcast", lambda x, y: mb.matmul(x=x, y=y), f32(2, 3, 7, 5), f32(3, 5, 6), tolerance=1e-6)
case("matmul_5d", lambda x, y: mb.matmul(x=x, y=y), f32(1, 2, 3, 7, 5), f32(1, 2, 1, 5, 6), tolerance=1e-6)
case(
    "matmul_weight",
    lambda x: mb.matmul(x=x, y=W, transpose_y=True),
    f16(2, 5, 20),
    expect=lambda x: dot(x, W.T),
    tolerance=1e-3,
)
case("range_1d", lambda s: mb.range_1d(start=np.int32(2), end=np.int32(11), step=np.int32(3)), i32(0))
Q8 = RNG.integers(-128, 128, (6, 8)).astype(np.int8)
SCALE, OFFSET = np.abs(f16(6, 2)) + np.float16(0.1), RNG.integers(-9, 9, (6, 2)).astype(np.int8)
spread = lambda v, shape: np.kron(v, np.ones([d // c for d, c in zip(shape, v.shape)], v.dtype))
scaled = lambda q, s, o: ((q.astype(np.float32) - o) * s.astype(np.float32)).astype(np.float16)
case(
    "constexpr_int8_block",
    lambda x: mb.add(x=x, y=mb.constexpr_blockwise_shift_scale(data=Q8, scale=SCALE, offset=OFFSET)),
    np.zeros((6, 8), np.float16),
    expect=lambda x: scaled(Q8, spread(SCALE, Q8.shape), spread(OFFSET, Q8.shape).astype(np.float32)),
)
Q4 = RNG.integers(-8, 8, (6, 8))
case(
    "constexpr_int4_block",
    lambda x: mb.add(
        x=x, y=mb.constexpr_blockwise_shift_scale(data=Q4.astype(types.np_int4_dtype), scale=SCALE)
    ),
    np.zeros((6, 8), np.float16),
    expect=lambda x: scaled(Q4, spread(SCALE, Q4.shape), np.float32(0)),
)
for bits in (2, 4, 6):
    kind = {2: types.np_uint2_dtype, 4: types.np_uint4_dtype, 6: types.np_uint6_dtype}[bits]
    indices, lut = RNG.integers(0, 2**bits, (6, 8)), f16(3, 1, 2**bits, 1)
    case(
        f"constexpr_lut{bits}",
        lambda x, i=indices, lut=lut, kind=kind: mb.add(
            x=x, y=mb.constexpr_lut_to_dense(indices=i.astype(kind), lut=lut)
        ),
        np.zeros((6, 8), np.float16),
        expect=lambda x, i=indices, lut=lut: np.stack([lut[r // 2, 0, i[r], 0] for r in range(6)]),
    )


def ops():
    inputs, expected, specs = {}, {}, []
    for name, build, arrays, expect, tolerance in CASES:
        for i, array in enumerate(arrays):
            inputs[f"{name}_in{i}"] = array
            specs.append(mb.TensorSpec(array.shape, dtype=TYPES[array.dtype]))
        holder = {}

        @mb.program(input_specs=[mb.TensorSpec((1,), dtype=types.fp16)], opset_version=ct.target.iOS18)
        def constants(unused):
            result = build(*[mb.const(val=array) for array in arrays])
            holder["value"] = result.val if expect is None else None
            return result

        value = holder.get("value") if expect is None else expect(*arrays)
        assert value is not None, f"{name}: coremltools has no value for it"
        expected[name] = (np.asarray(value), tolerance)

    names = list(inputs)

    def main(**values):
        results = []
        for name, build, arrays, _, _ in CASES:
            result = build(*[values[f"{name}_in{i}"] for i in range(len(arrays))])
            results.append(mb.identity(x=result, name=name))
        return tuple(results)

    # The builder reads parameter names from the function's signature.
    scope = {"main": main}
    exec(f"def program({', '.join(names)}):\n    return main(**locals())", scope)
    program = mb.program(input_specs=specs, opset_version=ct.target.iOS18)(scope["program"])
    save(program, "ops")
    flat = lambda v: [int(x) if v.dtype.kind in "iub" else float(x) for x in np.asarray(v).ravel()]
    lines = {
        "inputs": {
            k: {"dtype": str(v.dtype), "shape": v.shape, "values": flat(v)} for k, v in inputs.items()
        },
        "outputs": {
            k: {"shape": v.shape, "values": flat(v), "tolerance": t} for k, (v, t) in expected.items()
        },
    }
    write = lambda d: "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in d.items()) + "\n}"
    (HERE / "ops.json").write_text(
        '{"inputs": ' + write(lines["inputs"]) + ',\n"outputs": ' + write(lines["outputs"]) + "}\n"
    )


S, D, G, R, E = 96, 16, 2, 3, 32
CAUSAL = np.triu(np.full((S, S), -np.inf), 1).clip(-40000, 0).astype(np.float16)
WEIGHTS = {k: f16(n * D, E, scale=E**-0.5) for k, n in (("q", G * R), ("k", G), ("v", G))}
GAIN = f16(E)


def norm_trick(x):
    """RMS norm as exporters write it for the Neural Engine."""
    both = mb.concat(values=[x, mb.mul(x=x, y=np.float16(-1))], axis=-1)
    half, _ = mb.split(x=mb.layer_norm(x=both, axes=[-1], epsilon=np.float16(1e-5)), num_splits=2, axis=-1)
    return mb.mul(x=half, y=GAIN)


def rope(x):
    angles = np.outer(np.arange(S), 1e4 ** (-np.arange(0, D, 2) / D))
    angles = np.concatenate([angles, angles], -1)
    one, two = mb.split(x=x, num_splits=2, axis=-1)
    turned = mb.concat(values=[mb.mul(x=two, y=np.float16(-1)), one], axis=-1)
    cosine, sine = np.cos(angles).astype(np.float16), np.sin(angles).astype(np.float16)
    return mb.add(x=mb.mul(x=x, y=cosine), y=mb.mul(x=turned, y=sine))


def heads(x, name, n):
    x = mb.linear(x=x, weight=WEIGHTS[name])
    return mb.transpose(x=mb.reshape(x=x, shape=[1, S, n, D]), perm=[0, 2, 1, 3])


def softmax_in_steps(x):
    e = mb.exp(x=mb.sub(x=x, y=mb.reduce_max(x=x, axes=[-1], keep_dims=True)))
    return mb.real_div(x=e, y=mb.reduce_sum(x=e, axes=[-1], keep_dims=True))


def folded(q, k, v, mask):
    """The query heads of a group share the row axis."""
    q = mb.reshape(x=q, shape=[1, G, R * S, D])
    s = mb.mul(x=mb.matmul(x=q, y=k, transpose_y=True), y=np.float16(D**-0.5))
    p = mb.softmax(x=mb.add(x=s, y=np.tile(mask, (R, 1))[None, None]), axis=-1)
    return mb.reshape(x=mb.matmul(x=p, y=v), shape=[1, G * R, S, D])


def five_dimensions(q, k, v, mask):
    q = mb.reshape(x=mb.mul(x=q, y=np.float16(D**-0.5)), shape=[1, G, R, S, D])
    k, v = mb.expand_dims(x=k, axes=[2]), mb.expand_dims(x=v, axes=[2])
    p = mb.softmax(x=mb.add(x=mb.matmul(x=q, y=k, transpose_y=True), y=mask), axis=-1)
    return mb.reshape(x=mb.matmul(x=p, y=v), shape=[1, G * R, S, D])


def repeated(q, k, v, mask):
    """Keys and values repeated for every query head, -inf as the mask, the scale as a division."""
    repeat = lambda x: mb.reshape(
        x=mb.tile(x=mb.expand_dims(x=x, axes=[2]), reps=[1, 1, R, 1, 1]), shape=[1, G * R, S, D]
    )
    mask = np.where(mask < 0, -np.inf, 0).astype(np.float16)
    s = mb.real_div(x=mb.matmul(x=q, y=repeat(k), transpose_y=True), y=np.float16(D**0.5))
    return mb.matmul(x=mb.softmax(x=mb.add(x=mask[None, None], y=s), axis=-1), y=repeat(v))


def reshaped(q, k, v, mask):
    """Another shape between the products, and the softmax in steps."""
    q = mb.reshape(x=q, shape=[1, G, R * S, D])
    s = mb.reshape(x=mb.matmul(x=q, y=k, transpose_y=True), shape=[1, G * R, S, S])
    p = softmax_in_steps(mb.add(x=mb.mul(x=s, y=np.float16(D**-0.5)), y=mask))
    return mb.reshape(x=mb.matmul(x=mb.reshape(x=p, shape=[1, G, R * S, S]), y=v), shape=[1, G * R, S, D])


def unmasked(q, k, v, mask):
    q = mb.reshape(x=q, shape=[1, G, R * S, D])
    p = mb.softmax(x=mb.matmul(x=q, y=mb.transpose(x=k, perm=[0, 1, 3, 2])), axis=-1)
    return mb.reshape(x=mb.matmul(x=p, y=v), shape=[1, G * R, S, D])


def layer(attend):
    def main(x):
        h = norm_trick(x)
        q, k, v = rope(heads(h, "q", G * R)), rope(heads(h, "k", G)), heads(h, "v", G)
        a = attend(q, k, v, CAUSAL)
        a = mb.reshape(x=mb.transpose(x=a, perm=[0, 2, 1, 3]), shape=[1, S, G * R * D])
        gate, up = mb.split(x=a, num_splits=2, axis=-1)
        y = mb.mul(x=mb.silu(x=gate), y=up)
        return y, k, v

    return main


def attention():
    @mb.program(input_specs=[mb.TensorSpec((1, S, E), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x):
        results = []
        for attend in (folded, five_dimensions, repeated, reshaped, unmasked):
            y, k, v = layer(attend)(x)
            results.append(mb.identity(x=y, name=attend.__name__))
            if attend is folded:
                results += [mb.identity(x=k, name="keys"), mb.identity(x=v, name="values")]
        return tuple(results)

    save(program, "attention")


def blocks():
    """Blocks whose memory differs: a branch with wide intermediate values, a loop whose variables change places."""
    wide = f16(4096, 16, scale=0.1)

    @mb.program(
        input_specs=[mb.TensorSpec((64, 16), dtype=types.fp16), mb.TensorSpec((1,), dtype=types.int32)],
        opset_version=ct.target.iOS18,
    )
    def program(x, rounds):
        def widened():
            hidden = mb.tanh(x=mb.linear(x=x, weight=wide))
            return mb.matmul(x=hidden, y=wide)

        y = mb.cond(
            pred=mb.squeeze(x=mb.greater(x=rounds, y=i32(1)), axes=[0]),
            _true_fn=widened,
            _false_fn=lambda: mb.add(x=x, y=x),
        )

        def body(i, a, b):
            hidden = mb.sin(x=mb.tile(x=b, reps=[16, 1]))
            mean = mb.reduce_mean(x=mb.reshape(x=hidden, shape=[16, 64, 16]), axes=[0])
            return mb.add(x=i, y=i32(1)), mb.add(x=a, y=mean), a

        _, a, b = mb.while_loop(
            _cond=lambda i, a, b: mb.squeeze(x=mb.less(x=i, y=rounds), axes=[0]),
            _body=body,
            loop_vars=(mb.sub(x=rounds, y=rounds), y, x),
        )
        return mb.identity(x=a, name="a"), mb.identity(x=b, name="b")

    save(program, "blocks")


LAYERS, CAPACITY, CHUNK = 2, 12, 2


def stateful():
    """Two layers whose keys and values live in states that are updated in place, and a window that is shifted."""
    global RNG
    RNG = np.random.default_rng(13)
    weights = [
        {n: f16(G * D, E, scale=E**-0.5) for n in "qkv"} | {"o": f16(E, G * D, scale=0.2)}
        for _ in range(LAYERS)
    ]
    cache = (LAYERS, G, CAPACITY, D)

    @mb.program(
        input_specs=[
            mb.TensorSpec((CHUNK, E), dtype=types.fp16),
            mb.TensorSpec((1,), dtype=types.int32),
            mb.TensorSpec((1, CAPACITY), dtype=types.fp16),
            mb.StateTensorSpec(cache, dtype=types.fp16),
            mb.StateTensorSpec(cache, dtype=types.fp16),
            mb.StateTensorSpec((4, E), dtype=types.fp16),
        ],
        opset_version=ct.target.iOS18,
    )
    def program(x, position, mask, keys, values, window):
        end = mb.add(x=position, y=np.int32(CHUNK))
        k_all, v_all, recent = (
            mb.read_state(input=keys),
            mb.read_state(input=values),
            mb.read_state(input=window),
        )
        for layer, w in enumerate(weights):

            def heads(name):
                return mb.transpose(
                    x=mb.reshape(x=mb.linear(x=x, weight=w[name]), shape=[1, CHUNK, G, D]), perm=[0, 2, 1, 3]
                )

            def put(state, whole, new):
                begin = mb.concat(
                    values=[np.array([layer, 0], np.int32), position, np.array([0], np.int32)], axis=0
                )
                stop = mb.concat(
                    values=[np.array([layer + 1, G], np.int32), end, np.array([D], np.int32)], axis=0
                )
                whole = mb.slice_update(x=whole, update=new, begin=begin, end=stop)
                whole = mb.coreml_update_state(state=state, value=whole)
                part = mb.slice_by_index(x=whole, begin=[layer, 0, 0, 0], end=[layer + 1, G, CAPACITY, D])
                return whole, part

            k_all, k = put(keys, k_all, heads("k"))
            v_all, v = put(values, v_all, heads("v"))
            s = mb.mul(x=mb.matmul(x=heads("q"), y=k, transpose_y=True), y=np.float16(D**-0.5))
            a = mb.matmul(x=mb.softmax(x=mb.add(x=s, y=mask), axis=-1), y=v)
            a = mb.reshape(x=mb.transpose(x=a, perm=[0, 2, 1, 3]), shape=[CHUNK, G * D])
            x = mb.add(x=x, y=mb.linear(x=a, weight=w["o"]))
        rest = mb.slice_by_index(x=recent, begin=[CHUNK, 0], end=[4, E])
        recent = mb.coreml_update_state(state=window, value=mb.concat(values=[rest, x], axis=0))
        return mb.identity(x=x, name="y"), mb.reduce_sum(x=recent, axes=[0], keep_dims=False, name="recent")

    save(program, "stateful")
    k_all, v_all, recent = np.zeros(cache), np.zeros(cache), np.zeros((4, E))
    runs = []
    for step in range(3):
        first = step * CHUNK
        x = f16(CHUNK, E)
        mask = np.where(np.arange(CAPACITY) < first + CHUNK, 0, -np.inf).astype(np.float16)[None]
        run = {"x": x, "position": i32(first), "mask": mask.clip(-40000, 0)}
        y = x.astype(np.float64)
        for layer, w in enumerate(weights):
            q, k, v = (dot(y, w[n].T).reshape(CHUNK, G, D).swapaxes(0, 1) for n in "qkv")
            k_all[layer, :, first : first + CHUNK], v_all[layer, :, first : first + CHUNK] = k, v
            e = np.exp(q @ k_all[layer].swapaxes(-1, -2) * D**-0.5 + mask)
            a = (e / e.sum(-1, keepdims=True)) @ v_all[layer]
            y = y + dot(a.swapaxes(0, 1).reshape(CHUNK, G * D), w["o"].T)
        recent = np.concatenate([recent[CHUNK:], y])
        flat = lambda v: {
            "dtype": str(v.dtype),
            "shape": v.shape,
            "values": np.asarray(v, np.float32).ravel().tolist(),
        }
        runs.append(
            {"inputs": {n: flat(v) | ({"values": v.ravel().tolist()}) for n, v in run.items()}}
            | {"outputs": {"y": flat(y), "recent": flat(recent.sum(0))}}
            | {"states": {"keys": flat(k_all), "values": flat(v_all), "window": flat(recent)}}
        )
    (HERE / "stateful.json").write_text(json.dumps(runs) + "\n")


def past():
    """Attention over a chunk and the past before it, under a mask that is computed: a prefix, and a window's ring."""
    rows, slots, window = 8, 40, 20
    own, cache = (1, 2, rows, 16), (3, 2, slots, 16)
    shapes = [(1, 2, 3 * rows, 16), own, own, cache, cache]
    specs = [mb.TensorSpec(shape, dtype=types.fp16) for shape in shapes]

    @mb.program(
        input_specs=[*specs, mb.TensorSpec((1,), dtype=types.int32)],
        opset_version=ct.target.iOS18,
    )
    def program(q, k, v, past_k, past_v, position):
        def additive(shown):
            shape = tuple(shown.shape)
            return mb.select(cond=shown, a=np.zeros(shape, np.float16), b=np.full(shape, -np.inf, np.float16))

        causal = np.where(np.arange(rows) > np.arange(rows)[:, None], -np.inf, 0).astype(np.float16)[
            None, None
        ]
        prefix = mb.less(x=np.arange(slots, dtype=np.int32)[None, None, None], y=position)
        prefix = mb.tile(x=additive(prefix), reps=[1, 1, rows, 1])
        slot = np.arange(slots, dtype=np.int32)[None, None, None]
        age = mb.mod(x=mb.sub(x=mb.add(x=position, y=np.int32(slots - 1)), y=slot), y=np.int32(slots))
        reach = (window - 1 - np.arange(rows, dtype=np.int32))[None, None, :, None]
        ring = additive(mb.logical_and(x=mb.less(x=age, y=reach), y=mb.less(x=age, y=position)))
        results = []
        for layer, (name, shown) in enumerate((("prefix", prefix), ("ring", ring))):
            mask = mb.concat(values=[mb.const(val=causal), shown], axis=-1)
            at = {"begin": [layer, 0, 0, 0], "end": [layer + 1, 2, slots, 16]}
            keys = mb.concat(values=[k, mb.slice_by_index(x=past_k, **at)], axis=2)
            values = mb.concat(values=[v, mb.slice_by_index(x=past_v, **at)], axis=2)
            scores = mb.mul(x=mb.matmul(x=q, y=keys, transpose_y=True), y=np.float16(0.25))
            scores = mb.reshape(x=scores, shape=[2, 3, rows, rows + slots])
            weights = mb.softmax(x=mb.add(x=scores, y=mask), axis=-1)
            weights = mb.reshape(x=weights, shape=[1, 2, 3 * rows, rows + slots])
            results.append(mb.matmul(x=weights, y=values, name=name))
        return tuple(results)

    save(program, "past")


def refused():
    @mb.program(input_specs=[mb.TensorSpec((2, 3), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def missing(x):
        return mb.sliding_windows(x=mb.exp(x=x), axis=1, size=2, name="windows")

    save(missing, "missing")


if __name__ == "__main__":
    ops()
    attention()
    stateful()
    past()
    refused()
    blocks()

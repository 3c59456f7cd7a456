"""Runs cases through coremltools and writes them to `../ops/*.mil`.

A case is a builder and arrays. The builder is run twice by coremltools: on constants, where `value_inference` (Apple's
numpy definition of the operation) gives the expected values, and on inputs, which gives the program. Where coremltools
has no definition, or a broken one, a numpy expression stands beside the case, and the file says so. Cases run in every
opset from iOS 16 on that defines the operation anew. `registry.json` lists all operations of MIL, for the table in
`docs/ops.md`, and `types.json` the types that MIL lets their inputs have.
"""

import itertools
import json
import logging
import warnings
from pathlib import Path

logging.disable(logging.CRITICAL)
warnings.filterwarnings("ignore")

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry
from mil_text import numbers, program_text

HERE = Path(__file__).parent.parent / "ops"
TARGETS = {16: ct.target.iOS16, 17: ct.target.iOS17, 18: ct.target.iOS18}
VERSIONS = {16: 7, 17: 8, 18: 9}
TYPES = {
    "float16": types.fp16,
    "float32": types.fp32,
    "int32": types.int32,
    "int16": types.int16,
    "uint16": types.uint16,
    "int8": types.int8,
    "uint8": types.uint8,
    "bool": types.bool,
}
# Of the types that MIL allows, those that Core ML has a name for in the file and a value can have at run time or in a weight.
MIL_TYPES = set(
    [
        "fp16",
        "fp32",
        "int32",
        "int16",
        "uint16",
        "int8",
        "uint8",
        "bool",
        "int4",
        "uint1",
        "uint2",
        "uint3",
        "uint4",
        "uint6",
    ]
)
FILES: dict[str, list[str]] = {}
PROBLEMS: list[str] = []
F16, F32, I32 = np.float16, np.float32, np.int32
# Of the largest value: what rounding an fp32 or an fp16 result once more can change.
CLOSE, HALF = 1e-6, 1e-3


def opsets(op):
    """The first opset, from iOS 16 on, of each definition of `op`."""
    definitions = SSAOpRegistry.core_ops[op]
    found, last = [], None
    for version, target in TARGETS.items():
        definition = definitions.get(target)
        if definition is not None and definition is not last:
            found.append(version)
        last = definition
    return found


def rng(op, name):
    return np.random.default_rng(sum(map(ord, op + name)))


def case(op, name, build, *inputs, want=None, within=0.0, only=None, fails=None, oracle="numpy", edit=()):
    """`within`: of the largest expected value; 0 means the same values. Inputs are arrays, or shapes to fill with noise
    as `(dtype, *shape)`. `oracle`: where the values of `want` are from. `edit`: pairs of texts; the first one is
    replaced by the second one in the program, for programs that coremltools does not build."""
    random = rng(op, name)
    arrays = []
    for given in inputs:
        if isinstance(given, tuple):
            dtype, *shape = given
            noise = random.standard_normal(shape) * (1 if np.dtype(dtype).kind == "f" else 9)
            given = noise.astype(dtype) if dtype is not bool else noise > 0
        arrays.append(np.asarray(given))
    versions = only or opsets(op)
    for version in versions:
        try:
            FILES.setdefault(op, []).append(
                written(op, name, version, versions, build, arrays, want, within, fails, oracle, edit)
            )
        except Exception as error:
            PROBLEMS.append(f"{op} {name} iOS{version}: {type(error).__name__}: {error}")


def written(op, name, version, versions, build, arrays, want, within, fails, oracle, edit):
    """The text of one case in one opset."""
    label = name if len(versions) == 1 else f"{name}_ios{version}"
    names = ["x", "y", "z", "w"][: len(arrays)]
    specs = [mb.TensorSpec(a.shape, dtype=TYPES[str(a.dtype)]) for a in arrays]
    text, results, types_of = program_text(built(names, specs, build, version), VERSIONS[version])
    for old, new in edit:
        assert old in text, f"{old} is not in\n{text}"
        text = text.replace(old, new)
    expected = None
    if fails is None and want is None:
        oracle = "coremltools"
        holder = []

        @mb.program(input_specs=[mb.TensorSpec((1,), dtype=types.fp16)], opset_version=TARGETS[version])
        def constants(unused):
            holder.extend(as_tuple(build(*[mb.const(val=a.copy()) for a in arrays])))
            return mb.identity(x=unused)

        assert all(v.val is not None for v in holder), f"{op} {label}: coremltools has no value for it"
        expected = [v.val for v in holder]
    elif fails is None:
        expected = as_tuple(want(*arrays))
    lines = [
        f"case {label} {oracle}\n{text}",
        *(f"given {n} = {numbers(a)};\n" for n, a in zip(names, arrays)),
    ]
    if fails is not None:
        lines.append(f"fails {json.dumps(fails)};\n")
    else:
        assert len(results) == len(expected), f"{op} {label}: {len(results)} results, {len(expected)} values"
        lines += map(expectation, results, types_of, expected, itertools.repeat(within))
    return "".join(lines)


def as_tuple(result):
    return tuple(result) if isinstance(result, (list, tuple)) else (result,)


def built(names, specs, build, version):
    """coremltools' program of a builder; the builder asks for functions with named parameters."""
    scope = {"build": build, "as_tuple": as_tuple}
    exec(f"def program({', '.join(names)}):\n    return as_tuple(build({', '.join(names)}))", scope)
    return mb.program(input_specs=specs, opset_version=TARGETS[version])(scope["program"])


def expectation(name, declared, value, within):
    """`declared`: MIL's type, of which the shape may be unknown."""
    value = np.asarray(value)
    if value.dtype == np.float64:
        value = value.astype(np.float32)
    dtype, _, dims = declared.partition("[")
    known = dims.rstrip("]").split(", ") if dims else []
    assert len(known) == value.ndim, f"{name} has shape {value.shape}, MIL says {declared}"
    assert all(d in ("?", str(n)) for d, n in zip(known, value.shape)), f"{name} {value.shape}: {declared}"
    shape = f"[{', '.join(map(str, value.shape))}]" if value.ndim else ""
    tolerance = f" within {within:g}" if within and value.dtype.kind == "f" else ""
    return f"expect {name}: {dtype}{shape}{tolerance} = {numbers(value)};\n"


def state_case(op, name, states, inputs, build, calls, within=0.0):
    """A program with states: `states` and `inputs` are types by name, as `(dtype, *shape)`; `calls` are, for each run, what
    is given by name (states included, where they are set) and what its results and its states must be."""
    typed = lambda given: {"shape": given[1:], "dtype": TYPES[np.dtype(given[0]).name]}
    specs = [mb.StateTensorSpec(**typed(t)) for t in states.values()]
    specs += [mb.TensorSpec(**typed(t)) for t in inputs.values()]
    try:
        program = built([*states, *inputs], specs, build, 18)
        text, results, types_of = program_text(program, VERSIONS[18])
        runs = []
        for given, wanted, after in calls:
            lines = [f"given {n} = {numbers(v)};\n" for n, v in given.items()]
            lines += map(expectation, results, types_of, wanted, itertools.repeat(within))
            for state, (dtype, *shape) in states.items():
                declared = f"{type_text_of(dtype)}[{', '.join(map(str, shape))}]"
                lines.append(expectation(state, declared, after[state], within))
            runs.append("".join(lines))
        FILES.setdefault(op, []).append(f"case {name} numpy\n{text}" + "again\n".join(runs))
    except Exception as error:
        PROBLEMS.append(f"{op} {name}: {type(error).__name__}: {error}")


def type_text_of(dtype):
    return {"float16": "fp16", "float32": "fp32"}.get(np.dtype(dtype).name, np.dtype(dtype).name)


def domains():
    """The types that each operation's inputs may have, by the version of iOS that defines them: `{op: {version: {input:
    types}}}`; none where MIL does not list them."""
    found = {}
    for op in SSAOpRegistry.core_ops:
        for version in opsets(op):
            definition = SSAOpRegistry.core_ops[op][TARGETS[version]]
            named = {}
            for name, kind in definition.input_spec.input_types.items():
                if name[0] == "_":
                    continue
                group = getattr(kind, "_type_domain_id", None)
                allowed = getattr(kind, "_type_domain", None) or definition.type_domains.get(group, ())
                allowed = sorted({types.builtin_to_string(t) for t in allowed} & MIL_TYPES)
                named[name] = allowed
            found.setdefault(op, {})[version] = named
    return {op: by for op, by in sorted(found.items()) if op[0] != "_"}


def write():
    if PROBLEMS:
        raise SystemExit("\n".join(PROBLEMS))
    for old in HERE.glob("*.mil"):
        old.unlink()
    for op, cases in sorted(FILES.items()):
        head = f"# {op}: written by ../conformance/write.py, in the form that ../conformance/mil_text.py explains.\n\n"
        (HERE / f"{op}.mil").write_text(head + "\n".join(cases))
    registry = {
        op: sorted(v for v in VERSIONS if v in opsets(op)) for op in SSAOpRegistry.core_ops if op[0] != "_"
    }
    registry |= {"read_state": [18], "write_state": [18]}
    lines = ",\n".join(f"  {json.dumps(op)}: {json.dumps(v)}" for op, v in sorted(registry.items()))
    (HERE / "registry.json").write_text("{\n" + lines + "\n}\n")
    lines = ",\n".join(f"  {json.dumps(op)}: {json.dumps(v)}" for op, v in domains().items())
    (HERE / "types.json").write_text("{\n" + lines + "\n}\n")


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

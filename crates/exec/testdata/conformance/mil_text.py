"""Programs of coremltools as text: the form of `ops/*.mil`, which `tests/conformance` reads.

    case NAME ORACLE
    func OPSET (x: fp16[2, 3]) {
      y: fp16[2, 3] = softmax(axis = int32(-1), x = x);
      return y;
    }
    given x = 1.0, 2.0, …;
    expect y: fp16[2, 3] = …;     or  expect y: fp16[2, 3] within 1e-06 = …;   or  fails "message";

Constants are written in place, `TYPE[dimensions](values)`; attributes of an operation follow its inputs in brackets, blocks
of `cond` and `while_loop` in braces, after their own inputs. A type is a name of MIL and, unless it is a scalar, its
dimensions; `?` is one that is known only at run time. A state is an input of type `state fp16[2, 3]`: what is given is set
before a run, zeros at first; what is expected is what it holds afterwards. `again` begins another run on the same states.
"""

import json
import re

import numpy as np
from coremltools import proto
from coremltools.converters.mil.backend.mil import load

MIL = proto.MIL_pb2
NAMES = {
    MIL.FLOAT16: "fp16",
    MIL.FLOAT32: "fp32",
    MIL.INT32: "int32",
    MIL.INT16: "int16",
    MIL.UINT16: "uint16",
    MIL.INT8: "int8",
    MIL.UINT8: "uint8",
    MIL.UINT32: "uint32",
    MIL.BOOL: "bool",
    MIL.STRING: "string",
    MIL.INT4: "int4",
    MIL.UINT1: "uint1",
    MIL.UINT2: "uint2",
    MIL.UINT3: "uint3",
    MIL.UINT4: "uint4",
    MIL.UINT6: "uint6",
}
BYTES = {
    "fp16": np.float16,
    "int8": np.int8,
    "uint8": np.uint8,
    "int16": np.int16,
    "uint16": np.uint16,
    "uint32": np.uint32,
}


def number(value):
    """The shortest text that gives the same value back."""
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if isinstance(value, (float, np.floating)):
        return str(value.item() if not isinstance(value, np.floating) else value)
    return str(int(value))


def numbers(values):
    return ", ".join(number(v) for v in np.asarray(values).ravel())


def type_text(value_type):
    if value_type.WhichOneof("type") == "stateType":
        return f"state {type_text(value_type.stateType.wrappedType)}"
    tensor = value_type.tensorType
    if value_type.WhichOneof("type") != "tensorType":
        raise NotImplementedError(value_type.WhichOneof("type"))
    dims = [
        str(d.constant.size) if d.WhichOneof("dimension") == "constant" else "?" for d in tensor.dimensions
    ]
    return NAMES[tensor.dataType] + (f"[{', '.join(dims)}]" if tensor.rank else "")


def sizes(value_type):
    return [d.constant.size for d in value_type.tensorType.dimensions]


def unpacked(data, bits, signed, count):
    """Elements of fewer than eight bits, the lowest bit first."""
    single = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[: count * bits]
    values = single.reshape(count, bits).astype(int) @ (1 << np.arange(bits))
    return np.where(values >> (bits - 1) & 1, values - (1 << bits), values) if signed else values


def value_text(value):
    ty = type_text(value.type)
    name = ty.split("[")[0]
    tensor = value.immediateValue.tensor
    if name == "string":
        return f"{ty}({', '.join(json.dumps(s) for s in tensor.strings.values)})"
    bits = re.fullmatch(r"(u?)int([12346])", name)
    if bits:
        values = unpacked(
            tensor.bytes.values, int(bits[2]), not bits[1], np.prod(sizes(value.type), dtype=int)
        )
    elif name in BYTES and tensor.WhichOneof("value") == "bytes":
        values = np.frombuffer(tensor.bytes.values, BYTES[name])
    else:
        field = getattr(tensor, tensor.WhichOneof("value") or "ints").values
        values = np.array(field, np.float32 if name == "fp32" else None)
    return f"{ty}({numbers(values)})"


def block_text(block, constants, indent):
    lines = []
    constants = dict(constants)

    def argument(binding):
        if binding.WhichOneof("binding") == "value":
            return value_text(binding.value)
        return constants.get(binding.name, binding.name)

    for op in block.operations:
        if op.type == "const":
            constants[op.outputs[0].name] = value_text(op.attributes["val"])
            continue
        inputs = []
        for name in sorted(op.inputs):
            bound = [argument(a) for a in op.inputs[name].arguments]
            several = len(bound) > 1 or name in (
                "values",
                "loop_vars",
                "ref_tensors",
                "begins",
                "ends",
                "end_masks",
            )
            inputs.append(f"{name} = ({', '.join(bound)})" if several else f"{name} = {bound[0]}")
        kept = ", ".join(
            f"{name} = {value_text(op.attributes[name])}" for name in sorted(op.attributes) if name != "name"
        )
        outputs = ", ".join(f"{o.name}: {type_text(o.type)}" for o in op.outputs)
        outputs += " = " if outputs else ""
        kept = f"[{kept}]" if kept else ""
        nested = ""
        for inner in op.blocks:
            own = ", ".join(f"{i.name}: {type_text(i.type)}" for i in inner.inputs)
            nested += f" ({own}) {{\n{block_text(inner, constants, indent + '  ')}{indent}}}"
        lines.append(f"{indent}{outputs}{op.type}({', '.join(inputs)}){kept}{nested};\n")
    results = ", ".join(constants.get(name, name) for name in block.outputs)
    lines.append(f"{indent}return {results};\n")
    return "".join(lines)


def program_text(program, version):
    """`program`, a program of coremltools' builder, as it is written for specification version `version`; its results, and
    MIL's types of them."""
    load.should_use_weight_file = lambda *_: False
    exported = load.MILProtoExporter(program, "", version).export()
    function = exported.functions["main"]
    inputs = ", ".join(f"{i.name}: {type_text(i.type)}" for i in function.inputs)
    body = block_text(function.block_specializations[function.opset], {}, "  ")
    block = function.block_specializations[function.opset]
    names = list(block.outputs)
    declared = {o.name: o.type for op in block.operations for o in op.outputs}
    declared |= {i.name: i.type for i in function.inputs}
    declared = [type_text(declared[name]) for name in names]
    # The builder counts through all programs: values are numbered anew.
    own = {i.name for i in function.inputs}
    numbered = {}
    for name in re.findall(r"([A-Za-z_]\w*): (?=[a-z]+[0-9]*\b)", body):
        if name not in own:
            numbered.setdefault(name, f"v{len(numbered)}")
    rename = lambda text: re.sub(r'"[^"]*"|[A-Za-z_]\w*', lambda m: numbered.get(m[0], m[0]), text)
    return f"func {function.opset} ({inputs}) {{\n{rename(body)}}}\n", [rename(n) for n in names], declared

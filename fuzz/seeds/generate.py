"""Writes seeds for ``mil_program``: models with what exporters hardly ever write.

Run by hand:  python fuzz/seeds/generate.py   (coremltools 9.0)

``types.mlmodel`` has a constant of every element type in every field that may hold it, lists, and values of list,
tuple, dictionary and state type; ``features.mlmodel`` describes inputs of every kind, of enumerated and of ranged
shapes, with defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coremltools.proto import MIL_pb2 as mil
from coremltools.proto import Model_pb2 as model

HERE = Path(__file__).parent / "mil_program"
FIELDS: dict[str, list[str]] = {
    "floats": ["FLOAT32"],
    "doubles": ["FLOAT64"],
    "bools": ["BOOL"],
    "ints": ["INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32"],
    "longInts": ["INT64", "UINT64"],
    "bytes": [name for name, number in mil.DataType.items() if number > 2],
    "strings": ["STRING"],
}


def tensor(dtype: int, *shape: int) -> Any:
    """The type of a tensor."""
    ty = mil.ValueType()
    ty.tensorType.dataType = dtype
    ty.tensorType.rank = len(shape)
    for size in shape:
        ty.tensorType.dimensions.add().constant.size = size
    return ty


def bits(name: str) -> int:
    """Bits of an element of the type ``name``."""
    digits = "".join(c for c in name.split("E")[0] if c.isdigit())
    return int(digits or 8)


def immediate(field: str, name: str) -> Any:
    """Three elements."""
    value = mil.Value(type=tensor(mil.DataType.Value(name), 3))
    values = getattr(value.immediateValue.tensor, field)
    if field == "bytes":
        values.values = b"\x01" * ((3 * bits(name) + 7) // 8)
    else:
        values.values.extend({"bools": [True] * 3, "strings": ["a"] * 3}.get(field, [1] * 3))
    return value


def add(block: Any, name: str, value: Any) -> None:
    """Adds a constant."""
    op = block.operations.add(type="const")
    op.outputs.add(name=name).type.CopyFrom(value.type)
    op.attributes["val"].CopyFrom(value)


def empty(version: int = 9) -> tuple[Any, Any, Any]:
    """A model, its function and its block."""
    made = model.Model(specificationVersion=version)
    function = made.mlProgram.functions["main"]
    function.opset = "CoreML8"
    made.mlProgram.version = 1
    return made, function, function.block_specializations["CoreML8"]


def types() -> Any:
    """Constants and values of every type."""
    made, function, block = empty()
    for field, names in FIELDS.items():
        for name in names:
            add(block, f"{field}_{name}", immediate(field, name))
    of_list = mil.ValueType()
    of_list.listType.type.CopyFrom(tensor(mil.INT32))
    of_list.listType.length.constant.size = 2
    numbers = mil.Value(type=of_list)
    for number in (1, 2):
        element = numbers.immediateValue.list.values.add(type=tensor(mil.INT32))
        element.immediateValue.tensor.ints.values.append(number)
    texts = mil.Value(type=of_list)
    texts.type.listType.type.CopyFrom(tensor(mil.STRING))
    for text in ("a", "b"):
        element = texts.immediateValue.list.values.add(type=tensor(mil.STRING))
        element.immediateValue.tensor.strings.values.append(text)
    pair = mil.ValueType()
    pair.tupleType.types.add().CopyFrom(tensor(mil.FLOAT16, 2))
    pair.tupleType.types.add().CopyFrom(of_list)
    words = mil.ValueType()
    words.dictionaryType.keyType.CopyFrom(tensor(mil.STRING))
    words.dictionaryType.valueType.CopyFrom(tensor(mil.INT64))
    state = mil.ValueType()
    state.stateType.wrappedType.CopyFrom(tensor(mil.FLOAT16, 4, 2))
    op = block.operations.add(type="made_up")
    for name, ty in (("list", of_list), ("pair", pair), ("words", words)):
        op.outputs.add(name=name).type.CopyFrom(ty)
    op.inputs["numbers"].arguments.add().value.CopyFrom(numbers)
    op.inputs["texts"].arguments.add().value.CopyFrom(texts)
    function.inputs.add(name="kept").type.CopyFrom(state)
    block.outputs.append("ints_INT32")
    kept = made.description.state.add(name="kept").type.stateType.arrayType
    kept.dataType = 65552
    kept.shape.extend([4, 2])
    result = made.description.output.add(name="ints_INT32").type.multiArrayType
    result.dataType = 131104
    result.shape.append(3)
    return made


def features() -> Any:
    """Inputs of every kind."""
    made, function, block = empty(8)
    described = made.description
    kinds = ("int64Type", "doubleType", "stringType", "imageType", "dictionaryType", "sequenceType")
    for kind in kinds:
        feature = described.input.add(name=kind, shortDescription="odd")
        getattr(feature.type, kind).SetInParent()
    arrays = [("enumerated", 65552), ("ranged", 65568), ("ints", 131104), ("open", 0), ("double", 65600)]
    for name, number in arrays:
        array = described.input.add(name=name).type
        array.isOptional = name == "ints"
        array.multiArrayType.dataType = number
        array.multiArrayType.shape.extend([1, 4] if name != "open" else [])
        if name == "enumerated":
            for size in (4, 8):
                array.multiArrayType.enumeratedShapes.shapes.add().shape.extend([1, size])
        if name == "ranged":
            array.multiArrayType.floatDefaultValue = 0.5
            for low, high in ((1, 1), (1, -1)):
                array.multiArrayType.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)
        if name == "ints":
            array.multiArrayType.intDefaultValue = 3
        if name == "double":
            array.multiArrayType.doubleDefaultValue = 0.25
    dtypes = {"enumerated": mil.FLOAT16, "ranged": mil.FLOAT32, "ints": mil.INT32, "double": mil.FLOAT64}
    for feature in described.input:
        ty = tensor(dtypes.get(feature.name, mil.FLOAT16), 1, 4)
        if feature.name in ("enumerated", "ranged"):
            ty.tensorType.dimensions[1].unknown.variadic = False
        function.inputs.add(name=feature.name).type.CopyFrom(ty)
    described.metadata.author = "nobody"
    described.metadata.userDefined["key"] = "value"
    output = described.output.add(name="ints")
    output.type.multiArrayType.dataType = 131104
    output.type.multiArrayType.shape.extend([1, 4])
    block.outputs.append("ints")
    return made


if __name__ == "__main__":
    for name, made in (("types", types()), ("features", features())):
        (HERE / f"{name}.mlmodel").write_bytes(made.SerializeToString(deterministic=True))

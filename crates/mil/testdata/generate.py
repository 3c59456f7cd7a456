"""Writes the packages that the tests of `kvbaton-mil` read, and what coremltools says about each.

Run by hand:  python generate.py   (coremltools 9.0, numpy)

Each `NAME.mlpackage` has a `NAME.json` beside it, produced from the saved file by coremltools' own protobuf
classes and blob reader, never by kvbaton: functions, features, values, operation counts, the bytes of every
constant.
Weights are random but seeded. UUIDs in manifests differ from run to run; nothing reads them.
"""

import collections
import json
import logging
import shutil
import tempfile
import warnings
from pathlib import Path

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")

import coremltools as ct
import coremltools.optimize as cto
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol, types
from coremltools.libmilstoragepython import _BlobStorageReader as BlobReader
from coremltools.proto import FeatureTypes_pb2, MIL_pb2

HERE = Path(__file__).parent
RNG = np.random.default_rng(7)


def f16(*shape):
    return RNG.standard_normal(shape).astype(np.float16)


def convert(program, target, **options):
    return ct.convert(
        program,
        minimum_deployment_target=target,
        compute_precision=ct.precision.FLOAT16,
        pass_pipeline=ct.PassPipeline.EMPTY,
        **options,
    )


W_EMBED, W_K, W_V, W_OUT = f16(48, 32), f16(64, 32), f16(64, 32), f16(48, 32)


def prefill(tokens, target, layers=2):
    """A prefill in miniature: ids -> logits, stacked key and value caches [layer, kv_head, row, head_dim]."""

    @mb.program(
        input_specs=[
            mb.TensorSpec((1, tokens), dtype=types.int32),
            mb.TensorSpec((1,), dtype=types.int32),
        ],
        opset_version=target,
    )
    def main(input_ids, last_index):
        x = mb.gather(x=W_EMBED, indices=input_ids, axis=0, name="embedding")
        keys, values = [], []
        for layer in range(layers):
            for out, weight, label in ((keys, W_K, "k"), (values, W_V, "v")):
                y = mb.linear(x=x, weight=weight, name=f"layer{layer}_{label}")
                y = mb.reshape(x=y, shape=[1, tokens, 2, 32])
                out.append(mb.transpose(x=y, perm=[0, 2, 1, 3]))
            x = mb.add(x=x, y=mb.silu(x=x))
        last = mb.gather(x=x, indices=last_index, axis=1)
        logits = mb.linear(x=mb.squeeze(x=last, axes=[1]), weight=W_OUT, name="logits")
        return (
            logits,
            mb.concat(values=keys, axis=0, name="key_cache"),
            mb.concat(values=values, axis=0, name="value_cache"),
        )

    return main


def plain():
    model = convert(prefill(16, ct.target.iOS18), ct.target.iOS18)
    model.short_description = "a prefill in miniature"
    model.author = "kvbaton"
    model.license = "MIT"
    model.version = "1.2"
    model.user_defined_metadata["kvbaton.layout"] = 'name = "stacked"\n'
    model.user_defined_metadata["kvbaton.model"] = '{"layers": 2}'
    return model


def spec7():
    return convert(prefill(8, ct.target.iOS16, layers=1), ct.target.iOS16)


def stateful():
    shape = (2, 2, 32, 64)

    @mb.program(
        input_specs=[
            mb.TensorSpec((1, 4, 16), dtype=types.fp16),
            mb.TensorSpec((1,), dtype=types.int32),
            mb.TensorSpec((1, 1, 4, 32), dtype=types.fp16),
            mb.StateTensorSpec(shape, dtype=types.fp16),
            mb.StateTensorSpec(shape, dtype=types.fp16),
        ],
        opset_version=ct.target.iOS18,
    )
    def main(hidden, current_pos, causal_mask, k_state, v_state):
        outputs = []
        for state, weight, label in ((k_state, f16(128, 16), "k"), (v_state, f16(128, 16), "v")):
            cache = mb.read_state(input=state, name=f"{label}_cache")
            rows = mb.linear(x=hidden, weight=weight)
            rows = mb.transpose(x=mb.reshape(x=rows, shape=[1, 4, 2, 64]), perm=[0, 2, 1, 3])
            first = mb.concat(values=[np.int32([0, 0]), current_pos, np.int32([0])], axis=0)
            end = mb.concat(
                values=[np.int32([1, 2]), mb.add(x=current_pos, y=np.int32([4])), np.int32([64])], axis=0
            )
            cache = mb.slice_update(x=cache, update=rows, begin=first, end=end)
            outputs.append(mb.coreml_update_state(state=state, value=cache, name=f"{label}_new"))
        scores = mb.matmul(x=outputs[0], y=outputs[1], transpose_y=True)
        scores = mb.reduce_sum(x=scores, axes=[3], keep_dims=True)
        return mb.add(
            x=mb.reduce_sum(x=causal_mask, axes=[3], keep_dims=True), y=mb.reduce_max(x=scores), name="out"
        )

    return convert(main, ct.target.iOS18)


def projection(shape, target=ct.target.iOS18, inner=40):
    weight = f16(inner, 64)

    @mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.fp16)], opset_version=target)
    def main(x):
        return mb.linear(x=x, weight=weight, name="y")

    return main


def ranged():
    rows = ct.RangeDim(2, 128, default=8)
    model_input = ct.TensorType(name="x", shape=(1, rows, 64), dtype=np.float16)
    return convert(projection((1, get_new_symbol(), 64)), ct.target.iOS18, inputs=[model_input])


def enumerated():
    shapes = ct.EnumeratedShapes(shapes=[(1, 4, 64), (1, 16, 64)], default=(1, 4, 64))
    model_input = ct.TensorType(name="x", shape=shapes, dtype=np.float16)
    return convert(projection((1, get_new_symbol(), 64)), ct.target.iOS18, inputs=[model_input])


def compressed(target, config, palettize=False):
    model = convert(projection((1, 8, 64), target), target)
    config = cto.coreml.OptimizationConfig(global_config=config)
    run = cto.coreml.palettize_weights if palettize else cto.coreml.linear_quantize_weights
    return run(model, config)


def int4_block():
    config = cto.coreml.OpLinearQuantizerConfig(
        mode="linear", dtype="int4", granularity="per_block", block_size=32, weight_threshold=64
    )
    return compressed(ct.target.iOS18, config)


def lut6(target):
    config = cto.coreml.OpPalettizerConfig(mode="uniform", nbits=6, weight_threshold=64)
    return compressed(target, config, palettize=True)


def int8(target):
    config = cto.coreml.OpLinearQuantizerConfig(mode="linear", dtype="int8", weight_threshold=64)
    return compressed(target, config)


def branching():
    """`cond` and `while_loop`: blocks in blocks, and constants of every immediate field."""

    @mb.program(input_specs=[mb.TensorSpec((4,), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def main(x):
        total = mb.reduce_sum(x=x, axes=[0], keep_dims=False)
        positive = mb.greater(x=total, y=np.float16(0))
        y = mb.cond(
            pred=positive,
            _true_fn=lambda: mb.mul(x=x, y=np.float16(2)),
            _false_fn=lambda: mb.cond(
                pred=mb.less(x=total, y=np.float16(-8)),
                _true_fn=lambda: mb.add(x=x, y=np.float16([1, 2, 3, 4])),
                _false_fn=lambda: mb.sub(x=x, y=np.float16(1)),
            ),
        )
        counts = mb.while_loop(
            _cond=lambda i, v: mb.less(x=i, y=np.int32(3)),
            _body=lambda i, v: (mb.add(x=i, y=np.int32(1)), mb.mul(x=v, y=np.float16(0.5))),
            loop_vars=(np.int32(0), y),
        )
        return mb.identity(x=counts[1], name="y")

    return convert(main, ct.target.iOS18)


def two_functions(folder):
    paths = []
    for tokens in (8, 16):
        path = folder / f"prefill_{tokens}.mlpackage"
        convert(prefill(tokens, ct.target.iOS18), ct.target.iOS18).save(str(path))
        paths.append(path)
    join = ct.utils.MultiFunctionDescriptor()
    for path, tokens in zip(paths, (8, 16), strict=True):
        join.add_function(str(path), src_function_name="main", target_function_name=f"prefill_{tokens}")
    join.default_function_name = "prefill_16"
    ct.utils.save_multifunction(join, str(HERE / "two_functions.mlpackage"))


# What coremltools reads back.

DTYPES = {v.number: v.name for v in MIL_pb2.DataType.DESCRIPTOR.values}
ARRAYS = {v.number: v.name for v in FeatureTypes_pb2.ArrayFeatureType.ArrayDataType.DESCRIPTOR.values}


def tensor(ty):
    shape = [d.constant.size if d.WhichOneof("dimension") == "constant" else None for d in ty.dimensions]
    return {"dtype": DTYPES[ty.dataType], "shape": shape}


def value_type(ty):
    kind = ty.WhichOneof("type")
    if kind == "tensorType":
        return {"tensor": tensor(ty.tensorType)}
    if kind == "stateType":
        return {"state": tensor(ty.stateType.wrappedType.tensorType)}
    raise ValueError(kind)


def digest(array):
    """FNV-1a, 64 bits: a checksum that a test can compute in three lines."""
    h = 0xCBF29CE484222325
    for byte in np.ascontiguousarray(array).tobytes():
        h = ((h ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{h:016x}"


READ = {
    "FLOAT16": ("read_fp16_data", np.uint16),
    "FLOAT32": ("read_float_data", np.float32),
    "INT8": ("read_int8_data", np.int8),
    "UINT8": ("read_uint8_data", np.uint8),
    "INT16": ("read_int16_data", np.int16),
    "UINT16": ("read_uint16_data", np.uint16),
    "INT32": ("read_int32_data", np.int32),
    "UINT32": ("read_uint32_data", np.uint32),
    "INT4": ("read_int4_data", np.int8),
    "UINT1": ("read_uint1_data", np.uint8),
    "UINT2": ("read_uint2_data", np.uint8),
    "UINT3": ("read_uint3_data", np.uint8),
    "UINT4": ("read_uint4_data", np.uint8),
    "UINT6": ("read_uint6_data", np.uint8),
}
FIELDS = {"floats": "<f4", "doubles": "<f8", "bools": "u1", "longInts": "<i8"}
INTS = {"INT8": "i1", "UINT8": "u1", "INT16": "<i2", "UINT16": "<u2", "INT32": "<i4"}


def constant(value, package):
    """The constant as one array of whole elements (sub-byte ones as a byte each)."""
    ty = tensor(value.type.tensorType)
    if value.WhichOneof("value") == "blobFileValue":
        name = value.blobFileValue.fileName.removeprefix("@model_path/")
        reader = BlobReader(str(package / "Data/com.apple.CoreML" / name))
        method, dtype = READ[ty["dtype"]]
        array = np.asarray(getattr(reader, method)(value.blobFileValue.offset)).astype(dtype)
        return {**ty, "blob": True, "elements": int(array.size), "fnv1a": digest(array)}
    field = value.immediateValue.tensor.WhichOneof("value")
    values = getattr(value.immediateValue.tensor, field).values
    if field == "strings":
        return {**ty, "strings": list(values)}
    if field == "bytes":
        return {**ty, "bytes": list(values)}
    dtype = INTS[ty["dtype"]] if field == "ints" else FIELDS[field]
    return {**ty, "bytes": list(np.asarray(list(values), dtype).tobytes())}


def all_blocks(block):
    yield block
    for op in block.operations:
        for inner in op.blocks:
            yield from all_blocks(inner)


def constants_of(op, package):
    """Every constant of the operation but its name, by `output.parameter`; a `const` by its output alone."""
    output = op.outputs[0].name
    for key, value in op.attributes.items():
        if key == "val":
            yield output, constant(value, package)
        elif key != "name":
            yield f"{output}.{key}", constant(value, package)
    for key, argument in op.inputs.items():
        for binding in argument.arguments:
            if binding.WhichOneof("binding") == "value":
                yield f"{output}.{key}", constant(binding.value, package)


def array_feature(array):
    shape = list(array.shape)
    kind = array.WhichOneof("ShapeFlexibility")
    out = {"dtype": ARRAYS[array.dataType], "shape": shape}
    if kind == "enumeratedShapes":
        out["enumerated"] = [list(s.shape) for s in array.enumeratedShapes.shapes]
    if kind == "shapeRange":
        out["ranges"] = [[r.lowerBound, r.upperBound] for r in array.shapeRange.sizeRanges]
    return out


def feature(f):
    kind = f.type.WhichOneof("Type")
    array = f.type.stateType.arrayType if kind == "stateType" else f.type.multiArrayType
    return {"name": f.name, "optional": f.type.isOptional, **array_feature(array)}


def expected(package):
    spec = ct.models.utils.load_spec(str(package))
    described = {f.name: f for f in spec.description.functions}
    functions = {}
    for name, function in spec.mlProgram.functions.items():
        block = function.block_specializations[function.opset]
        ops, constants = collections.Counter(), {}
        values = {i.name: value_type(i.type) for i in function.inputs}
        for inner in all_blocks(block):
            values.update({i.name: value_type(i.type) for i in inner.inputs})
            for op in inner.operations:
                ops[op.type] += 1
                values.update({o.name: value_type(o.type) for o in op.outputs})
                if op.outputs:
                    constants.update(constants_of(op, package))
        features = described.get(name, spec.description)
        functions[name] = {
            "opset": function.opset,
            "inputs": [feature(f) for f in features.input],
            "outputs": [feature(f) for f in features.output],
            "states": [feature(f) for f in features.state],
            "block_outputs": list(block.outputs),
            "ops": dict(sorted(ops.items())),
            "values": dict(sorted(values.items())),
            "constants": dict(sorted(constants.items())),
        }
    texts = spec.description.metadata
    return {
        "specification_version": spec.specificationVersion,
        "default_function": spec.description.defaultFunctionName or "main",
        "short_description": texts.shortDescription,
        "author": texts.author,
        "license": texts.license,
        "version": texts.versionString,
        "user_defined": dict(texts.userDefined),
        "functions": functions,
    }


def main():
    packages = {
        "plain": plain,
        "spec7": spec7,
        "stateful": stateful,
        "ranged": ranged,
        "enumerated": enumerated,
        "int4_block": int4_block,
        "lut6": lambda: lut6(ct.target.iOS18),
        "lut6_spec7": lambda: lut6(ct.target.iOS16),
        "int8_spec7": lambda: int8(ct.target.iOS16),
        "int8_spec8": lambda: int8(ct.target.iOS17),
        "branching": branching,
    }
    for old in HERE.glob("*.mlpackage"):
        shutil.rmtree(old)
    for name, build in packages.items():
        model = build()
        model.user_defined_metadata.pop("com.github.apple.coremltools.conversion_date", None)
        model.save(str(HERE / f"{name}.mlpackage"))
    with tempfile.TemporaryDirectory() as folder:
        two_functions(Path(folder))
    for package in sorted(HERE.glob("*.mlpackage")):
        text = json.dumps(expected(package), separators=(",", ":"))
        package.with_suffix(".json").write_text(text + "\n")
        print(package.name, len(text))


if __name__ == "__main__":
    main()

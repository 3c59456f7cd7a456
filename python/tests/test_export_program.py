"""The exported program: its functions, ops and outputs, and what the package declares about them."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from export_helpers import DIGEST, TinyModel, small_export
from kvbaton._export import read_model_spec
from kvbaton._export.config import parse_config
from kvbaton._export.layout import kv_groups, layout_toml

pytest.importorskip("coremltools")
from coremltools.models.utils import load_spec

FLOAT16, INT32 = 65552, 131104


def features(description: Any) -> dict[str, tuple[int, list[int]]]:
    return {f.name: (f.type.multiArrayType.dataType, list(f.type.multiArrayType.shape)) for f in description}


def functions(spec: Any) -> dict[str, Any]:
    """Name to the block of the only opset."""
    found = {}
    for name, function in spec.mlProgram.functions.items():
        assert list(function.block_specializations) == ["CoreML8"]
        found[name] = function.block_specializations["CoreML8"]
    return found


# --- structure -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(tiny_models.CONFIGS))
def test_every_architecture_exports_with_declared_shapes(
    name: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = tiny_models.CONFIGS[name]
    report = small_export(tiny_model(name), tmp_path / "m.mlpackage")
    assert report.functions == ("prefill_8", "prefill_16")
    spec = load_spec(str(report.path))
    assert spec.specificationVersion == 9
    assert spec.description.defaultFunctionName == "prefill_8"
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    for description, rows in zip(spec.description.functions, (8, 16), strict=True):
        assert description.name == f"prefill_{rows}"
        assert features(description.input) == {"input_ids": (INT32, [1, rows]), "last_index": (INT32, [1])}
        layers = {"_full": 1, "_sliding": 2} if "sliding_window_pattern" in config else {"": 3}
        caches = {
            f"{part}_cache{kind}": (FLOAT16, [count, config["num_key_value_heads"], rows, head_dim])
            for part in ("key", "value")
            for kind, count in layers.items()
        }
        assert features(description.output) == {"logits": (FLOAT16, [1, 512]), **caches}


@pytest.mark.parametrize("name", ["llama_tied", "gemma3"])
def test_a_chunk_takes_the_cache_so_far(name: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    report = small_export(tiny_model(name), tmp_path / "m.mlpackage", context=(32, 64), chunk=16)
    assert report.functions == ("prefill_8", "prefill_16", "prefill_16_of_32", "prefill_16_of_64")
    assert (report.contexts, report.chunk) == ((32, 64), 16)
    spec = load_spec(str(report.path))
    metadata = spec.description.metadata.userDefined
    assert json.loads(metadata["kvbaton.functions"])[1:3] == [
        {"name": "prefill_16", "kind": "prefill", "tokens": 16},
        {"name": "prefill_16_of_32", "kind": "prefill", "tokens": 16, "context": 32},
    ]
    kinds = {"full": (1, 64), "sliding": (2, 12)} if name == "gemma3" else {"": (3, 64)}
    description = spec.description.functions[3]
    past = {
        f"past_{part}{kind and '_' + kind}": (FLOAT16, [layers, 2, slots, 16])
        for part in ("key", "value")
        for kind, (layers, slots) in kinds.items()
    }
    tokens = {"input_ids": (INT32, [1, 16]), "last_index": (INT32, [1]), "position": (INT32, [1])}
    assert features(description.input) == {**tokens, **past}
    rows = {
        f"{part}_cache{kind and '_' + kind}": (FLOAT16, [layers, 2, 16, 16])
        for part in ("key", "value")
        for kind, (layers, _) in kinds.items()
    }
    assert features(description.output) == {"logits": (FLOAT16, [1, 512]), **rows}
    layout = tomllib.loads(metadata["kvbaton.past"])
    assert (layout["placement"], layout["sliding_placement"]) == ("left", "ring")
    assert {tensor["name"] for tensor in layout["tensor"]} == set(past)


@pytest.mark.parametrize("name", ["llama_tied", "gemma3"])
def test_a_decode_step_keeps_the_cache_in_states(name: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    small_export(tiny_model(name), tmp_path / "m.mlpackage", kind="decode", context=(64,))
    spec = load_spec(str(tmp_path / "m.mlpackage"))
    (description,) = spec.description.functions
    assert features(description.input) == {"input_ids": (INT32, [1, 1]), "position": (INT32, [1])}
    assert features(description.output) == {"logits": (FLOAT16, [1, 512])}
    states = {s.name: list(s.type.stateType.arrayType.shape) for s in description.state}
    kinds = (
        {"_full": [1, 2, 64, 16], "_sliding": [2, 2, 12, 16]} if name == "gemma3" else {"": [3, 2, 64, 16]}
    )
    assert states == {f"{part}_cache{kind}": s for part in ("key", "value") for kind, s in kinds.items()}
    (block,) = functions(spec).values()
    count = Counter(op.type for op in block.operations)
    # One read of each state, and one of what each update has left in it.
    assert count["slice_update"] == count["write_state"] == 2 * 3
    assert count["read_state"] == len(states) + count["write_state"]
    layout = tomllib.loads(spec.description.metadata.userDefined["kvbaton.layout"])
    assert layout["inputs"] == {"tokens": "input_ids", "position": "position"}


def test_packages_of_a_chain_pass_hidden_states_on(tiny_model: TinyModel, tmp_path: Path) -> None:
    small_export(tiny_model("gemma3"), tmp_path / "chain", split=2, buckets=(16,), context=(64,), chunk=16)
    found = []
    for index in range(2):
        spec = load_spec(str(tmp_path / f"chain/part_{index}.mlpackage"))
        layout = tomllib.loads(spec.description.metadata.userDefined["kvbaton.layout"])
        assert layout["partial"] is True
        held = sorted(layer for tensor in layout["tensor"] for layer in tensor["layers"])
        found.append((layout["inputs"], layout["outputs"], sorted(set(held))))
        names = [f.name for f in spec.description.functions]
        assert names == ["prefill_16", "prefill_16_of_64"]
    first, last = found
    assert first[0] == {"tokens": "input_ids", "position": "position"}
    assert first[1] == {"hidden": "output_hidden_states"}
    assert last[0] == {"hidden": "hidden_states", "last_index": "last_index", "position": "position"}
    assert last[1] == {"logits": "logits"}
    assert first[2] + last[2] == [0, 1, 2]


def test_ops_are_the_planned_ones(tiny_model: TinyModel, tmp_path: Path) -> None:
    small_export(tiny_model("qwen3"), tmp_path / "m.mlpackage")
    for block in functions(load_spec(str(tmp_path / "m.mlpackage"))).values():
        count = Counter(op.type for op in block.operations)
        layers = 3
        assert count["softmax"] == count["silu"] == layers
        assert count["matmul"] == 2 * layers
        assert count["layer_norm"] == 4 * layers + 1  # block norms, q and k norms, the last one
        assert count["linear"] == 7 * layers + 1
        assert count["gather"] == 3  # embeddings; residual and attention of the last row
        assert set(count) == {
            "const", "gather", "mul", "add", "concat", "split", "layer_norm", "linear", "reshape",
            "transpose", "tile", "matmul", "softmax", "silu",
        }  # fmt: skip
        ranks = [
            len(output.type.tensorType.dimensions)
            for op in block.operations
            if op.type != "const"
            for output in op.outputs
        ]
        assert max(ranks) == 4


@pytest.mark.parametrize(
    ("name", "chain"),
    [
        ("llama_tied", ["matmul", "mul", "add", "softmax", "matmul"]),
        ("qwen2", ["mul", "matmul", "add", "softmax", "matmul"]),
    ],
)
def test_attention_is_a_recognisable_chain(
    name: str, chain: list[str], tiny_model: TinyModel, tmp_path: Path
) -> None:
    small_export(tiny_model(name), tmp_path / "m.mlpackage", buckets=(8,))
    (block,) = functions(load_spec(str(tmp_path / "m.mlpackage"))).values()
    producer = {output.name: op for op in block.operations for output in op.outputs}
    for last in [op for op in block.operations if op.type == "softmax"]:
        (after,) = [
            o for o in block.operations if last.outputs[0].name in _names(o, "x") and o.type == "matmul"
        ]
        seen, op = [after.type, "softmax"], last
        while len(seen) < len(chain):
            op = producer[_names(op, "x")[0]]
            seen.append(op.type)
        assert seen[::-1] == chain


def _names(op: Any, argument: str) -> list[str]:
    return [a.name for a in op.inputs[argument].arguments] if argument in op.inputs else []


def test_mask_is_stored_once_for_all_heads(tiny_model: TinyModel, tmp_path: Path) -> None:
    small_export(tiny_model("llama_tied"), tmp_path / "m.mlpackage", buckets=(16,))
    (block,) = functions(load_spec(str(tmp_path / "m.mlpackage"))).values()
    sizes = [
        [d.constant.size for d in op.outputs[0].type.tensorType.dimensions]
        for op in block.operations
        if op.outputs and op.outputs[0].name == "causal_mask"
    ]
    assert sizes == [[1, 1, 16, 16]]


def test_functions_share_their_weights(tiny_model: TinyModel, tmp_path: Path) -> None:
    one = small_export(tiny_model("llama_untied"), tmp_path / "one.mlpackage", buckets=(16,))
    two = small_export(tiny_model("llama_untied"), tmp_path / "two.mlpackage", buckets=(15, 16))
    parameters = sum(np.prod(s) for s in tiny_models.shapes(tiny_models.CONFIGS["llama_untied"]).values())
    weight_file = Path("Data/com.apple.CoreML/weights/weight.bin")
    sizes = [(report.path / weight_file).stat().st_size for report in (one, two)]
    assert sizes[0] >= 2 * parameters
    # The second function adds its rotary tables and mask alone.
    assert sizes[1] - sizes[0] < 4096


@pytest.mark.parametrize("kv_outputs", ["stacked", "grouped", "per-layer"])
def test_cache_outputs_follow_the_flag(kv_outputs: Any, tiny_model: TinyModel, tmp_path: Path) -> None:
    # 2 KV heads * 256 rows * 3 layers fit into one group; the limit itself is tested on kv_groups.
    report = small_export(tiny_model("llama_tied"), tmp_path / "m.mlpackage", kv_outputs=kv_outputs)
    spec = load_spec(str(report.path))
    found = {
        name: shape
        for name, (_, shape) in features(spec.description.functions[1].output).items()
        if name != "logits"
    }
    assert tuple(sorted(found)) == tuple(sorted(report.cache_outputs))
    expected = {
        "stacked": {f"{part}_cache": [3, 2, 16, 16] for part in ("key", "value")},
        "grouped": {f"{part}_cache_0": [3, 2, 16, 16] for part in ("key", "value")},
        "per-layer": {f"{part}_cache_{i}": [1, 2, 16, 16] for part in ("key", "value") for i in range(3)},
    }
    assert found == expected[kv_outputs]


@pytest.mark.parametrize(
    ("layers", "kv_heads", "rows", "sizes"),
    [
        (30, 3, 512, [10, 10, 10]),  # SmolLM2: 10 * 3 * 512 = 15,360 rows
        (28, 8, 512, [4] * 7),  # Qwen3-0.6B: exactly 16,384 rows
        (5, 8, 512, [4, 1]),
        (3, 8, 4096, [1, 1, 1]),  # one layer alone is above the limit
    ],
)
def test_groups_stay_within_a_surface(layers: int, kv_heads: int, rows: int, sizes: list[int]) -> None:
    sizes_of_heads = {"num_attention_heads": kv_heads, "num_key_value_heads": kv_heads, "head_dim": 64}
    config = parse_config({**tiny_models.BASE, "num_hidden_layers": layers, **sizes_of_heads})
    groups = kv_groups("grouped", config, rows)
    assert [len(group.layers) for group in groups] == sizes
    assert [layer for group in groups for layer in group.layers] == list(range(layers))


def test_grouping_splits_the_outputs_of_all_functions_alike(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbaton._export.layout.SURFACE_ROWS", 2 * 2 * 16)
    report = small_export(tiny_model("llama_tied"), tmp_path / "m.mlpackage", kv_outputs="grouped")
    spec = load_spec(str(report.path))
    for description, rows in zip(spec.description.functions, (8, 16), strict=True):
        shapes = features(description.output)
        assert shapes["key_cache_0"][1] == [2, 2, rows, 16]
        assert shapes["value_cache_1"][1] == [1, 2, rows, 16]
    layout = tomllib.loads(spec.description.metadata.userDefined["kvbaton.layout"])
    assert [(t["name"], t["layers"]) for t in layout["tensor"]] == [
        ("key_cache_0", [0, 1]),
        ("value_cache_0", [0, 1]),
        ("key_cache_1", [2]),
        ("value_cache_1", [2]),
    ]


# --- metadata --------------------------------------------------------------------------------------------


def test_metadata_describes_model_and_layout(tiny_model: TinyModel, tmp_path: Path) -> None:
    small_export(tiny_model("llama3_rope"), tmp_path / "m.mlpackage")
    metadata = load_spec(str(tmp_path / "m.mlpackage")).description.metadata.userDefined
    assert metadata["kvbaton.format"] == "1"
    layer = {"kind": "full", "kv_heads": 2, "key_dim": 16, "value_dim": 16}
    assert json.loads(metadata["kvbaton.model"]) == {
        "architecture": "llama",
        "vocab_size": 512,
        "dtype": "float16",
        "rope": {
            "kind": "half-split",
            "theta": 500000.0,
            "dims": 16,
            "scaling": {
                "kind": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        "layers": [layer] * 3,
        "weights_digest": DIGEST,
    }
    assert tomllib.loads(metadata["kvbaton.layout"]) == {
        "name": "kvbaton-stacked",
        "placement": "left",
        "inputs": {"tokens": "input_ids", "last_index": "last_index"},
        "outputs": {"logits": "logits"},
        "tensor": [
            {"name": f"{part}_cache", "holds": part, "axes": "layer kv_head row head_dim", "dtype": "float16"}
            for part in ("key", "value")
        ],
    }


def test_per_layer_layout_names_a_pattern(tiny_model: TinyModel, tmp_path: Path) -> None:
    small_export(tiny_model("llama_tied"), tmp_path / "m.mlpackage", kv_outputs="per-layer")
    metadata = load_spec(str(tmp_path / "m.mlpackage")).description.metadata.userDefined
    assert tomllib.loads(metadata["kvbaton.layout"])["tensor"] == [
        {
            "name": f"{part}_cache_{{layer}}",
            "holds": part,
            "axes": "batch kv_head row head_dim",
            "dtype": "float16",
        }
        for part in ("key", "value")
    ]


@pytest.mark.parametrize("name", list(tiny_models.CONFIGS))
def test_decoder_spec_equals_the_package_spec(name: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    small_export(tiny_model(name), tmp_path / "m.mlpackage", buckets=(8,))
    metadata = load_spec(str(tmp_path / "m.mlpackage")).description.metadata.userDefined
    declared = json.loads(metadata["kvbaton.model"])
    assert declared.pop("weights_digest") == DIGEST
    assert read_model_spec(tiny_model(name)) == declared


@pytest.mark.parametrize(
    ("kv_outputs", "names"),
    [
        ("stacked", [("key_cache_full", [2, 5]), ("key_cache_sliding", [0, 1, 3, 4, 6])]),
        (
            "grouped",
            [("key_cache_0", [2, 5]), ("key_cache_1", [0, 1]), ("key_cache_2", [3, 4]), ("key_cache_3", [6])],
        ),
    ],
)
def test_outputs_hold_layers_of_one_kind(
    kv_outputs: Any, names: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbaton._export.layout.SURFACE_ROWS", 2 * 2 * 16)
    config = parse_config({**tiny_models.GEMMA3, "num_hidden_layers": 7})
    groups = kv_groups(kv_outputs, config, 16)
    assert [(group.key, list(group.layers)) for group in groups] == names
    rules = tomllib.loads(layout_toml(kv_outputs, groups))["tensor"]
    assert [(rule["name"], rule["layers"]) for rule in rules if rule["holds"] == "key"] == names


def test_gemma3_has_norms_around_both_halves_of_a_block(tiny_model: TinyModel, tmp_path: Path) -> None:
    small_export(tiny_model("gemma3"), tmp_path / "m.mlpackage", buckets=(8,))
    (block,) = functions(load_spec(str(tmp_path / "m.mlpackage"))).values()
    count = Counter(op.type for op in block.operations)
    assert (count["gelu"], count["silu"], count["layer_norm"]) == (3, 0, 6 * 3 + 1)
    tables = {op.outputs[0].name for op in block.operations if "rope" in op.outputs[0].name}
    assert tables == {"rope_cos", "rope_sin", "window_rope_cos", "window_rope_sin"}

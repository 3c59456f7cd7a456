"""The exported package: its structure, what it declares, what is refused, and how it appears."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_models
from kvbaton import _export
from kvbaton._export import ExportError, export, read_model_spec
from kvbaton._export.layout import kv_groups

pytest.importorskip("coremltools")
from coremltools.models.utils import load_spec

FLOAT16, INT32 = 65552, 131104
DIGEST = "blake3:" + "0" * 64


def stub_digest(folder: Path) -> str:
    return DIGEST


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds each tiny model once."""
    parent = tmp_path_factory.mktemp("models")

    def get(name: str) -> Path:
        return parent / name if (parent / name).exists() else tiny_models.build(name, parent)

    return get


def small_export(model: Path, out: Path, **options: Any) -> _export.ExportReport:
    return export(model, out, **{"buckets": (8, 16), "digest": stub_digest, **options})


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
    name: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    config = tiny_models.CONFIGS[name]
    report = small_export(folder(name), tmp_path / "m.mlpackage")
    assert report.functions == ("prefill_8", "prefill_16")
    spec = load_spec(str(report.path))
    assert spec.specificationVersion == 9
    assert spec.description.defaultFunctionName == "prefill_8"
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    for description, rows in zip(spec.description.functions, (8, 16), strict=True):
        assert description.name == f"prefill_{rows}"
        assert features(description.input) == {"input_ids": (INT32, [1, rows]), "last_index": (INT32, [1])}
        cache = [3, config["num_key_value_heads"], rows, head_dim]
        assert features(description.output) == {
            "logits": (FLOAT16, [1, 512]),
            "key_cache": (FLOAT16, cache),
            "value_cache": (FLOAT16, cache),
        }


def test_ops_are_the_planned_ones(folder: Callable[[str], Path], tmp_path: Path) -> None:
    small_export(folder("qwen3"), tmp_path / "m.mlpackage")
    for block in functions(load_spec(str(tmp_path / "m.mlpackage"))).values():
        count = Counter(op.type for op in block.operations)
        layers = 3
        assert count["softmax"] == count["silu"] == layers
        assert count["matmul"] == 2 * layers
        assert count["layer_norm"] == 4 * layers + 1  # block norms, q and k norms, the last one
        assert count["linear"] == 7 * layers + 1
        assert count["gather"] == 2
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
    name: str, chain: list[str], folder: Callable[[str], Path], tmp_path: Path
) -> None:
    small_export(folder(name), tmp_path / "m.mlpackage", buckets=(8,))
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


def test_mask_is_stored_once_for_all_heads(folder: Callable[[str], Path], tmp_path: Path) -> None:
    small_export(folder("llama_tied"), tmp_path / "m.mlpackage", buckets=(16,))
    (block,) = functions(load_spec(str(tmp_path / "m.mlpackage"))).values()
    sizes = [
        [d.constant.size for d in op.outputs[0].type.tensorType.dimensions]
        for op in block.operations
        if op.outputs and op.outputs[0].name == "causal_mask"
    ]
    assert sizes == [[1, 1, 16, 16]]


def test_functions_share_their_weights(folder: Callable[[str], Path], tmp_path: Path) -> None:
    one = small_export(folder("llama_untied"), tmp_path / "one.mlpackage", buckets=(16,))
    two = small_export(folder("llama_untied"), tmp_path / "two.mlpackage", buckets=(15, 16))
    parameters = sum(np.prod(s) for s in tiny_models.shapes(tiny_models.CONFIGS["llama_untied"]).values())
    weight_file = Path("Data/com.apple.CoreML/weights/weight.bin")
    sizes = [(report.path / weight_file).stat().st_size for report in (one, two)]
    assert sizes[0] >= 2 * parameters
    # The second function adds its rotary tables and mask alone.
    assert sizes[1] - sizes[0] < 4096


@pytest.mark.parametrize("kv_outputs", ["stacked", "grouped", "per-layer"])
def test_cache_outputs_follow_the_flag(
    kv_outputs: Any, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    # 2 KV heads * 256 rows * 3 layers fit into one group; the limit itself is tested on kv_groups.
    report = small_export(folder("llama_tied"), tmp_path / "m.mlpackage", kv_outputs=kv_outputs)
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
    groups = kv_groups("grouped", layers, kv_heads, rows)
    assert [len(group.layers) for group in groups] == sizes
    assert [layer for group in groups for layer in group.layers] == list(range(layers))


def test_grouping_splits_the_outputs_of_all_functions_alike(
    folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbaton._export.layout.SURFACE_ROWS", 2 * 2 * 16)
    report = small_export(folder("llama_tied"), tmp_path / "m.mlpackage", kv_outputs="grouped")
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


def test_metadata_describes_model_and_layout(folder: Callable[[str], Path], tmp_path: Path) -> None:
    small_export(folder("llama3_rope"), tmp_path / "m.mlpackage")
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


def test_per_layer_layout_names_a_pattern(folder: Callable[[str], Path], tmp_path: Path) -> None:
    small_export(folder("llama_tied"), tmp_path / "m.mlpackage", kv_outputs="per-layer")
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
def test_decoder_spec_equals_the_package_spec(
    name: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    small_export(folder(name), tmp_path / "m.mlpackage", buckets=(8,))
    metadata = load_spec(str(tmp_path / "m.mlpackage")).description.metadata.userDefined
    declared = json.loads(metadata["kvbaton.model"])
    assert declared.pop("weights_digest") == DIGEST
    assert read_model_spec(folder(name)) == declared


# --- equal models, equal packages ------------------------------------------------------------------------


def stored(package: Path) -> bytes:
    return (package / "Data/com.apple.CoreML/weights/weight.bin").read_bytes()


def test_quantised_folder_exports_as_its_dequantised_twin(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    mx = pytest.importorskip("mlx.core")
    quantised = folder("llama_4bit")
    tensors = mx.load(str(quantised / "model.safetensors"))
    plain = {}
    for name, values in tensors.items():
        path, _, leaf = name.rpartition(".")
        if f"{path}.scales" not in tensors:
            plain[name] = np.array(values)
        elif leaf == "weight":
            bits = 8 if path == "model.layers.0.mlp.down_proj" else 4
            scales, biases = (tensors[f"{path}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            plain[name] = np.array(mx.dequantize(values, scales, biases, 32, bits)).astype(np.float16)
    twin = tmp_path / "twin"
    twin.mkdir()
    tiny_models.write_plain(twin, tiny_models.BASE, plain)
    report = small_export(quantised, tmp_path / "q.mlpackage")
    assert report.dequantized
    small_export(twin, tmp_path / "p.mlpackage")
    assert stored(tmp_path / "q.mlpackage") == stored(tmp_path / "p.mlpackage")


def test_sharded_bf16_folder_exports_as_one_f32_file(folder: Callable[[str], Path], tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    sharded = folder("llama_sharded_bf16")
    single = tmp_path / "single"
    single.mkdir()
    tensors: dict[str, Any] = {}
    for file in sharded.glob("model*.safetensors"):
        tensors |= {name: np.array(t.astype(mx.float32)) for name, t in mx.load(str(file)).items()}
    tiny_models.save_safetensors(tensors, single / "model.safetensors")
    (single / "config.json").write_text(json.dumps(tiny_models.BASE))
    small_export(sharded, tmp_path / "a.mlpackage")
    small_export(single, tmp_path / "b.mlpackage")
    assert stored(tmp_path / "a.mlpackage") == stored(tmp_path / "b.mlpackage")


# --- the output folder -----------------------------------------------------------------------------------


def test_existing_package_needs_force(folder: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "m.mlpackage"
    small_export(folder("llama_tied"), out, buckets=(8,))
    before = stored(out)
    with pytest.raises(ExportError, match="exists") as error:
        small_export(folder("llama_untied"), out, buckets=(8,))
    assert error.value.kind == "output"
    assert stored(out) == before
    small_export(folder("llama_untied"), out, buckets=(8,), force=True)
    assert stored(out) != before
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.mlpackage"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("step", ["write_package", "_put_in_place"])
def test_interrupted_export_leaves_nothing(
    step: str,
    failure: type[BaseException],
    folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: Any) -> None:
        raise failure

    monkeypatch.setattr(_export, step, fail)
    with pytest.raises(failure):
        small_export(folder("llama_tied"), tmp_path / "m.mlpackage")
    assert list(tmp_path.iterdir()) == []


def test_failed_replacement_brings_the_old_package_back(
    folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "m.mlpackage"
    small_export(folder("llama_tied"), out, buckets=(8,))
    before = stored(out)
    rename = os.rename

    def fail_once(source: Any, target: Any) -> None:
        if Path(target) == out and Path(source).name == out.name:
            raise OSError("no space")
        rename(source, target)

    monkeypatch.setattr("os.rename", fail_once)
    with pytest.raises(OSError, match="no space"):
        small_export(folder("llama_untied"), out, buckets=(8,), force=True)
    assert stored(out) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.mlpackage"]


@pytest.mark.parametrize(
    ("out", "fragment"),
    [("model.zip", "does not end in .mlpackage"), ("missing/m.mlpackage", "does not exist")],
)
def test_unusable_output_is_refused(
    out: str, fragment: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=fragment) as error:
        small_export(folder("llama_tied"), tmp_path / out)
    assert error.value.kind == "output"


def test_unknown_kv_outputs_is_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="'paged', wanted one of stacked, grouped, per-layer"):
        small_export(folder("llama_tied"), tmp_path / "m.mlpackage", kv_outputs="paged")


def test_progress_counts_up_to_its_totals(folder: Callable[[str], Path], tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    small_export(folder("llama_tied"), tmp_path / "m.mlpackage", progress=lambda *call: calls.append(call))
    assert list(dict.fromkeys(stage for stage, _, _ in calls)) == ["digest", "build", "write"]
    for stage in ("digest", "build", "write"):
        done = [(d, t) for s, d, t in calls if s == stage]
        assert done == sorted(done)
        assert done[-1][0] == done[-1][1]


def test_export_prints_nothing(folder: Callable[[str], Path], tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from kvbaton._export import export; "
        "assert 'coremltools' not in sys.modules; "
        "export(Path(sys.argv[1]), Path(sys.argv[2]), buckets=(8,), digest=lambda folder: 'blake3:0')"
    )
    python = Path(_export.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, folder("llama_tied"), tmp_path / "m.mlpackage"],
        capture_output=True,
        text=True,
        cwd=python,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- missing parts ---------------------------------------------------------------------------------------


def test_missing_coremltools_is_named(
    folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "coremltools", None)
    with pytest.raises(ExportError, match="export needs coremltools") as error:
        small_export(folder("llama_tied"), tmp_path / "m.mlpackage")
    assert error.value.kind == "dependency"


def test_missing_native_module_is_named(
    folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvbaton._native", None)
    with pytest.raises(ExportError, match="native module") as error:
        small_export(folder("llama_tied"), tmp_path / "m.mlpackage", digest=None)
    assert error.value.kind == "dependency"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("buckets", "fragment"),
    [
        ((), "no bucket given"),
        ((0, 8), "0 tokens cannot hold"),
        ((257,), "257 tokens is longer than max_position_embeddings 256"),
    ],
)
def test_unusable_buckets_are_refused(
    buckets: tuple[int, ...], fragment: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=fragment) as error:
        small_export(folder("llama_tied"), tmp_path / "m.mlpackage", buckets=buckets)
    assert error.value.kind == "buckets"


def test_buckets_are_sorted_and_counted_once(folder: Callable[[str], Path], tmp_path: Path) -> None:
    report = small_export(folder("llama_tied"), tmp_path / "m.mlpackage", buckets=[16, 8, 16])
    assert report.buckets == (8, 16)
    spec = load_spec(str(report.path))
    assert spec.description.defaultFunctionName == "prefill_8"

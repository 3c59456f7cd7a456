"""What export makes of its arguments; packages appear whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from export_helpers import TinyModel, small_export, weight_bytes
from kvbaton import _export
from kvbaton._export import ExportError
from kvbaton._export.package import interrupts_held

pytest.importorskip("coremltools")
from coremltools.models.utils import load_spec

# --- equal models, equal packages ------------------------------------------------------------------------


def test_quantised_folder_exports_as_its_dequantised_twin(tiny_model: TinyModel, tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    quantised = tiny_model("llama_4bit")
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
    assert weight_bytes(tmp_path / "q.mlpackage") == weight_bytes(tmp_path / "p.mlpackage")


def test_sharded_bf16_folder_exports_as_one_f32_file(tiny_model: TinyModel, tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    sharded = tiny_model("llama_sharded_bf16")
    single = tmp_path / "single"
    single.mkdir()
    tensors: dict[str, Any] = {}
    for file in sharded.glob("model*.safetensors"):
        tensors |= {name: np.array(t.astype(mx.float32)) for name, t in mx.load(str(file)).items()}
    tiny_models.save_safetensors(tensors, single / "model.safetensors")
    (single / "config.json").write_text(json.dumps(tiny_models.BASE))
    small_export(sharded, tmp_path / "a.mlpackage")
    small_export(single, tmp_path / "b.mlpackage")
    assert weight_bytes(tmp_path / "a.mlpackage") == weight_bytes(tmp_path / "b.mlpackage")


# --- the output folder -----------------------------------------------------------------------------------


def test_existing_package_needs_force(tiny_model: TinyModel, tmp_path: Path) -> None:
    out = tmp_path / "m.mlpackage"
    small_export(tiny_model("llama_tied"), out, buckets=(8,))
    before = weight_bytes(out)
    with pytest.raises(ExportError, match="exists") as error:
        small_export(tiny_model("llama_untied"), out, buckets=(8,))
    assert error.value.kind == "output"
    assert weight_bytes(out) == before
    small_export(tiny_model("llama_untied"), out, buckets=(8,), force=True)
    assert weight_bytes(out) != before
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.mlpackage"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("step", ["write_package", "_put_in_place"])
def test_interrupted_export_leaves_nothing(
    step: str,
    failure: type[BaseException],
    tiny_model: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: Any) -> None:
        raise failure

    monkeypatch.setattr(_export, step, fail)
    with pytest.raises(failure):
        small_export(tiny_model("llama_tied"), tmp_path / "m.mlpackage")
    assert list(tmp_path.iterdir()) == []


def test_failed_replacement_brings_the_old_package_back(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "m.mlpackage"
    small_export(tiny_model("llama_tied"), out, buckets=(8,))
    before = weight_bytes(out)
    rename = os.rename

    def fail_once(source: Any, target: Any) -> None:
        if Path(target) == out and Path(source).name == out.name:
            raise OSError("no space")
        rename(source, target)

    monkeypatch.setattr("os.rename", fail_once)
    with pytest.raises(OSError, match="no space"):
        small_export(tiny_model("llama_untied"), out, buckets=(8,), force=True)
    assert weight_bytes(out) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.mlpackage"]


def test_swallowed_interrupt_is_raised_after_the_block() -> None:
    def swallow() -> None:
        with interrupts_held(), contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    # A shell starts background jobs with SIGINT ignored; the test is about Python's own handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            swallow()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("out", "fragment"),
    [
        ("model.zip", "does not end in .mlpackage"),
        ("missing/m.mlpackage", "does not exist"),
        pytest.param(
            "/proc/m.mlpackage",
            "/proc cannot be written to",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="a folder that nobody can write to"),
        ),
    ],
)
def test_unusable_output_is_refused(out: str, fragment: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=fragment) as error:
        small_export(tiny_model("llama_tied"), tmp_path / out)
    assert error.value.kind == "output"


def test_unknown_kv_outputs_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="'paged', wanted one of stacked, grouped, per-layer"):
        small_export(tiny_model("llama_tied"), tmp_path / "m.mlpackage", kv_outputs="paged")


def test_progress_counts_up_to_its_totals(tiny_model: TinyModel, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    out = tmp_path / "m.mlpackage"
    small_export(tiny_model("llama_tied"), out, progress=lambda *call: calls.append(call))
    assert list(dict.fromkeys(stage for stage, _, _ in calls)) == ["digest", "build", "write"]
    for stage in ("digest", "build", "write"):
        done = [(d, t) for s, d, t in calls if s == stage]
        assert done == sorted(done)
        assert done[-1][0] == done[-1][1]


def test_export_prints_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from kvbaton._export import export; "
        "assert 'coremltools' not in sys.modules; "
        "export(Path(sys.argv[1]), Path(sys.argv[2]), buckets=(8,), digest=lambda folder: 'blake3:0')"
    )
    python = Path(_export.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, tiny_model("llama_tied"), tmp_path / "m.mlpackage"],
        capture_output=True,
        text=True,
        cwd=python,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- missing parts ---------------------------------------------------------------------------------------


def test_missing_coremltools_is_named(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "coremltools", None)
    with pytest.raises(ExportError, match="export needs coremltools") as error:
        small_export(tiny_model("llama_tied"), tmp_path / "m.mlpackage")
    assert error.value.kind == "dependency"


def test_digest_is_the_native_one_by_default(tiny_model: TinyModel, tmp_path: Path) -> None:
    from kvbaton import weights_digest

    folder = tiny_model("llama_tied")
    report = small_export(folder, tmp_path / "m.mlpackage", digest=None, buckets=(8,))
    assert report.weights_digest == weights_digest(folder)
    assert report.weights_digest.startswith("blake3:")


@pytest.mark.parametrize(
    ("buckets", "fragment"),
    [
        ((), "no bucket given"),
        ((0, 8), "0 tokens cannot hold"),
        ((257,), "257 tokens is longer than max_position_embeddings 256"),
    ],
)
def test_unusable_buckets_are_refused(
    buckets: tuple[int, ...], fragment: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=fragment) as error:
        small_export(tiny_model("llama_tied"), tmp_path / "m.mlpackage", buckets=buckets)
    assert error.value.kind == "buckets"


@pytest.mark.parametrize(
    ("options", "kind", "fragment"),
    [
        ({"context": (0,)}, "buckets", "a context of 0 tokens"),
        ({"context": (300,)}, "buckets", "a context of 300 tokens is longer than .* 256"),
        ({"context": (64,), "chunk": 0}, "buckets", "a chunk of 0 tokens"),
        (
            {"context": (64, 128), "chunk": 65},
            "buckets",
            "a chunk of 65 tokens is longer than the context of 64",
        ),
        ({"kind": "decode", "context": (64, 128)}, "buckets", "one context, 2 were given"),
        ({"kind": "decode", "split": 2}, "output", "a decode package is not split"),
        ({"kind": "encode"}, "output", "unknown kind 'encode', wanted one of prefill, decode"),
        ({"split": 2}, "output", "ends in .mlpackage, a split model is a folder"),
        ({"split": 0}, "output", "3 layers cannot be split into 0 parts"),
        ({"split": 4}, "output", "3 layers cannot be split into 4 parts"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    options: dict[str, Any], kind: str, fragment: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=fragment) as error:
        small_export(tiny_model("llama_tied"), tmp_path / "m.mlpackage", **options)
    assert error.value.kind == kind
    assert list(tmp_path.iterdir()) == []


def test_only_a_chain_is_replaced_by_a_chain(tiny_model: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("precious")
    for force, fragment in ((False, "replacing it was not asked for"), (True, "holds no chain.toml")):
        with pytest.raises(ExportError, match=fragment):
            small_export(tiny_model("llama_tied"), tmp_path / "mine", split=2, force=force)
    assert (tmp_path / "mine/notes.txt").read_text() == "precious"
    small_export(tiny_model("llama_tied"), tmp_path / "chain", buckets=(8,), split=2)
    report = small_export(tiny_model("llama_tied"), tmp_path / "chain", buckets=(8,), split=3, force=True)
    assert report.packages == ("part_0.mlpackage", "part_1.mlpackage", "part_2.mlpackage")
    assert sorted(p.name for p in (tmp_path / "chain").iterdir()) == ["chain.toml", *report.packages]


def test_a_folder_that_holds_the_model_is_not_replaced(tiny_model: TinyModel, tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    small_export(tiny_model("llama_tied"), chain, split=2)
    shutil.copytree(tiny_model("llama_tied"), chain / "model")
    before = sorted(chain.rglob("*"))
    with pytest.raises(ExportError, match="holds the model") as error:
        small_export(chain / "model", chain, split=2, force=True)
    assert error.value.kind == "output"
    assert sorted(chain.rglob("*")) == before


@pytest.mark.parametrize(
    ("field", "size", "fragment"),
    [
        ("vocab_size", 10**9, r"embed_tokens.weight has shape \[512, 64\], .* for 1000000000 rows"),
        ("hidden_size", 10**9, r"input_layernorm.weight has shape \[64\], .* for 1000000000 rows"),
        ("head_dim", 10**9, r"k_proj.weight has shape \[32, 64\], .* for 2000000000 rows"),
        ("num_key_value_heads", 1, r"k_proj.weight has shape \[32, 64\], .* for 16 rows"),
    ],
)
def test_sizes_that_no_tensor_bears_out_are_refused_before_tables_are_made(
    field: str, size: int, fragment: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama_tied"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: size}))
    with pytest.raises(ExportError, match=fragment) as error:
        small_export(folder, tmp_path / "m.mlpackage")
    assert error.value.kind == "weights"


def test_buckets_are_sorted_and_counted_once(tiny_model: TinyModel, tmp_path: Path) -> None:
    report = small_export(tiny_model("llama_tied"), tmp_path / "m.mlpackage", buckets=[16, 8, 16])
    assert report.buckets == (8, 16)
    spec = load_spec(str(report.path))
    assert spec.description.defaultFunctionName == "prefill_8"

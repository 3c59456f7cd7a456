"""Packages with projections and embeddings in fewer bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kvbaton
import numpy as np
import pytest
from conftest import ROOT, Run
from export_helpers import TinyModel
from kvbaton._export import ExportError, export
from kvbaton._export.quantize import Quantizer
from safetensors.numpy import load_file, save_file

SCHEMES = ("int8", "int4-block32", "int4-block32-int8", "lut6")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LIMITS = {None: 0.99999, "int8": 0.999, "int4-block32": 0.98, "int4-block32-int8": 0.98, "lut6": 0.98}
"""Cosine of the logits with a float32 reference, at least.

The demo's weights were quantised once before, to four bits with a scale and a minimum for each 32 values (Q4_1):
projections in ``int4-block32`` hold them almost exactly, which says nothing of other models.
"""


def copied(folder: Path, out: Path, change: Any) -> Path:
    """A model folder with its matrices changed."""
    out.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        made = {name: change(name, w) if w.ndim == 2 else w for name, w in weights.items()}
        save_file(made, out / file.name, metadata={"format": "mlx"})
    return out


def parts_of(scheme: Any, weight: np.ndarray, name: str = "weight") -> dict[str, np.ndarray]:
    return Quantizer(scheme).quantized(name, lambda: weight.astype(np.float16))


def dense(scheme: str, weight: np.ndarray, name: str = "weight") -> np.ndarray:
    """What a scheme leaves of a matrix: what MIL says of the parts, in numpy."""
    parts = parts_of(scheme, weight, name)
    if scheme == "lut6":
        lut, indices = parts["lut"][:, 0, :, 0], parts["indices"].astype(int)
        rows = len(weight) // len(lut)
        made = np.concatenate([lut[i][indices[i * rows : (i + 1) * rows]] for i in range(len(lut))])
    else:
        data, scale = parts["data"].astype(np.float32), parts["scale"].astype(np.float32)
        width = weight.shape[1] // scale.shape[1]
        if "offset" in parts:
            offset = np.repeat(parts["offset"].astype(np.float32), width, axis=1)
            data = (data - offset).astype(np.float16).astype(np.float32)
        made = data * np.repeat(scale, width, axis=1)
    return made.astype(np.float16).astype(weight.dtype)


def evenly(scheme: str, weight: np.ndarray) -> np.ndarray:
    """The same with codes spread evenly over each block, nothing searched."""
    w = weight.astype(np.float32)
    if scheme == "lut6":
        groups = w.reshape(len(w) // 16, -1)
        low = groups.min(1, keepdims=True)
        step = (groups.max(1, keepdims=True) - low) / 63
        return (low + np.rint((groups - low) / step) * step).reshape(w.shape)
    blocks = w.reshape(len(w), -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / 7
    return (np.rint(blocks / scale) * scale).reshape(w.shape)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantised_package_computes_with_the_weights_of_its_scheme(
    tiny_model: TinyModel, tmp_path: Path, scheme: Any
) -> None:
    folder = tiny_model("llama_tied")
    export(folder, tmp_path / "q.mlpackage", buckets=(8, 16), quantize=scheme)
    rounded = copied(folder, tmp_path / "rounded", lambda name, w: dense(scheme, w, name))
    export(rounded, tmp_path / "plain.mlpackage", buckets=(8, 16))
    plain = kvbaton.Prefill(tmp_path / "plain.mlpackage")(PROMPT)
    for weights in ("resident", "streamed"):
        done = kvbaton.Prefill(tmp_path / "q.mlpackage", weights=weights)(PROMPT)
        assert np.array_equal(done.logits, plain.logits), weights
        for a, b in zip(done.cache.layers, plain.cache.layers, strict=True):
            assert np.array_equal(a.arrays["key"], b.arrays["key"])
            assert np.array_equal(a.arrays["value"], b.arrays["value"])


def noise(rows: int, columns: int) -> np.ndarray:
    """Weights as models have them: most are small, a few are not."""
    return np.random.default_rng(5).standard_t(4, (rows, columns)).astype(np.float16)


@pytest.mark.parametrize(("scheme", "share"), [("int4-block32", 0.8), ("lut6", 0.5)])
def test_a_search_leaves_less_error_than_even_codes(scheme: str, share: float) -> None:
    weight = noise(64, 256).astype(np.float32)
    searched, even = (
        ((made - weight) ** 2).sum() for made in (dense(scheme, weight), evenly(scheme, weight))
    )
    assert searched < share * even, (searched, even)


def test_blocks_that_a_scale_holds_exactly_are_kept() -> None:
    """Codes -8 to 7 and the scale of a power of two, either sign up; one value; and codes that do not end at 0."""
    codes = np.array([*range(-8, 8), *range(-8, 8)])
    weight = np.stack(
        [codes * 0.25, codes * -0.5, codes * 0.0, np.minimum(codes, 3) * 2.0, codes * 0 + 0.3, codes + 20.0]
    ).astype(np.float16)
    assert np.array_equal(dense("int4-block32", weight), weight)


def test_each_entry_of_a_palette_is_the_mean_of_its_values() -> None:
    weight = noise(16, 512)
    parts = parts_of("lut6", weight)
    lut, indices = parts["lut"].reshape(-1).astype(np.float32), parts["indices"].astype(int)
    assert (np.diff(lut) >= 0).all()
    values = weight.astype(np.float32)
    nearest = np.abs(values[..., None] - lut).min(-1)
    assert np.allclose(np.abs(values - lut[indices]), nearest, atol=1e-6)
    means = np.array([values[indices == entry].mean() for entry in np.unique(indices)])
    assert np.abs(means - lut[np.unique(indices)]).max() < 0.02 * np.abs(values).max()


def test_only_projections_and_embeddings_are_quantised(
    kvbaton_cli: Run, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = tiny_model("llama_tied")
    out = tmp_path / "q.mlpackage"
    done = kvbaton_cli("export", folder, out, "--buckets", "8,16", "--quantize", "int8", "--json")
    assert done.json()["quantize"] == "int8"
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    package = kvbaton_cli("inspect", out, "--json").json()
    for function in package["functions"]:
        operations = function["operations"]
        assert (
            operations["constexpr_blockwise_shift_scale"] == 7 * layers + 1
        )  # the embedding is the head, too
    dtypes = {of["dtype"]: of for of in package["weights"]["by_dtype"]}
    assert dtypes["int8"]["count"] == 7 * layers + 1  # both functions share them
    assert "kvbaton.quantize" in package["user_metadata"]
    for scheme, wanted in (("int4-block32", (7 * layers + 1, 0)), ("int4-block32-int8", (7 * layers, 1))):
        out = tmp_path / f"{scheme}.mlpackage"
        assert not kvbaton_cli("export", folder, out, "--buckets", "8", "--quantize", scheme).code
        dtypes = {
            of["dtype"]: of for of in kvbaton_cli("inspect", out, "--json").json()["weights"]["by_dtype"]
        }
        assert tuple(dtypes.get(dtype, {"count": 0})["count"] for dtype in ("uint4", "int8")) == wanted


def test_rows_of_zeros_stay_zeros(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Padding of a vocabulary: coremltools' own quantiser divides by 0 there."""

    def zeroed(name: str, weight: np.ndarray) -> np.ndarray:
        changed = weight.copy()
        if "embed_tokens" in name:
            changed[100:140] = 0
        return changed

    folder = copied(tiny_model("llama_tied"), tmp_path / "zeroed", zeroed)
    for scheme in SCHEMES:
        export(folder, tmp_path / f"{scheme}.mlpackage", buckets=(8,), quantize=scheme)
        logits = kvbaton.Prefill(tmp_path / f"{scheme}.mlpackage")(PROMPT).logits
        assert logits is not None
        assert np.isfinite(logits).all()
        # Groups of 16 rows: 112 to 127 lie in zeros alone.
        assert not logits[112:128].any()


def test_schemes_that_do_not_fit_are_refused(kvbaton_cli: Run, tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tiny_model("llama_tied")
    with pytest.raises(
        ExportError, match="int3; known: int8, int4-block32, int4-block32-int8, lut6"
    ) as refused:
        export(folder, tmp_path / "q.mlpackage", quantize="int3")  # type: ignore[arg-type]
    assert refused.value.kind == "quantize"
    done = kvbaton_cli("export", folder, tmp_path / "q.mlpackage", "--quantize", "int3", "--json")
    assert done.code == 2
    assert done.json()["error"]["kind"] == "usage"
    quantizer = Quantizer("int4-block32")
    with pytest.raises(ExportError, match="rows of 40 values, .* multiple of 32"):
        quantizer.quantized("weight", lambda: np.ones((4, 40), np.float16))
    assert not (tmp_path / "q.mlpackage").exists()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_logits_of_smollm2_stay_close_to_float32(
    smollm2: Any, model_folder: Path, tmp_path: Path, scheme: Any
) -> None:
    import mlx.core as mx

    model, tokenizer = smollm2
    ids = list(tokenizer.encode((ROOT / "demo/prompt.txt").read_text()))[:500]
    assert len(ids) > 300
    reference = np.array(model(mx.array([ids]))[0, -1], np.float64)
    export(model_folder, tmp_path / "q.mlpackage", buckets=(512,), quantize=scheme)
    done = kvbaton.Prefill(tmp_path / "q.mlpackage")(ids)
    assert done.logits is not None
    cosine = done.logits @ reference / np.linalg.norm(done.logits) / np.linalg.norm(reference)
    print(f"{scheme}: cosine {cosine:.7f}, {done.report.tokens_per_second:.0f} tokens/s")
    assert cosine >= LIMITS[scheme]
    if scheme is not None:
        streamed = kvbaton.Prefill(tmp_path / "q.mlpackage", weights="streamed")(ids)
        assert np.array_equal(streamed.logits, done.logits)

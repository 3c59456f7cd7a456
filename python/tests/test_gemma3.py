"""Gemma 3 270M with its real weights: windows and full layers from Core ML to MLX, and back.

    make test-slow

The first run downloads 238 MB (see ``demo/convert_gemma3.py``).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvbaton
import mlx.core as mx
import numpy as np
import pytest
from kvbaton.mlx import make_caches

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
MODEL, PACKAGE = ROOT / "demo/out/gemma3", ROOT / "demo/out/gemma3.mlpackage"
WINDOW = 512
# Prompt lengths on both sides of the window, and around it.
LENGTHS = (7, 60, 128, 300, WINDOW - 1, WINDOW + 1, 700, 1000)
NEAR_TIE = 0.01
"""Difference of two logits below which fp16 may choose the other."""

ACTIVATION_LIMIT = 32768


@pytest.fixture(scope="module")
def gemma() -> tuple[Any, list[int]]:
    """The model in float32, and the ids of a long text."""
    import mlx_lm

    subprocess.run([sys.executable, ROOT / "demo/convert_gemma3.py", MODEL], check=True)
    model, tokenizer = mlx_lm.load(str(MODEL))[:2]
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    text = "".join((ROOT / name).read_text() for name in ("ARCHITECTURE.md", "CONTRIBUTING.md"))
    return model, list(tokenizer.encode(text))


@pytest.fixture(scope="module")
def prefill(gemma: Any) -> kvbaton.Prefill:
    from kvbaton._export import export

    if not PACKAGE.exists():
        export(MODEL, PACKAGE, buckets=(128, 1024))
    return kvbaton.Prefill(PACKAGE)


def step(model: Any, caches: Sequence[Any], token: int) -> np.ndarray:
    return np.array(model(mx.array([[token]]), cache=caches)[0, -1])


def filled(model: Any, tokens: Sequence[int]) -> list[Any]:
    caches = make_caches(model)
    mx.eval(model(mx.array([list(tokens)]), cache=caches), [c.state for c in caches])
    return caches


@pytest.mark.parametrize("length", LENGTHS)
def test_32_tokens_are_those_of_mlx_alone(gemma: Any, prefill: kvbaton.Prefill, length: int) -> None:
    model, text = gemma
    tokens = text[:length]
    result = prefill(tokens)
    assert result.report.function == ("prefill_128" if length <= 128 else "prefill_1024")
    handoff = kvbaton.to_mlx(result.cache, model, measure_memcpy=False)
    assert handoff.report.overflow == handoff.report.nan == handoff.report.infinity == 0
    kinds = [type(c).__name__ for c in handoff.prompt_cache]
    assert kinds == (["RotatingKVCache"] * 5 + ["KVCache"]) * 3
    alone = filled(model, tokens[:-1])
    token = tokens[-1]
    for number in range(32):
        ours, theirs = step(model, handoff.prompt_cache, token), step(model, alone, token)
        mine, token = int(ours.argmax()), int(theirs.argmax())  # both go on along mlx-lm's own tokens
        assert mine == token or theirs[token] - theirs[mine] < NEAR_TIE, (number, mine, token)


def test_keys_and_values_are_those_of_mlx(gemma: Any, prefill: kvbaton.Prefill) -> None:
    model, text = gemma
    for length in (100, 700):
        caches = make_caches(model)
        logits = np.array(model(mx.array([text[:length]]), cache=caches)[0, -1])
        result = prefill(text[:length])
        assert cosine(result.logits, logits) > 0.999999
        for index, (layer, cache) in enumerate(zip(result.cache.layers, caches, strict=True)):
            first = max(0, length - (layer.window or length))
            assert layer.positions == range(first, length)
            for part, array in (("key", cache.keys), ("value", cache.values)):
                assert cosine(layer.arrays[part], np.array(array[0, :, first:length])) > 0.9999, (index, part)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_the_package_s_largest_activation_is_below_half_of_what_fp16_holds(
    gemma: Any, prefill: kvbaton.Prefill
) -> None:
    """Read from the package as it runs; the residual is at a quarter there."""
    for length in (128, 1000):
        found = prefill.activations(gemma[1][:length])
        assert found.infinite == found.nan == 0
        assert found.largest is not None
        assert abs(found.largest.value) < ACTIVATION_LIMIT, found.largest
    assert abs(found.largest.value) > 16000  # unscaled, it would be beyond fp16


def test_activations_stay_below_half_of_what_fp16_holds(gemma: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, with the residual as the package keeps it: a quarter."""
    import mlx.nn as nn
    from kvbaton._export.program import RESIDUAL
    from mlx_lm.models.gemma3_text import TransformerBlock

    model, text = gemma
    peaks: dict[str, float] = {}

    def note(name: str, value: mx.array, times: float = 1.0) -> mx.array:
        peaks[name] = max(peaks.get(name, 0.0), times * float(mx.abs(value).max()))
        return value

    def block(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        a = note("attention", self.self_attn(note("norm", self.input_layernorm(x)), mask, cache))
        h = note("residual", x + note("added", self.post_attention_layernorm(a), RESIDUAL), RESIDUAL)
        n = self.pre_feedforward_layernorm(h)
        up, gate = note("up", self.mlp.up_proj(n)), note("gate", self.mlp.gate_proj(n))
        d = note("down", self.mlp.down_proj(note("product", nn.gelu_approx(gate) * up)))
        return note("residual", h + note("added", self.post_feedforward_layernorm(d), RESIDUAL), RESIDUAL)

    monkeypatch.setattr(TransformerBlock, "__call__", block)
    mx.eval(model(mx.array([text[:1000]])))
    assert 16000 < peaks["residual"] < ACTIVATION_LIMIT  # unscaled, it would be beyond fp16
    assert max(peaks.values()) < ACTIVATION_LIMIT, peaks


@pytest.mark.parametrize("length", [300, 1000])
def test_a_detour_through_core_ml_s_sliding_layout_changes_nothing(gemma: Any, length: int) -> None:
    model, text = gemma
    tokens = text[:length]
    caches = filled(model, tokens[:-1])
    for cache in caches:  # values that the layout's float16 holds, so that nothing is rounded on the way
        cache.keys, cache.values = (
            a.astype(mx.float16).astype(mx.float32) for a in (cache.keys, cache.values)
        )
    view = kvbaton.from_mlx(caches, model, tokens=tokens[:-1])
    inputs = kvbaton.to_coreml(view, "coreml-llm-sliding", capacity=2048)
    assert inputs.arrays["K_sliding_in"].shape == (15, 1, WINDOW, 512)
    assert inputs.arrays["K_full_in"].shape == (3, 1, 2048, 512)
    back = inputs.view(tokens[:-1], view.model)
    del view
    handoff = kvbaton.to_mlx(back, model, tokens, measure_memcpy=False)
    token = tokens[-1]
    for number in range(32):
        ours, theirs = step(model, handoff.prompt_cache, token), step(model, caches, token)
        token = int(theirs.argmax())
        assert int(ours.argmax()) == token, number

"""Every exported architecture end to end, on tiny random models: package → prefill → hand-off → mlx-lm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvbaton
import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from kvbaton._export import export
from kvbaton.mlx import make_caches
from mlx_lm.utils import load_model

PROMPT = [(7 * i * i + 3 * i + 11) % tiny_models.VOCAB for i in range(50)]
NEAR_TIE = 0.01
# The package of a quantised folder holds its dequantised weights rounded to float16, the decoder does not.
QUANTISED_NEAR_TIE = 0.03

Ready = Callable[..., tuple[Any, kvbaton.Prefill, Path]]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Ready:
    """A model in float32 and its package, built once for each set of options."""
    made: dict[tuple[str, str], tuple[Any, kvbaton.Prefill, Path]] = {}

    def get(name: str, kv_outputs: Any = "stacked") -> tuple[Any, kvbaton.Prefill, Path]:
        key = (name, kv_outputs)
        if key not in made:
            parent = tmp_path_factory.mktemp("tiny")
            folder = tiny_models.build(name, parent)
            export(folder, parent / "p.mlpackage", buckets=(16, 64), kv_outputs=kv_outputs)
            model = load_model(folder)[0]
            model.set_dtype(mx.float32)
            made[key] = (model, kvbaton.Prefill(parent / "p.mlpackage"), folder)
        return made[key]

    return get


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_keys_and_values_are_those_of_mlx(ready: Ready, name: str) -> None:
    model, prefill, _ = ready(name)
    caches = make_caches(model)
    logits = model(mx.array([PROMPT]), cache=caches)[0, -1]
    result = prefill(PROMPT)
    for index, (layer, cache) in enumerate(zip(result.cache.layers, caches, strict=True)):
        first = max(0, len(PROMPT) - (layer.window or len(PROMPT)))
        assert layer.positions == range(first, len(PROMPT))
        for part, reference in (("key", cache.keys), ("value", cache.values)):
            theirs = np.array(reference[0, :, first : len(PROMPT)].astype(mx.float32))
            assert cosine(layer.arrays[part], theirs) >= 0.9999, (name, index, part)
    assert cosine(result.logits, np.array(logits.astype(mx.float32))) >= 0.9999


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_tokens_are_those_of_mlx(ready: Ready, name: str) -> None:
    model, prefill, _ = ready(name)
    alone = make_caches(model)
    expected = model(mx.array([PROMPT]), cache=alone)[0, -1]
    handoff = kvbaton.to_mlx(prefill(PROMPT).cache, model, dtype=mx.float32, measure_memcpy=False)
    token = handoff.remaining_tokens
    for step in range(32):
        got = model(mx.array([token]), cache=handoff.prompt_cache)[0, -1]
        wanted = int(mx.argmax(expected))
        chosen = int(mx.argmax(got))
        margin = float(expected[wanted] - expected[chosen])
        tie = QUANTISED_NEAR_TIE if name.endswith("4bit") else NEAR_TIE
        assert chosen == wanted or margin < tie, (name, step, chosen, wanted, margin)
        token = [wanted]  # along mlx-lm's own tokens, so that one near tie does not end the comparison
        expected = model(mx.array([token]), cache=alone)[0, -1]


@pytest.mark.parametrize("kv_outputs", ["grouped", "per-layer"])
def test_the_cache_is_the_same_however_it_leaves_the_program(ready: Ready, kv_outputs: str) -> None:
    stacked = ready("qwen3")[1](PROMPT).cache
    other = ready("qwen3", kv_outputs)[1](PROMPT).cache
    assert other.layout != stacked.layout
    for a, b in zip(stacked.layers, other.layers, strict=True):
        for part in ("key", "value"):
            assert np.array_equal(a.arrays[part].view(np.uint16), b.arrays[part].view(np.uint16))


def test_the_shortest_function_that_fits_runs(ready: Ready) -> None:
    prefill = ready("llama_tied")[1]
    assert prefill.functions == {"prefill_16": 16, "prefill_64": 64}
    assert prefill(PROMPT[:16]).report.function == "prefill_16"
    assert prefill(PROMPT[:17]).report.function == "prefill_64"


def test_functions_agree_on_a_short_prompt(ready: Ready, tmp_path: Path) -> None:
    _, prefill, folder = ready("llama_tied")
    export(folder, tmp_path / "one.mlpackage", buckets=(64,))
    long = kvbaton.Prefill(tmp_path / "one.mlpackage")(PROMPT[:10])
    short = prefill(PROMPT[:10])
    assert (long.report.function, short.report.function) == ("prefill_64", "prefill_16")
    for a, b in zip(short.cache.layers, long.cache.layers, strict=True):
        assert cosine(a.arrays["key"], b.arrays["key"]) >= 0.999999


def test_a_cache_of_another_model_is_refused(ready: Ready) -> None:
    cache = ready("llama_tied")[1](PROMPT).cache
    for other, field in (
        ("llama_no_groups", "kv_heads"),
        ("llama_linear_rope", "rope"),
        ("qwen3", "head_dim"),
    ):
        with pytest.raises(kvbaton.errors.IncompatibleError) as refused:
            kvbaton.to_mlx(cache, ready(other)[0])
        assert refused.value.fields["field"] == field
        assert {"package", "model"} <= set(refused.value.fields)


def test_too_long_and_empty_prompts_are_refused(ready: Ready) -> None:
    prefill = ready("llama_tied")[1]
    with pytest.raises(kvbaton.errors.PromptTooLongError, match=r"65 tokens .* takes 64"):
        prefill([1] * 65)
    with pytest.raises(kvbaton.errors.EmptyPromptError):
        prefill([])
    with pytest.raises(kvbaton.errors.UsageError, match="token 512 at position 1"):
        prefill([1, tiny_models.VOCAB])


def test_a_view_outlives_its_prefill(ready: Ready) -> None:
    folder = ready("llama_tied")[2]
    package = folder.parent / "p.mlpackage"
    view = kvbaton.Prefill(package)(PROMPT).cache
    again = kvbaton.Prefill(package)(PROMPT).cache
    assert np.array_equal(view.layers[1].arrays["key"], again.layers[1].arrays["key"])


def test_bare_arrays_hand_over_as_the_prefill_does(ready: Ready) -> None:
    model, prefill, folder = ready("qwen3")
    cache = prefill(PROMPT).cache
    stacked = {
        f"{part}_cache": np.stack([layer.arrays[part] for layer in cache.layers]) for part in ("key", "value")
    }
    view = kvbaton.CacheView.from_arrays(stacked, layout="yetter", tokens=PROMPT, model=folder)
    theirs = kvbaton.to_mlx(view, model, measure_memcpy=False)
    ours = kvbaton.to_mlx(cache, model, measure_memcpy=False)
    assert theirs.remaining_tokens == ours.remaining_tokens
    rows = len(PROMPT) - 1
    for a, b in zip(theirs.prompt_cache, ours.prompt_cache, strict=True):
        assert mx.array_equal(a.keys[..., :rows, :], b.keys[..., :rows, :])
        assert mx.array_equal(a.values[..., :rows, :], b.values[..., :rows, :])
    with pytest.raises(kvbaton.errors.IncompatibleError, match="rope"):
        kvbaton.to_mlx(
            kvbaton.CacheView.from_arrays(
                {name: array[..., :16].copy() for name, array in stacked.items()},
                layout="yetter",
                tokens=PROMPT,
                model=ready("llama_tied")[2],
            ),
            ready("llama_linear_rope")[0],
        )


def test_arrays_that_only_speak_dlpack_are_taken(ready: Ready) -> None:
    class Lent:
        def __init__(self, array: np.ndarray) -> None:
            self.array, self.dtype = array, array.dtype

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    keys = np.arange(2 * 2 * 5 * 4, dtype=np.float16).reshape(2, 2, 5, 4)
    arrays = {"key_cache": Lent(keys), "value_cache": Lent(-keys)}
    view = kvbaton.CacheView.from_arrays(arrays, layout="yetter", tokens_seen=3)
    assert np.array_equal(view.layers[1].arrays["value"], -keys[1, :, :3])


def test_compatibility_compares_facts_and_weights(ready: Ready) -> None:
    one = ready("llama_tied")[1]
    cache = one(PROMPT).cache
    kvbaton.check_compatible(cache, one.model)
    other = {**one.model, "weights_digest": "blake3:0"}
    with pytest.raises(kvbaton.errors.IncompatibleError, match="weights_digest"):
        kvbaton.check_compatible(cache, other)
    kvbaton.check_compatible(cache, other, allow_different={"weights"})
    unknown = {k: v for k, v in one.model.items() if k != "weights_digest"}
    with pytest.raises(kvbaton.errors.IncompatibleError, match="unknown"):
        kvbaton.check_compatible(unknown, unknown)
    with pytest.raises(kvbaton.errors.IncompatibleError, match="vocab_size"):
        kvbaton.check_compatible(cache, {**one.model, "vocab_size": 7}, allow_different={"weights"})

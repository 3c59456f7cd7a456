"""Every cache class of mlx-lm against mlx-lm itself: fed, read, handed over, and both continued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cache_models
import kvbaton
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from cache_models import WINDOW, prompt
from kvbaton.mlx import make_caches
from mlx_lm.models import cache as mlx_cache

LENGTHS = (0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 2, 255, 256, 257)
STEPS = 40
# Rows in another order sum in another order: the last bits of float32 differ where a ring was unrolled.
ROUNDING = 2e-5

Models = Callable[[str], Any]

# Before 0.32 mlx-lm's ChunkedKVCache cuts its buffer where it should cut its rows: it loses rows once the buffer
# is as long as the chunk. What it can do is tested with `llama4_long`.
WRONG_CHUNKS = tuple(int(n) for n in mlx_lm.__version__.split(".")[:2]) < (0, 32)
FAMILIES = [f for f in cache_models.CONFIGS if f != "llama_wide" and not (f == "llama4" and WRONG_CHUNKS)]


def feed(model: Any, caches: Sequence[Any], tokens: Sequence[int], singly: int = 0) -> mx.array | None:
    """Runs ``tokens``, the last ``singly`` of them one by one; the logits after the last."""
    cut = max(0, len(tokens) - singly)
    pieces = [list(tokens[:cut])] + [[t] for t in tokens[cut:]]
    logits = None
    for piece in pieces:
        if piece:
            logits = model(mx.array([piece]), cache=caches)[0, -1]
            mx.eval(logits)
    return logits


def go_on(model: Any, caches: Sequence[Any], token: int, steps: int = STEPS) -> list[int]:
    tokens = []
    for _ in range(steps):
        logits = model(mx.array([[token]]), cache=caches)[0, -1]
        token = int(mx.argmax(logits).item())
        tokens.append(token)
    return tokens


Contents = list[tuple[int | None, list[int], dict[str, Any]]]
"""Of each layer: rows that stay (``None`` without a window), positions, arrays."""


def of_view(view: kvbaton.CacheView) -> Contents:
    return [(layer.keep, list(layer.positions), layer.arrays) for layer in view.layers]


def contents(caches: Sequence[Any], model: Any, seen: int | None = None) -> Contents:
    return of_view(kvbaton.from_mlx(caches, model, tokens_seen=seen))


def assert_same(ours: Contents, theirs: Contents, seen: int, tolerance: float) -> None:
    """Equal rows; of windows those that the next token reads."""
    assert len(ours) == len(theirs)
    for layer, ((keep, rows, arrays), (keep2, rows2, arrays2)) in enumerate(zip(ours, theirs, strict=True)):
        assert keep == keep2
        read = rows2
        if keep is not None:
            read = [r for r in rows2 if r in rows]
            oldest = seen - WINDOW + keep + 1
            assert {*range(min(keep, seen)), *range(max(0, oldest), seen)} <= set(read)
        for part, array in arrays.items():
            other = arrays2[part]
            if rows2:
                array = array[:, [rows.index(r) for r in read]]
                other = other[:, [rows2.index(r) for r in read]]
            where = f"layer {layer}, {part}"
            if tolerance == 0:
                np.testing.assert_array_equal(array, other, err_msg=where)
            else:
                np.testing.assert_allclose(array, other, rtol=tolerance, atol=tolerance, err_msg=where)


@pytest.mark.parametrize("singly", [0, 3], ids=["at-once", "stepped"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_handed_over_cache_goes_on_as_the_source(
    models: Models, family: str, length: int, singly: int
) -> None:
    model = models(family)
    tokens = prompt(length + 1)
    source = make_caches(model)
    feed(model, source, tokens[:-1], singly)
    before = contents(source, model, length)
    view = kvbaton.from_mlx(source, model, tokens=tokens[:-1])
    handoff = kvbaton.to_mlx(view, model, tokens, measure_memcpy=False)
    del view
    assert handoff.remaining_tokens == tokens[-1:]
    assert handoff.cached_tokens == length
    if length:
        assert_same(contents(handoff.prompt_cache, model, length), before, length, 0)
    assert go_on(model, handoff.prompt_cache, tokens[-1]) == go_on(model, source, tokens[-1])
    seen = length + STEPS
    assert_same(contents(handoff.prompt_cache, model, seen), contents(source, model, seen), seen, 0)


# A class by itself: (family, fresh caches, left padding).
Fresh = Callable[[], list[Any]]
CLASSES: dict[str, tuple[str, Fresh, int]] = {
    "KVCache": ("llama", lambda: [mlx_cache.KVCache() for _ in range(3)], 0),
    "RotatingKVCache": ("llama", lambda: [mlx_cache.RotatingKVCache(WINDOW) for _ in range(3)], 0),
    "RotatingKVCache-keep": (
        "llama",
        lambda: [mlx_cache.RotatingKVCache(WINDOW, keep=3) for _ in range(3)],
        0,
    ),
    "QuantizedKVCache-8": ("llama_wide", lambda: [mlx_cache.QuantizedKVCache(64, 8) for _ in range(3)], 0),
    "QuantizedKVCache-4": ("llama_wide", lambda: [mlx_cache.QuantizedKVCache(32, 4) for _ in range(3)], 0),
    "QuantizedKVCache-2": ("llama_wide", lambda: [mlx_cache.QuantizedKVCache(64, 2) for _ in range(3)], 0),
    "ConcatenateKVCache": ("llama", lambda: [mlx_cache.ConcatenateKVCache() for _ in range(3)], 0),
    "BatchKVCache": ("llama", lambda: [mlx_cache.BatchKVCache([0]) for _ in range(3)], 0),
    "BatchKVCache-padded": ("llama", lambda: [mlx_cache.BatchKVCache([5]) for _ in range(3)], 5),
    "BatchRotatingKVCache": (
        "llama",
        lambda: [mlx_cache.BatchRotatingKVCache(WINDOW, [0]) for _ in range(3)],
        0,
    ),
    "BatchRotatingKVCache-padded": (
        "llama",
        lambda: [mlx_cache.BatchRotatingKVCache(WINDOW, [5]) for _ in range(3)],
        5,
    ),
}


# Padding alone is no past.
CASES = [(name, length) for name in CLASSES for length in LENGTHS if length or not CLASSES[name][2]]


@pytest.mark.parametrize("singly", [0, 3], ids=["at-once", "stepped"])
@pytest.mark.parametrize(("name", "length"), CASES)
def test_each_class_goes_on_as_itself(models: Models, name: str, length: int, singly: int) -> None:
    family, fresh, pad = CLASSES[name]
    model, tokens = models(family), prompt(length + 1)
    source = fresh()
    if length:
        feed(model, source, [0] * pad + tokens[:-1], singly)
    view = kvbaton.from_mlx(source, model, tokens=tokens[:-1])
    kinds = {layer.kind for layer in view.layers}
    assert kinds == ({"sliding"} if "Rotating" in name else {"full"})
    before = [layer.arrays for layer in view.layers]
    handoff = kvbaton.to_mlx(view, model, tokens, prompt_cache=fresh(), measure_memcpy=False)
    del view
    assert [type(c) for c in handoff.prompt_cache] == [type(c) for c in source]
    if length:
        after = kvbaton.from_mlx(handoff.prompt_cache, model)
        for mine, theirs in zip(after.layers, before, strict=True):
            for part, array in theirs.items():
                np.testing.assert_array_equal(mine.arrays[part], array)
        del after
    assert go_on(model, handoff.prompt_cache, tokens[-1]) == go_on(model, source, tokens[-1])
    ours, theirs = contents(handoff.prompt_cache, model), contents(source, model)
    # A ring stays where it turns, so that sums keep their order.
    assert_same(ours, theirs, length + STEPS, 0)


@pytest.mark.parametrize("name", [n for n in CLASSES if "padded" not in n])
def test_each_class_takes_the_rows_of_plain_caches(models: Models, name: str) -> None:
    """From ``KVCache``, as if the class itself had been fed; windows no longer than their own rows."""
    family, fresh, _ = CLASSES[name]
    model = models(family)
    length = WINDOW if "Rotating" in name else 100
    tokens = prompt(length + 1)
    plain, native = make_caches(model), fresh()
    feed(model, plain, tokens[:-1])
    view = kvbaton.from_mlx(plain, model, tokens=tokens[:-1])
    handoff = kvbaton.to_mlx(view, model, tokens, prompt_cache=fresh(), measure_memcpy=False)
    if "Quantized" in name:
        # Quantised attention makes other rows of deeper layers: only the codes of these rows can be compared.
        for cache, source in zip(handoff.prompt_cache, plain, strict=True):
            assert (cache.bits, cache.group_size, cache.offset) == (
                native[0].bits,
                native[0].group_size,
                length,
            )
            for mine, rows in ((cache.keys, source.keys), (cache.values, source.values)):
                theirs = mx.quantize(rows[..., :length, :], group_size=cache.group_size, bits=cache.bits)
                for a, b in zip(mine, theirs, strict=True):
                    assert mx.array_equal(a[..., :length, :], b)
        return
    feed(model, native, tokens[:-1])
    assert go_on(model, handoff.prompt_cache, tokens[-1]) == go_on(model, native, tokens[-1])


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("qwen3_next", "falcon_h1")])
@pytest.mark.parametrize("length", [2, WINDOW, WINDOW + 1, 3 * WINDOW + 2, 256])
def test_dropping_the_last_row_and_running_its_token_again_is_the_same(
    models: Models, family: str, length: int
) -> None:
    model, tokens = models(family), prompt(length)
    source = make_caches(model)
    logits = feed(model, source, tokens, 1)
    assert logits is not None
    handoff = kvbaton.to_mlx(kvbaton.from_mlx(source, model, tokens=tokens), model, measure_memcpy=False)
    assert (handoff.remaining_tokens, handoff.cached_tokens) == (tokens[-1:], length - 1)
    assert handoff.logits is None
    first = int(mx.argmax(logits).item())
    assert go_on(model, handoff.prompt_cache, tokens[-1]) == [first, *go_on(model, source, first, STEPS - 1)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shorter_past_is_lengthened_by_the_missing_rows(models: Models, family: str) -> None:
    model, tokens = models(family), prompt(31)
    source, target = make_caches(model), make_caches(model)
    feed(model, target, tokens[:25], 2)
    feed(model, source, tokens[:30], 2)
    view = kvbaton.from_mlx(source, model, tokens=tokens[:30])
    handoff = kvbaton.to_mlx(view, model, tokens, prompt_cache=target, measure_memcpy=False)
    assert all(a is b for a, b in zip(handoff.prompt_cache, target, strict=True))
    assert handoff.report.rows == 5
    # The two were fed in other pieces: recurrent states were summed in another order.
    assert_same(contents(target, model, 30), contents(source, model, 30), 30, 1e-3)
    assert go_on(model, target, tokens[-1]) == go_on(model, source, tokens[-1])


def test_one_sequence_of_a_batch_is_read_by_its_number(models: Models) -> None:
    model = models("llama")
    prompts = [prompt(9, seed=1), prompt(6, seed=2)]
    batch = [mlx_cache.BatchKVCache([0, 3]) for _ in range(3)]
    padded = mx.array([prompts[0], [0, 0, 0, *prompts[1]]])
    mx.eval(model(padded, cache=batch))
    for number, tokens in enumerate(prompts):
        alone = make_caches(model)
        feed(model, alone, tokens)
        view = kvbaton.from_mlx(batch, model, sequence=number)
        assert view.tokens_seen == len(tokens)
        assert_same(of_view(view), contents(alone, model), len(tokens), ROUNDING)
    with pytest.raises(kvbaton.errors.UsageError, match="holds 2 sequences"):
        kvbaton.from_mlx(batch, model)


def test_a_view_stays_as_it_is_while_the_caches_go_on(models: Models) -> None:
    model, tokens = models("gemma3"), prompt(20)
    caches = make_caches(model)
    feed(model, caches, tokens)
    view = kvbaton.from_mlx(caches, model, tokens=tokens)
    before = [layer.arrays for layer in view.layers]
    go_on(model, caches, 5)
    for layer, arrays in zip(view.layers, before, strict=True):
        for part, array in arrays.items():
            np.testing.assert_array_equal(layer.arrays[part], array)


def test_without_a_view_the_first_steps_write_in_place(models: Models) -> None:
    for family in FAMILIES:
        model, tokens = models(family), prompt(WINDOW + 1)
        caches = make_caches(model)
        feed(model, caches, tokens[:-1])
        handoff = kvbaton.to_mlx(kvbaton.from_mlx(caches, model), model, tokens, measure_memcpy=False)
        before = kvbaton.mlx.cache_addresses(handoff.prompt_cache)
        model(mx.array([tokens[-1:]]), cache=handoff.prompt_cache)
        mx.eval([c.state for c in handoff.prompt_cache])
        assert kvbaton.mlx.copied_bytes(before, handoff.prompt_cache) == 0, family


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_other_element_types_keep_their_bits(dtype: Any) -> None:
    for family in ("gemma3", "qwen3_next", "falcon_h1"):
        model = cache_models.build(family, dtype)
        tokens = prompt(20)
        caches = make_caches(model)
        feed(model, caches, tokens[:-1])
        view = kvbaton.from_mlx(caches, model, tokens=tokens[:-1])
        handoff = kvbaton.to_mlx(view, model, tokens, measure_memcpy=False)
        assert handoff.report.path == "fill"
        after = kvbaton.from_mlx(handoff.prompt_cache, model, tokens_seen=19)
        for ours, theirs in zip(after.layers, view.layers, strict=True):
            for part, array in theirs.arrays.items():
                if theirs.kind == "sliding":  # the source's window may hold more than the target's
                    assert np.array_equal(ours.arrays[part][:, -WINDOW + 1 :], array[:, -WINDOW + 1 :])
                else:
                    assert np.array_equal(ours.arrays[part], array), (family, part)

"""Failures that others met with caches, trims, prefixes and recurrent states; and what is refused here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cache_models
import kvbaton
import mlx.core as mx
import numpy as np
import pytest
from cache_models import WINDOW, prompt
from kvbaton.errors import CapacityError, IncompatibleError, LayoutError, OverflowInCacheError, UsageError
from kvbaton.mlx import cache_addresses, copied_bytes, make_caches
from kvbaton.testing import FakePrefill
from mlx_lm.models import cache as mlx_cache
from test_cache_classes import feed, go_on

Models = Callable[[str], Any]


def kv(rows: int, kind: Any = mlx_cache.KVCache, heads: int = 2, dim: int = 64, **made: Any) -> Any:
    """One cache of ``rows`` random rows."""
    cache = kind(**made)
    mx.random.seed(rows)
    cache.update_and_fetch(*(mx.random.normal((1, heads, rows, dim)).astype(mx.float16) for _ in range(2)))
    return cache


def ring(tokens: int, size: int = WINDOW, keep: int = 0) -> Any:
    """A ``RotatingKVCache`` fed one token at a time; every row holds its position."""
    cache = mlx_cache.RotatingKVCache(size, keep)
    for position in range(tokens):
        row = mx.full((1, 1, 1, 4), position, mx.float16)
        cache.update_and_fetch(row, row)
    return cache


def rows_of(view: kvbaton.CacheView, layer: int = 0) -> list[int]:
    """Positions by what rows say of themselves."""
    return [int(x) for x in view.layers[layer].arrays["key"][0, :, 0]]


def test_d01_three_live_rows_of_a_buffer_of_256_are_three(models: Models) -> None:
    cache = kv(3)
    assert cache.keys.shape[2] == 256
    (layer,) = kvbaton.from_mlx([cache]).layers
    assert layer.positions == range(3)
    assert layer.arrays["key"].shape == (2, 3, 64)


def test_d03_an_unknown_cache_class_is_named_with_its_place() -> None:
    class FooKVCache:
        pass

    with pytest.raises(IncompatibleError, match="unsupported cache class FooKVCache at cache 1"):
        kvbaton.from_mlx([kv(3), FooKVCache()])


def test_d04_a_quantised_cache_keeps_offset_bits_and_groups(models: Models) -> None:
    model, tokens = models("llama_wide"), prompt(285)
    source = [mlx_cache.QuantizedKVCache(32, 4) for _ in range(3)]
    feed(model, source, tokens[:-1])
    fresh = [mlx_cache.QuantizedKVCache(32, 4) for _ in range(3)]
    view = kvbaton.from_mlx(source, tokens=tokens[:-1])
    handoff = kvbaton.to_mlx(view, model, tokens, prompt_cache=fresh)
    for cache in handoff.prompt_cache:
        assert (cache.offset, cache.bits, cache.group_size) == (284, 4, 32)
    assert handoff.report.path == "fill"


def test_d05_the_same_prompt_again_says_what_is_cached_and_what_remains(models: Models) -> None:
    model, tokens = models("llama"), prompt(5)
    cold = make_caches(model)
    first = feed(model, cold, tokens)
    source = make_caches(model)
    feed(model, source, tokens)
    view = kvbaton.from_mlx(source, model, tokens=tokens)
    handoff = kvbaton.to_mlx(view, model, tokens)
    assert (handoff.cached_tokens, handoff.remaining_tokens) == (4, [tokens[4]])
    # What remains is run by the caller, and mlx-lm checks nothing.
    with pytest.raises(UsageError, match="token 1000000 at position 5 is not in the vocabulary of"):
        kvbaton.to_mlx(view, model, [*tokens, 1000000])
    answer = int(mx.argmax(first).item())
    assert go_on(model, handoff.prompt_cache, tokens[4], 6) == [answer, *go_on(model, cold, answer, 5)]


def test_d06_a_prefix_of_300_of_1000_trims_700() -> None:
    view = kvbaton.from_mlx([kv(1000)])
    assert view.prefix(300).tokens_seen == view.trim(700).tokens_seen == 300
    assert view.trim(700).layers[0].positions == range(300)
    for wrong in (1001, 1256):
        with pytest.raises(UsageError, match=f"cannot trim {wrong} tokens: the cache has seen 1000"):
            view.trim(wrong)
    with pytest.raises(UsageError, match="a prefix of 1001 tokens"):
        view.prefix(1001)
    with pytest.raises(UsageError, match="fewer than none"):
        view.trim(-1)


def test_d07_a_trim_counts_from_the_rows_not_from_the_buffer() -> None:
    cache = kv(5)
    whole = kvbaton.from_mlx([cache]).layers[0].arrays["key"]
    view = kvbaton.from_mlx([cache]).trim(2)
    assert view.layers[0].positions == range(3)
    np.testing.assert_array_equal(view.layers[0].arrays["key"], whole[:, :3])


def test_d08_a_window_that_has_turned_is_not_trimmed() -> None:
    cache = ring(20)
    view = kvbaton.from_mlx([cache])
    with pytest.raises(UsageError, match=r"window of 8 of layer 0 no longer holds row 7") as caught:
        view.trim(6)
    assert caught.value.fields == {"layer": 0, "row": 7}
    assert rows_of(view) == list(range(12, 20))
    assert rows_of(view.trim(1)) == list(range(12, 19))  # row 11 is not read by token 19
    cache.trim(6)
    assert (cache.offset, cache._idx) == (14, -2)  # what mlx-lm itself does
    with pytest.raises(IncompatibleError, match="offset 14 and index -2 in 8 slots"):
        kvbaton.from_mlx([cache])


def test_d08_mixed_layers_are_trimmed_all_or_none() -> None:
    view = kvbaton.from_mlx([kv(20, heads=1, dim=4), ring(20)])
    with pytest.raises(UsageError):
        view.trim(6)
    assert [list(la.positions) for la in view.layers] == [list(range(20)), list(range(12, 20))]
    both = view.trim(1)
    assert [list(la.positions) for la in both.layers] == [list(range(19)), list(range(12, 19))]


def test_d09_a_ring_is_read_in_the_order_of_time() -> None:
    cache = ring(20)
    assert [int(x) for x in np.array(cache.keys)[0, 0, :, 0]] == [16, 17, 18, 19, 12, 13, 14, 15]
    view = kvbaton.from_mlx([cache])
    assert rows_of(view) == list(range(12, 20))
    assert view.layers[0].positions == range(12, 20)


@pytest.mark.parametrize("offset", [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 2])
@pytest.mark.parametrize("keep", [0, 3])
def test_d10_live_rows_are_the_lesser_of_offset_and_window(offset: int, keep: int) -> None:
    view = kvbaton.from_mlx([ring(offset, keep=keep)])
    newest = WINDOW - keep
    want = [*range(keep), *range(offset - newest, offset)] if offset > WINDOW else list(range(offset))
    assert rows_of(view) == list(view.layers[0].positions) == want
    assert (view.layers[0].window, view.layers[0].keep) == (WINDOW, keep)


def test_d11_of_13_rows_prefilled_into_a_window_of_8_the_last_8_count() -> None:
    cache = mlx_cache.RotatingKVCache(WINDOW)
    rows = mx.arange(13).astype(mx.float16).reshape(1, 1, 13, 1) * mx.ones((1, 1, 1, 4), mx.float16)
    cache.update_and_fetch(rows, rows)
    assert cache.keys.shape[2] == 13
    view = kvbaton.from_mlx([cache])
    assert (view.tokens_seen, rows_of(view)) == (13, list(range(5, 13)))


@pytest.mark.parametrize("length", [20, 100])
def test_d12_prompts_on_both_sides_of_the_window_go_on(models: Models, length: int) -> None:
    model, tokens = models("gemma3"), prompt(length + 1)
    source = make_caches(model)
    feed(model, source, tokens[:-1])
    handoff = kvbaton.to_mlx(kvbaton.from_mlx(source, model), model, tokens)
    assert go_on(model, handoff.prompt_cache, tokens[-1], 16) == go_on(model, source, tokens[-1], 16)


def test_d13_kv_bits_quantise_full_layers_and_keep_windows() -> None:
    config = {**cache_models.CONFIGS["gemma3"], "head_dim": 64, "num_hidden_layers": 6}
    cache_models.CONFIGS["gemma3_wide"] = config
    try:
        model = cache_models.build("gemma3_wide")
    finally:
        del cache_models.CONFIGS["gemma3_wide"]
    tokens = prompt(30)
    source = make_caches(model)
    feed(model, source, tokens[:-1])
    view = kvbaton.from_mlx(source, model)
    handoff = kvbaton.to_mlx(view, model, tokens, kv_bits=8)
    kinds = [type(c).__name__ for c in handoff.prompt_cache]
    assert kinds == ["RotatingKVCache", "RotatingKVCache", "QuantizedKVCache"] * 2
    assert handoff.quantized_layers == 2
    assert [la.encoding for la in view.quantize(8, 64).layers] == [
        "plain",
        "plain",
        "8-bit affine in groups of 64",
    ] * 2
    windows = [mlx_cache.RotatingKVCache(WINDOW) for _ in range(6)]
    with pytest.raises(UsageError, match="no cache can be quantised: the decoder has RotatingKVCache"):
        kvbaton.to_mlx(view, model, tokens, prompt_cache=windows, kv_bits=8)
    assert all(c.keys is None for c in windows)
    with pytest.raises(UsageError, match="no layer can be quantised"):
        kvbaton.from_mlx([ring(20)]).quantize(8, 64)


def test_d14_heads_that_groups_do_not_divide_are_refused_by_name() -> None:
    view = kvbaton.from_mlx([kv(10, dim=96)])
    with pytest.raises(LayoutError, match="groups of 64 do not divide 96 lanes; groups of 32 would"):
        view.quantize(8, 64)
    assert view.quantize(8, 32).layers[0].encoding == "8-bit affine in groups of 32"


def test_d14_kv_bits_that_do_not_fit_leave_the_caches_alone(models: Models) -> None:
    model, tokens = models("llama"), prompt(5)
    caches = make_caches(model)
    feed(model, caches, tokens[:-1])
    fresh = [mlx_cache.QuantizedKVCache(64, 8) for _ in range(3)]
    with pytest.raises(UsageError, match="groups of 64 do not divide the 8 lanes"):
        kvbaton.to_mlx(kvbaton.from_mlx(caches), model, tokens, prompt_cache=fresh)
    assert all(c.keys is None and c.offset == 0 for c in fresh)


def test_d16_a_quantised_cache_is_trimmed_in_all_six_arrays(models: Models) -> None:
    model, tokens = models("llama_wide"), prompt(253)
    source = [mlx_cache.QuantizedKVCache(64, 8) for _ in range(3)]
    feed(model, source, tokens)
    view = kvbaton.from_mlx(source, tokens=tokens).trim(236)
    assert view.tokens_seen == 17
    fresh = [mlx_cache.QuantizedKVCache(64, 8) for _ in range(3)]
    handoff = kvbaton.to_mlx(view, model, tokens[:18], prompt_cache=fresh, spare_rows=0)
    for mine, theirs in zip(handoff.prompt_cache, source, strict=True):
        for a, b in zip((*mine.keys, *mine.values), (*theirs.keys, *theirs.values), strict=True):
            assert a.shape[2] == 17
            assert mx.array_equal(a, b[:, :, :17])


def test_d18_values_that_are_no_numbers_are_found_with_their_places() -> None:
    caches = [kv(10) for _ in range(5)]
    key = caches[3].keys
    key[0, 1, 7, 5] = float("nan")
    key[0, 1, 8, 6] = float("inf")
    found = kvbaton.from_mlx(caches).scan()
    assert (found.nan, found.infinity, found.overflow) == (1, 1, 0)
    first, second = found.places
    assert (first.kind, first.tensor, first.layer, first.head, first.row, first.lane) == (
        "nan",
        "key",
        3,
        1,
        7,
        5,
    )
    assert (second.kind, second.layer, second.row, second.value) == ("infinity", 3, 8, float("inf"))


def test_d19_bfloat16_values_beyond_float16_are_an_error_unless_asked() -> None:
    cache = kv(4, dim=8)
    cache.keys, cache.values = (a.astype(mx.bfloat16) for a in (cache.keys, cache.values))
    cache.keys[0, 1, 2, 3] = 70000
    view = kvbaton.from_mlx([cache])
    (found,) = view.scan("float16").places
    assert (found.kind, found.head, found.row, found.lane) == ("overflow", 1, 2, 3)
    with pytest.raises(OverflowInCacheError, match="1 values do not fit float16") as caught:
        view.cast("float16")
    assert caught.value.fields["first"] == {"tensor": "key", "layer": 0, "head": 1, "row": 2, "lane": 3}
    clamped = view.cast("float16", on_overflow="clamp")
    assert clamped.overflow == 1
    assert clamped.layers[0].arrays["key"][1, 2, 3] == 65504
    assert np.isinf(view.cast("float16", on_overflow="count").layers[0].arrays["key"][1, 2, 3])
    assert view.scan("bfloat16").overflow == 0


def test_d29_decoding_500_tokens_after_1000_moves_each_layer_twice_at_most(models: Models) -> None:
    model, tokens = models("llama"), prompt(1001)
    source = make_caches(model)
    feed(model, source, tokens[:-1])
    handoff = kvbaton.to_mlx(kvbaton.from_mlx(source), model, tokens, measure_memcpy=False)
    moves, before, token = 0, cache_addresses(handoff.prompt_cache), tokens[-1]
    for _ in range(500):
        (token,) = go_on(model, handoff.prompt_cache, token, 1)
        mx.eval([c.state for c in handoff.prompt_cache])
        moves += copied_bytes(before, handoff.prompt_cache) > 0
        before = cache_addresses(handoff.prompt_cache)
    assert moves <= 2


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_d30_every_operation_on_a_hybrid_cache_works_or_says_why_not(models: Models, family: str) -> None:
    model, tokens = models(family), prompt(20)
    caches = make_caches(model)
    logits = feed(model, caches, tokens)
    view = kvbaton.from_mlx(caches, model, tokens=tokens)
    assert "recurrent" in {la.kind for la in view.layers}
    for refused in (lambda: view.trim(1), lambda: view.prefix(10)):
        with pytest.raises(UsageError, match="recurrent state holds all 20"):
            refused()
    assert view.trim(0).tokens_seen == view.prefix(20).tokens_seen == 20
    assert view.cast("float16").tokens_seen == 20
    assert view.scan().nan == 0
    with pytest.raises(UsageError, match="the last cannot be run again"):
        kvbaton.to_mlx(view, model)
    view.logits = np.array(logits)
    handoff = kvbaton.to_mlx(view, model)
    assert (handoff.remaining_tokens, handoff.cached_tokens) == ([], 20)
    first = int(np.argmax(handoff.logits))
    assert go_on(model, handoff.prompt_cache, first) == go_on(model, caches, first)


def test_d31_what_was_reused_is_said_and_is_not_nothing(models: Models) -> None:
    model, tokens = models("qwen3_next"), prompt(20)
    caches = make_caches(model)
    feed(model, caches, tokens[:-1])
    handoff = kvbaton.to_mlx(kvbaton.from_mlx(caches, model), model, tokens)
    assert handoff.cached_tokens == handoff.report.rows == 19
    states = [c.cache for c in handoff.prompt_cache if type(c).__name__ == "ArraysCache"]
    assert states
    assert all(float(mx.abs(a).max()) > 0 for pair in states for a in pair)


def test_d33_heads_may_differ_from_layer_to_layer() -> None:
    shapes = [(16, 32)] * 5 + [(4, 64)]
    caches = [kv(12, heads=h, dim=d) for h, d in shapes]
    view = kvbaton.from_mlx(caches)
    layout = "kvbaton-per-layer"
    inputs = kvbaton.to_coreml(view, layout, capacity=20)
    back = inputs.view()
    for (heads, dim), mine, theirs in zip(shapes, back.layers, view.layers, strict=True):
        assert mine.arrays["key"].shape == (heads, 12, dim)
        for part in ("key", "value"):
            np.testing.assert_array_equal(mine.arrays[part], theirs.arrays[part])


def test_d34_layers_that_share_a_cache_are_listed_and_carried_once(models: Models) -> None:
    model, tokens = models("gemma3n"), prompt(10)
    caches = make_caches(model)
    feed(model, caches, tokens[:-1])
    assert (len(caches), len(model.layers)) == (4, 6)
    view = kvbaton.from_mlx(caches, model)
    assert [la.kind for la in view.layers] == ["sliding", "full"] * 2 + ["shared"] * 2
    handoff = kvbaton.to_mlx(view, model, tokens)
    assert len(handoff.prompt_cache) == 4
    with pytest.raises(IncompatibleError, match=r"the model keeps 4 things, the caches hold 3"):
        kvbaton.from_mlx(caches[:3], model)
    with pytest.raises(IncompatibleError, match=r"3 layers that keep rows, the decoder has 4 caches"):
        kvbaton.to_mlx(kvbaton.from_mlx(caches[:3]), model, tokens)


def test_d36_the_decoder_s_own_arrays_hold_the_rows_and_no_more_is_written(models: Models) -> None:
    model, tokens = models("llama"), prompt(101)
    source = make_caches(model)
    feed(model, source, tokens[:-1])
    handoff = kvbaton.to_mlx(kvbaton.from_mlx(source), model, tokens)
    live = 0
    for mine, theirs in zip(handoff.prompt_cache, source, strict=True):
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert np.array_equal(np.array(a[:, :, :100]), np.array(b[:, :, :100]))
            live += a[:, :, :100].nbytes
    assert live <= handoff.report.bytes <= 1.05 * live


def test_caches_too_short_for_the_rows_are_refused_before_anything_is_copied(models: Models) -> None:
    model, tokens = models("llama"), prompt(WINDOW + 2)
    source = make_caches(model)
    feed(model, source, tokens[:-1])
    view = kvbaton.from_mlx(source)
    short = [mlx_cache.KVCache(), mlx_cache.KVCache(), mlx_cache.RotatingKVCache(WINDOW)]
    with pytest.raises(
        CapacityError, match=f"cache 2 keeps {WINDOW} rows, {WINDOW + 1} are to be handed over"
    ):
        kvbaton.to_mlx(view, model, tokens, prompt_cache=short)
    assert all(c.keys is None and c.offset == 0 for c in short)


def test_a_window_that_dropped_rows_does_not_fill_a_cache_that_keeps_all(models: Models) -> None:
    model, tokens = models("llama"), prompt(20)
    source = [mlx_cache.RotatingKVCache(WINDOW) for _ in range(3)]
    feed(model, source, tokens[:-1])
    with pytest.raises(IncompatibleError, match=r"the target wants rows 0\.\.19, the source has 11\.\.19"):
        kvbaton.to_mlx(kvbaton.from_mlx(source), model, tokens)


def test_another_model_is_refused_naming_the_difference(models: Models) -> None:
    tokens = prompt(6)
    caches = make_caches(models("llama"))
    feed(models("llama"), caches, tokens[:-1])
    with pytest.raises(IncompatibleError) as caught:
        kvbaton.to_mlx(kvbaton.from_mlx(caches, models("llama")), models("llama_wide"), tokens)
    assert caught.value.fields["field"] == "head_dim"
    with pytest.raises(IncompatibleError, match="key_dim is 8, the decoder's is 64"):
        kvbaton.to_mlx(kvbaton.from_mlx(caches), models("llama_wide"), tokens)


def test_other_rope_is_refused_where_the_configuration_is_only_read_as_written(models: Models) -> None:
    tokens = prompt(6)
    model = models("qwen3_next")
    caches = make_caches(model)
    feed(model, caches, tokens[:-1])
    config = {**cache_models.CONFIGS["qwen3_next"], "rope_theta": 5000.0}
    cache_models.CONFIGS["other"] = config
    try:
        other = cache_models.build("other")
    finally:
        del cache_models.CONFIGS["other"]
    with pytest.raises(IncompatibleError, match="rope"):
        kvbaton.to_mlx(kvbaton.from_mlx(caches, model), other, tokens)


def test_a_chunk_that_lost_its_rows_is_refused_by_name() -> None:
    cache = kv(20, mlx_cache.ChunkedKVCache, chunk_size=WINDOW)
    cache.start_position = 248  # where mlx-lm 0.31 goes after a prefill of 20 rows into a buffer of 256
    with pytest.raises(IncompatibleError, match="offset 20 and start 248 in 256 slots"):
        kvbaton.from_mlx([cache])


def test_caches_that_disagree_on_the_tokens_seen_are_refused() -> None:
    with pytest.raises(UsageError, match="cache 0 has seen 5 tokens, cache 1 6"):
        kvbaton.from_mlx([kv(5), kv(6)])


def test_states_alone_need_the_tokens_seen() -> None:
    cache = mlx_cache.ArraysCache(2)
    cache[0], cache[1] = mx.ones((1, 3, 8)), mx.ones((1, 2, 4, 4))
    with pytest.raises(UsageError, match="recurrent states do not count tokens"):
        kvbaton.from_mlx([cache])
    (layer,) = kvbaton.from_mlx([cache], tokens_seen=5).layers
    assert (layer.arrays["conv"].shape, layer.arrays["state"].shape) == ((1, 3, 8), (2, 4, 4))


def test_arrays_that_are_no_states_are_refused() -> None:
    cache = mlx_cache.ArraysCache(1)
    cache[0] = mx.ones((1, 3, 8), mx.int32)
    with pytest.raises(IncompatibleError, match=r"array 0 of shape .* int32 is no convolution or recurrent"):
        kvbaton.from_mlx([cache], tokens_seen=5)


def test_empty_caches_need_the_model(models: Models) -> None:
    with pytest.raises(UsageError, match="cache 0 is empty"):
        kvbaton.from_mlx([mlx_cache.KVCache()])
    view = kvbaton.from_mlx(make_caches(models("llama")), models("llama"))
    assert (view.tokens_seen, [len(la.positions) for la in view.layers]) == (0, [0] * 3)
    with pytest.raises(UsageError, match="a decoder needs one to run"):
        kvbaton.to_mlx(view, models("llama"), [])


def test_a_longer_target_is_refused(models: Models) -> None:
    model, tokens = models("llama"), prompt(20)
    long, short = make_caches(model), make_caches(model)
    feed(model, long, tokens)
    feed(model, short, tokens[:10])
    with pytest.raises(UsageError, match="the caches have seen 20 tokens, 10 are to be handed over"):
        kvbaton.to_mlx(kvbaton.from_mlx(short), model, tokens[:11], prompt_cache=long)


def test_rows_of_a_trimmed_view_are_those_of_a_shorter_prompt(models: Models) -> None:
    """Rows of a whole-context buffer reach behind the window, so going back is possible there."""
    model, tokens = models("gemma3"), prompt(30)
    long, short = make_caches(model), make_caches(model)
    feed(model, long, tokens)
    feed(model, short, tokens[:22])
    kept = [mlx_cache.KVCache() for _ in range(3)]
    feed(model, kept, tokens)
    view = kvbaton.from_mlx(kept, tokens=tokens).prefix(22)
    fresh = [mlx_cache.KVCache() for _ in range(3)]
    handoff = kvbaton.to_mlx(view, model, tokens[:23], prompt_cache=fresh)
    assert go_on(model, handoff.prompt_cache, tokens[22], 10) == go_on(model, short, tokens[22], 10)
    assert view.tokens == tokens[:22]


def partly_fed(model: Any, tokens: list[int], which: Sequence[int]) -> list[Any]:
    """Fresh caches, but those in ``which``, which hold ``tokens``."""
    fed, caches = make_caches(model), make_caches(model)
    feed(model, fed, tokens)
    return [fed[at] if at in which else cache for at, cache in enumerate(caches)]


def test_caches_of_which_one_is_empty_are_not_lengthened(models: Models) -> None:
    model, tokens = models("llama"), prompt(10)
    source = make_caches(model)
    feed(model, source, tokens[:-1])
    view = kvbaton.from_mlx(source, model, tokens=tokens[:-1])
    caches = partly_fed(model, tokens[:4], (0, 2))
    with pytest.raises(UsageError, match="the caches have seen different numbers of tokens") as caught:
        kvbaton.to_mlx(view, model, tokens, prompt_cache=caches)
    assert caught.value.fields == {"tokens_seen": {"cache 0": 4, "cache 1": 0, "cache 2": 4}}
    assert [cache.offset for cache in caches] == [4, 0, 4]


def test_one_cache_in_two_places_is_refused(models: Models) -> None:
    model, tokens = models("llama"), prompt(10)
    source = make_caches(model)
    feed(model, source, tokens[:-1])
    view = kvbaton.from_mlx(source, model, tokens=tokens[:-1])
    twice = mlx_cache.KVCache()
    caches = [twice, mlx_cache.KVCache(), twice]
    with pytest.raises(UsageError, match="cache 0 and cache 2 are the same object"):
        kvbaton.to_mlx(view, model, tokens, prompt_cache=caches)
    assert all(cache.keys is None for cache in caches)


def test_filled_caches_of_other_heads_of_a_batch_or_without_order_are_left_alone(models: Models) -> None:
    model, tokens = models("llama"), prompt(10)
    source = make_caches(model)
    feed(model, source, tokens[:-1])
    view = kvbaton.from_mlx(source, model, tokens=tokens[:-1])
    wide = partly_fed(models("llama_wide"), tokens[:4], (0, 1, 2))
    batch = make_caches(model)
    mx.eval(model(mx.array([tokens[:4]] * 2), cache=batch))
    turned = [mlx_cache.RotatingKVCache(WINDOW) for _ in range(3)]
    feed(model, turned, prompt(20), singly=20)
    for cache in turned:
        cache.trim(14)
    for caches, error, message in (
        (wide, IncompatibleError, "cache 0: key_dim is 64, the decoder's is 8"),
        (batch, UsageError, "cache 0 holds 2 sequences"),
        (turned, IncompatibleError, "which slot holds which token cannot be told"),
    ):
        before = [(cache.offset, np.array(cache.keys)) for cache in caches]
        with pytest.raises(error, match=message):
            kvbaton.to_mlx(view, model, tokens, prompt_cache=caches)
        for cache, (offset, keys) in zip(caches, before, strict=True):
            assert cache.offset == offset
            np.testing.assert_array_equal(np.array(cache.keys), keys)


def test_a_scan_names_values_to_the_last_bit() -> None:
    rows = np.full((1, 1, 2, 8), 0.1, np.float32)
    rows[0, 0, 1, 3] = np.float32(1e20) / 3
    view = kvbaton.CacheView.from_arrays(
        {"key_cache": rows, "value_cache": rows}, "kvbaton-stacked", tokens_seen=2
    )
    found = view.scan("float16")
    assert found.largest == float(rows.max())
    assert [place.value for place in found.places] == [float(rows.max())] * 2
    assert view.prefix(1).scan("float16").largest == float(np.float32(0.1))


def test_a_prompt_of_one_token_gets_the_caches_that_were_asked_for(models: Models) -> None:
    shape = {"layers": 3, "kv_heads": 2}
    wide, model = models("llama_wide"), models("llama")
    engine, narrow = FakePrefill(**shape, head_dim=64), FakePrefill(**shape, head_dim=8)
    handoff = kvbaton.prefill_to_mlx(engine, [1], wide, kv_bits=4, kv_group_size=32)
    assert [(type(c).__name__, c.bits) for c in handoff.prompt_cache] == [("QuantizedKVCache", 4)] * 3
    assert (handoff.quantized_layers, handoff.remaining_tokens) == (3, [1])
    filled = partly_fed(model, prompt(6), (0, 1, 2))
    for caches, error, message in (
        (filled, UsageError, "the caches have seen 6 tokens"),
        ([], IncompatibleError, "the decoder keeps 3 things, there are 0 caches"),
        ([mlx_cache.KVCache()] * 3, UsageError, "are the same object"),
        (
            [mlx_cache.QuantizedKVCache(64, 8) for _ in range(3)],
            UsageError,
            "groups of 64 do not divide the 8 lanes",
        ),
    ):
        with pytest.raises(error, match=message):
            kvbaton.prefill_to_mlx(narrow, [1], model, prompt_cache=caches)
    assert [cache.offset for cache in filled] == [6, 6, 6]


def test_a_cache_that_lacks_a_part_is_named() -> None:
    lacking, flat, codes = kv(3), kv(3), kv(3, mlx_cache.QuantizedKVCache)
    lacking.values, flat.keys, codes.keys = None, flat.keys[0], codes.keys[:2]
    for cache, message in (
        (lacking, "cache 1: the values of a KVCache are one array of four dimensions, these are not"),
        (flat, "cache 1: the keys of a KVCache are one array of four dimensions, these are not"),
        (codes, "cache 1: the keys of a QuantizedKVCache are codes, scales and biases, these are not"),
    ):
        with pytest.raises(IncompatibleError, match=message):
            kvbaton.from_mlx([kv(3), cache])

"""Planted faults: each is found on its rung, and its place is named.

The faults are made with numpy and MLX in caches that were handed over correctly, or in the producer's model;
the layouts and kernels under test have no part in making them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cache_models
import kvbaton
import mlx.core as mx
import numpy as np
import pytest
from kvbaton._verify.ladder import prefill_mlx

LENGTH = 21
STEPS = 8

Models = Callable[[str], Any]


class Pipeline:
    """A prefill by ``producer``, and its cache handed over to ``decoder``: caches that can be spoilt."""

    thresholds = kvbaton.Thresholds()

    def __init__(self, decoder: Any, producer: Any | None = None, length: int = LENGTH) -> None:
        self.model = decoder
        self.tokens = cache_models.prompt(length)
        self.kept = prefill_mlx(producer or decoder, self.tokens[:-1])
        self.source = kvbaton.from_mlx(
            self.kept, producer or decoder, tokens=self.tokens[:-1], tokens_seen=length - 1
        )
        self.caches = kvbaton.to_mlx(self.source, decoder, self.tokens).prompt_cache

    def reference(self) -> kvbaton.CacheView:
        caches = prefill_mlx(self.model, self.tokens[:-1])
        return kvbaton.from_mlx(caches, self.model, tokens=self.tokens[:-1], tokens_seen=len(self.tokens) - 1)

    def verify(self, **more: Any) -> kvbaton.VerifyReport:
        return kvbaton.verify(
            self.reference(),
            self.caches,
            self.model,
            self.tokens,
            source=self.source,
            max_tokens=STEPS,
            thresholds=self.thresholds,
            **more,
        )


@pytest.fixture(autouse=True, params=["float32", "bfloat16"])
def _usual(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are found within what is usual for either type: a coarse decoder hides none."""
    monkeypatch.setattr(Pipeline, "thresholds", kvbaton.Thresholds.usual(request.param))


def changed(array: Any, change: Callable[[np.ndarray[Any, Any]], None]) -> Any:
    """A copy of an MLX array with ``change`` made by numpy."""
    values = np.array(array)
    change(values)
    return mx.array(values)


def places(report: kvbaton.VerifyReport, name: str) -> dict[str, Any]:
    where = report.rung(name).where
    assert where is not None, report
    return where


def element(where: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The head that is named: of values, of a tensor's heads the one that is farthest off."""
    return where["tensor"], where["layer"], where["head"]


def statuses(report: kvbaton.VerifyReport) -> list[str]:
    return [rung.status for rung in report.rungs]


@pytest.mark.parametrize("family", sorted(cache_models.CONFIGS))
def test_a_clean_hand_off_passes_on_every_family(models: Models, family: str) -> None:
    report = Pipeline(models(family)).verify()
    assert report.verdict == "pass", report
    assert statuses(report) == ["pass"] * 5
    bytes_ = report.rung("bytes").figures
    assert bytes_["differing"] == 0
    assert bytes_["elements"] > 0
    assert bytes_["source_digest"] == bytes_["arrived_digest"]


def test_one_flipped_bit(models: Models) -> None:
    pipeline = Pipeline(models("llama"))
    cache = pipeline.caches[1]

    def flip(values: np.ndarray[Any, Any]) -> None:
        values.view(np.uint32)[0, 1, 13, 5] ^= 1 << 3

    cache.values = changed(cache.values, flip)
    report = pipeline.verify()
    assert places(report, "bytes") == {"tensor": "value", "layer": 1, "head": 1, "row": 13, "lane": 5}
    assert report.rung("bytes").figures["differing"] == 1
    assert "bit 3 is flipped" in (report.rung("bytes").note or "")
    # A bit so low changes nothing that the other rungs could see, and they say so.
    assert statuses(report) == ["fail", "pass", "pass", "pass", "pass"]
    assert report.verdict == "fail"


def test_a_flipped_exponent_is_found_in_the_values_too(models: Models) -> None:
    pipeline = Pipeline(models("llama"))
    cache = pipeline.caches[2]

    def flip(values: np.ndarray[Any, Any]) -> None:
        values.view(np.uint32)[0, 0, 7, 2] ^= 1 << 30

    cache.keys = changed(cache.keys, flip)
    report = pipeline.verify()
    place = {"tensor": "key", "layer": 2, "head": 0, "row": 7, "lane": 2}
    assert places(report, "bytes") == place
    assert places(report, "values") == place


def test_heads_swapped(models: Models) -> None:
    pipeline = Pipeline(models("llama"))
    cache = pipeline.caches[1]
    cache.keys = mx.concatenate([cache.keys[:, 1:2], cache.keys[:, :1]], axis=1)
    report = pipeline.verify()
    assert places(report, "bytes") == {"tensor": "key", "layer": 1, "head": 0, "row": 0, "lane": 0}
    for rung in ("bytes", "values"):
        assert element(places(report, rung)) == ("key", 1, 0)
        assert "head 0 holds head 1, head 1 holds head 0" in (report.rung(rung).note or ""), report
    assert statuses(report)[:3] == ["fail"] * 3


def test_keys_and_values_exchanged(models: Models) -> None:
    pipeline = Pipeline(models("llama"))
    cache = pipeline.caches[2]
    cache.keys, cache.values = cache.values, cache.keys
    report = pipeline.verify()
    assert places(report, "bytes") == {"tensor": "key", "layer": 2, "head": 0, "row": 0, "lane": 0}
    for rung in ("bytes", "values"):
        assert element(places(report, rung))[1] == 2
        assert "keys and values are exchanged" in (report.rung(rung).note or ""), report


@pytest.mark.parametrize(("by", "says"), [(1, "1 position earlier"), (-1, "1 position later")])
def test_rows_shifted_by_one(models: Models, by: int, says: str) -> None:
    pipeline = Pipeline(models("llama"))
    cache, rows = pipeline.caches[0], LENGTH - 1

    def shift(values: np.ndarray[Any, Any]) -> None:
        held = values[:, :, :rows].copy()
        values[:, :, :rows] = 0
        if by > 0:
            values[:, :, 1:rows] = held[:, :, : rows - 1]
        else:
            values[:, :, : rows - 1] = held[:, :, 1:]

    cache.keys, cache.values = changed(cache.keys, shift), changed(cache.values, shift)
    report = pipeline.verify()
    assert places(report, "bytes") == {"tensor": "key", "layer": 0, "head": 0, "row": 0, "lane": 0}
    for rung in ("bytes", "values"):
        assert element(places(report, rung))[:2] == ("key", 0)
        note = report.rung(rung).note or ""
        assert "rows of layer 0 are shifted" in note, report
        assert says in note, report


def test_a_layer_never_filled(models: Models) -> None:
    pipeline = Pipeline(models("llama"))
    cache = pipeline.caches[1]
    cache.keys, cache.values = mx.zeros_like(cache.keys), mx.zeros_like(cache.values)
    report = pipeline.verify()
    for rung in ("bytes", "values"):
        assert element(places(report, rung)) == ("key", 1, 0)
        assert "layer 1 is all zeros" in (report.rung(rung).note or "")


def test_a_layer_left_out(models: Models) -> None:
    """The cache lacks a layer: nothing can be decoded from it, and those rungs say so."""
    pipeline = Pipeline(models("llama"))
    arrived = kvbaton.from_mlx([pipeline.caches[0], pipeline.caches[2]], tokens=pipeline.tokens[:-1])
    report = kvbaton.verify(pipeline.source, arrived, pipeline.model, pipeline.tokens)
    assert places(report, "bytes") == {
        "tensor": None,
        "layer": 1,
        "head": None,
        "row": None,
        "lane": None,
    }
    assert "3 layers left, 2 arrived" in (report.rung("bytes").note or "")
    assert statuses(report) == ["fail", *["not_run"] * 4]
    assert report.verdict == "fail"


def test_a_layer_in_the_place_of_another(models: Models) -> None:
    pipeline = Pipeline(models("llama"))
    pipeline.caches[1].keys = mx.array(pipeline.caches[2].keys)
    pipeline.caches[1].values = mx.array(pipeline.caches[2].values)
    report = pipeline.verify()
    for rung in ("bytes", "values"):
        assert element(places(report, rung)) == ("key", 1, 0)
    assert "layer 1 holds the keys of layer 2" in (report.rung("bytes").note or ""), report


def test_a_ring_in_the_order_of_its_slots(models: Models) -> None:
    """The slots of mlx-lm's ring, after more tokens than its window, taken for rows in the order of time."""
    model = models("gemma3")
    pipeline = Pipeline(model, length=cache_models.WINDOW + 6)
    ring = prefill_mlx(model, pipeline.tokens[:1])
    for token in pipeline.tokens[1:-1]:
        prefill_mlx(model, [token], ring)
    assert type(ring[0]).__name__ == "RotatingKVCache"
    assert 0 < ring[0]._idx < cache_models.WINDOW
    cache = pipeline.caches[0]
    assert cache.keys.shape == ring[0].keys.shape
    cache.keys, cache.values = mx.array(ring[0].keys), mx.array(ring[0].values)
    cache._idx = cache_models.WINDOW
    report = pipeline.verify()
    place = places(report, "bytes")
    assert (place["tensor"], place["layer"], place["head"]) == ("key", 0, 0)
    # The oldest row of the window comes first in time.
    assert place["row"] == len(pipeline.tokens) - 1 - cache_models.WINDOW
    for rung in ("bytes", "values"):
        assert element(places(report, rung)) == ("key", 0, 0)
        assert f"a ring of {cache_models.WINDOW} slots" in (report.rung(rung).note or ""), report


@pytest.mark.parametrize(("slot", "tensor"), [(1, "state"), (0, "conv")])
def test_a_zeroed_recurrent_state(models: Models, slot: int, tensor: str) -> None:
    pipeline = Pipeline(models("qwen3_next"))
    cache = pipeline.caches[0]
    cache[slot] = mx.zeros_like(cache[slot])
    report = pipeline.verify()
    for rung in ("bytes", "values"):
        place = places(report, rung)
        assert (place["tensor"], place["layer"]) == (tensor, 0)
        assert "state of layer 0 is all zeros" in (report.rung(rung).note or ""), report


def test_the_last_token_given_twice(models: Models) -> None:
    """All rows are right; the decoder is fed a token that the cache has seen."""
    model = models("llama")
    pipeline = Pipeline(model)
    caches = prefill_mlx(model, pipeline.tokens)
    whole = kvbaton.from_mlx(caches, model, tokens=pipeline.tokens)
    report = kvbaton.verify(
        whole, whole, model, pipeline.tokens, remaining=pipeline.tokens[-1:], max_tokens=STEPS
    )
    assert statuses(report)[:3] == ["pass", "pass", "fail"], report
    assert places(report, "logits")["row"] == LENGTH - 1
    assert f"token {LENGTH - 1} is run twice" in (report.rung("logits").note or "")
    right = kvbaton.verify(whole, whole, model, pipeline.tokens, max_tokens=STEPS)
    assert right.verdict == "pass", right


def test_another_rope_base(models: Models) -> None:
    """The producer turned its keys by other angles: the transport is right, the keys of the first layer are not."""
    right = models("llama")
    cache_models.CONFIGS["llama_rope"] = {**cache_models.CONFIGS["llama"], "rope_theta": 20000.0}
    wrong = cache_models.build("llama_rope")
    pipeline = Pipeline(right)
    # The producer's own description would be refused; this one does not say its base.
    kept = prefill_mlx(wrong, pipeline.tokens[:-1])
    pipeline.source = kvbaton.from_mlx(kept, tokens=pipeline.tokens[:-1])
    pipeline.caches = kvbaton.to_mlx(pipeline.source, right, pipeline.tokens).prompt_cache
    report = pipeline.verify()
    assert statuses(report)[:2] == ["pass", "fail"], report
    place = places(report, "values")
    assert (place["tensor"], place["layer"]) == ("key", 0)
    assert place["row"] > 0
    assert "the rotary base" in (report.rung("values").note or "")


def test_what_is_wrong_in_one_head_is_not_its_rotary_base(models: Models) -> None:
    """An angle is the same for all heads; here the rows of one are shifted."""
    pipeline = Pipeline(models("llama"))
    cache, rows = pipeline.caches[0], LENGTH - 1

    def shift(values: np.ndarray[Any, Any]) -> None:
        values[:, 1, :rows] = np.roll(values[:, 1, :rows], 1, axis=1)

    cache.keys = changed(cache.keys, shift)
    report = pipeline.verify()
    assert element(places(report, "values")) == ("key", 0, 1)
    assert "rotary" not in (report.rung("values").note or "")


@pytest.mark.parametrize(("only", "layer"), [("rope_local_base_freq", 0), ("rope_theta", 2)])
def test_another_rope_base_in_one_kind_of_layers(models: Models, only: str, layer: int) -> None:
    """Of layers 0 to 2 the last is full; the others have a window, and a base of their own."""
    right = models("gemma3")
    base = {"rope_local_base_freq": 20000.0, "rope_theta": 50000.0}[only]
    cache_models.CONFIGS["gemma3_rope"] = {**cache_models.CONFIGS["gemma3"], only: base}
    pipeline = Pipeline(right)
    kept = prefill_mlx(cache_models.build("gemma3_rope"), pipeline.tokens[:-1])
    pipeline.source = kvbaton.from_mlx(kept, tokens=pipeline.tokens[:-1])
    pipeline.caches = kvbaton.to_mlx(pipeline.source, right, pipeline.tokens).prompt_cache
    report = pipeline.verify()
    assert statuses(report)[:2] == ["pass", "fail"], report
    assert element(places(report, "values"))[:2] == ("key", layer)
    assert "the rotary base" in (report.rung("values").note or ""), report


def test_half_bits_read_as_bfloat16(models: Models) -> None:
    pipeline = Pipeline(models("llama"))
    cache = pipeline.caches[1]
    cache.keys = cache.keys.astype(mx.float16).view(mx.bfloat16).astype(mx.float32)
    mx.eval(cache.keys)
    report = pipeline.verify()
    assert places(report, "bytes") == {"tensor": "key", "layer": 1, "head": 0, "row": 0, "lane": 0}
    for rung in ("bytes", "values"):
        assert element(places(report, rung)) == ("key", 1, 0)
        assert "float16 bits that were read as bfloat16" in (report.rung(rung).note or ""), report


def test_a_source_whose_type_is_misstated(models: Models) -> None:
    """The transport of a misread source is faithful; its values say that it was misread."""
    model = models("llama")
    pipeline = Pipeline(model)
    arrays, dtypes = {}, {}
    for layer, cache in enumerate(pipeline.caches):
        for name, part in (("keys", cache.keys), ("values", cache.values)):
            half = np.array(part[0, :, : LENGTH - 1].astype(mx.float16))
            arrays[f"{name}_{layer}"] = half.view(np.uint16)
            dtypes[f"{name}_{layer}"] = "bfloat16"
    layout = (
        'name = "dump"\n[[tensor]]\nname = "keys_{layer}"\nholds = "key"\naxes = "kv_head row head_dim"\n'
        '[[tensor]]\nname = "values_{layer}"\nholds = "value"\naxes = "kv_head row head_dim"\n'
    )
    layers = [{"kind": "full", "kv_heads": 2, "key_dim": 8, "value_dim": 8}] * 3
    misread = kvbaton.CacheView.from_arrays(
        arrays, layout, cache=layers, tokens=pipeline.tokens[:-1], dtypes=dtypes
    )
    pipeline.source = misread
    pipeline.caches = kvbaton.to_mlx(misread, model, pipeline.tokens).prompt_cache
    report = pipeline.verify()
    assert statuses(report)[:2] == ["pass", "fail"], report
    assert places(report, "values")["layer"] == 0
    assert "float16 bits that were read as bfloat16" in (report.rung("values").note or ""), report


def test_a_cache_of_other_weights(models: Models) -> None:
    right = models("llama")
    pipeline = Pipeline(right, cache_models.build("llama", seed=11))
    report = pipeline.verify()
    assert statuses(report)[:3] == ["pass", "fail", "fail"], report
    place = places(report, "values")
    assert (place["tensor"], place["layer"], place["head"]) == ("key", 0, 0)
    assert "cosine" in (report.rung("values").note or "")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_no_numbers(models: Models, value: float) -> None:
    pipeline = Pipeline(models("llama"))
    cache = pipeline.caches[2]

    def spoil(values: np.ndarray[Any, Any]) -> None:
        values[0, 1, 7, 3] = value

    cache.keys = changed(cache.keys, spoil)
    report = pipeline.verify()
    place = {"tensor": "key", "layer": 2, "head": 1, "row": 7, "lane": 3}
    assert places(report, "values") == place
    assert places(report, "bytes") == place
    assert report.rung("values").figures["nan" if np.isnan(value) else "infinity"] == 1
    assert statuses(report)[:2] == ["fail", "fail"]


def test_values_that_the_decoder_s_type_cannot_hold(models: Models) -> None:
    """Nothing arrives then; the values rung names the place and the others were not run."""
    model = cache_models.build("llama", dtype=mx.float16)
    pipeline = Pipeline(model)
    layout = (
        'name = "dump"\n[[tensor]]\nname = "keys_{layer}"\nholds = "key"\naxes = "kv_head row head_dim"\n'
        '[[tensor]]\nname = "values_{layer}"\nholds = "value"\naxes = "kv_head row head_dim"\n'
    )
    arrays = {}
    for layer, cache in enumerate(pipeline.caches):
        arrays[f"keys_{layer}"] = np.array(cache.keys[0, :, : LENGTH - 1].astype(mx.float32))
        arrays[f"values_{layer}"] = np.array(cache.values[0, :, : LENGTH - 1].astype(mx.float32))
    arrays["values_1"][0, 4, 6] = 1e6
    layers = [{"kind": "full", "kv_heads": 2, "key_dim": 8, "value_dim": 8}] * 3
    source = kvbaton.CacheView.from_arrays(arrays, layout, cache=layers, tokens=pipeline.tokens[:-1])
    report = kvbaton.verify(pipeline.reference(), source, model, pipeline.tokens, max_tokens=STEPS)
    assert places(report, "values") == {"tensor": "value", "layer": 1, "head": 0, "row": 4, "lane": 6}
    assert "float16" in (report.rung("values").note or "")
    assert report.verdict == "fail"

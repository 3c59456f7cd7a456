"""From MLX to Core ML: every layout that can hold a cache, masks, extension and growth."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cache_models
import kvbaton
import mlx.core as mx
import numpy as np
import pytest
from cache_models import WINDOW, prompt
from kvbaton.errors import CapacityError, IncompatibleError, LayoutError, UsageError
from kvbaton.mlx import make_caches
from test_cache_classes import feed, go_on

Models = Callable[[str], Any]

PRESETS = sorted(p.stem for p in (Path(__file__).parents[2] / "crates/layout/presets").glob("*.toml"))
# Layouts of states beside rows.
HYBRID = {
    "atomgradient-coreml",
    "atomgradient-file",
    "coreai-qwen3-5",
    "coreml-llm-qwen3-5",
    "exo",
    "forge",
    "forge-v8",
    "mlx-lm",
    "mlx-swift-lm",
}
# Keys and values of single layers that other layers read; and recurrent layers alone.
PARTIAL = {"coreml-llm-shared", "recurrent"}
AFFINE = {"mlx-lm-4bit": 4, "mlx-lm-8bit": 8, "mlx-swift-lm-8bit": 8}
CAPACITY, SEEN = 32, 20


@pytest.fixture(scope="module")
def view_of() -> Callable[[str], kvbaton.CacheView]:
    made: dict[str, tuple[Any, kvbaton.CacheView]] = {}

    def get(family: str) -> kvbaton.CacheView:
        if family not in made:
            model, tokens = cache_models.build(family, mx.float16), prompt(SEEN)
            caches = make_caches(model)
            feed(model, caches, tokens, 2)
            made[family] = caches, kvbaton.from_mlx(caches, model, tokens=tokens)
        return made[family][1]

    return get


def can_hold(preset: str, family: str) -> bool:
    if preset in PARTIAL:
        return False
    if preset in AFFINE:
        return family == "llama_wide"
    return preset in HYBRID or family not in ("qwen3_next", "falcon_h1")


def decoded(preset: str, part: str, array: np.ndarray, dtype: Any) -> np.ndarray:
    """What a layout gives back of a part, as float32: by mlx itself for its codes."""
    if preset in AFFINE and part in ("key", "value"):
        rows = mx.array(array.astype(np.float32))
        codes = mx.quantize(rows, group_size=64, bits=AFFINE[preset])
        return np.array(mx.dequantize(*codes, group_size=64, bits=AFFINE[preset]))
    return array.astype(dtype).astype(np.float32)


def coded_error(preset: str, part: str, array: np.ndarray) -> np.ndarray:
    """How far a value may be from what its int8 code stands for: half a step and the scale's rounding."""
    array = array.astype(np.float32)
    if preset == "forge-v8" and part == "value":
        return np.abs(array).max(-1, keepdims=True) / 127 * 0.51 + 1e-3
    return np.zeros_like(array)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("family", ["llama", "llama_wide", "gemma3", "gemma3n", "qwen3_next", "falcon_h1"])
def test_what_a_layout_holds_is_what_was_handed_over(
    view_of: Callable[[str], kvbaton.CacheView], family: str, preset: str
) -> None:
    view = view_of(family)
    if not can_hold(preset, family):
        with pytest.raises((LayoutError, IncompatibleError)):
            kvbaton.to_coreml(view, preset, CAPACITY, dtype="float32")
        return
    inputs = kvbaton.to_coreml(view, preset, CAPACITY, dtype="float32")
    back = inputs.view()
    assert back.tokens_seen == SEEN
    compared = 0
    for mine, theirs in zip(back.layers, view.layers, strict=True):
        for part, array in theirs.arrays.items():
            own = mine.arrays[part]
            error = coded_error(preset, part, array)
            expected = decoded(preset, part, array, own.dtype)
            if (
                mine.kind == "sliding"
            ):  # layouts whose windows are one row shorter lose one that is never read
                rows = [p for p in theirs.positions if p in mine.positions]
                assert set(range(SEEN - WINDOW + 1, SEEN)) <= set(rows)
                own = own[:, [list(mine.positions).index(p) for p in rows]]
                at = [list(theirs.positions).index(p) for p in rows]
                expected, error = expected[:, at], error[:, at]
            assert (np.abs(own.astype(np.float32) - expected) <= error).all(), part
            compared += 1
    assert compared == sum(len(la.arrays) for la in view.layers)


def positioned(layers: list[dict[str, Any]], seen: int) -> kvbaton.CacheView:
    """A cache of whole-context rows, each of which holds its position plus one."""
    arrays = {}
    for layer, spec in enumerate(layers):
        rows = np.arange(1, seen + 1, dtype=np.float16)[None, None, :, None]
        for part in ("key", "value"):
            arrays[f"{part}_cache_{layer}"] = np.tile(rows, (1, spec["kv_heads"], 1, spec["key_dim"]))
    return kvbaton.CacheView.from_arrays(arrays, "kvbaton-per-layer", cache=layers, tokens_seen=seen)


FULL = {"kind": "full", "kv_heads": 2, "key_dim": 4, "value_dim": 4}
SLIDING = {**FULL, "kind": "sliding", "window": {"size": WINDOW, "keep": 0}}


@pytest.mark.parametrize("seen", [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 2])
@pytest.mark.parametrize(
    ("layout", "full", "sliding"),
    [
        ("kvbaton-per-layer", lambda a: a["key_cache_0"][0, 0, :, 0], lambda a: a["key_cache_1"][0, 0, :, 0]),
        ("coreml-llm-sliding", lambda a: a["K_full_in"][0, 0, :, 0], lambda a: a["K_sliding_in"][0, 0, :, 0]),
        (
            "coreml-llm-stateful",
            lambda a: a["kv_cache_full"][0, 0, :, 0],
            lambda a: a["kv_cache_sliding"][0, 0, :, 0],
        ),
        ("mlx-lm", lambda a: a["keys_0"][0, 0, :, 0], lambda a: a["keys_1"][0, 0, :, 0]),
        (
            "anemll",
            lambda a: next(iter(a.values()))[0, 0, :, 0],
            lambda a: next(iter(a.values()))[1, 0, :, 0],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_masks_show_the_rows_that_the_next_token_reads(
    layout: str, full: Callable[[Any], Any], sliding: Callable[[Any], Any], seen: int
) -> None:
    inputs = kvbaton.to_coreml(positioned([FULL, SLIDING], seen), layout, capacity=40)
    for slots, mask, window in ((full, inputs.mask, None), (sliding, inputs.sliding_mask, WINDOW)):
        held = slots(inputs.arrays).astype(np.int64) - 1  # -1 where a slot is zero
        read = (held >= 0) & (held > seen - window if window else held < seen)
        assert mask.dtype == np.float16
        np.testing.assert_array_equal(mask, np.where(read, 0, -1e4).astype(np.float16)[None, None, None])
        assert read.sum() == (min(seen, window - 1) if window else seen)
    assert inputs.positions.tolist() == [seen]


def test_left_padded_rows_follow_the_padding_that_was_asked_for() -> None:
    inputs = kvbaton.to_coreml(positioned([FULL], 5), "atomgradient-coreml", capacity=12, pad=4)
    key = inputs.arrays["past_key_0"][0, 0, :, 0]
    assert key.tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5, 0, 0, 0]
    assert (inputs.mask[0, 0, 0] == 0).tolist() == [4 <= slot < 9 for slot in range(12)]


def test_slots_without_rows_are_zero() -> None:
    inputs = kvbaton.to_coreml(positioned([FULL, SLIDING], 20), "kvbaton-per-layer", capacity=64)
    for name, array in inputs.arrays.items():
        assert not array[:, :, 20:].any(), name


def test_more_rows_than_slots_are_refused() -> None:
    with pytest.raises(CapacityError, match="20 live rows do not fit the capacity of 19"):
        kvbaton.to_coreml(positioned([FULL], 20), "kvbaton-stacked", capacity=19)
    with pytest.raises(UsageError, match="a capacity of 0 slots"):
        kvbaton.to_coreml(positioned([FULL], 20), "kvbaton-stacked", capacity=0)


@pytest.mark.parametrize(
    "layout", ["kvbaton-per-layer", "coreml-llm-sliding", "coreml-llm-stateful", "mlx-lm"]
)
def test_an_extension_copies_only_what_is_missing(layout: str) -> None:
    first = kvbaton.to_coreml(positioned([FULL, SLIDING], 18), layout, capacity=40)
    longer = kvbaton.to_coreml(positioned([FULL, SLIDING], 23), into=first)
    assert longer.report.rows == 5
    assert all(longer.arrays[name] is array for name, array in first.arrays.items())
    moved = {"coreml-llm-sliding": WINDOW, "mlx-lm": WINDOW}.get(layout, 5)
    assert longer.report.bytes == (5 + moved) * 2 * 2 * 4 * 2
    whole = kvbaton.to_coreml(positioned([FULL, SLIDING], 23), layout, capacity=40)
    for mine, theirs in zip(longer.view().layers, whole.view().layers, strict=True):
        assert mine.positions == theirs.positions
        for part, array in theirs.arrays.items():
            np.testing.assert_array_equal(mine.arrays[part], array)
    np.testing.assert_array_equal(longer.mask, whole.mask)


def test_an_extension_goes_forward_in_the_same_tensors() -> None:
    first = kvbaton.to_coreml(positioned([FULL], 18), "kvbaton-stacked", capacity=20)
    with pytest.raises(UsageError, match="the tensors have 18 tokens, the cache has seen 17"):
        kvbaton.to_coreml(positioned([FULL], 17), into=first)
    with pytest.raises(UsageError, match="have 20 slots, 30 were asked for"):
        kvbaton.to_coreml(positioned([FULL], 19), into=first, capacity=30)
    with pytest.raises(CapacityError):
        kvbaton.to_coreml(positioned([FULL], 21), into=first)
    with pytest.raises(UsageError, match="other layers"):
        kvbaton.to_coreml(positioned([FULL, FULL], 19), into=first)
    assert [int(x) for x in first.view().layers[0].arrays["key"][0, :, 0]] == list(range(1, 19))


def test_a_round_trip_through_core_ml_goes_on_as_without_it(models: Models) -> None:
    for family, layout in (("gemma3", "coreml-llm-sliding"), ("qwen3_next", "forge"), ("llama", "yetter")):
        model, tokens = cache_models.build(family, mx.float16), prompt(31)
        caches = make_caches(model)
        feed(model, caches, tokens[:-1])
        view = kvbaton.from_mlx(caches, model, tokens=tokens[:-1])
        inputs = kvbaton.to_coreml(view, layout, capacity=64)
        back = inputs.view(tokens[:-1], view.model)
        handoff = kvbaton.to_mlx(back, model, tokens, measure_memcpy=False)
        assert go_on(model, handoff.prompt_cache, tokens[-1], 16) == go_on(model, caches, tokens[-1], 16), (
            family
        )


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_160_moves_between_8k_and_16k_leave_no_memory_behind() -> None:
    recurrent = {
        "kind": "recurrent",
        "conv_steps": 3,
        "conv_channels": 16,
        "heads": 2,
        "value_dim": 8,
        "key_dim": 8,
    }
    layers = [{**FULL, "key_dim": 64, "value_dim": 64}, SLIDING, recurrent] * 2
    seen, rng = 5000, np.random.default_rng(1)
    arrays: dict[str, Any] = {}
    for layer, spec in enumerate(layers):
        if spec["kind"] == "recurrent":
            arrays[f"conv_state_{layer}"] = rng.standard_normal((1, 3, 16)).astype(np.float16)
            arrays[f"recurrent_state_{layer}"] = rng.standard_normal((1, 2, 8, 8)).astype(np.float16)
        else:
            rows = seen if spec["kind"] == "full" else WINDOW
            shape = (1, 2, rows, spec["key_dim"])
            for part in ("key", "value"):
                arrays[f"{part}_{layer}"] = rng.standard_normal(shape).astype(np.float16)
    layout = "\n".join(
        [
            'name = "grown"',
            'sliding_placement = "ring"',
            *(
                f'[[tensor]]\nname = "{name}_{{layer}}"\nholds = "{holds}"\naxes = "{axes}"\n'
                for name, holds, axes in (
                    ("key", "key", "batch kv_head row head_dim"),
                    ("value", "value", "batch kv_head row head_dim"),
                    ("conv_state", "conv", "batch row channel"),
                    ("recurrent_state", "state", "batch kv_head value_dim key_dim"),
                )
            ),
        ]
    )
    view = kvbaton.CacheView.from_arrays(arrays, layout, cache=layers, tokens_seen=seen)
    pending = np.arange(6, dtype=np.float16)
    grown = kvbaton.GrowingCache(view, layout, carried={"pending": pending})
    assert grown.capacity == 8192
    after_tenth = 0
    for move in range(1, 161):
        grown.move(16384 if grown.capacity == 8192 else 8192)
        if move == 10:
            gc.collect()
            after_tenth = resident_bytes()
    gc.collect()
    assert abs(resident_bytes() - after_tenth) <= 0.01 * after_tenth
    assert (grown.capacity, grown.tokens_seen) == (8192, seen)
    assert grown.inputs.arrays["pending"] is pending
    for mine, theirs in zip(grown.view().layers, view.layers, strict=True):
        assert (mine.kind, mine.positions) == (theirs.kind, theirs.positions)
        for part, array in theirs.arrays.items():
            np.testing.assert_array_equal(mine.arrays[part], array)


def test_a_cache_moves_up_when_it_outgrows_its_tensors() -> None:
    grown = kvbaton.GrowingCache(positioned([FULL, SLIDING], 7), "kvbaton-per-layer", ladder=(8, 16, 32))
    capacities = []
    for seen in range(8, 33):
        grown.extend(positioned([FULL, SLIDING], seen))
        capacities.append(grown.capacity)
    assert capacities == [8] + [16] * 8 + [32] * 16
    assert [int(x) for x in grown.view().layers[0].arrays["value"][1, :, 3]] == list(range(1, 33))
    with pytest.raises(CapacityError, match="33 rows do not fit the largest capacity of 32"):
        grown.extend(positioned([FULL, SLIDING], 33))
    with pytest.raises(CapacityError):
        grown.move(16)
    assert (grown.capacity, grown.tokens_seen) == (32, 32)

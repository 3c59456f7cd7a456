"""Every preset against an independent reading with numpy.

A *writer* lays a small cache out in numpy as the preset's system does, from what that system's sources say:
slices, transposes and index arithmetic, nothing of kvbaton. Then

* the arrays it wrote, with NaN in every slot that holds no row, read back as that cache;
* arrays of zeros, filled from that cache by kvbaton, are those that it wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import kvbaton
import numpy as np
import pytest
from kvbaton import _native

SEEN = 6
CAPACITY = 9
WINDOW = 4
HEADS, DIM = 2, 8
STEPS, CHANNELS = 3, 5
STATE_HEADS, VALUE_DIM, KEY_DIM = 3, 4, 2

FULL = {"kind": "full", "kv_heads": HEADS, "key_dim": DIM, "value_dim": DIM}
SLIDING = {**FULL, "kind": "sliding", "window": {"size": WINDOW}}
RECURRENT = {
    "kind": "recurrent",
    "conv_steps": STEPS,
    "conv_channels": CHANNELS,
    "heads": STATE_HEADS,
    "value_dim": VALUE_DIM,
    "key_dim": KEY_DIM,
}
PLAIN = [FULL] * 4
WINDOWED = [SLIDING, FULL, SLIDING]
HYBRID = [RECURRENT, RECURRENT, RECURRENT, FULL]

Arrays = dict[str, np.ndarray]


class Cache:
    """Random rows in canonical order, exact in float16."""

    def __init__(self, layers: list[dict[str, Any]], dim: int = DIM) -> None:
        rng = np.random.default_rng(7)
        self.layers = [{**s, "key_dim": dim, "value_dim": dim} if "kv_heads" in s else s for s in layers]

        def some(*shape: int) -> np.ndarray:
            return rng.integers(-500, 500, shape).astype(np.float16) / np.float16(64)

        self.parts: list[dict[str, np.ndarray]] = []
        for spec in self.layers:
            if spec["kind"] == "recurrent":
                conv = some(1, STEPS, CHANNELS)
                self.parts.append({"conv": conv, "state": some(STATE_HEADS, VALUE_DIM, KEY_DIM)})
            elif spec["kind"] == "shared":
                self.parts.append({})
            else:
                kept = min(SEEN, spec.get("window", {}).get("size", SEEN))
                self.parts.append({"key": some(HEADS, kept, dim), "value": some(HEADS, kept, dim)})

    def of(self, kind: str) -> list[int]:
        return [i for i, spec in enumerate(self.layers) if spec["kind"] == kind]


@dataclass
class Preset:
    """How to write a cache as a preset's system does."""

    write: Callable[[Cache, float], Arrays]
    layers: list[dict[str, Any]]
    live: dict[str, Any] = field(default_factory=dict)
    dim: int = DIM


PRESETS: dict[str, Preset] = {}


def preset(name: str, layers: list[dict[str, Any]], *, dim: int = DIM, **live: Any) -> Callable[[Any], Any]:
    def register(write: Callable[[Cache, float], Arrays]) -> Callable[[Cache, float], Arrays]:
        PRESETS[name] = Preset(write, layers, live, dim)
        return write

    return register


def empty(*shape: int, dead: float, dtype: Any = np.float16) -> np.ndarray:
    return np.full(shape, dead, dtype)


def stacked(cache: Cache, part: str, dead: float, dtype: Any = np.float16) -> np.ndarray:
    """(layers, heads, capacity, lanes), rows from slot 0."""
    out = empty(len(cache.layers), HEADS, CAPACITY, DIM, dead=dead, dtype=dtype)
    for layer, parts in enumerate(cache.parts):
        out[layer, :, :SEEN] = parts[part]
    return out


def unroll(rows: np.ndarray, capacity: int) -> list[int]:
    """Slots of the newest rows of a ring by position."""
    return [p % capacity for p in range(SEEN - rows.shape[1], SEEN)]


@preset("kvbaton-stacked", PLAIN)
@preset("yetter", PLAIN)
def _(cache: Cache, dead: float) -> Arrays:
    return {f"{p}_cache": stacked(cache, p, dead) for p in ("key", "value")}


@preset("kvbaton-grouped", PLAIN)
def _(cache: Cache, dead: float) -> Arrays:
    arrays = {}
    for part in ("key", "value"):
        whole = stacked(cache, part, dead)
        arrays[f"{part}_cache_0"], arrays[f"{part}_cache_1"] = whole[:3].copy(), whole[3:].copy()
    return arrays


@preset("kvbaton-per-layer", PLAIN)
def _(cache: Cache, dead: float) -> Arrays:
    return {f"{p}_cache_{i}": stacked(cache, p, dead)[i : i + 1] for p in ("key", "value") for i in range(4)}


def rotating(cache: Cache, dead: float) -> Arrays:
    """Full layers as mlx-lm's KVCache; windows token by token as its RotatingKVCache."""
    arrays = {}
    for layer, spec in enumerate(cache.layers):
        for part in ("key", "value"):
            rows = cache.parts[layer][part]
            if spec["kind"] == "full":
                out = empty(1, HEADS, CAPACITY, DIM, dead=dead)
                out[0, :, :SEEN] = rows
            else:
                out = empty(1, HEADS, WINDOW, DIM, dead=dead)
                index = 0
                for position in range(SEEN):
                    index = 0 if index == WINDOW else index
                    if position >= SEEN - WINDOW:
                        out[0, :, index] = rows[:, position - (SEEN - WINDOW)]
                    index += 1
            arrays[f"{part}s_{layer}"] = out
    return arrays


preset("mlx-lm", WINDOWED, ring_start=SEEN % WINDOW)(rotating)
preset("mlx-swift-lm", WINDOWED, ring_start=SEEN % WINDOW)(rotating)


@preset("mlx-lm-batch", PLAIN, pad=2, sequence=1)
def _(cache: Cache, dead: float) -> Arrays:
    arrays = {}
    for layer, parts in enumerate(cache.parts):
        for part in ("key", "value"):
            out = empty(3, HEADS, CAPACITY, DIM, dead=dead)
            out[1, :, 2 : 2 + SEEN] = parts[part]
            arrays[f"{part}s_{layer}"] = out
    return arrays


@preset("mlx-lm-chunked", PLAIN)
def _(cache: Cache, dead: float) -> Arrays:
    return {f"{p}s_{i}": stacked(cache, p, dead)[i : i + 1] for p in ("key", "value") for i in range(4)}


@preset("atomgradient-coreml", HYBRID, pad=CAPACITY - SEEN)
def _(cache: Cache, dead: float) -> Arrays:
    arrays = {}
    for layer, parts in enumerate(cache.parts):
        if "conv" in parts:
            conv = empty(1, CHANNELS, STEPS + 1, dead=dead)  # (1, C, K): the oldest of K is one too many
            conv[0, :, 1:] = parts["conv"][0].T
            arrays[f"conv_state_{layer}"] = conv
            arrays[f"recurrent_state_{layer}"] = parts["state"][None]  # (1, Hv, Dv, Dk)
        else:
            for part in ("key", "value"):
                out = empty(1, HEADS, CAPACITY, DIM, dead=dead)
                out[0, :, CAPACITY - SEEN :] = parts[part]  # real rows are the tail
                arrays[f"past_{part}_{layer}"] = out
    return arrays


@preset("atomgradient-file", HYBRID, ring_start=7, conv_start=2)
def _(cache: Cache, dead: float) -> Arrays:
    arrays = {}
    for layer, parts in enumerate(cache.parts):
        if "conv" in parts:
            conv = empty(CHANNELS, STEPS, dead=dead, dtype=np.float32)
            for step in range(STEPS):
                conv[:, (2 + step) % STEPS] = parts["conv"][0, step]
            arrays[f"conv_{layer}"] = conv
            arrays[f"ssm_{layer}"] = parts["state"].transpose(0, 2, 1).astype(np.float32)  # [Hv, Dk, Dv]
        else:
            for part in ("key", "value"):
                out = empty(CAPACITY, HEADS, DIM, dead=dead, dtype=np.float32)
                for row in range(SEEN):
                    out[(7 + row) % CAPACITY] = parts[part][:, row]
                arrays[f"{part}_{layer}"] = out
    return arrays


def coreml_llm(cache: Cache, dead: float, suffix: str) -> Arrays:
    """Heads padded with zeros to 512; windows shifted, live rows at their end."""
    arrays = {}
    for part, letter in (("key", "K"), ("value", "V")):
        sliding, full = cache.of("sliding"), cache.of("full")
        windows = empty(len(sliding), HEADS, WINDOW, 512, dead=dead)
        for slot, layer in enumerate(sliding):
            windows[slot, :, :, :DIM] = cache.parts[layer][part]
            windows[slot, :, :, DIM:] = 0
        whole = empty(len(full), HEADS, CAPACITY, 512, dead=dead)
        for slot, layer in enumerate(full):
            whole[slot, :, :SEEN, :DIM] = cache.parts[layer][part]
            whole[slot, :, :SEEN, DIM:] = 0
        arrays[f"{letter}_sliding{suffix}"], arrays[f"{letter}_full{suffix}"] = windows, whole
    return arrays


preset("coreml-llm-sliding", WINDOWED)(lambda c, d: coreml_llm(c, d, "_in"))
preset("coreml-llm-sliding-outputs", WINDOWED)(lambda c, d: coreml_llm(c, d, "_out"))


@preset("coreml-llm-chunked", WINDOWED)
def _(cache: Cache, dead: float) -> Arrays:
    arrays = {}
    for name, whole in coreml_llm(cache, dead, "_in").items():
        parts = [whole[:1], whole[1:]] if "sliding" in name else [whole]
        arrays |= {f"{package}/{name}": part.copy() for package, part in enumerate(parts)}
    return arrays


@preset("coreml-llm-prefill", [FULL, {"kind": "shared", "with": 0}, FULL])
def _(cache: Cache, dead: float) -> Arrays:
    arrays = {}
    for layer in cache.of("full"):
        for part, letter in (("key", "K"), ("value", "V")):
            out = empty(1, HEADS, CAPACITY, DIM, dead=dead)
            out[0, :, :SEEN] = cache.parts[layer][part]
            arrays[f"{letter}{layer}"] = out
    return arrays


@preset("coreml-llm-shared", [FULL] * 13 + [SLIDING, FULL])
def _(cache: Cache, dead: float) -> Arrays:
    arrays = {}
    for part, letter in (("key", "k"), ("value", "v")):
        arrays[f"kv13_{letter}"] = cache.parts[13][part][None].copy()
        out = empty(1, HEADS, CAPACITY, DIM, dead=dead)
        out[0, :, :SEEN] = cache.parts[14][part]
        arrays[f"kv14_{letter}"] = out
    return arrays


@preset("coreml-llm-litert", PLAIN)
def _(cache: Cache, dead: float) -> Arrays:
    keys, values = stacked(cache, "key", dead), stacked(cache, "value", dead)
    arrays = {f"kv{i}_k": keys[i : i + 1] for i in range(4)}
    return arrays | {f"kv{i}_v": np.ascontiguousarray(values[i : i + 1].swapaxes(2, 3)) for i in range(4)}


def coreml_llm_states(cache: Cache, dead: float, ring: bool) -> Arrays:
    """K of layer i at 2i, V at 2i + 1."""
    arrays = {}
    for kind, name, capacity in (
        ("sliding", "kv_cache_sliding", WINDOW),
        ("full", "kv_cache_full", CAPACITY),
    ):
        layers = cache.of(kind)
        out = empty(2 * len(layers), HEADS, capacity, 512, dead=dead)
        for slot, layer in enumerate(layers):
            for half, part in enumerate(("key", "value")):
                rows = cache.parts[layer][part]
                slots = unroll(rows, WINDOW) if kind == "sliding" and ring else list(range(rows.shape[1]))
                out[2 * slot + half, :, slots, :] = 0
                for row, at in enumerate(slots):
                    out[2 * slot + half, :, at, :DIM] = rows[:, row]
        arrays[name] = out
    return arrays


preset("coreml-llm-stateful", WINDOWED)(lambda c, d: coreml_llm_states(c, d, True))
preset("coreml-llm-stateful-shift", WINDOWED)(lambda c, d: coreml_llm_states(c, d, False))


@preset("coreml-llm-qwen3-vl", PLAIN)
def _(cache: Cache, dead: float) -> Arrays:
    out = empty(8, HEADS, CAPACITY, DIM, dead=dead)
    out[0::2], out[1::2] = stacked(cache, "key", dead), stacked(cache, "value", dead)
    return {"kv_cache_0": out}


@preset("coreml-llm-qwen3-5", [RECURRENT, FULL, RECURRENT, FULL])
def _(cache: Cache, dead: float) -> Arrays:
    arrays = {}
    for layer, parts in enumerate(cache.parts):
        if "conv" in parts:
            conv = empty(
                1, CHANNELS, STEPS + 1, dead=dead
            )  # a kernel of K columns: the oldest is one too many
            conv[0, :, 1:] = parts["conv"][0].T
            arrays[f"conv_state_{layer}"] = conv
            arrays[f"rec_state_{layer}"] = (
                parts["state"][None].transpose(0, 1, 3, 2).copy()
            )  # (1, Hv, Dk, Dv)
        else:
            state = empty(2, HEADS, CAPACITY, DIM, dead=dead)  # one package a full layer here
            state[0, :, :SEEN], state[1, :, :SEEN] = parts["key"], parts["value"]
            arrays[f"{layer // 2}/kv_cache"] = state
    return arrays


@preset("coreml-llm-rolling", [SLIDING] * 2)
def _(cache: Cache, dead: float) -> Arrays:
    # cat(K[1:], k) for every token.
    return {f"{p[0]}_{i}": cache.parts[i][p][None].copy() for p in ("key", "value") for i in range(2)}


@preset("anemll", PLAIN)
def _(cache: Cache, dead: float) -> Arrays:
    both = [stacked(cache, "key", dead), stacked(cache, "value", dead)]
    return {"model.model.kv_cache_0": np.concatenate(both)}


@preset("anemll-chunked", PLAIN)
def _(cache: Cache, dead: float) -> Arrays:
    keys, values = stacked(cache, "key", dead), stacked(cache, "value", dead)
    name = "model.model.kv_cache_0"
    return {
        f"0/{name}": np.concatenate([keys[:1], values[:1]]),
        f"1/{name}": np.concatenate([keys[1:], values[1:]]),
    }


def forge(cache: Cache, dead: float, pending: int = 2) -> Arrays:
    """conv (P + 3, C), its committed steps after two other rows here; rec (Hv, Dk, Dv)."""
    arrays = {}
    for number, layer in enumerate(cache.of("recurrent")):
        conv = empty(pending + STEPS, CHANNELS, dead=dead)
        conv[2 : 2 + STEPS] = cache.parts[layer]["conv"][0]
        arrays[f"conv{number}"] = conv
        arrays[f"rec{number}"] = np.ascontiguousarray(cache.parts[layer]["state"].transpose(0, 2, 1))
    for number, layer in enumerate(cache.of("full")):
        for part in ("key", "value"):
            out = empty(HEADS, CAPACITY, DIM, dead=dead)
            out[:, :SEEN] = cache.parts[layer][part]
            arrays[f"{part[0]}{number}"] = out
    return arrays


preset("forge", HYBRID, pad=2)(forge)


@preset("forge-drafter", PLAIN, live=SEEN)
def _(cache: Cache, dead: float) -> Arrays:
    arrays = {}
    for layer, parts in enumerate(cache.parts):
        for part in ("key", "value"):
            out = empty(HEADS, CAPACITY, DIM, dead=dead)
            out[:, unroll(parts[part], CAPACITY)] = parts[part]
            arrays[f"{part[0]}{layer}"] = out
    return arrays


@preset("coreai-macos", PLAIN)
def _(cache: Cache, dead: float) -> Arrays:
    return {f"{p[0]}_cache": stacked(cache, p, dead)[:, None] for p in ("key", "value")}


def bc1s(heads: np.ndarray) -> np.ndarray:
    """(…, heads, rows, lanes) to (…, heads · lanes, 1, rows)."""
    swapped = heads.swapaxes(-1, -2)
    return np.ascontiguousarray(swapped.reshape(*swapped.shape[:-3], HEADS * DIM, 1, swapped.shape[-1]))


@preset("coreai-gemma4", WINDOWED)
def _(cache: Cache, dead: float) -> Arrays:
    arrays = {}
    for part in ("Key", "Value"):
        windows = empty(2, 1, HEADS, WINDOW, DIM, dead=dead)
        full = empty(1, 1, HEADS, CAPACITY, DIM, dead=dead)
        for slot, layer in enumerate(cache.of("sliding")):
            rows = cache.parts[layer][part.lower()]
            windows[slot, 0][:, unroll(rows, WINDOW)] = rows  # written at position % window
        full[0, 0, :, :SEEN] = cache.parts[cache.of("full")[0]][part.lower()]
        arrays[f"sliding{part}Cache"], arrays[f"full{part}Cache"] = windows, full
    return arrays


def stacked_states(cache: Cache, dtype: Any = np.float16) -> tuple[np.ndarray, np.ndarray]:
    """(layers, 1, C, K − 1) and (layers, 1, Hv, Dk, Dv) of the recurrent layers."""
    parts = [cache.parts[layer] for layer in cache.of("recurrent")]
    conv = np.stack([p["conv"].transpose(0, 2, 1) for p in parts])
    state = np.stack([p["state"][None].transpose(0, 1, 3, 2) for p in parts])
    return conv.astype(dtype), state.astype(dtype)


@preset("coreai-qwen3-5", [RECURRENT, FULL, RECURRENT, FULL])
def _(cache: Cache, dead: float) -> Arrays:
    arrays = {}
    for part in ("key", "value"):
        out = empty(2, 1, HEADS, CAPACITY, DIM, dead=dead)
        for slot, layer in enumerate(cache.of("full")):
            out[slot, 0, :, :SEEN] = cache.parts[layer][part]
        arrays[f"{part}Cache"] = out
    conv, state = stacked_states(cache)
    return {**arrays, "convState": conv, "recState": state}


@preset("recurrent", [RECURRENT] * 2)
def _(cache: Cache, dead: float) -> Arrays:
    conv, state = stacked_states(cache, np.float32)
    return {f"conv_{i}": conv[i] for i in range(2)} | {f"state_{i}": state[i] for i in range(2)}


@preset("coreai-ios", PLAIN)
def _(cache: Cache, dead: float) -> Arrays:
    return {f"{p}_cache": bc1s(stacked(cache, p, dead))[:, None] for p in ("key", "value")}


@preset("smpanaro-llama2", PLAIN)
def _(cache: Cache, dead: float) -> Arrays:
    arrays = {}
    for layer, parts in enumerate(cache.parts):
        for part in ("key", "value"):
            out = empty(HEADS, CAPACITY, DIM, dead=dead)
            out[:, CAPACITY - SEEN :] = parts[part]
            arrays[f"{part[0]}_cache_{layer}"] = bc1s(out)[None]
    return arrays


@preset("smpanaro-gpt2", PLAIN, pad=1)
def _(cache: Cache, dead: float) -> Arrays:
    out = empty(4, 1, CAPACITY, 2 * HEADS * DIM, dead=dead)
    for layer, parts in enumerate(cache.parts):
        rows = [parts[p].transpose(1, 0, 2).reshape(SEEN, HEADS * DIM) for p in ("key", "value")]
        out[layer, 0, 1 : 1 + SEEN] = np.concatenate(rows, axis=1)
    return {"kv_cache": out}


@preset("swift-transformers", PLAIN)
@preset("apple-mistral", PLAIN)
def _(cache: Cache, dead: float) -> Arrays:
    return {f"{p}Cache": stacked(cache, p, dead)[:, None] for p in ("key", "value")}


@preset("whisperkit", PLAIN)
def _(cache: Cache, dead: float) -> Arrays:
    channels = 4 * HEADS * DIM
    return {
        f"{p}_cache": bc1s(stacked(cache, p, dead)).reshape(1, channels, 1, CAPACITY)
        for p in ("key", "value")
    }


@preset("executorch-static", PLAIN)
def _(cache: Cache, dead: float) -> Arrays:
    return {f"{p}/l{i}": stacked(cache, p, dead)[i : i + 1] for p in ("key", "value") for i in range(4)}


@preset("executorch-static-shift", PLAIN)
def _(cache: Cache, dead: float) -> Arrays:
    arrays = {}
    for part in ("key", "value"):
        whole = np.roll(stacked(cache, part, dead), CAPACITY - SEEN, axis=2)
        arrays |= {f"{part}/l{i}": whole[i : i + 1].copy() for i in range(4)}
    return arrays


def one_head(cache: Cache, dead: float, transposed: bool) -> Arrays:
    arrays = {}
    for part in ("key", "value"):
        whole = stacked(cache, part, dead)
        for layer in range(4):
            for head in range(HEADS):
                rows = whole[layer, head : head + 1]
                rows = rows.swapaxes(1, 2) if transposed else rows
                arrays[f"{part}/l{layer},h{head}"] = np.ascontiguousarray(rows)
    return arrays


preset("executorch-static-heads", PLAIN)(lambda c, d: one_head(c, d, False))
preset("executorch-static-heads-transposed", PLAIN)(lambda c, d: one_head(c, d, True))


@preset("executorch-mlx", PLAIN)
def _(cache: Cache, dead: float) -> Arrays:
    return {
        f"{i}/{p[0]}_cache": stacked(cache, p, dead)[i : i + 1] for p in ("key", "value") for i in range(4)
    }


TABLE = [3, 1, 4]  # physical blocks of two rows


def pages(rows: np.ndarray, dead: float) -> np.ndarray:
    """(blocks, rows of a block, heads, lanes)."""
    out = empty(5, 2, HEADS, DIM, dead=dead)
    for position in range(SEEN):
        out[TABLE[position // 2], position % 2] = rows[:, position]
    return out


@preset("vllm-metal", PLAIN, block_table=TABLE)
def _(cache: Cache, dead: float) -> Arrays:
    return {f"{p}_caches[{i}]": pages(cache.parts[i][p], dead) for p in ("key", "value") for i in range(4)}


def both_pages(cache: Cache, dead: float) -> list[np.ndarray]:
    """(blocks, K and V, rows, heads, lanes) of each layer."""
    return [np.stack([pages(parts[p], dead) for p in ("key", "value")], axis=1) for parts in cache.parts]


@preset("vllm-nhd", PLAIN, block_table=TABLE)
def _(cache: Cache, dead: float) -> Arrays:
    return {f"kv_cache_{i}": whole for i, whole in enumerate(both_pages(cache, dead))}


@preset("vllm-hnd", PLAIN, block_table=TABLE)
def _(cache: Cache, dead: float) -> Arrays:
    swapped = [np.ascontiguousarray(whole.swapaxes(2, 3)) for whole in both_pages(cache, dead)]
    return {f"kv_cache_{i}": whole for i, whole in enumerate(swapped)}


@preset("vllm-fused", PLAIN, block_table=TABLE)
def _(cache: Cache, dead: float) -> Arrays:
    # [block, head, row, 2 · lanes]
    fused = [np.concatenate([w[:, 0], w[:, 1]], axis=-1).swapaxes(1, 2) for w in both_pages(cache, dead)]
    return {f"kv_cache_{i}": np.ascontiguousarray(whole) for i, whole in enumerate(fused)}


def tokens_first(cache: Cache, dead: float, name: Callable[[str, int], str], dtype: Any) -> Arrays:
    arrays = {}
    for part in ("key", "value"):
        whole = stacked(cache, part, dead, dtype).swapaxes(1, 2)
        arrays |= {name(part, i): np.ascontiguousarray(whole[i]) for i in range(4)}
    return arrays


preset("exo", PLAIN)(lambda c, d: tokens_first(c, d, lambda p, i: f"{p}s_{i}", np.float16))
preset("ane-infer-gpu", PLAIN)(lambda c, d: tokens_first(c, d, lambda p, i: f"{p[0]}_{i}", np.float32))


@preset("ane-infer-cpu", PLAIN)
def _(cache: Cache, dead: float) -> Arrays:
    return {f"{p[0]}_{i}": stacked(cache, p, dead, np.float32)[i] for p in ("key", "value") for i in range(4)}


@preset("aneforge", PLAIN)
def _(cache: Cache, dead: float) -> Arrays:
    return {f"{p[0]}_{i}": stacked(cache, p, dead)[i] for p in ("key", "value") for i in range(4)}


CELLS = [8, 0, 1, 2, 6, 4]


def llama_cpp(cache: Cache, dead: float, transposed: bool) -> Arrays:
    arrays = {}
    for layer, parts in enumerate(cache.parts):
        for part in ("key", "value"):
            out = empty(CAPACITY, HEADS * DIM, dead=dead)
            out[CELLS] = parts[part].transpose(1, 0, 2).reshape(SEEN, HEADS * DIM)
            out = np.ascontiguousarray(out.T) if transposed and part == "value" else out
            arrays[f"cache_{part[0]}_l{layer}"] = out
    return arrays


preset("llama-cpp", PLAIN, block_table=CELLS)(lambda c, d: llama_cpp(c, d, False))
preset("llama-cpp-v-transposed", PLAIN, block_table=CELLS)(lambda c, d: llama_cpp(c, d, True))

CODED = {"mlx-lm-8bit": 8, "mlx-lm-4bit": 4, "mlx-swift-lm-8bit": 8}
NAMES = _native.layout_names()


def reference(cache: Cache) -> kvbaton.CacheView:
    """The cache as plain arrays in canonical order, one a layer and part."""
    text = ['name = "canonical"', 'placement = "left"']
    arrays = {}
    for part, axes in (
        ("key", "kv_head row head_dim"),
        ("value", "kv_head row head_dim"),
        ("conv", "1 row channel"),
        ("state", "kv_head value_dim key_dim"),
    ):
        held = {f"{part}_{i}": parts[part] for i, parts in enumerate(cache.parts) if part in parts}
        if held:
            text += ["[[tensor]]", f'name = "{part}_{{layer}}"', f'holds = "{part}"', f'axes = "{axes}"']
            arrays |= held
    # Windows hold their newest rows, from slot 0 on.
    text.insert(2, 'sliding_placement = "right"')
    return kvbaton.CacheView.from_arrays(arrays, "\n".join(text), cache=cache.layers, tokens_seen=SEEN)


def covered(name: str, cache: Cache) -> list[int]:
    return [13, 14] if name == "coreml-llm-shared" else list(range(len(cache.layers)))


def test_every_preset_has_a_writer() -> None:
    assert sorted([*PRESETS, *CODED, "forge-v8"]) == sorted(NAMES)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_arrays_read_as_the_cache_they_were_written_from(name: str) -> None:
    case = PRESETS[name]
    cache = Cache(case.layers, case.dim)
    arrays = case.write(cache, np.nan)
    view = kvbaton.CacheView.from_arrays(arrays, name, cache=cache.layers, tokens_seen=SEEN, **case.live)
    for layer in covered(name, cache):
        for part, want in cache.parts[layer].items():
            data, dtype, shape, first = view._native.canonical(layer, part)
            have = np.frombuffer(data, dtype).reshape(shape)
            np.testing.assert_array_equal(have.astype(np.float16), want, f"{name}, layer {layer}, {part}")
            if part in ("key", "value"):
                assert first == SEEN - want.shape[1]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_filling_writes_the_arrays_that_the_system_would(name: str) -> None:
    case = PRESETS[name]
    cache = Cache(case.layers, case.dim)
    want = case.write(cache, 0)
    have = {key: np.zeros_like(np.ascontiguousarray(array)) for key, array in want.items()}
    targets = [(key, array, str(array.dtype)) for key, array in have.items()]
    live = {"tokens_seen": SEEN, **case.live}
    _native.view_fill(reference(cache)._native, targets, name, json.dumps(live))
    for key, array in want.items():
        np.testing.assert_array_equal(have[key], array, f"{name}, {key}")


@pytest.mark.parametrize("name", sorted(CODED))
def test_mlx_codes_are_mlx_s(name: str) -> None:
    """Codes, scales and biases are those of ``mx.quantize`` bit for bit, and read as ``dequantize`` reads."""
    mx = pytest.importorskip("mlx.core")
    bits = CODED[name]
    cache = Cache([FULL, SLIDING, FULL], dim=64)
    live = json.dumps({"tokens_seen": SEEN})
    arrays: Arrays = {}
    want: Arrays = {}
    for layer in range(3):
        for part in ("key", "value"):
            base = f"{part}s_{layer}"
            if layer == 1:
                arrays[base] = np.zeros((1, HEADS, WINDOW, 64), np.float16)
                continue
            rows = np.zeros((1, HEADS, CAPACITY, 64), np.float16)
            rows[0, :, :SEEN] = cache.parts[layer][part]
            coded = mx.quantize(mx.array(rows), group_size=64, bits=bits)
            for suffix, array in zip(("", "_scales", "_biases"), coded, strict=True):
                full = np.array(array)
                arrays[base + suffix] = np.zeros_like(full)
                full[:, :, SEEN:] = 0
                want[base + suffix] = full
    targets = [(key, array, str(array.dtype)) for key, array in arrays.items()]
    _native.view_fill(reference(cache)._native, targets, name, live)
    for key, array in want.items():
        np.testing.assert_array_equal(arrays[key], array, key)
    view = kvbaton.CacheView.from_arrays(arrays, name, cache=cache.layers, tokens_seen=SEEN)
    for layer in (0, 2):
        for part in ("key", "value"):
            coded = [mx.array(arrays[f"{part}s_{layer}{suffix}"]) for suffix in ("", "_scales", "_biases")]
            decoded = np.array(mx.dequantize(*coded, group_size=64, bits=bits))[0, :, :SEEN]
            np.testing.assert_array_equal(view.layers[layer].arrays[part], decoded)


def test_int8_values_are_a_code_times_a_scale() -> None:
    """Forge V8: int8 values with an fp16 scale for each token and head."""
    cache = Cache(HYBRID)
    rng = np.random.default_rng(3)
    arrays = forge(cache, np.nan)
    codes = rng.integers(-127, 128, (HEADS, CAPACITY, DIM)).astype(np.int8)
    scales = np.full((HEADS, CAPACITY), np.nan, np.float16)
    scales[:, :SEEN] = rng.integers(1, 64, (HEADS, SEEN)) / 256
    arrays |= {"v0": codes, "vs0": scales}
    rows: dict[str, Any] = {"tokens_seen": SEEN, "pad": 2}
    view = kvbaton.CacheView.from_arrays(arrays, "forge-v8", cache=cache.layers, **rows)
    want = (codes.astype(np.float32) * scales[..., None].astype(np.float32)).astype(np.float16)[:, :SEEN]
    np.testing.assert_array_equal(view.layers[3].arrays["value"], want)
    np.testing.assert_array_equal(view.layers[3].arrays["key"], cache.parts[3]["key"])

    filled = {key: np.zeros_like(array) for key, array in arrays.items()}
    targets = [(key, array, str(array.dtype)) for key, array in filled.items()]
    _native.view_fill(reference(cache)._native, targets, "forge-v8", json.dumps(rows))
    values = cache.parts[3]["value"].astype(np.float32)
    stored = np.maximum(np.abs(values).max(-1) / np.float32(127), 1e-6).astype(np.float16)
    np.testing.assert_array_equal(filled["vs0"][:, :SEEN], stored)
    wanted = np.clip(np.rint(values / stored[..., None].astype(np.float32)), -127, 127)
    np.testing.assert_array_equal(filled["v0"][:, :SEEN], wanted.astype(np.int8))
    assert not filled["v0"][:, SEEN:].any()


def test_sizes_come_from_the_shapes_where_the_layout_leaves_none_open() -> None:
    cache = Cache(PLAIN)
    arrays = PRESETS["yetter"].write(cache, np.nan)
    view = kvbaton.CacheView.from_arrays(arrays, "yetter", tokens_seen=SEEN)
    np.testing.assert_array_equal(view.layers[3].arrays["value"], cache.parts[3]["value"])
    arrays = PRESETS["coreai-ios"].write(cache, np.nan)
    with pytest.raises(kvbaton.KvbatonError, match="leaves several sizes of one dimension open"):
        kvbaton.CacheView.from_arrays(arrays, "coreai-ios", tokens_seen=SEEN)

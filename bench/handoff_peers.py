#!/usr/bin/env python3
"""The hand-off against today's other routes, in one run: from one pair of stacked arrays to mlx-lm caches.

    python bench/handoff_peers.py [--context 4096,8192] [--repeats 7] [--json]

Every route starts from the same float16 arrays (layers, kv_heads, context, head_dim) of Qwen3-0.6B's shape
with three quarters of the rows live, and ends when the first decode step has updated every cache. "cold" is a
route's first use in a process of its own, "warm" the median of the later ones. Each route's rows are checked.

The routes are written out from what their projects describe: the naive split (one MLX array, split by layer and
made contiguous), arrays made of each layer's rows or whole capacity, mx.zeros filled by numpy, exo's token-major
chunks in msgpack, and mlx-lm's own save_prompt_cache and load_prompt_cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kvbaton
import mlx.core as mx
import msgpack
import numpy as np
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache
from mlx_lm.models.qwen3 import Model, ModelArgs

LAYERS, HEADS, DIM = 28, 8, 128
SPARE = 256

Caches = list[Any]
Array = np.ndarray[Any, Any]


def decoder() -> Any:
    """A model with the shape's caches and hardly any weights."""
    return Model(
        ModelArgs(
            model_type="qwen3",
            hidden_size=64,
            num_hidden_layers=LAYERS,
            intermediate_size=64,
            num_attention_heads=HEADS,
            rms_norm_eps=1e-6,
            vocab_size=128,
            num_key_value_heads=HEADS,
            max_position_embeddings=65536,
            rope_theta=1e6,
            head_dim=DIM,
            tie_word_embeddings=True,
        )
    )


def _cache(keys: Any, values: Any, rows: int) -> Any:
    cache = KVCache()
    cache.keys, cache.values, cache.offset = keys, values, rows
    return cache


def route_kvbaton(k: Array, v: Array, rows: int, model: Any) -> Caches:
    """kvbaton.to_mlx."""
    view = kvbaton.CacheView.from_arrays({"key_cache": k, "value_cache": v}, "yetter", tokens_seen=rows)
    tokens = [1] * (rows + 1)
    return kvbaton.to_mlx(view, model, tokens, dtype=mx.float16, measure_memcpy=False).prompt_cache


def route_whole_capacity(k: Array, v: Array, rows: int, model: Any) -> Caches:
    """mx.array of each layer's whole capacity, offset set: two lines, and the best of the rest."""
    caches = [_cache(mx.array(k[i : i + 1]), mx.array(v[i : i + 1]), rows) for i in range(LAYERS)]
    mx.eval([c.keys for c in caches], [c.values for c in caches])
    return caches


def route_numpy_fill(k: Array, v: Array, rows: int, model: Any) -> Caches:
    """mx.zeros with spare rows, filled by numpy on two threads."""
    shape = (1, HEADS, -(-(rows + SPARE) // 256) * 256, DIM)
    caches = [_cache(mx.zeros(shape, mx.float16), mx.zeros(shape, mx.float16), rows) for _ in range(LAYERS)]
    mx.eval([c.keys for c in caches], [c.values for c in caches])
    jobs = [(c.keys, k[i]) for i, c in enumerate(caches)] + [(c.values, v[i]) for i, c in enumerate(caches)]

    def fill(job: tuple[Any, Array]) -> None:
        target, source = job
        np.copyto(np.asarray(memoryview(target))[0, :, :rows], source[:, :rows])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(fill, jobs))
    return caches


def route_slices(k: Array, v: Array, rows: int, model: Any) -> Caches:
    """One big MLX array, sliced for each layer."""
    keys, values = mx.array(k), mx.array(v)
    caches = [_cache(keys[i : i + 1, :, :rows], values[i : i + 1, :, :rows], rows) for i in range(LAYERS)]
    mx.eval([c.keys for c in caches], [c.values for c in caches])
    return caches


def route_naive_split(k: Array, v: Array, rows: int, model: Any) -> Caches:
    """One big MLX array, split by layer; each layer's live rows made contiguous."""
    keys, values = (mx.split(mx.array(source), LAYERS) for source in (k, v))
    caches = [
        _cache(mx.contiguous(a[:, :, :rows]), mx.contiguous(b[:, :, :rows]), rows)
        for a, b in zip(keys, values, strict=True)
    ]
    mx.eval([c.keys for c in caches], [c.values for c in caches])
    return caches


def route_layers(k: Array, v: Array, rows: int, model: Any) -> Caches:
    """Each layer's live rows cut out with numpy, made an array of MLX, and given to an empty cache."""
    caches = []
    for layer in range(LAYERS):
        cache = KVCache()
        cache.update_and_fetch(
            mx.array(k[layer : layer + 1, :, :rows]), mx.array(v[layer : layer + 1, :, :rows])
        )
        caches.append(cache)
    mx.eval([c.keys for c in caches], [c.values for c in caches])
    return caches


def route_save_load(k: Array, v: Array, rows: int, model: Any) -> Caches:
    """mlx-lm's prompt cache file, written by the one side and read by the other."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "cache.safetensors")
        save_prompt_cache(file, route_layers(k, v, rows, model))
        caches = load_prompt_cache(file)
        mx.eval([c.keys for c in caches], [c.values for c in caches])
    return list(caches)


def route_msgpack(k: Array, v: Array, rows: int, model: Any) -> Caches:
    """exo's wire order: token-major chunks of 512 rows in msgpack, put together by the receiver."""
    caches = []
    for layer in range(LAYERS):
        parts: dict[str, list[Array]] = {"keys": [], "values": []}
        for start in range(0, rows, 512):
            stop = min(start + 512, rows)
            chunk = {
                name: np.ascontiguousarray(source[layer, :, start:stop].transpose(1, 0, 2)).tobytes()
                for name, source in (("keys", k), ("values", v))
            }
            received = msgpack.unpackb(msgpack.packb({"layer": layer, "num_tokens": stop - start, **chunk}))
            for name, part in parts.items():
                flat = np.frombuffer(received[name], np.float16)
                part.append(flat.reshape(stop - start, HEADS, DIM))
        arrays = [mx.array(np.concatenate(p).transpose(1, 0, 2)[None]) for p in parts.values()]
        caches.append(_cache(arrays[0], arrays[1], rows))
    mx.eval([c.keys for c in caches], [c.values for c in caches])
    return caches


ROUTES: dict[str, Callable[[Array, Array, int, Any], Caches]] = {
    "kvbaton": route_kvbaton,
    "mx.array of the capacity": route_whole_capacity,
    "mx.zeros + numpy, 2 threads": route_numpy_fill,
    "mx.array of each layer's rows": route_layers,
    "naive split": route_naive_split,
    "slices of one mx.array": route_slices,
    "mlx-lm save and load": route_save_load,
    "msgpack chunks, token-major": route_msgpack,
}


def first_step(caches: Caches) -> None:
    """What one decode step does to the caches."""
    row = mx.ones((1, HEADS, 1, DIM), mx.float16)
    sums = []
    for cache in caches:
        keys, values = cache.update_and_fetch(row, row)
        sums.append(keys[..., -1:, :].sum() + values[..., -1:, :].sum())
    mx.eval(sums)


def check(caches: Caches, k: Array, rows: int) -> None:
    """A few rows of the last layer must be the source's, and the new row must follow them."""
    last = caches[-1]
    got = np.array(last.keys[0, HEADS - 1, rows - 3 : rows + 1])
    assert last.offset == rows + 1
    assert np.array_equal(got[:3], k[-1, HEADS - 1, rows - 3 : rows]), "wrong rows"
    assert (got[3] == 1).all(), "the first step's row is missing"


def measure(route: str, context: int, repeats: int) -> dict[str, Any]:
    """Seconds of build and first step, one pair a repeat."""
    rows = context * 3 // 4
    rng = np.random.default_rng(0)
    line = rng.standard_normal((HEADS, context, DIM), dtype=np.float32).astype(np.float16)
    k = np.stack([np.roll(line, layer, axis=1) for layer in range(LAYERS)])
    v = k.copy()
    model = decoder()
    build, step = [], []
    for _ in range(repeats):
        gc.collect()
        start = time.perf_counter()
        caches = ROUTES[route](k, v, rows, model)
        built = time.perf_counter()
        first_step(caches)
        step.append(time.perf_counter() - built)
        build.append(built - start)
        check(caches, k, rows)
        del caches
    return {"build_seconds": build, "first_step_seconds": step}


def main() -> None:
    """Runs every route in processes of its own and prints a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--context", default="4096,8192")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3, help="processes a route, taken in turn")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("ROUTE", "CONTEXT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), args.repeats)))
        return
    rows = []
    for context in map(int, args.context.split(",")):
        cold: dict[str, list[float]] = {route: [] for route in ROUTES}
        warm: dict[str, list[float]] = {route: [] for route in ROUTES}
        for _ in range(args.rounds):
            for route in ROUTES:
                command = [
                    sys.executable,
                    __file__,
                    "--repeats",
                    str(args.repeats),
                    "--one",
                    route,
                    str(context),
                ]
                done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                totals = [
                    b + s for b, s in zip(done["build_seconds"], done["first_step_seconds"], strict=True)
                ]
                cold[route].append(totals[0])
                warm[route] += totals[1:]
        ours = {"cold": statistics.median(cold["kvbaton"]), "warm": statistics.median(warm["kvbaton"])}
        for route in ROUTES:
            row = {"context": context, "live_rows": context * 3 // 4, "route": route}
            for state, times in (("cold", cold[route]), ("warm", warm[route])):
                median = statistics.median(times)
                row[f"{state}_seconds"] = {"min": min(times), "median": median, "max": max(times)}
                row[f"{state}_ratio"] = median / ours[state]
            rows.append(row)
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    print(f"{'context':>8}  {'route':<29} {'cold ms':>9} {'× ours':>7} {'warm ms':>9} {'× ours':>7}")
    for row in rows:
        cold_ms, warm_ms = (row[f"{s}_seconds"]["median"] * 1e3 for s in ("cold", "warm"))
        ratios = f"{cold_ms:>9.1f} {row['cold_ratio']:>7.1f} {warm_ms:>9.1f} {row['warm_ratio']:>7.1f}"
        print(f"{row['context']:>8}  {row['route']:<29} {ratios}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What a hand-off adds at long contexts, streamed and not: from the fake engine to mlx-lm's caches.

    python bench/long_handoff.py [--context 4096,8192,16384,32768] [--chunk 512] [--json] [--svg FOLDER]

The engine computes nothing: it writes a float16 cache of Llama 3.1 8B's shape (32 layers, 8 KV heads, head_dim
128; 131,072 bytes a token) at ``--tokens-per-second``, at once or in chunks. kvbaton hands it to the caches of
a decoder of that shape with hardly any weights, whose first decode step then updates every cache. Every mode
runs in processes of its own: "cold" is the first hand-off of a process, "warm" the median of the later ones. So
that the later ones find memory that was used before, glibc is told to keep what the process freed: MLX's Linux
build has no cache of buffers of its own, as it has on a Mac.
``memcpy`` moves as many bytes on all threads, right after, into memory in the same state.

The largest needs 12 GB of memory when it is not streamed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kvbaton
import mlx.core as mx
import numpy as np
from kvbaton import _native
from kvbaton._page import Series, chart, standalone
from kvbaton.mlx import cache_addresses, copied_bytes
from kvbaton.testing import FakePrefill, element
from mlx_lm.models.qwen3 import Model, ModelArgs

LAYERS, HEADS, DIM = 32, 8, 128
MODES = ("after", "chunks", "layers")
KEPT = os.environ | {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": "0"}


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
            vocab_size=4096,
            num_key_value_heads=HEADS,
            max_position_embeddings=65536,
            rope_theta=1e6,
            head_dim=DIM,
            tie_word_embeddings=True,
        )
    )


def engine(mode: str, context: int, chunk: int, tokens_per_second: float) -> FakePrefill:
    """The fake engine at a length."""
    return FakePrefill(
        layers=LAYERS,
        kv_heads=HEADS,
        head_dim=DIM,
        lengths=(context,),
        chunk_tokens=0 if mode == "after" else chunk,
        by_layer=mode == "layers",
        token_seconds=1 / tokens_per_second,
    )


def first_step(caches: list[Any]) -> int:
    """What one decode step does to the caches; returns the bytes that it copied."""
    row = mx.ones((1, HEADS, 1, DIM), mx.float16)
    before = cache_addresses(caches)
    sums = []
    for cache in caches:
        keys, values = cache.update_and_fetch(row, row)
        sums.append(keys[..., -1:, :].sum() + values[..., -1:, :].sum())
    mx.eval(sums)
    return copied_bytes(before, caches)


def check(caches: list[Any], tokens: list[int]) -> None:
    """Rows here and there must be what the engine's description says."""
    for layer, head, row in ((0, 0, 0), (LAYERS - 1, HEADS - 1, len(tokens) - 1), (7, 3, len(tokens) // 2)):
        for part, array in (("key", caches[layer].keys), ("value", caches[layer].values)):
            want = [element(part, layer, head, row, lane, tokens[row]) for lane in range(DIM)]
            assert np.array_equal(np.array(array[0, head, row]), np.array(want, np.float16)), (layer, row)


def measure(mode: str, context: int, chunk: int, repeats: int, tokens_per_second: float) -> dict[str, Any]:
    """One process: a cold hand-off and some warm ones."""
    tokens = [(i * 7919 + 13) % 4096 for i in range(context)]
    model, source = decoder(), engine(mode, context, chunk, tokens_per_second)
    runs = []
    for _ in range(repeats):
        gc.collect()
        start = time.perf_counter()
        if mode == "after":
            result = source(tokens)
            handoff = kvbaton.to_mlx(
                result.cache, model, [*tokens, 1], dtype=mx.float16, measure_memcpy=False
            )
            prefill = result.report
            del result
        else:
            handoff = kvbaton.prefill_to_mlx(
                source, [*tokens, 1], model, dtype=mx.float16, measure_memcpy=False
            )
            assert handoff.prefill is not None
            prefill = handoff.prefill
        wall = time.perf_counter() - start
        start = time.perf_counter()
        copied = first_step(handoff.prompt_cache)
        step = time.perf_counter() - start
        assert copied == 0, f"the first step copied {copied} bytes"
        check(handoff.prompt_cache, tokens)
        report = handoff.report
        runs.append(
            {
                "prefill_seconds": prefill.seconds,
                "exposed_seconds": report.exposed_seconds,
                "handoff_seconds": report.seconds,
                "copy_seconds": report.copy_seconds,
                "gigabytes_per_second": report.gigabytes_per_second,
                "first_step_seconds": step,
                "wall_seconds": wall,
                "bytes": report.bytes,
                "longest_copy_seconds": (report.streamed or {}).get("longest_copy_seconds"),
            }
        )
        del handoff
    moved = 2 * runs[0]["bytes"]
    mx.clear_cache()
    del source
    gc.collect()
    return {
        "runs": runs,
        "memcpy_warm_seconds": _native.memcpy_seconds(moved),
        "memcpy_cold_seconds": _native.memcpy_seconds(moved, cold=True),
    }


def main() -> None:
    """Runs every mode in processes of its own and prints a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--context", default="4096,8192,16384,32768")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument(
        "--repeats", type=int, default=4, help="hand-offs of a process, the first of them cold"
    )
    parser.add_argument("--tokens-per-second", type=float, default=4000.0)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--svg", type=Path, help="a folder for the plots")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("MODE", "CONTEXT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        mode, context = args.one[0], int(args.one[1])
        print(json.dumps(measure(mode, context, args.chunk, args.repeats, args.tokens_per_second)))
        return
    rows = []
    for context in map(int, args.context.split(",")):
        for mode in args.modes.split(","):
            command = [sys.executable, __file__, "--one", mode, str(context)]
            command += ["--chunk", str(args.chunk), "--repeats", str(args.repeats)]
            command += ["--tokens-per-second", str(args.tokens_per_second)]
            run = subprocess.run(command, check=True, capture_output=True, text=True, env=KEPT)
            done = json.loads(run.stdout)
            rows += [summary(context, mode, state, done) for state in ("cold", "warm")]
            if not args.json:
                print(line(rows[-2]), line(rows[-1]), sep="\n", flush=True)
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))
    if args.svg:
        plots(rows, args.svg)


def summary(context: int, mode: str, state: str, done: dict[str, Any]) -> dict[str, Any]:
    """The medians of one state."""
    runs = done["runs"][:1] if state == "cold" else done["runs"][1:]
    medians = {
        key: None if runs[0][key] is None else statistics.median(run[key] for run in runs) for key in runs[0]
    }
    return {"context": context, "mode": mode, "state": state, **medians} | {
        "memcpy_seconds": done[f"memcpy_{state}_seconds"]
    }


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    exposed, copy, memcpy = (row[k] * 1e3 for k in ("exposed_seconds", "copy_seconds", "memcpy_seconds"))
    return (
        f"{row['context']:>6} {row['mode']:<7} {row['state']:<5} {row['bytes'] / 1e9:6.2f} GB  "
        f"exposed {exposed:9.1f} ms  copies {copy:9.1f} ms  memcpy {memcpy:9.1f} ms  "
        f"first step {row['first_step_seconds'] * 1e3:7.1f} ms  prefill {row['prefill_seconds']:6.2f} s"
    )


def plots(rows: list[dict[str, Any]], folder: Path) -> None:
    """Exposed seconds by context, and the speed of the copies against memcpy."""
    folder.mkdir(parents=True, exist_ok=True)

    def series(mode: str, state: str, figure: Any) -> Series:
        points = [(r["context"], figure(r)) for r in rows if (r["mode"], r["state"]) == (mode, state)]
        return Series(f"{mode}, {state}", points, marks=True)

    modes = list(dict.fromkeys(row["mode"] for row in rows))
    exposed = [
        series(m, s, lambda r: r["exposed_seconds"] * 1e3) for m in modes[:2] for s in ("warm", "cold")
    ]
    drawing = chart.lines(exposed, "tokens", "exposed milliseconds", log_x=True, log_y=True)
    (folder / "handoff-exposed.svg").write_text(svg(drawing))
    speed = [series("after", s, lambda r: r["gigabytes_per_second"]) for s in ("warm", "cold")]
    for state in ("warm", "cold"):
        points = [
            (r["context"], 2 * r["bytes"] / r["memcpy_seconds"] / 1e9)
            for r in rows
            if (r["mode"], r["state"]) == ("after", state)
        ]
        speed.append(Series(f"memcpy, {state}", points, marks=True))
    drawing = chart.lines(speed, "tokens", "GB/s read and written", log_x=True)
    (folder / "handoff-speed.svg").write_text(svg(drawing))


def svg(drawing: Any) -> str:
    """The drawing as a file; a legend beside it belongs to the page."""
    return standalone(drawing[: drawing.index("</svg>") + 6])


if __name__ == "__main__":
    main()

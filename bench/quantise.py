#!/usr/bin/env python3
"""Affine quantisation of a cache and its inverse against MLX's own on the CPU, in one run.

    python bench/quantise.py [--context 2048] [--bits 8] [--repeats 5] [--json]

Both code the same number of float16 rows of Qwen3-0.6B's shape (28 layers, 8 KV heads, head_dim 128) in groups
of 64, into memory that was written before: kvbaton as the copy of ``kvbaton bench handoff`` between float16 rows
and mlx-lm's quantised caches, MLX into buffers that its allocator keeps. That both answers are the same bits is
checked first, on rows that both are given. The two take turns; the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import kvbaton
import mlx.core as mx
import numpy as np

LAYERS, HEADS, DIM, GROUP = 28, 8, 128, 64


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that ``work`` took, and its answer."""
    start = time.perf_counter()
    answer = work()
    return time.perf_counter() - start, answer


def handed_over(source: str, target: str, context: int) -> float:
    """Seconds of a warm copy between two layouts, the median of several."""
    command = [
        sys.executable,
        "-m",
        "kvbaton",
        "bench",
        "handoff",
        "--shape",
        "qwen3-0.6b",
        "--live-fraction",
        "1",
    ]
    command += ["--context", str(context), "--source", source, "--target", target, "--repeats", "9", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (row,) = json.loads(done.stdout)["rows"]
    return float(row["copy_seconds"]["median"])


def main() -> None:
    """Runs the rounds and prints a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--bits", type=int, choices=(4, 8), default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    shape = (LAYERS, HEADS, args.context, DIM)
    rows = rng.standard_normal(shape, dtype=np.float32).astype(np.float16)
    keys, values = mx.array(rows), mx.array(rows)
    mx.eval(keys, values)
    view = kvbaton.CacheView.from_arrays(
        {"key_cache": rows, "value_cache": rows}, "yetter", tokens_seen=args.context
    )

    def mlx_quantise() -> list[Any]:
        done = [mx.quantize(a, group_size=GROUP, bits=args.bits) for a in (keys, values)]
        mx.eval(done)
        return done

    def mlx_dequantise() -> list[Any]:
        done = [mx.dequantize(*c, group_size=GROUP, bits=args.bits) for c in codes]
        mx.eval(done)
        return done

    codes = mlx_quantise()
    ours = view.quantize(args.bits, GROUP)
    last = ours.cast("float16").layers[-1].arrays["key"]
    assert np.array_equal(last, np.array(mlx_dequantise()[0][-1])), "the two differ"
    coded = f"mlx-lm-{args.bits}bit"
    table = []
    for name, pair, theirs in (
        ("quantise", ("yetter", coded), mlx_quantise),
        ("dequantise", (coded, "mlx-lm"), mlx_dequantise),
    ):
        rounds = []
        for _ in range(args.repeats):
            mlx_seconds = statistics.median(timed(theirs)[0] for _ in range(3))
            rounds.append((handed_over(*pair, args.context), mlx_seconds))
        table.append(
            {
                "operation": name,
                "bits": args.bits,
                "context": args.context,
                "kvbaton_seconds": statistics.median(a for a, _ in rounds),
                "mlx_seconds": statistics.median(b for _, b in rounds),
                "ratio": statistics.median(b / a for a, b in rounds),
            }
        )
    if args.json:
        print(json.dumps({"rows": table}, indent=1))
        return
    print(f"{'':<12} {'kvbaton ms':>11} {'MLX ms':>9} {'ratio':>7}")
    for row in table:
        ours_ms, mlx_ms = row["kvbaton_seconds"] * 1e3, row["mlx_seconds"] * 1e3
        print(f"{row['operation']:<12} {ours_ms:>11.1f} {mlx_ms:>9.1f} {row['ratio']:>7.1f}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Draws the time of each chunk of a long prefill against the work that it needs, as an SVG.

    kvbaton bench prefill PACKAGE --tokens 8192 --json > chunks.json
    scripts/plot-chunks.py chunks.json MODEL/config.json docs/plots/chunks.svg

The work of a chunk of T tokens after p others, in floating-point operations: two for each weight of the layers and
token, and four for each lane of a query head, each token and each row that it attends to. The line is the rate at
which the whole prompt ran: a chunk above it costs more than its work.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 360, 64, 48, 24, 16


def work(config: dict[str, Any], position: int, tokens: int) -> float:
    """Floating-point operations that a chunk needs."""
    hidden, inner, heads = (config[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads"))
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads", heads)
    weights = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    attended = sum(position + row + 1 for row in range(tokens))
    layer = 2 * weights * tokens + 4 * heads * head_dim * attended
    return float(config["num_hidden_layers"] * layer)


def svg(points: list[tuple[float, float]], labels: list[str]) -> str:
    """Points of (GFLOP, seconds), and the line of the mean rate."""
    most_x = 1.08 * max(x for x, _ in points)
    most_y = 1.12 * max(y for _, y in points)
    rate = sum(y for _, y in points) / sum(x for x, _ in points)

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = WIDTH - LEFT - RIGHT, HEIGHT - BOTTOM - TOP
        return LEFT + across * x / most_x, HEIGHT - BOTTOM - up * y / most_y

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]

    def text(x: float, y: float, words: str, anchor: str = "middle") -> None:
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>')

    def line(a: tuple[float, float], b: tuple[float, float], color: str) -> None:
        parts.append(
            f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" stroke="{color}"/>'
        )

    line(at(0, 0), at(most_x, 0), "black")
    line(at(0, 0), at(0, most_y), "black")
    for step in range(1, 5):
        x, y = most_x * step / 4.32, most_y * step / 4.48
        text(at(x, 0)[0], HEIGHT - BOTTOM + 16, f"{x:.0f}")
        text(LEFT - 6, at(0, y)[1] + 4, f"{y:.2f}", "end")
    text((LEFT + WIDTH) / 2, HEIGHT - 10, "work of the chunk, GFLOP")
    text(8, TOP - 8, "seconds of the chunk", "start")
    line(at(0, 0), at(most_x, rate * most_x), "#888")
    text(*at(most_x, rate * most_x * 0.93), f"{1 / rate:.0f} GFLOP/s", "end")
    for (x, y), label in zip(points, labels, strict=True):
        cx, cy = at(x, y)
        parts.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="#06c"/>')
        if label:
            text(cx, cy - 9, label)
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(bench: str, config: str, out: str) -> None:
    """Prints each chunk and writes the picture."""
    (row,) = [r for r in json.loads(Path(bench).read_text())["rows"] if r.get("chunks")]
    shape = json.loads(Path(config).read_text())
    points, labels = [], []
    print("position  tokens    GFLOP  seconds  GFLOP/s")
    for chunk in row["chunks"]:
        position, tokens = chunk["position"], chunk["tokens"]
        gflop, seconds = work(shape, position, tokens) / 1e9, chunk["seconds"]
        points.append((gflop, seconds))
        end = position + tokens
        labels.append(f"{end // 1024}K" if end in (2048, 4096, 8192) else "")
        print(f"{position:8} {tokens:7} {gflop:8.0f} {seconds:8.2f} {gflop / seconds:8.0f}")
    Path(out).write_text(svg(points, labels), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])

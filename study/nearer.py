"""Which cache of a bfloat16 decoder is nearer to float32's: its own prefill's, or the one that is handed over?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kvbaton
import mlx.core as mx
import numpy as np
import numpy.typing as npt
from batches import Recorded

Array = npt.NDArray[np.float64]


def distances(source: kvbaton.CacheView, exact: Recorded, own: Recorded) -> dict[str, float]:
    """Errors of all keys and values, relative to float32's norm: of ``source`` in bfloat16, and of ``own``."""
    rows = source.tokens_seen
    handed = _Sum()
    alone = _Sum()
    for layer, (expected, found) in enumerate(zip(exact.caches(), own.caches(), strict=True)):
        arrays = source.layers[layer].arrays
        for part, name in enumerate(("key", "value")):
            truth = _wide(expected.state[part])[:, :rows]
            arrived = mx.array(np.asarray(arrays[name], np.float32)).astype(mx.bfloat16)
            handed.add(_wide(arrived[None]), truth)
            alone.add(_wide(found.state[part])[:, :rows], truth)
    return {"handed_over": handed.relative(), "own_prefill": alone.relative()}


class _Sum:
    """Squares of differences and of what they are relative to."""

    def __init__(self) -> None:
        self._difference, self._norm = 0.0, 0.0

    def add(self, found: Array, truth: Array) -> None:
        self._difference += float(np.sum((found - truth) ** 2))
        self._norm += float(np.sum(truth**2))

    def relative(self) -> float:
        return float(np.sqrt(self._difference / self._norm))


def _wide(array: Any) -> Array:
    return np.array(array.astype(mx.float32))[0].astype(np.float64)


def sentence(model: str, found: Sequence[dict[str, float]]) -> str:
    """What the page says of it."""
    spans = []
    for side in ("handed_over", "own_prefill"):
        percent = [100 * one[side] for one in found]
        spans.append(f"{min(percent):.2f} to {max(percent):.2f} %")
    return f"{model}: handed over {spans[0]}, its own prefill {spans[1]} ({len(found)} prompts)"

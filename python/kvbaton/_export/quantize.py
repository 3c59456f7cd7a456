"""Weights in fewer bits: projections and embeddings alone.

Tables and masks stay as they are: a causal mask or a rotary table in eight bits is another model, and a row of
zeros has no scale. Each scheme is one ``constexpr`` operation of iOS 18:

- ``int8``: symmetric, a scale for each output (row).
- ``int4-block32``: a scale for each 32 values of a row, the best of several. Codes are -8..7. Embeddings and the
  head are ``int8``: rows of a vocabulary differ by less than 4 bits tell apart.
- ``lut6``: palettes of 64 values, one for every 16 rows, by k-means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from .errors import ExportError
from .weights import Half

Quantize = Literal["int8", "int4-block32", "lut6"]

BLOCK = 32
"""Values that share a scale in ``int4-block32``."""

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
"""Weights with a row for each token."""

PEAKS = (-8.6, -8.3, -8.0, -7.7, -7.4, -7.0, -6.6, 7.0, 7.3, 7.6, 8.0)
"""Where ``int4-block32`` tries to put a block's value of largest magnitude, in codes."""

PIECE = 1 << 17
"""Blocks that are fitted at a time, so that a large vocabulary takes no more memory than a small one."""

GROUP = 16
"""Rows that share a palette in ``lut6``."""

ENTRIES = 64
"""Values of a palette."""

ROUNDS = 30
"""Rounds of k-means, at most; the error hardly changes after ten."""

Array = npt.NDArray[Any]


@dataclass
class Quantizer:
    """Quantises each weight once for all functions of a package."""

    scheme: Quantize
    parts: dict[str, dict[str, Array]] = field(default_factory=dict)

    def quantized(self, name: str, value: Callable[[], Half]) -> dict[str, Array]:
        """The parts of the weight ``name`` (rows, columns): ``data`` and ``scale``, or ``indices`` and ``lut``."""
        if name not in self.parts:
            self.parts[name] = _SCHEMES[self.scheme](name, value())
        return self.parts[name]

    def forget(self, kept: str) -> None:
        """Drops every weight but one."""
        self.parts = {name: parts for name, parts in self.parts.items() if name == kept}


def check_scheme(scheme: str | None) -> Quantizer | None:
    """The quantiser of a scheme.

    Raises:
        ExportError: there is no such scheme (``quantize``).
    """
    if scheme is None:
        return None
    for known in get_args(Quantize):
        if scheme == known:
            return Quantizer(known)
    names = ", ".join(get_args(Quantize))
    raise ExportError("quantize", f"weights cannot be quantised to {scheme}; known: {names}", quantize=scheme)


def _symmetric(weight: Array, peak_code: float, low: int, high: int) -> tuple[Array, Array]:
    """Codes in ``low..high`` and fp16 scales, along the last axis; the largest value is at ``peak_code``."""
    peak = np.abs(weight).max(axis=-1, keepdims=True)
    scale = _usable(peak / peak_code)
    return np.clip(np.rint(weight / scale), low, high), scale.astype(np.float16)


def _int8(name: str, value: Half) -> dict[str, Array]:
    codes, scale = _symmetric(value.astype(np.float32), 127, -127, 127)
    return {"data": codes.astype(np.int8), "scale": scale}


def _int4(name: str, value: Half) -> dict[str, Array]:
    from coremltools.converters.mil.mil import types

    if name in VOCABULARY:
        return _int8(name, value)
    rows, columns = value.shape
    if columns % BLOCK:
        raise ExportError(
            "quantize",
            f"{name} has rows of {columns} values, int4-block32 needs a multiple of {BLOCK}",
            tensor=name,
            columns=columns,
        )
    blocks = value.reshape(rows * columns // BLOCK, BLOCK)
    parts = [_fitted(blocks[at : at + PIECE].astype(np.float32)) for at in range(0, len(blocks), PIECE)]
    codes = np.concatenate([codes for codes, _ in parts]).reshape(rows, columns)
    scale = np.concatenate([scale for _, scale in parts]).reshape(rows, columns // BLOCK)
    return {"data": codes.astype(types.np_int4_dtype), "scale": scale}


def _fitted(blocks: Array) -> tuple[Array, Array]:
    """Codes and fp16 scales of blocks, whichever of several scales leaves the smallest error.

    Each scale puts the value of largest magnitude at one of :data:`PEAKS` (a scale may be negative: there is a code
    more on that side), and is then fitted to the codes by least squares.
    """
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[:, None], -1)
    best_error = np.full(peak.shape, np.inf, np.float32)
    best_codes, best_scale = np.zeros_like(blocks, np.int8), np.ones(peak.shape, np.float16)
    for at in PEAKS:
        scale = _usable(peak / np.float32(at))
        codes = np.clip(np.rint(blocks / scale), -8, 7)
        squares = (codes * codes).sum(-1, keepdims=True)
        fitted = (blocks * codes).sum(-1, keepdims=True) / np.where(squares == 0, 1, squares)
        scale = _usable(np.where(fitted == 0, scale, fitted))
        codes = np.clip(np.rint(blocks / scale), -8, 7)
        error = ((codes * scale - blocks) ** 2).sum(-1, keepdims=True)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_codes = np.where(better, codes, best_codes).astype(np.int8)
        best_scale = np.where(better, scale, best_scale).astype(np.float16)
    return best_codes, best_scale


def _usable(scale: Array) -> Array:
    """The scale as fp16 holds it.

    All zeros, or too small for fp16: any scale will do, and no code is divided by 0.
    """
    scale = scale.astype(np.float16).astype(np.float32)
    scale[scale == 0] = 1
    return scale


def _lut6(name: str, value: Half) -> dict[str, Array]:
    from coremltools.converters.mil.mil import types

    rows, columns = value.shape
    group = next(g for g in range(min(GROUP, rows), 0, -1) if rows % g == 0)
    weight = value.astype(np.float32).reshape(rows // group, group * columns)
    lut = np.empty((len(weight), ENTRIES), np.float16)
    indices = np.empty(weight.shape, np.uint8)
    for number, values in enumerate(weight):
        lut[number] = _palette(values)
        entries = lut[number].astype(np.float32)
        indices[number] = np.searchsorted((entries[1:] + entries[:-1]) / 2, values)
    indices = indices.reshape(rows, columns)
    return {"indices": indices.astype(types.np_uint6_dtype), "lut": lut.reshape(-1, 1, ENTRIES, 1)}


def _palette(values: Array) -> Array:
    """The fp16 entries, ascending, to which k-means moves a start halfway between even spacing and even shares."""
    ordered = np.sort(values)
    sums = np.concatenate([[0], np.cumsum(ordered, dtype=np.float64)])
    shares = np.quantile(ordered, (np.arange(ENTRIES) + 0.5) / ENTRIES)
    entries = (shares + np.linspace(ordered[0], ordered[-1], ENTRIES)) / 2
    for _ in range(ROUNDS):
        middles = (entries[1:] + entries[:-1]) / 2
        edges = np.concatenate([[0], np.searchsorted(ordered, middles), [len(ordered)]])
        members = np.diff(edges)
        means = np.diff(sums[edges]) / np.maximum(members, 1)
        moved = np.where(members > 0, means, entries)
        if np.array_equal(moved, entries):
            break
        entries = moved
    return np.sort(entries).astype(np.float16)


_SCHEMES: dict[str, Callable[[str, Half], dict[str, Array]]] = {
    "int8": _int8,
    "int4-block32": _int4,
    "lut6": _lut6,
}

"""Weights in fewer bits: projections and embeddings alone.

Tables and masks stay as they are: a causal mask or a rotary table in eight bits is another model, and a row of
zeros has no scale. Each scheme is one ``constexpr`` operation of iOS 18:

- ``int8``: symmetric, a scale for each output (row).
- ``int4-block32``: a scale and an offset for each 32 values of a row, the best of several. Codes are 0..15.
- ``int4-block32-int8``: the same, with embeddings and head in ``int8``: rows of a vocabulary differ by less than 4
  bits tell apart.
- ``lut6``: palettes of 64 values, one for every 16 rows, by k-means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from .errors import ExportError
from .weights import Half

Quantize = Literal["int8", "int4-block32", "int4-block32-int8", "lut6"]

BLOCK = 32
"""Values that share a scale and an offset in ``int4-block32``."""

LARGEST = 15
"""The largest code of four bits."""

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
"""Weights with a row for each token."""

SHARES = (1.0, 0.94, 0.88, 0.82, 0.75)
"""Of a block's range, what ``int4-block32`` tries to spread its codes over; values outside take the last one."""

PEAKS = (-8.0, 7.5, -7.0)
"""Where it tries to put the value of largest magnitude, counted from the code 8, which stands for 0 then."""

PIECE = 1 << 13
"""Blocks that are fitted at a time: few enough for the processor's cache."""

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


def _int4_int8(name: str, value: Half) -> dict[str, Array]:
    return (_int8 if name in VOCABULARY else _int4)(name, value)


def _int4(name: str, value: Half) -> dict[str, Array]:
    from coremltools.converters.mil.mil import types

    rows, columns = value.shape
    if columns % BLOCK:
        raise ExportError(
            "quantize",
            f"{name} has rows of {columns} values, int4-block32 needs a multiple of {BLOCK}",
            tensor=name,
            columns=columns,
        )
    blocks = value.reshape(rows * columns // BLOCK, BLOCK)
    pieces = (blocks[at : at + PIECE].astype(np.float32) for at in range(0, len(blocks), PIECE))
    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(_fitted, pieces))
    codes, scale, offset = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return {
        "data": codes.reshape(rows, columns).astype(types.np_uint4_dtype),
        "scale": scale.reshape(rows, columns // BLOCK),
        "offset": offset.reshape(rows, columns // BLOCK),
    }


def _fitted(blocks: Array) -> tuple[Array, Array, Array]:
    """Codes, fp16 scales and fp16 offsets of blocks, whichever of several starts leaves the smallest error.

    A value is ``(code - offset) * scale``, the difference rounded to fp16. Each start is fitted to the codes that
    it gives by least squares.
    """
    best_error = np.full((len(blocks), 1), np.inf, np.float32)
    best_codes = np.zeros_like(blocks, np.uint8)
    best_scale, best_offset = np.ones_like(best_error, np.float16), np.zeros_like(best_error, np.float16)
    for scale, low in _starts(blocks):
        for _ in range(2):
            scale, low = _least_squares(blocks, _coded(blocks, scale, -low / scale), scale, low)
        scale = _usable(scale)
        offset = (-low / scale).astype(np.float16)
        codes = _coded(blocks, scale, offset.astype(np.float32))
        made = (codes - offset.astype(np.float32)).astype(np.float16).astype(np.float32) * scale
        error = ((made - blocks) ** 2).sum(-1, keepdims=True)
        # Offsets beyond fp16 leave no number.
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_codes = np.where(better, codes, best_codes).astype(np.uint8)
        best_scale = np.where(better, scale, best_scale).astype(np.float16)
        best_offset = np.where(better, offset, best_offset)
    return best_codes, best_scale, best_offset


def _starts(blocks: Array) -> Iterator[tuple[Array, Array]]:
    """Scales, and the values that code 0 stands for."""
    low, high = blocks.min(-1, keepdims=True), blocks.max(-1, keepdims=True)
    for share in SHARES:
        scale = _nonzero((high - low) * np.float32(share / LARGEST))
        yield scale, (low + high - scale * LARGEST) / 2
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[:, None], -1)
    for at in PEAKS:
        scale = _nonzero(peak / np.float32(at))
        yield scale, -8 * scale


def _coded(blocks: Array, scale: Array, offset: Array) -> Array:
    codes: Array = np.clip(np.rint(blocks / scale + offset), 0, LARGEST)
    return codes


def _least_squares(blocks: Array, codes: Array, scale: Array, low: Array) -> tuple[Array, Array]:
    """The line through ``blocks`` over ``codes``; as it was where all codes are one."""
    mean, middle = codes.mean(-1, keepdims=True), blocks.mean(-1, keepdims=True)
    spread = codes - mean
    squares = (spread * spread).sum(-1, keepdims=True)
    fitted = (spread * (blocks - middle)).sum(-1, keepdims=True) / _nonzero(squares)
    fits = (squares > 0) & (fitted != 0)
    return np.where(fits, fitted, scale), np.where(fits, middle - fitted * mean, low)


def _nonzero(values: Array) -> Array:
    nonzero: Array = np.where(values == 0, np.float32(1), values)
    return nonzero


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
    "int4-block32-int8": _int4_int8,
    "lut6": _lut6,
}

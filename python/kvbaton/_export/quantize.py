"""Weights in fewer bits: projections and embeddings alone.

Tables and masks stay as they are: a causal mask or a rotary table in eight bits is another model, and a row of
zeros has no scale. Each scheme is one ``constexpr`` operation of iOS 18:

- ``int8``: symmetric, a scale for each output (row).
- ``int4-block32``: symmetric, a scale for each 32 values of a row. Codes are -8..7 and the largest value lies half
  a step beyond 7, as coremltools has it: each code then stands for as wide a range.
- ``lut6``: palettes of 64 evenly spaced values, one for every 16 rows.
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

GROUP = 16
"""Rows that share a palette in ``lut6``."""

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
    scale = (peak / peak_code).astype(np.float16)
    # All zeros, or too small for fp16: any scale will do, and no code is divided by 0.
    scale[scale == 0] = 1
    codes = np.clip(np.rint(weight / scale.astype(np.float32)), low, high)
    return codes, scale


def _int8(name: str, value: Half) -> dict[str, Array]:
    codes, scale = _symmetric(value.astype(np.float32), 127, -127, 127)
    return {"data": codes.astype(np.int8), "scale": scale}


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
    blocks = value.astype(np.float32).reshape(rows, columns // BLOCK, BLOCK)
    codes, scale = _symmetric(blocks, 7.5, -8, 7)
    data = codes.reshape(rows, columns).astype(np.int8).astype(types.np_int4_dtype)
    return {"data": data, "scale": scale[..., 0]}


def _lut6(name: str, value: Half) -> dict[str, Array]:
    from coremltools.converters.mil.mil import types

    rows, columns = value.shape
    group = next(g for g in range(min(GROUP, rows), 0, -1) if rows % g == 0)
    weight = value.astype(np.float32).reshape(rows // group, group * columns)
    low = weight.min(axis=1, keepdims=True)
    step = (weight.max(axis=1, keepdims=True) - low) / 63
    step[step == 0] = 1
    indices = np.rint((weight - low) / step).astype(np.uint8).reshape(rows, columns)
    lut = (low + np.arange(64, dtype=np.float32) * step).astype(np.float16)
    return {"indices": indices.astype(types.np_uint6_dtype), "lut": lut.reshape(-1, 1, 64, 1)}


_SCHEMES: dict[str, Callable[[str, Half], dict[str, Array]]] = {
    "int8": _int8,
    "int4-block32": _int4,
    "lut6": _lut6,
}

"""Rotary tables, by the formulas of mlx-lm's ``rope_utils.py``, in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .config import Rope

Float64 = npt.NDArray[np.float64]


def periods(rope: Rope) -> Float64:
    """The divisors of positions, shape ``(dims / 2,)``: ``p`` turns pair ``i`` by ``p / periods[i]``.

    For ``llama3`` these are mlx-lm's ``Llama3RoPE._freqs``; ``linear`` stretches positions by its factor.
    """
    exponents = np.arange(0, rope.dims, 2, dtype=np.float64) / rope.dims
    base: Float64 = np.asarray(rope.theta**exponents)
    scaling = rope.scaling
    if scaling["kind"] == "linear":
        return base * float(scaling["factor"])
    if scaling["kind"] != "llama3":
        return base
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * np.pi * base
    # Long waves are stretched, short ones kept, those between are blended.
    stretched: Float64 = np.where(wavelength > context / low, base * factor, base)
    between = (wavelength > context / high) & (wavelength < context / low)
    if not between.any():
        return stretched
    smooth = (context / wavelength - low) / (high - low)
    blended: Float64 = np.where(between, base / ((1 - smooth) / factor + smooth), stretched)
    return blended


def tables(rope: Rope, rows: int) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """Cosine and sine of positions ``0..rows``, each ``(rows, dims)`` fp16, both halves alike."""
    angles = np.arange(rows, dtype=np.float64)[:, None] / periods(rope)
    angles = np.concatenate([angles, angles], axis=-1)
    return np.cos(angles).astype(np.float16), np.sin(angles).astype(np.float16)

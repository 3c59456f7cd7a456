"""Codes of few bits as coremltools takes them: shared by what writes compressed weights (here and in ``bench``)."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import types

RANGES = {
    "int4": (types.np_int4_dtype, -8, 8),
    "uint1": (types.np_uint1_dtype, 0, 2),
    "uint2": (types.np_uint2_dtype, 0, 4),
    "uint3": (types.np_uint3_dtype, 0, 8),
    "uint4": (types.np_uint4_dtype, 0, 16),
    "uint6": (types.np_uint6_dtype, 0, 64),
    "int8": (np.int8, -128, 128),
    "uint8": (np.uint8, 0, 256),
}
"""numpy's type that coremltools knows a width by, the smallest code, and the one after the largest."""


def codes(rng: np.random.Generator, kind: str, *shape: int) -> Any:
    """Random codes."""
    dtype, low, high = RANGES[kind]
    return rng.integers(low, high, shape).astype(dtype)


def mask(rng: np.random.Generator, share: float, *shape: int) -> Any:
    """Random bits, of which ``share`` are set."""
    return (rng.random(shape) < share).astype(types.np_uint1_dtype)


def pack(values: Any, bits: int) -> Any:
    """Codes of ``bits`` bits one after the other, the lowest bit first: what opsets before iOS 18 store."""
    flat = (values.ravel()[:, None] >> np.arange(bits)) & 1
    return np.packbits(flat.ravel().astype(np.uint8), bitorder="little")

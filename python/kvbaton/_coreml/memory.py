"""Zeroed memory of its own for each tensor: whole pages that go back to the system when the array goes."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CapacityError

NUMPY = {
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float32": np.float32,
    "int8": np.int8,
    "uint32": np.uint32,
}


def zeros(shape: list[int], strides: list[int], size_bytes: int, dtype: str) -> npt.NDArray[Any]:
    """A zeroed array; pages that nobody writes take no memory."""
    if size_bytes == 0:
        return np.zeros(shape, NUMPY[dtype])
    try:
        pages = mmap.mmap(-1, size_bytes)
    except (OSError, OverflowError) as error:
        raise CapacityError(
            f"{size_bytes} bytes for a tensor of shape {shape} cannot be had: {error}",
            hint="fewer slots",
            fields={"bytes": size_bytes, "shape": shape},
        ) from error
    return np.ndarray(tuple(shape), NUMPY[dtype], buffer=pages, strides=tuple(strides))

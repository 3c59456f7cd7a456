"""MLX-owned arrays that nobody has written yet.

``mx.zeros`` writes every page once before the rows are copied over it, on one thread, and page faults cost
more than the copy. MLX allocates an array without writing it when it loads one from a file: here from a file
object that says how many tensors there are and of what shape, and leaves their bytes unread. The fill that
follows writes all of them, free rows included, on all threads.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

_NAMES = {"float16": ("F16", 2), "bfloat16": ("BF16", 2), "float32": ("F32", 4), "uint32": ("U32", 4)}

Wanted = Sequence[tuple[Sequence[int], str]]
"""Shapes and types of elements."""


class _UnreadTensors(io.RawIOBase):
    """A safetensors file of the given shapes whose header can be read and whose data is left alone."""

    def __init__(self, wanted: Wanted) -> None:
        header: dict[str, Any] = {}
        end = 0
        for index, (shape, dtype) in enumerate(wanted):
            name, size = _NAMES[dtype]
            start, end = end, end + math.prod(shape) * size
            header[str(index)] = {"dtype": name, "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        self._head = struct.pack("<Q", len(text)) + text
        self._size = len(self._head) + end
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._size - self._at)
        head = self._head[self._at : self._at + count]
        buffer[: len(head)] = head
        self._at += count
        return count


def size_bytes(wanted: Wanted) -> int:
    """Bytes of all of them."""
    return sum(math.prod(shape) * _NAMES[dtype][1] for shape, dtype in wanted)


def reserve(wanted: Wanted) -> tuple[list[mx.array], str]:
    """One array for each shape and type, allocated by MLX, and how: ``reserved`` (contents undefined) or
    ``zeroed``."""
    import mlx.core as mx

    try:
        loaded: Any = mx.load(_UnreadTensors(wanted), format="safetensors")  # type: ignore[arg-type]
        arrays = [loaded[str(index)] for index in range(len(wanted))]
        del loaded
        mx.eval(arrays)
        kind = "reserved"
    except (RuntimeError, TypeError, ValueError):
        # A version of MLX that reads files otherwise: the documented way, which costs a pass over the memory.
        arrays = [mx.zeros(shape, getattr(mx, dtype)) for shape, dtype in wanted]
        mx.eval(arrays)
        kind = "zeroed"
    return arrays, kind

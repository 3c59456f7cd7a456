"""Weights of an MLX model folder as fp16 arrays: sharded or not, bf16 or fp32, affine-quantised or plain.

Reads safetensors directly, because numpy has no bfloat16. Arithmetic is numpy's alone, so export gives the
same bytes with and without mlx installed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ExportError

HALF_MAX = 65504.0
"""The largest finite fp16 value."""

# bfloat16 is kept as its bits until it is widened.
_DTYPES: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F32": np.dtype("<f4"),
    "U32": np.dtype("<u4"),
}
_HEADER_LIMIT_BYTES = 100_000_000

Half = npt.NDArray[np.float16]
Single = npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies: file, dtype name, shape, and the absolute start of its data."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int

    def load(self) -> npt.NDArray[Any]:
        if 0 in self.shape:
            return np.empty(self.shape, _DTYPES[self.dtype])
        return np.memmap(self.file, _DTYPES[self.dtype], "r", self.offset_bytes, self.shape)


class Weights:
    """The tensors of one folder, handed out by name; remembers which were asked for."""

    def __init__(self, folder: Path, quantization: dict[str, Any] | None = None) -> None:
        """Reads the headers of ``model*.safetensors``, the files that mlx-lm loads.

        Raises:
            ExportError: no such file, a broken one, or two that hold the same tensor (``weights``).
        """
        files = sorted(Path(folder).glob("model*.safetensors"))
        if not files:
            raise ExportError("weights", f"no model*.safetensors in {folder}", path=str(folder))
        self._stored: dict[str, _Stored] = {}
        for file in files:
            for name, stored in _read_header(file).items():
                if name in self._stored:
                    first = self._stored[name].file.name
                    raise ExportError(
                        "weights",
                        f"tensor {name} is in {first} and in {file.name}",
                        tensor=name,
                        files=[first, file.name],
                    )
                self._stored[name] = stored
        self._quantization = quantization
        self._used: set[str] = set()

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def take(self, name: str, shape: tuple[int, ...]) -> Half:
        """Returns tensor ``name`` as fp16 of the given shape, dequantised where the folder is quantised.

        Raises:
            ExportError: missing or of another shape or dtype (``weights``); a value that fp16 cannot hold
                (``overflow``).
        """
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and f"{path}.scales" in self._stored:
            values: npt.NDArray[Any] = self._dequantized(path, shape)
        else:
            stored = self._find(name)
            if stored.dtype == "U32":
                raise ExportError(
                    "weights", f"tensor {name} is packed (U32) but has no scales", tensor=name, dtype="U32"
                )
            _check_shape(name, stored.shape, shape)
            values = _widened(stored)
        return _to_half(name, values)

    def check_rows(self, name: str, rows: int) -> None:
        """Raises when the outermost axis of tensor ``name``, packed or not, is not ``rows`` long."""
        found = list(self._find(name).shape)
        if found[:1] != [rows]:
            raise ExportError(
                "weights",
                f"tensor {name} has shape {found}, config.json asks for {rows} rows",
                tensor=name,
                found=found,
                wanted=rows,
            )

    def unused(self) -> list[str]:
        """Names that nothing asked for, sorted."""
        return sorted(set(self._stored) - self._used)

    def _find(self, name: str) -> _Stored:
        stored = self._stored.get(name)
        if stored is None:
            raise ExportError("weights", f"the model has no tensor {name}", tensor=name)
        self._used.add(name)
        return stored

    def _dequantized(self, path: str, shape: tuple[int, ...]) -> Single:
        packed, scales = self._find(f"{path}.weight"), self._find(f"{path}.scales")
        biases = self._find(f"{path}.biases")
        group, bits = self._group_and_bits(path, packed, scales, shape)
        if packed.dtype != "U32":
            raise ExportError(
                "weights",
                f"tensor {path}.weight has scales but is {packed.dtype}, not U32",
                tensor=f"{path}.weight",
                dtype=packed.dtype,
            )
        rows, lanes = shape
        _check_shape(f"{path}.weight", packed.shape, (rows, lanes * bits // 32))
        _check_shape(f"{path}.scales", scales.shape, (rows, lanes // group))
        _check_shape(f"{path}.biases", biases.shape, (rows, lanes // group))
        return dequantize(packed.load(), _widened(scales), _widened(biases), group, bits)

    def _group_and_bits(
        self, path: str, packed: _Stored, scales: _Stored, shape: tuple[int, ...]
    ) -> tuple[int, int]:
        """What config.json says of this tensor, else what the shapes say; mlx-lm's order."""
        entry = (self._quantization or {}).get(path)
        if self._quantization is None:
            raise ExportError(
                "weights",
                f"tensor {path}.weight is quantised but config.json has no quantization",
                tensor=f"{path}.weight",
            )
        try:
            if isinstance(entry, dict):
                group, bits = int(entry["group_size"]), int(entry["bits"])
            else:
                group, bits = shape[-1] // scales.shape[-1], packed.shape[-1] * 32 // shape[-1]
        except (KeyError, TypeError, ValueError, ZeroDivisionError, IndexError) as error:
            raise ExportError(
                "weights", f"cannot tell the group size and bits of {path}.weight", tensor=f"{path}.weight"
            ) from error
        if bits not in (2, 3, 4, 5, 6, 8) or group < 1 or shape[-1] % group or shape[-1] * bits % 32:
            raise ExportError(
                "weights",
                f"tensor {path}.weight is packed with {bits} bits in groups of {group}, "
                f"which do not fit its {shape[-1]} lanes",
                tensor=f"{path}.weight",
                bits=bits,
                group_size=group,
                lanes=shape[-1],
            )
        return group, bits


def dequantize(
    packed: npt.NDArray[np.uint32], scales: Single, biases: Single, group_size: int, bits: int
) -> Single:
    """MLX affine dequantisation: ``scale * q + bias`` per group of the last axis, in f32.

    ``packed`` is (rows, lanes * bits / 32), ``scales`` and ``biases`` (rows, lanes / group_size); the result
    is (rows, lanes). Values lie back to back in a little-endian bit stream, lowest bits first, for every bit
    width.
    """
    rows = packed.shape[0]
    if 32 % bits == 0:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        codes = ((packed[..., None] >> shifts) & np.uint32((1 << bits) - 1)).reshape(rows, -1)
    else:
        stream = np.unpackbits(np.ascontiguousarray(packed).view(np.uint8), axis=-1, bitorder="little")
        codes = stream.reshape(rows, -1, bits) @ (1 << np.arange(bits)).astype(np.uint8)
    values = codes.astype(np.float32).reshape(rows, -1, group_size)
    values *= scales[..., None]
    values += biases[..., None]
    return values.reshape(rows, -1)


def _widened(stored: _Stored) -> npt.NDArray[Any]:
    values = stored.load()
    if stored.dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def _to_half(name: str, values: npt.NDArray[Any]) -> Half:
    """Rounds to fp16; refuses what would become infinite, and what is not a number."""
    with np.errstate(over="ignore"):
        half = np.ascontiguousarray(values, dtype=np.float16)
    # On the bits, because numpy's fp16 arithmetic is slow: exponent and fraction of a finite value stay below
    # inf's.
    if half.size and int((half.view(np.uint16) & 0x7FFF).max()) >= 0x7C00:
        largest = float(np.abs(values).max())
        raise ExportError(
            "overflow",
            f"tensor {name} reaches {largest:g}, above the largest float16 value {HALF_MAX:g}",
            tensor=name,
            largest=str(largest),
            limit=HALF_MAX,
        )
    return half


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise ExportError(
            "weights",
            f"tensor {name} has shape {list(found)}, config.json asks for {list(wanted)}",
            tensor=name,
            found=list(found),
            wanted=list(wanted),
        )


def _read_header(file: Path) -> dict[str, _Stored]:
    """Parses one safetensors header: u64 length, JSON, data. Every range is checked against the file."""

    def broken(why: str) -> ExportError:
        return ExportError("weights", f"{file} is not a valid safetensors file: {why}", path=str(file))

    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _HEADER_LIMIT_BYTES):
                raise broken(f"a header of {length} bytes in a file of {size}")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise ExportError(
            "weights", f"cannot read {file}: {error.strerror or error}", path=str(file)
        ) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ExportError):
            raise
        raise broken("its header is not JSON") from error
    if not isinstance(header, dict):
        raise broken("its header is not an object")
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
            begin, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise broken(f"the entry of {name} is malformed") from error
        if dtype not in _DTYPES:
            raise ExportError(
                "weights",
                f"tensor {name} has dtype {dtype}, known are {', '.join(_DTYPES)}",
                tensor=name,
                dtype=dtype,
            )
        count = 1
        for n in shape:
            count *= n
        if min(shape, default=0) < 0 or not 0 <= begin <= end <= size - 8 - length:
            raise broken(f"the data of {name} lies outside the file")
        if count * _DTYPES[dtype].itemsize != end - begin:
            raise broken(f"{name} has {end - begin} bytes for {count} values of {dtype}")
        found[name] = _Stored(file, dtype, shape, 8 + length + begin)
    return found

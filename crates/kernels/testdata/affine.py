"""Writes affine.bin: rows quantised and dequantised by MLX on the CPU, for the tests of `kvbaton_kernels::affine`.

usage: python affine.py     (needs mlx and numpy; writes beside itself)

The file is a sequence of cases: a header of four little-endian u32 (bits, group, dtype 0 = f16 / 1 = bf16 / 2 = f32, lanes), then values,
packed codes, scales, biases and dequantised values, each packed without padding.
"""

import struct
from pathlib import Path

import mlx.core as mx
import numpy as np

LANES = 128
DTYPES = [mx.float16, mx.bfloat16, mx.float32]


def rows(rng: np.random.Generator) -> np.ndarray:
    """Finite rows of 128 lanes that all three dtypes can hold, ordinary and odd ones."""
    normal = rng.standard_normal(LANES)
    odd = [
        normal,
        normal * 1e-3 + 5,
        -np.abs(normal) * 300,
        np.zeros(LANES),
        np.full(LANES, -3.25),
        normal * 1e-7,
        np.where(np.arange(LANES) % 2, 65504, -65504),
        np.round(normal * 4) / 4,
        np.where(np.arange(LANES) == 100, 6e4, normal * 1e-2),
        np.where(np.arange(LANES) % 3, -0.0, 0.0),
    ]
    return np.stack(odd).astype(np.float32)


def raw(array: mx.array) -> bytes:
    """The bytes of an array, whatever numpy thinks of its dtype."""
    size = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[array.dtype.size]
    return np.array(array.view(size)).tobytes()


def main() -> None:
    mx.set_default_device(mx.cpu)
    rng = np.random.default_rng(7)
    out = bytearray()
    for bits in [2, 3, 4, 5, 6, 8]:
        for group in [32, 64, 128]:
            for index, dtype in enumerate(DTYPES):
                # One odd row each keeps the file small; every row meets every width.
                table = rows(rng)
                for row in table[(bits + group // 32 + index) % 3 :: 3]:
                    values = mx.array(row).astype(dtype).reshape(1, LANES)
                    packed, scales, biases = mx.quantize(values, group_size=group, bits=bits)
                    back = mx.dequantize(packed, scales, biases, group_size=group, bits=bits)
                    out += struct.pack("<4I", bits, group, index, LANES)
                    for array in [values, packed, scales, biases, back]:
                        out += raw(array)
    Path(__file__).with_name("affine.bin").write_bytes(out)


if __name__ == "__main__":
    main()

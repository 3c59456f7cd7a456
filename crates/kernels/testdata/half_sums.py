"""Writes half_sums.bin: sums that are kept in fp16, as numpy defines them, for `tests/half_sums.rs`.

usage: python half_sums.py     (needs numpy; writes beside itself)

The definition, in numpy's words:

- product: the sum of an element grows over k, one term at a time, in float32; it is rounded to fp16 after every 32
  terms and after the last. Then the bias is added and the result rounded.
- row sums: value i of a row goes to partial sum i mod 16. All partial sums are rounded after every 32 values of the
  row and after its last; then the upper half of them is added to the lower, rounded, until one is left.

The file is a sequence of records: a little-endian u32 length and as many float32 values. Five products come first
(m, k, n; left [m, k]; right [n, k]; bias [n]; result [m, n]), then five rows (row; sum; sum of squares; softmax).
"""

import struct
from pathlib import Path

import numpy as np

TERMS, LANES = 32, 16


def half(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float16).astype(np.float32)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a·b + c rounded once: a and b are fp16 values, so that float64 holds their product and the sum."""
    with np.errstate(over="ignore"):
        return (a.astype(np.float64) * b + c).astype(np.float32)


def product(left: np.ndarray, right: np.ndarray, bias: np.ndarray) -> np.ndarray:
    total = np.zeros((left.shape[0], right.shape[0]), np.float32)
    depth = left.shape[1]
    for p in range(depth):
        total = fma(left[:, p, None], right[None, :, p], total)
        if (p + 1) % TERMS == 0 or p + 1 == depth:
            total = half(total)
    return half(total + bias)


def row_sum(row: np.ndarray, squares: bool = False) -> np.float32:
    partial = np.zeros(LANES, np.float32)
    for i, x in enumerate(row):
        lane = i % LANES
        if squares:
            # Rows may be float32 here: x² is exact in float64, and the sum rounds once to 53 bits, then to 24.
            partial[lane] = np.float32(np.float64(x) * np.float64(x) + np.float64(partial[lane]))
        else:
            partial[lane] += x
        if (i + 1) % TERMS == 0 or i + 1 == len(row):
            partial = half(partial)
    while len(partial) > 1:
        middle = len(partial) // 2
        partial = half(partial[:middle] + partial[middle:])
    return partial[0]


def softmax(row: np.ndarray) -> np.ndarray:
    e = np.exp((row - row.max()).astype(np.float64)).astype(np.float32)
    return half(e / row_sum(e))


def main() -> None:
    rng = np.random.default_rng(5)
    out = bytearray()

    def record(values: object) -> None:
        flat = np.asarray(values, np.float32).ravel()
        out.extend(struct.pack("<I", flat.size) + flat.astype("<f4").tobytes())

    for m, k, n in [(1, 64, 5), (1, 33, 40), (7, 1, 3), (13, 100, 35), (29, 700, 33)]:
        left, right = half(rng.standard_normal((m, k)) + 0.5), half(rng.standard_normal((n, k)) + 0.5)
        bias = half(rng.standard_normal(n))
        for values in [(m, k, n), left, right, bias, product(left, right, bias)]:
            record(values)
    for length, scale in [(1, 1), (16, 1), (47, 3), (600, 8), (4000, 1)]:
        row = half(rng.standard_normal(length) * scale + 0.25)
        for values in [row, row_sum(row), row_sum(row, squares=True), softmax(row)]:
            record(values)
    Path(__file__).with_name("half_sums.bin").write_bytes(out)


if __name__ == "__main__":
    main()

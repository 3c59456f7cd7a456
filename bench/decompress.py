"""Decompression of every form of compressed weights, as a share of the speed of a copy.

    python bench/decompress.py [MEGABYTES [PART_OF_A_NAME]]

Each form is one package with a weight of so many megabytes of fp16 (64 by default), decompressed by
``crates/exec/examples/decompress.rs`` on all cores and compared with a copy of as many bytes to fresh memory.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "crates/exec/testdata"))

from codes import codes as of_codes
from codes import mask as of_bits

RNG = np.random.default_rng(9)
COLUMNS = 4096
codes = partial(of_codes, RNG)


def halves(*shape: int) -> Any:
    """Random fp16 values."""
    return RNG.standard_normal(shape).astype(np.float16)


def forms(rows: int) -> Iterator[tuple[str, Any, Callable[[], Any]]]:
    """Name, target and maker of each form of a weight of ``rows`` rows."""
    new, old = ct.target.iOS18, ct.target.iOS16
    shape = (rows, COLUMNS)
    for kind in ("int8", "int4", "uint8", "uint4"):
        for what, coarse in (("channel", (rows, 1)), ("block 32", (rows, COLUMNS // 32))):
            offset = codes(kind, *coarse) if kind[0] == "u" else None
            yield (
                f"blockwise_shift_scale {kind}, a {what}" + (", offsets" if offset is not None else ""),
                new,
                lambda kind=kind, coarse=coarse, offset=offset: mb.constexpr_blockwise_shift_scale(
                    data=codes(kind, *shape), scale=halves(*coarse), offset=offset
                ),
            )
    for bits in (1, 2, 3, 4, 6, 8):
        yield (
            f"lut_to_dense uint{bits}, 16 rows",
            new,
            lambda bits=bits: mb.constexpr_lut_to_dense(
                indices=codes(f"uint{bits}", *shape), lut=halves(rows // 16, 1, 1 << bits, 1)
            ),
        )
    yield (
        "lut_to_dense uint4, vectors of 4",
        new,
        lambda: mb.constexpr_lut_to_dense(
            indices=codes("uint4", rows, COLUMNS // 4),
            lut=halves(rows // 16, 1, 16, 4),
            vector_axis=np.int32(1),
        ),
    )
    mask = of_bits(RNG, 0.4, *shape)
    count = int((mask != 0).sum())
    yield (
        "sparse_to_dense, 40 % stored",
        new,
        lambda: mb.constexpr_sparse_to_dense(mask=mask, nonzero_data=halves(count)),
    )

    def scaled() -> Any:
        parts = mb.constexpr_sparse_blockwise_shift_scale(
            data_mask=mask, nonzero_data=codes("int8", count), scale=halves(rows, 1)
        )
        return mb.constexpr_sparse_to_dense(mask=parts[0], nonzero_data=parts[1])

    def looked_up() -> Any:
        parts = mb.constexpr_lut_to_sparse(
            indices_mask=mask, indices_nonzero_data=codes("uint4", count), lut=halves(rows // 16, 1, 16, 1)
        )
        return mb.constexpr_sparse_to_dense(mask=parts[0], nonzero_data=parts[1])

    yield "sparse_blockwise_shift_scale int8, 40 % stored", new, scaled
    yield "lut_to_sparse uint4, 40 % stored", new, looked_up
    yield (
        "affine_dequantize uint8",
        old,
        lambda: mb.constexpr_affine_dequantize(
            quantized_data=codes("uint8", *shape), scale=halves(rows), zero_point=codes("uint8", rows), axis=0
        ),
    )


def package(folder: Path, target: Any, make: Callable[[], Any]) -> Path:
    """A program whose only work is to have the weight."""

    @mb.program(input_specs=[mb.TensorSpec((1, COLUMNS), dtype=types.fp16)], opset_version=target)
    def program(x: Any) -> Any:
        return mb.linear(x=x, weight=make(), name="y")

    model = ct.convert(
        program,
        minimum_deployment_target=target,
        compute_precision=ct.precision.FLOAT32,
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )
    path = folder / "weight.mlpackage"
    model.save(str(path))
    return path


def main() -> None:
    """Builds, runs and prints."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    rows = megabytes * 1_000_000 // (2 * COLUMNS) // 16 * 16
    cargo = ["cargo", "run", "--quiet", "--release", "-p", "kvbaton-exec", "--example", "decompress", "--"]
    print(f"{'form':52} {'GB/s written':>12}  share of a copy")
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    for name, target, make in (form for form in forms(rows) if wanted in form[0]):
        with tempfile.TemporaryDirectory() as folder:
            path = package(Path(folder), target, make)
            done = subprocess.run([*cargo, path], cwd=ROOT, capture_output=True, text=True, check=True)
        fields = dict(line.split(": ") for line in done.stdout.splitlines() if line.startswith("median "))
        print(
            f"{name:52} {fields['median GB/s written']:>12}  {fields['median share of a copy']}", flush=True
        )


if __name__ == "__main__":
    main()

"""Writes the packages that `kvbaton selftest` carries, with coremltools.

    python crates/kvbaton/testdata/generate.py

``double`` doubles arrays whose rows are 64, 100 and 200 elements long: an array can go in and come out of it, and its
strides show how rows are padded. ``sum`` adds its input to a state and returns the state. The third package that
`selftest` carries, a prefill in miniature, is one of the reader's own test files.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

HERE = Path(__file__).parent
SHAPES = {"64": (4, 64), "100": (6, 100), "200": (5, 200)}


def double():
    specs = [mb.TensorSpec(shape=shape, dtype=types.fp16) for shape in SHAPES.values()]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS16)
    def program(in_64, in_100, in_200):
        return tuple(
            mb.mul(x=x, y=np.float16(2), name=f"out_{n}")
            for n, x in zip(SHAPES, (in_64, in_100, in_200), strict=True)
        )

    return program, ct.target.iOS16


def summing():
    @mb.program(
        input_specs=[
            mb.TensorSpec(shape=(4, 64), dtype=types.fp16),
            mb.StateTensorSpec((4, 64), dtype=types.fp16),
        ],
        opset_version=ct.target.iOS18,
    )
    def program(in_64, total):
        now = mb.add(x=mb.read_state(input=total), y=in_64)
        now = mb.coreml_update_state(state=total, value=now)
        return mb.identity(x=now, name="out_64")

    return program, ct.target.iOS18


def main() -> None:
    for name, (program, target) in {"double": double(), "sum": summing()}.items():
        model = ct.convert(program, convert_to="mlprogram", minimum_deployment_target=target)
        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/m.mlpackage")
            out = HERE / f"{name}.mlpackage"
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(f"{folder}/m.mlpackage", out)


main()

"""Writes the packages that `kvbaton selftest` carries, with coremltools.

    python crates/kvbaton/testdata/generate.py

``double`` doubles arrays whose rows are 64, 100 and 200 elements long: an array can go in and come out of it, and its
strides show how rows are padded. ``sum`` adds its input to a state and returns the state; ``sides`` does so in functions
whose states have rows of 64, 96 and 100 elements: a power of two, a multiple of 32, and neither. ``prefill`` and ``decode``
are kvbaton's own exports of a language model in miniature with random weights: one leaves a cache, the other takes it.
A further package that `selftest` carries is one of the reader's own test files.
``chain`` is the same model split in two, for prompts in chunks of 8 tokens.

``states`` is for tests alone: the model split in two to ANEMLL's shapes, in packages which keep their part of the cache in
states and say nothing of themselves.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import coremltools as ct
import numpy as np
from coremltools.converters import mil
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

HERE = Path(__file__).resolve().parent
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


def summing(side: int = 64, name: str = "_64"):
    specs = {
        f"in{name}": mb.TensorSpec(shape=(4, side), dtype=types.fp16),
        "total": mb.StateTensorSpec((4, side), dtype=types.fp16),
    }
    program = mil.Program()
    with mil.Function(specs, opset_version=ct.target.iOS18) as function:
        total = function.inputs["total"]
        now = mb.add(x=mb.read_state(input=total), y=function.inputs[f"in{name}"])
        now = mb.coreml_update_state(state=total, value=now)
        function.set_outputs([mb.identity(x=now, name=f"out{name}")])
    program.add_function("main", function)
    return program, ct.target.iOS18


def sides() -> None:
    """One function a side, under one roof."""
    with tempfile.TemporaryDirectory() as folder:
        described = ct.utils.MultiFunctionDescriptor()
        for side in (64, 96, 100):
            program, target = summing(side, "")
            path = f"{folder}/{side}.mlpackage"
            ct.convert(program, convert_to="mlprogram", minimum_deployment_target=target).save(path)
            described.add_function(path, "main", f"rows_of_{side}")
        described.default_function_name = "rows_of_64"
        out = HERE / "sides.mlpackage"
        shutil.rmtree(out, ignore_errors=True)
        ct.utils.save_multifunction(described, str(out))


def language(model: Path) -> None:
    """Writes a Llama of two layers."""
    import tiny_models

    tiny_models.VOCAB = 48
    config = {
        **tiny_models.BASE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 48,
        "max_position_embeddings": 64,
    }
    tiny_models.write_plain(model, config, tiny_models.random_weights(config, seed=9))


def packages(model: Path) -> None:
    """The model as a prefill package and as a decode package of one context."""
    from kvbaton._export import export

    export(model, HERE / "prefill.mlpackage", buckets=(8, 16), force=True)
    export(model, HERE / "decode.mlpackage", kind="decode", context=(32,), force=True)


def chains(model: Path) -> None:
    """The model in two halves, with a past as an input and with the cache in states."""
    import test_chains as foreign
    from kvbaton._export import export
    from kvbaton._export.config import read_config
    from kvbaton._export.function import Part
    from kvbaton._export.package import write_package
    from kvbaton._export.weights import Weights

    export(model, HERE / "chain", buckets=(8,), context=(32,), chunk=8, split=2, force=True)
    config, take = read_config(model), Weights(model, None).take
    made = {"embeddings": {"main": foreign.embeddings(config, take)}}
    for layer in range(config.layers):
        part = Part(layer, layer + 1, config.layers)
        made[f"chunk_{layer}"] = {"prefill": foreign.layers(config, take, part)}
    out = HERE / "states"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for name, functions in made.items():
        write_package(functions, next(iter(functions)), out / f"{name}.mlpackage", {}, name)
    (out / "chain.toml").write_text(foreign.CHAIN)
    (out / "ffn.toml").write_text(foreign.FFN)


def main() -> None:
    sys.path.insert(0, str(HERE.parents[2] / "python/tests"))
    with tempfile.TemporaryDirectory() as folder:
        language(Path(folder))
        packages(Path(folder))
        chains(Path(folder))
    sides()
    for name, (program, target) in {"double": double(), "sum": summing()}.items():
        model = ct.convert(program, convert_to="mlprogram", minimum_deployment_target=target)
        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/m.mlpackage")
            out = HERE / f"{name}.mlpackage"
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(f"{folder}/m.mlpackage", out)


if __name__ == "__main__":
    main()

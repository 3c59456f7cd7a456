"""What the export tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvbaton._export import ExportReport, export

TinyModel = Callable[[str], Path]
"""The folder of a model named in ``tiny_models.CONFIGS``."""

DIGEST = "blake3:" + "0" * 64


def small_export(model: Path, out: Path, **options: Any) -> ExportReport:
    """Exports with short buckets and a digest that needs no native module."""
    return export(model, out, **{"buckets": (8, 16), "digest": lambda folder: DIGEST, **options})


def weight_bytes(package: Path) -> bytes:
    """The package's weight file."""
    return (package / "Data/com.apple.CoreML/weights/weight.bin").read_bytes()

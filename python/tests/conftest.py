"""Fixtures: tiny models, built once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_models
from export_helpers import TinyModel


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Gives the folder of a model named in :data:`tiny_models.CONFIGS`."""
    parent = tmp_path_factory.mktemp("models")

    def get(name: str) -> Path:
        return parent / name if (parent / name).exists() else tiny_models.build(name, parent)

    return get

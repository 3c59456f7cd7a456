"""What importing the package costs, and what it gives."""

from __future__ import annotations

import subprocess
import sys

import kvbaton


def test_every_public_name_is_there() -> None:
    """Names are imported when they are asked for: one that no module gives would be missed only then."""
    for name in kvbaton.__all__:
        assert getattr(kvbaton, name) is not None, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As of any module."""
    assert not hasattr(kvbaton, "no_such_name")


def test_importing_it_imports_no_numpy() -> None:
    """The command line starts with this import."""
    code = "import kvbaton, sys; sys.exit(any(m in sys.modules for m in ('numpy', 'mlx', 'coremltools')))"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0

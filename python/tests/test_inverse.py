"""Core ML writing into memory that MLX owns: the probe, with the fake in Core ML's place."""

from __future__ import annotations

import json
import sys

import kvbaton
import mlx.core as mx
import numpy as np
import pytest
from kvbaton import _native
from kvbaton._mlx import inverse

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="Core ML is there, and its answer is open")


def test_the_fake_writes_into_an_array_of_mlx_and_mlx_sees_it() -> None:
    found = inverse.probe()
    assert (found.engine, found.used, found.seen, found.stayed) == ("fake", True, True, True)
    assert found.works
    assert found.to_dict()["works"]
    assert found.mlx == mx.__version__


def test_nothing_behind_the_output_is_touched() -> None:
    array = mx.full((600,), 7, dtype=mx.float16)
    mx.eval(array)
    found = json.loads(_native.write_into(("output", array, "float16")))
    assert (found["elements"], found["value"]) == (256, 2.0)
    assert np.array_equal(np.array(array), np.array([2] * 256 + [7] * 344, np.float16))


def test_memory_that_is_too_small_or_read_only_is_refused_untouched() -> None:
    small = np.zeros(100, np.float16)
    with pytest.raises(kvbaton.errors.ProgramError, match="512 bytes are needed, there are 200"):
        _native.write_into(("output", small, "float16"))
    assert not small.any()
    fixed = np.zeros(256, np.float16)
    fixed.flags.writeable = False
    with pytest.raises(kvbaton.errors.UsageError, match="read-only"):
        _native.write_into(("output", fixed, "float16"))


def test_a_backing_that_was_not_used_is_no_way_without_a_copy() -> None:
    found = inverse.Inverse(
        "coreml", "0.32.4", "metal", used=False, seen=False, stayed=True, bytes_into_page=0
    )
    assert not found.works

"""The fake engine's habits, and hand-offs that survive them."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import kvbaton
import numpy as np
import pytest
from kvbaton.testing import FakePrefill, element

SHAPE = {"layers": 3, "kv_heads": 2, "head_dim": 24}


def expected(part: str, layer: int, tokens: list[int]) -> np.ndarray:
    """By the docstring's words, element by element."""
    rows = [
        [
            [element(part, layer, head, row, lane, token) for lane in range(24)]
            for row, token in enumerate(tokens)
        ]
        for head in range(2)
    ]
    return np.array(rows, np.float16)


@pytest.mark.parametrize("align", [0, 64, 100])
def test_every_element_arrives_where_it_belongs(align: int) -> None:
    tokens = [5, 900, 17, 3]
    cache = FakePrefill(**SHAPE, lengths=(8,), row_align_bytes=align)(tokens).cache
    for index, layer in enumerate(cache.layers):
        for part in ("key", "value"):
            assert np.array_equal(layer.arrays[part], expected(part, index, tokens)), (index, part)


def test_a_held_cache_is_never_overwritten() -> None:
    engine = FakePrefill(**SHAPE)
    held = engine([1, 2, 3]).cache
    with pytest.raises(kvbaton.errors.LeaseError, match="still read by 1"):
        engine([4])
    del held
    gc.collect()
    assert engine([4]).cache.tokens == [4]


def test_ignored_backings_leave_the_held_cache_alone() -> None:
    engine = FakePrefill(**SHAPE, ignores_backings=True)
    held = engine([1, 2, 3]).cache
    engine([9, 9, 9])
    assert np.array_equal(held.layers[0].arrays["key"], expected("key", 0, [1, 2, 3]))


@pytest.mark.skipif(sys.platform == "darwin", reason="Core ML is there")
def test_core_ml_elsewhere_is_refused_and_so_are_its_options(tmp_path: Path) -> None:
    with pytest.raises(kvbaton.errors.UnavailableError, match="needs a Mac"):
        kvbaton.Prefill(tmp_path, engine="coreml")
    with pytest.raises(kvbaton.errors.UsageError, match="--compute-units is for the engine coreml"):
        kvbaton.Prefill(tmp_path, compute_units="cpu-and-ne")
    with pytest.raises(kvbaton.errors.UsageError, match="no compute units are called `ane`"):
        kvbaton.Prefill(tmp_path, compute_units="ane")
    with pytest.raises(kvbaton.errors.UsageError, match="engine_timeout -1"):
        kvbaton.Prefill(tmp_path, engine_timeout=-1)


def test_a_failure_is_typed_and_the_next_prediction_works() -> None:
    engine = FakePrefill(**SHAPE, fails_at=(1,))
    assert engine.engine == "fake"
    engine([1])
    with pytest.raises(kvbaton.errors.ProgramError, match="prediction 1"):
        engine([2])
    assert engine([3]).report.tokens == 1

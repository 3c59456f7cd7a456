"""Long calls of an engine, told of to whoever waits, and their limits."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import kvbaton
import pytest
import tiny_models
from kvbaton._export import export
from kvbaton.testing import FakeCoreML

SLOW: dict[str, Any] = {"compute_units": "cpu", "hangs_loading": ("cpu",), "hang_seconds": 1.3}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of a tiny model."""
    parent = tmp_path_factory.mktemp("waiting")
    export(tiny_models.build("llama_tied", parent), parent / "p.mlpackage", buckets=(8,))
    return parent / "p.mlpackage"


def test_whoever_waits_hears_what_for_once_a_second(package: Path) -> None:
    heard: list[tuple[str, float]] = []
    engine = FakeCoreML(package, on_wait=lambda *told: heard.append(told), **SLOW)
    assert heard == []
    engine.prepare(3)
    [(what, seconds)] = heard
    assert what == "p.mlpackage: loading the model"
    assert 1 <= seconds < 1.3
    assert engine([1, 2, 3]).report.compute_units == "cpu"
    assert len(heard) == 1


def test_what_is_raised_meanwhile_neither_ends_the_call_nor_is_lost(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)

    def broken(what: str, seconds: float) -> None:
        raise ValueError(what)

    engine = FakeCoreML(package, on_wait=broken, **SLOW)
    assert engine([1, 2, 3]).report.tokens == 3
    assert [(type(said.exc_value), said.object) for said in lost] == [(ValueError, broken)]

    def interrupted(what: str, seconds: float) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        engine = FakeCoreML(package, on_wait=interrupted, **SLOW)
        with pytest.raises(KeyboardInterrupt):
            engine.prepare(3)
        assert len(lost) == 1
        assert engine([1, 2, 3]).report.tokens == 3
        # Where interrupts are ignored there is nothing to put it off to.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        FakeCoreML(package, on_wait=interrupted, **SLOW).prepare(3)
        assert type(lost[1].exc_value) is KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_prediction_has_a_limit_of_its_own(package: Path) -> None:
    engine = FakeCoreML(package, prediction_timeout=0.2, hangs_at=(0,), hang_seconds=0.8)
    said = r"the prediction did not return within 0\.2 s \(function `prefill_8` of `.*p\.mlpackage`\)"
    with pytest.raises(kvbaton.KvbatonError, match=said) as late:
        engine([1, 2, 3])
    assert late.value.fields["function"] == "prefill_8"
    assert engine([1, 2, 3]).cache.tokens == [1, 2, 3]
    with pytest.raises(kvbaton.errors.UsageError, match="prediction_timeout -1"):
        FakeCoreML(package, prediction_timeout=-1)

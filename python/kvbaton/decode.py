"""Decode: runs a Core ML package one token at a time, its cache in states."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _arguments as arguments
from . import _native
from .cache import CacheView
from .errors import UsageError
from .report import HandoffReport

__all__ = ["Decode"]


class Decode:
    """A decode package, as ``kvbaton export --kind decode`` writes it, ready to run.

    Its states hold the cache: :meth:`receive` fills them, every step adds a row.
    """

    def __init__(
        self,
        package: str | os.PathLike[str],
        *,
        threads: int = 0,
        engine: str | None = None,
        compute_units: str | None = None,
        engine_timeout: float | None = None,
        prediction_timeout: float | None = None,
        on_wait: Callable[[str, float], None] | None = None,
    ) -> None:
        """Opens ``package`` and loads it. ``threads`` 0 takes all cores.

        ``engine`` is ``coreml`` on a Mac and ``cpu`` elsewhere, unless it is named. ``compute_units`` (``all``,
        ``cpu-and-ne``, ``cpu-and-gpu``, ``cpu``), ``engine_timeout``, the seconds that loading may take,
        ``prediction_timeout``, those that a step may take, and ``on_wait`` are Core ML's: see
        :class:`kvbaton.Prefill`.

        Raises:
            UnavailableError: the engine is not of this system, or the system has no states.
            UsageError: the options are another engine's.
        """
        self._native = _native.NativeDecode(
            arguments.path(package, "package"),
            arguments.threads(threads),
            arguments.maybe_text(engine, "engine"),
            arguments.maybe_text(compute_units, "compute_units"),
            arguments.seconds(engine_timeout, "engine_timeout"),
            arguments.seconds(prediction_timeout, "prediction_timeout"),
            arguments.maybe_callable(on_wait, "on_wait"),
        )
        self._threads = threads

    @property
    def engine(self) -> str:
        """``cpu`` or ``coreml``."""
        return self._native.engine

    @property
    def compute_units(self) -> str | None:
        """The compute units that it was loaded for, where the engine has them."""
        return self._native.compute_units

    @property
    def notes(self) -> list[str]:
        """What there is to know of how it runs: units that were replaced, work off the Neural Engine."""
        return self._native.notes

    @property
    def model(self) -> dict[str, Any]:
        """What the package says of its model."""
        found: dict[str, Any] = json.loads(self._native.model)
        return found

    @property
    def layout(self) -> str:
        """The layout of the states, as TOML: what :func:`kvbaton.to_coreml` takes."""
        return self._native.layout

    @property
    def capacity(self) -> int:
        """Rows that the states hold: the context."""
        return self._native.capacity

    @property
    def tokens_seen(self) -> int:
        """Tokens that the states have seen: the position of the next one."""
        return self._native.tokens_seen

    @property
    def cache(self) -> CacheView:
        """The states as a cache. While the view lives, the next step copies them."""
        return CacheView(self._native.cache())

    def clear(self) -> None:
        """Forgets every token."""
        self._native.clear()

    def receive(self, cache: CacheView) -> HandoffReport:
        """Takes ``cache`` over; whatever the states held is gone.

        Raises:
            IncompatibleError: the cache is of another model.
            CapacityError: it has more rows than the states.
            OverflowError: values that float16 does not hold.
        """
        arguments.instance(cache, CacheView, "cache")
        start = time.perf_counter()
        report = HandoffReport.from_json(self._native.receive(cache._native, self._threads))
        report.seconds = report.exposed_seconds = time.perf_counter() - start
        return report

    def step(self, token: int) -> npt.NDArray[np.float32]:
        """Runs ``token`` after those seen and returns the logits of the next, one a token of the vocabulary."""
        return np.frombuffer(
            self._native.step(arguments.whole(token, "token", most=2**32 - 1)), dtype=np.float32
        )

    def generate(self, tokens: Sequence[int], max_tokens: int) -> Iterator[int]:
        """Runs ``tokens``, of which there must be one, and yields the likeliest token ``max_tokens`` times."""
        ids = arguments.ids(tokens)
        max_tokens = arguments.whole(max_tokens, "max_tokens")
        if not ids:
            raise UsageError("a decoder starts from a token, and none was given")
        for token in ids[:-1]:
            self.step(token)
        token = ids[-1]
        for _ in range(max_tokens):
            token = int(self.step(token).argmax())
            yield token

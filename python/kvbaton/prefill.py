"""Prefill: runs a Core ML package over a prompt."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from . import _arguments as arguments
from . import _native
from ._mlx.adopting import settle
from .cache import CacheView, _describe
from .report import Activations, PrefillReport

__all__ = ["Prefill", "PrefillResult"]


@dataclass(frozen=True)
class PrefillResult:
    """What a prefill leaves: the cache of all its tokens, the logits after the last one (float32, one a token
    of the vocabulary; ``None`` where the program computes none), and what it cost."""

    cache: CacheView
    logits: npt.NDArray[np.float32] | None
    report: PrefillReport


class Prefill:
    """A Core ML prefill package, or a chain of them, ready to run.

    Runs on Core ML on a Mac, on kvbaton's CPU executor elsewhere. The package (``.mlpackage``; on a Mac also a
    compiled ``.mlmodelc``) must state its cache, as those made by ``kvbaton export`` do, or the caller must say it.
    A chain is named by its ``chain.toml`` or its folder; all its packages run on one engine.
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
        numerics: Literal["f32", "f16-storage", "f16-accumulate"] = "f16-storage",
        weights: Literal["resident", "streamed"] = "resident",
        max_memory: int | None = None,
        layout: str | os.PathLike[str] | None = None,
        model: str | os.PathLike[str] | None = None,
    ) -> None:
        """Opens ``package``.

        ``engine`` is ``coreml`` or ``cpu`` where the system's own is not wanted. ``compute_units`` say where Core
        ML may run it: ``all``, ``cpu-and-ne``, ``cpu-and-gpu`` or ``cpu``; left out, all are tried first and fewer
        when that fails, which the report says. ``engine_timeout`` is how many seconds Core ML may take to load a
        function, its compilation for the Neural Engine included (1200 if left out), ``prediction_timeout`` how many
        one prediction may take (300). ``on_wait`` is called once a second while Core ML is waited for, with what is
        waited for (``m.mlpackage: loading the model``) and the seconds so far. It cannot use the engine, which is
        busy, nor end the wait: what it raises goes to :func:`sys.unraisablehook`, a ``KeyboardInterrupt`` comes
        once the call has returned.

        The others are the CPU executor's. ``threads`` 0 takes all cores. ``numerics`` says what it rounds to fp16:
        nothing (``f32``), every result of the program's fp16 operations (``f16-storage``), or their sums as they
        grow, too (``f16-accumulate``: after every 32 terms). An answer that differs between them hangs on an
        engine's roundings. ``weights`` says whether compressed weights are kept decompressed (``resident``) or
        decompressed each time they are used (``streamed``); the results are the same bits. A function that would
        take more than ``max_memory`` bytes (what the machine has available, when ``None``) is refused before it is
        loaded.

        ``layout`` (a preset's name, or TOML that also names the program's inputs: a file or its text) and
        ``model`` (the folder that the package was made from) say what a foreign package does not say of itself.

        Raises:
            UnavailableError: the engine is not of this system.
            UsageError: an option is not one of those, or belongs to the other engine.
        """
        self._native = _native.NativePrefill(
            arguments.path(package, "package"),
            arguments.threads(threads),
            arguments.maybe_text(engine, "engine"),
            arguments.maybe_text(compute_units, "compute_units"),
            arguments.seconds(engine_timeout, "engine_timeout"),
            arguments.seconds(prediction_timeout, "prediction_timeout"),
            arguments.maybe_callable(on_wait, "on_wait"),
            arguments.text(numerics, "numerics"),
            arguments.text(weights, "weights"),
            arguments.maybe_whole(max_memory, "max_memory"),
            None if layout is None else arguments.layout(layout),
            _facts(model),
        )

    @classmethod
    def of_native(cls, native: _native.NativePrefill) -> Prefill:
        """Wraps an engine of the native module."""
        made = cls.__new__(cls)
        made._native = native
        return made

    @property
    def engine(self) -> str:
        """``cpu`` or ``coreml``; ``fake`` in tests."""
        return self._native.engine

    @property
    def functions(self) -> dict[str, int]:
        """Tokens that each function takes at once."""
        return dict(self._native.functions)

    @property
    def model(self) -> dict[str, Any] | None:
        """What the package says of its model."""
        text = self._native.model
        return None if text is None else json.loads(text)

    def prepare(self, tokens: int) -> None:
        """Loads what a prompt of ``tokens`` tokens needs; otherwise the first prefill does."""
        self._native.prepare(arguments.whole(tokens, "tokens"))

    def activations(self, tokens: Sequence[int]) -> Activations:
        """Runs ``tokens`` one operation at a time: the largest activation that they reach, and every overflow.

        Masked scores are left out, as are rows of padding: see :class:`Activations`.
        """
        return Activations.from_json(self._native.activations(arguments.ids(tokens)))

    def __call__(self, tokens: Sequence[int]) -> PrefillResult:
        """Prefills all of ``tokens`` with the shortest function that takes them.

        The logits are those after the last token. To decode from the cache, one token must be run again or
        still be to come: see :func:`kvbaton.to_mlx`.
        """
        settle(self._native)
        view, logits, report = self._native.prefill(arguments.ids(tokens))
        values = None if logits is None else np.frombuffer(logits, dtype=np.float32)
        cache = CacheView(view, values)
        cache.adoptable = True
        return PrefillResult(cache, values, PrefillReport.from_json(report))


def _facts(model: str | os.PathLike[str] | None) -> str | None:
    """What the folder that a package was made from says of its model, as JSON."""
    return None if model is None else json.dumps(_describe(model))

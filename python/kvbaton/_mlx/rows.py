"""Where rows come from: a cache that is there, or a prefill that is about to run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from .. import _native
from ..cache import CacheView
from ..errors import UsageError
from ..prefill import Prefill
from ..report import HandoffReport, PrefillReport
from .adopting import settle
from .slots import Spec

Arrays = list[tuple[str, Any, str]]
"""Names, arrays and element types."""

Wanted = tuple[str, str, str]
"""The targets' layout as TOML; their live rows and what their layers keep, as JSON."""


class Source(Protocol):
    """Fills arrays with rows."""

    layers: list[Spec]
    tokens_seen: int
    rings: dict[int, int]
    """Slots at which rings of mlx-lm start, by layer."""
    keeps_rows: bool
    """Whether only some of the rows can be asked for."""

    def fill(
        self, targets: Arrays, wanted: Wanted, only: tuple[int, int] | None, threads: int
    ) -> HandoffReport:
        """Fills ``targets``, which nobody has written; with ``only``, just those positions."""


class Rows:
    """The rows of a cache."""

    keeps_rows = True

    def __init__(self, cache: CacheView) -> None:
        self._native = cache._native
        self.layers: list[Spec] = json.loads(cache._native.cache)
        self.tokens_seen = cache.tokens_seen
        self.rings = cache.rings

    def fill(
        self, targets: Arrays, wanted: Wanted, only: tuple[int, int] | None, threads: int
    ) -> HandoffReport:
        layout, live, cache = wanted
        report = _native.view_fill(
            self._native, targets, layout, live, cache, only, threads=threads, fresh=True
        )
        return HandoffReport.from_json(report)


class Prefilling:
    """The rows of a prefill that runs when they are asked for, and fills as it goes."""

    keeps_rows = False

    def __init__(self, prefill: Prefill, tokens: Sequence[int]) -> None:
        layers = prefill._native.cache
        if layers is None:
            raise UsageError(
                "the engine does not say what its cache keeps before it runs",
                hint="prefill first, and hand the result over with to_mlx",
            )
        self._native = prefill._native
        self._tokens = list(tokens)
        self.layers: list[Spec] = json.loads(layers)
        self.tokens_seen = len(self._tokens)
        self.rings: dict[int, int] = {}
        self.report: PrefillReport | None = None

    def fill(
        self, targets: Arrays, wanted: Wanted, only: tuple[int, int] | None, threads: int
    ) -> HandoffReport:
        assert only is None, "checked where the caches are looked at"
        settle(self._native)
        prefill, report = self._native.prefill_into(self._tokens, targets, *wanted, threads=threads)
        self.report = PrefillReport.from_json(prefill)
        return HandoffReport.from_json(report)

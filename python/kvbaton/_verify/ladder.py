"""One prompt's ladder: from caches to rungs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .. import _native
from ..cache import CacheView
from ..errors import (
    CapacityError,
    IncompatibleError,
    KvbatonError,
    LayoutError,
    OverflowInCacheError,
    UsageError,
)
from ..mlx import dtype_name, from_mlx, make_caches, to_mlx
from .rungs import (
    Rung,
    Text,
    Thresholds,
    free_running_rung,
    logits_rung,
    not_run,
    teacher_forced_rung,
)
from .walk import Start, walk

DECODED = ("logits", "teacher_forced", "free_running")

# As many as mlx-lm's generate_step takes at once.
_CHUNK = 2048


class Side:
    """A cache to decode from, as often as is asked for."""

    def view(self) -> CacheView:
        """The live rows as the decoder has them. Nothing may decode from this side while the view lives."""
        raise NotImplementedError

    def raw(self) -> CacheView:
        """The live rows whose bytes are compared."""
        return self.view()

    def start(self) -> Start:
        """Caches of their own, ready to decode."""
        raise NotImplementedError

    @property
    def ready(self) -> str | None:
        """Why this side cannot be decoded from; ``None`` if it can."""
        return None


@dataclass
class HandedOver(Side):
    """A view that is handed over to a decoder, each time anew.

    With ``through``, bytes are compared after the hand-off, otherwise before it.
    """

    cache: CacheView
    model: Any
    tokens: Sequence[int] | None
    through: bool = False

    def __post_init__(self) -> None:
        self._first: Start | None = None

    def view(self) -> CacheView:
        """What arrived in the decoder's caches."""
        start = self._first = self._first or self._handed()
        ids = list(self.tokens) if self.tokens is not None else self.cache.tokens
        if ids is not None:
            ids = ids[: start.position]
        return from_mlx(start.caches, self.model, tokens=ids, tokens_seen=start.position)

    def raw(self) -> CacheView:
        """What arrived, or the view itself."""
        return self.view() if self.through else self.cache

    def start(self) -> Start:
        """The caches that :meth:`view` showed, then fresh ones."""
        first, self._first = self._first, None
        return first or self._handed()

    def _handed(self) -> Start:
        handed = to_mlx(self.cache, self.model, self.tokens, measure_memcpy=False)
        logits = None if handed.logits is None else np.asarray(handed.logits, np.float32)
        return Start(handed.prompt_cache, handed.remaining_tokens, handed.cached_tokens, logits)


@dataclass
class Caches(Side):
    """Caches of the decoder's own, which the caller has filled.

    They are copied, never written, unless they are this side's ``own``: then they can be started from once.
    """

    caches: Sequence[Any]
    model: Any | None
    tokens: Sequence[int] | None
    own: bool = False

    def view(self) -> CacheView:
        """Their live rows."""
        view = from_mlx(self.caches, self.model, tokens_seen=self._seen_by_tokens())
        return view

    def start(self) -> Start:
        """Copies of them, and the tokens that they have not seen."""
        seen = from_mlx(self.caches, self.model, tokens_seen=self._seen_by_tokens()).tokens_seen
        assert self.tokens is not None
        caches = list(self.caches) if self.own else copy.deepcopy(list(self.caches))
        return Start(caches, list(self.tokens)[seen:], seen)

    def _seen_by_tokens(self) -> int | None:
        """Recurrent states alone do not count tokens: all but the last are taken to be seen."""
        from .._mlx.slots import flatten

        recurrent = all(slot.recurrent for slot in flatten(list(self.caches)))
        return len(self.tokens) - 1 if recurrent and self.tokens is not None else None

    @property
    def ready(self) -> str | None:
        """The tokens must be known, and at least one must remain."""
        if self.tokens is None:
            return "the tokens are not known: give tokens="
        return None


def prefill_mlx(
    model: Any, tokens: Sequence[int], prompt_cache: list[Any] | None = None, piece: int = _CHUNK
) -> list[Any]:
    """The decoder's own prefill of ``tokens``, in pieces as mlx-lm cuts them unless another length is asked for."""
    import mlx.core as mx

    caches = make_caches(model) if prompt_cache is None else prompt_cache
    for first in range(0, len(tokens), piece):
        model(mx.array([[int(t) for t in tokens[first : first + piece]]]), cache=caches)
        mx.eval([c.state for c in caches])
    return caches


@dataclass(frozen=True)
class Job:
    """What a ladder needs besides its two sides.

    ``source`` is what left; without it the reference is taken for that, too. ``rungs`` are those to be run.
    """

    model: Any | None
    thresholds: Thresholds
    max_tokens: int
    source: CacheView | None = None
    rungs: Collection[str] = ("bytes", "values", *DECODED)
    ends: Collection[int] = ()
    text: Text | None = None
    tick: Callable[[], None] | None = None


def climb(reference: Side, candidate: Side, job: Job) -> list[Rung]:
    """All rungs of one prompt. A failure on one does not keep the others from running."""
    rungs = _compare(reference, candidate, job)
    wanted = [name for name in DECODED if name in job.rungs]
    if wanted:
        rungs += [rung for rung in _decode(reference, candidate, job) if rung["name"] in wanted]
    return rungs


def _compare(reference: Side, candidate: Side, job: Job) -> list[Rung]:
    rungs: list[Rung] = []
    if "bytes" in job.rungs:
        rungs.append(_attempt("bytes", lambda: _bytes(reference, candidate, job)))
    if "values" in job.rungs:
        rungs.append(_attempt("values", lambda: _values(reference, candidate, job)))
    return rungs


def _attempt(name: str, run: Callable[[], Rung]) -> Rung:
    """A rung, or why there is none: a cache that cannot be handed over keeps no other rung from running."""
    try:
        return run()
    except OverflowInCacheError as error:
        if name != "values":
            return not_run(name, str(error))
        first = error.fields.get("first") or {}
        place = {key: first.get(key) for key in ("tensor", "layer", "head", "row", "lane")}
        return {"name": name, "status": "fail", "where": place, "note": str(error)}
    except RefusedError as error:
        return not_run(name, str(error))


class RefusedError(Exception):
    """The decoder's caches cannot be filled from a side."""


def _bytes(reference: Side, candidate: Side, job: Job) -> Rung:
    source = job.source if job.source is not None else _handed(reference.raw)
    arrived = _handed(candidate.raw)
    found = _native.verify_bytes(_as_far(source, arrived)._native, arrived._native)
    return dict(json.loads(found))


def _values(reference: Side, candidate: Side, job: Job) -> Rung:
    expected, found = _handed(reference.view), _handed(candidate.view)
    dtype = "float32" if job.model is None else dtype_name(job.model)
    limits = json.dumps(asdict(job.thresholds))
    rung = _native.verify_values(_as_far(expected, found)._native, found._native, limits, dtype)
    return dict(json.loads(rung))


def _handed(view: Callable[[], CacheView]) -> CacheView:
    try:
        return view()
    except OverflowInCacheError:
        raise
    except (IncompatibleError, CapacityError, LayoutError) as error:
        raise RefusedError(str(error)) from error


def _as_far(source: CacheView, arrived: CacheView) -> CacheView:
    """The source without its last row where that was left out on purpose: its token is run again."""
    if source.tokens_seen != arrived.tokens_seen + 1:
        return source
    try:
        return source.trim(1)
    except UsageError:
        return source


def _decode(reference: Side, candidate: Side, job: Job) -> list[Rung]:
    def none(why: str) -> list[Rung]:
        return [not_run(name, why) for name in DECODED]

    if job.model is None:
        return none("there is no model to decode with: give model=")
    for side in (reference, candidate):
        if side.ready is not None:
            return none(side.ready)
    try:
        begin, forced = reference.start(), candidate.start()
        for start in (begin, forced):
            if not start.remaining and start.logits is None:
                return none("no token remains to be run: give one token more in tokens=")
        free = candidate.start() if "free_running" in job.rungs else None
    except KvbatonError as error:
        return none(str(error))
    misplaced = _misplaced(begin, forced)
    done = walk(job.model, begin, forced, free, job.max_tokens, job.ends, job.tick)
    return [
        logits_rung(done, job.thresholds, misplaced),
        teacher_forced_rung(done, job.thresholds),
        free_running_rung(done, job.thresholds, job.text),
    ]


def _misplaced(reference: Start, candidate: Start) -> str | None:
    """Why the first step's positions differ, if they do."""
    ours = reference.position + len(reference.remaining)
    theirs = candidate.position + len(candidate.remaining)
    if ours == theirs:
        return None
    if theirs == ours + 1 and list(candidate.remaining)[-1:] == list(reference.remaining)[-1:]:
        return (
            f"token {ours - 1} is run twice: the cache has seen {candidate.position} tokens, that one among them, "
            "and it is the decoder's first input"
        )
    return f"the decoder's first logits follow {theirs} tokens, the reference's {ours}"

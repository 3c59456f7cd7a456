"""Does a hand-off change the answer?"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import _arguments as arguments
from . import _native
from ._verify.ladder import DECODED, Caches, HandedOver, Job, Side, climb
from ._verify.rungs import Thresholds
from .cache import CacheView
from .errors import StorageError, UsageError
from .mlx import check_ids, dtype_name

__all__ = ["Rung", "Thresholds", "VerifyReport", "verify"]

RUNGS = ("bytes", "values", *DECODED)


@dataclass(frozen=True)
class Rung:
    """One rung: ``status`` is ``pass``, ``fail`` or ``not_run``; ``where`` names tensor, layer, head, row and
    lane of the first failure (``None`` where they do not apply); ``tie`` says that tokens differ at near ties
    alone; ``figures`` are its numbers under their JSON names."""

    name: str
    status: str
    where: dict[str, Any] | None
    note: str | None
    tie: bool
    figures: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        place = ", ".join(f"{k} {v}" for k, v in (self.where or {}).items() if v is not None)
        words = [
            f"{self.name}: {self.status.replace('_', ' ')}",
            f"at {place}" if place else "",
            self.note or "",
        ]
        return "; ".join(w for w in words if w)


class VerifyReport:
    """What :func:`verify` found, in the structure of ``kvbaton verify --json``."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    @property
    def verdict(self) -> str:
        """``pass``, ``tie``, ``fail`` or ``incomplete``."""
        return str(self._document["verdict"])

    @property
    def ok(self) -> bool:
        """Whether the verdict is ``pass`` or ``tie``."""
        return self.verdict in ("pass", "tie")

    @property
    def reason(self) -> str:
        """One sentence on why."""
        return str(self._document["reason"])

    @property
    def rungs(self) -> list[Rung]:
        """The rungs, lowest first."""
        return list(_rungs(self._document["prompts"][0]["rungs"]))

    def rung(self, name: str) -> Rung:
        """The rung called ``name``."""
        for rung in self.rungs:
            if rung.name == name:
                return rung
        raise UsageError(f"no rung is called `{name}`", hint=f"rungs: {', '.join(RUNGS)}")

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        return self._document

    def to_html(self) -> str:
        """The report as one self-contained HTML page."""
        from ._verify.page import render

        return render(self._document)

    def save_html(self, path: str | Path) -> None:
        """Writes :meth:`to_html`, whole or not at all."""
        write_text(Path(path), self.to_html())

    def __str__(self) -> str:
        return "\n".join([f"{self.verdict}: {self.reason}", *map(str, self.rungs)])

    def __repr__(self) -> str:
        return f"VerifyReport({self.verdict}: {self.reason})"


def _rungs(documents: Sequence[dict[str, Any]]) -> Iterator[Rung]:
    named = ("name", "status", "where", "note", "tie")
    for d in documents:
        figures = {k: v for k, v in d.items() if k not in named}
        yield Rung(d["name"], d["status"], d["where"], d["note"], bool(d["tie"]), figures)


def verify(
    reference: CacheView | Sequence[Any],
    candidate: CacheView | Sequence[Any],
    model: Any | None = None,
    tokens: Sequence[int] | None = None,
    *,
    source: CacheView | None = None,
    remaining: Sequence[int] | None = None,
    max_tokens: int = 32,
    thresholds: Thresholds | None = None,
    rungs: Collection[str] = RUNGS,
    tokenizer: Any | None = None,
) -> VerifyReport:
    """Compares two caches of the same tokens, and what ``model`` says from either.

    Each is a :class:`CacheView`, or mlx-lm caches that were filled already: these are decoded from as they
    are, in copies. ``tokens`` are the ids of the prompt, as in :func:`to_mlx`; they may be left out where the
    views know them. ``remaining`` are the tokens that your pipeline runs first on the candidate, where it is
    not what :func:`to_mlx` would say. ``source`` is what the candidate was filled from, if that is not the
    reference: then *bytes* compares with the source, everything else with the reference.

    ``tokenizer`` adds text around the first difference, and ends the comparison with the reference's answer.
    ``thresholds`` are what is usual for the model's type when absent. Rungs left out of ``rungs``, and those
    without a model, are not run, and the verdict is then ``incomplete``.

    Raises:
        UsageError: ``tokens`` do not fit or are not in the vocabulary, a threshold or a rung's name is none, or
            ``max_tokens`` is not positive.
        IncompatibleError: heads or lanes differ, so that there is nothing to compare.
    """
    max_tokens = arguments.whole(max_tokens, "max_tokens")
    if max_tokens < 1:
        raise UsageError(f"max_tokens={max_tokens} asks for no token", fields={"max_tokens": max_tokens})
    unknown = [name for name in rungs if name not in RUNGS]
    if unknown:
        raise UsageError(f"no rung is called `{unknown[0]}`", hint=f"rungs: {', '.join(RUNGS)}")
    limits = thresholds or Thresholds.usual("float32" if model is None else dtype_name(model))
    ids = None if tokens is None else arguments.numbers(tokens)
    rest = None if remaining is None else arguments.ids(remaining, "remaining")
    job = Job(
        model=model,
        thresholds=limits,
        max_tokens=max_tokens,
        source=source,
        rungs=rungs,
        ends=frozenset(getattr(tokenizer, "eos_token_ids", None) or ()),
        text=None if tokenizer is None else lambda run: str(tokenizer.decode(list(run))),
    )
    sides = (_side(reference, model, ids), _side(candidate, model, _said(candidate, ids, rest)))
    climbed = climb(*sides, job)
    return report([(climbed, {"name": "prompt"})], limits, {"settings": {"max_tokens": max_tokens}})


def report(
    prompts: Sequence[tuple[list[dict[str, Any]], dict[str, Any]]],
    thresholds: Thresholds,
    facts: dict[str, Any],
) -> VerifyReport:
    """Adds up prompts: their rungs and facts."""
    text = _native.verify_report(json.dumps(prompts), json.dumps(asdict(thresholds)), json.dumps(facts))
    return VerifyReport(json.loads(text))


class _Shown(Side):
    """A view that can be looked at, and not decoded from."""

    def __init__(self, cache: CacheView, why: str) -> None:
        self._cache = cache
        self._why = why

    def view(self) -> CacheView:
        return self._cache

    @property
    def ready(self) -> str | None:
        return self._why


def _side(given: CacheView | Sequence[Any], model: Any | None, tokens: list[int] | None) -> Side:
    known = given.tokens if tokens is None and isinstance(given, CacheView) else tokens
    if model is not None:
        check_ids(model, known or ())
    if not isinstance(given, CacheView):
        return Caches(given, model, tokens)
    if model is None:
        return _Shown(given, "there is no model to decode with: give model=")
    if known is None:
        return _Shown(given, "the tokens are not known: give tokens=")
    recurrent = next((i for i, layer in enumerate(given.layers) if layer.kind == "recurrent"), None)
    if recurrent is not None and given.logits is None and len(known) == given.tokens_seen:
        why = (
            f"layer {recurrent} keeps a recurrent state, which cannot drop a token: give one more in tokens="
        )
        return _Shown(given, why)
    return HandedOver(given, model, tokens)


def _said(
    candidate: CacheView | Sequence[Any], tokens: list[int] | None, remaining: Sequence[int] | None
) -> list[int] | None:
    """The candidate's tokens: those it has seen, then those that the caller says remain."""
    if remaining is None:
        return tokens
    if not isinstance(candidate, CacheView):
        raise UsageError(
            "remaining= is for views; of mlx-lm caches, give the tokens they have not seen in tokens="
        )
    seen = candidate.tokens if candidate.tokens is not None else tokens
    if seen is None or len(seen) < candidate.tokens_seen:
        raise UsageError("the ids of the candidate's tokens are not known", hint="give tokens=")
    return [*seen[: candidate.tokens_seen], *remaining]


def write_text(path: Path, text: str) -> None:
    """Writes a file aside and renames it, so that nobody sees half of it. A link stays one; what is neither a file
    nor absent, a pipe or a device, is written to and never replaced."""
    import errno
    import os
    import tempfile

    try:
        path = Path(os.path.realpath(path))
        if path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        if path.exists() and not (path.is_file() or path.is_dir()):
            path.write_text(text, encoding="utf-8")
            return
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(aside).chmod(0o644)
            Path(aside).replace(path)
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StorageError(f"cannot write `{path}`: {error.strerror}", fields={"path": str(path)}) from error

"""From what the decoders said to rungs, in the form of the JSON document."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .. import _native
from ..errors import UsageError
from .distributions import Step
from .walk import Walk

Rung = dict[str, Any]
Text = Callable[[Sequence[int]], str]

# Tokens of text that are shown before the first difference.
_BEFORE = 24
_AFTER = 12


@dataclass(frozen=True)
class Thresholds:
    """What is still a pass.

    ``tie``: a token that the reference prefers by less than so much of a logit is a near tie. ``min_cosine``,
    ``max_norm_error`` and ``max_row_error`` are those of one head of one layer, the last two relative.
    ``max_kl`` is the largest divergence of one step in nats, ``min_agreement`` the smallest share of steps at
    which the likeliest token is the reference's or nearly tied with it.

    The defaults are those of a decoder in float32 or float16; :meth:`usual` knows those of the others.
    """

    tie: float = 0.01
    min_cosine: float = 0.999
    max_norm_error: float = 0.01
    max_row_error: float = 0.1
    max_kl: float = 0.01
    min_agreement: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name}={value} is no threshold", fields={name: str(value)})
            if value > 1 and name in ("min_cosine", "min_agreement"):
                raise UsageError(
                    f"{name}={value} is reached by nothing: 1 is the most", fields={name: str(value)}
                )

    @classmethod
    def usual(cls, dtype: str) -> Thresholds:
        """What is usual for a decoder whose weights and cache are of ``dtype``.

        Raises:
            LayoutError: no type is called so.
        """
        return cls(**json.loads(_native.usual_thresholds(dtype)))


def not_run(name: str, why: str) -> Rung:
    """A rung that could not be run."""
    return {"name": name, "status": "not_run", "where": None, "note": why}


def logits_rung(walk: Walk, thresholds: Thresholds, misplaced: str | None) -> Rung:
    """The distributions at the boundary and along the reference's continuation.

    ``misplaced`` says why the candidate's positions are not the reference's, where that is known.
    """
    bad = [i for i, s in enumerate(walk.steps) if not s.kl <= thresholds.max_kl]
    first = walk.steps[0]
    note = misplaced
    if note is None and bad:
        what = "the boundary" if bad[0] == 0 else f"step {bad[0]}"
        kl = walk.steps[bad[0]].kl
        says = f"{kl:.4g} nats" if math.isfinite(kl) else "not a number"
        note = f"divergence at {what}: {says}, at most {thresholds.max_kl:g} is a pass"
    failed = bool(bad) or misplaced is not None
    at = bad[0] if bad and misplaced is None else 0
    return {
        "name": "logits",
        "status": "fail" if failed else "pass",
        "where": _row(walk.position - 1 + at) if failed else None,
        "note": note,
        "boundary": _step(first),
        "max_kl": _finite(max(s.kl for s in walk.steps)),
        "max_difference": _finite(max(s.difference for s in walk.steps)),
        "top1_agreement": sum(s.agrees for s in walk.steps) / len(walk.steps),
        "top5_overlap": sum(s.top5 for s in walk.steps) / len(walk.steps),
        "kl": [_finite(s.kl) for s in walk.steps],
        "difference": [_finite(s.difference) for s in walk.steps],
    }


def teacher_forced_rung(walk: Walk, thresholds: Thresholds) -> Rung:
    """The likeliest token at each step of the reference's own continuation."""
    steps = len(walk.steps)
    other = [i for i, s in enumerate(walk.steps) if not s.agrees]
    ties = [i for i in other if walk.steps[i].margin < thresholds.tie]
    wrong = [i for i in other if i not in ties]
    # Not one minus a share: rounding would put it below the same share written out.
    share = (steps - len(wrong)) / steps
    failed = share < thresholds.min_agreement
    note = None
    if failed:
        note = (
            f"{len(wrong)} of {steps} tokens differ by more than a near tie, the first at step {wrong[0]}: "
            f"{_preference(walk.steps[wrong[0]])}"
        )
    return {
        "name": "teacher_forced",
        "status": "fail" if failed else "pass",
        "where": _row(walk.position + wrong[0]) if failed else None,
        "tie": bool(ties) and not failed,
        "note": note,
        "steps": steps,
        "agreed": steps - len(other),
        "near_ties": len(ties),
        "disagreements": [
            {"step": i, "margin": _finite(walk.steps[i].margin), "near_tie": i in ties} for i in other[:16]
        ],
    }


def free_running_rung(walk: Walk, thresholds: Thresholds, text: Text | None) -> Rung:
    """The continuations, each on its own: where they part, and how decided the reference was there."""
    found = walk.difference
    tie = found is not None and found.step.margin < thresholds.tie
    failed = found is not None and not tie
    rung: Rung = {
        "name": "free_running",
        "status": "fail" if failed else "pass",
        "where": _row(walk.position + found.index) if failed and found else None,
        "tie": tie,
        "note": None,
        "tokens": {"reference": walk.reference, "candidate": walk.free},
        "first_difference": None,
    }
    if found is None:
        return rung
    both = {"reference": found.step.token, "candidate": found.step.candidate}
    rung["note"] = f"token {found.index} differs: {_preference(found.step)}{', a near tie' if tie else ''}"
    rung["first_difference"] = {
        "step": found.index,
        "position": walk.position + found.index,
        "tokens": both,
        "logits": {side: [_finite(v) for v in values] for side, values in found.logits.items()},
        "margin": _finite(found.step.margin),
        "candidate_margin": _finite(found.step.candidate_margin),
        "near_tie": tie,
        "text": None if text is None else _around(walk, found.index, text),
    }
    return rung


def _preference(step: Step) -> str:
    if not math.isfinite(step.margin):
        return "logits are not numbers"
    return f"the reference prefers its own by {step.margin:.4g}"


def _around(walk: Walk, index: int, text: Text) -> dict[str, str]:
    before = walk.reference[max(0, index - _BEFORE) : index]
    return {
        "before": text(before),
        "reference": text(walk.reference[index : index + _AFTER]),
        "candidate": text(walk.free[index : index + _AFTER]),
    }


def _row(position: int) -> dict[str, Any]:
    return {"tensor": None, "layer": None, "head": None, "row": position, "lane": None}


def _step(step: Step) -> dict[str, Any]:
    return {
        "kl": _finite(step.kl),
        "top1": step.agrees,
        "top5_overlap": step.top5,
        "max_difference": _finite(step.difference),
    }


def _finite(value: float) -> float | None:
    """JSON has no infinities."""
    return float(value) if math.isfinite(value) else None

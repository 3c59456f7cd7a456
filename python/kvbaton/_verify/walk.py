"""Decoding side by side: the reference, the candidate fed the reference's tokens, and the candidate on its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ModelError
from .distributions import Logits, Step, compare, likeliest


@dataclass
class Start:
    """Caches ready to decode, the tokens that remain to be run, and the position of the first of them.

    With none remaining, ``logits`` are those that the source left.
    """

    caches: list[Any]
    remaining: Sequence[int]
    position: int
    logits: npt.NDArray[np.float32] | None = None


class Decode:
    """A decoder at work on one start."""

    def __init__(self, model: Any, start: Start) -> None:
        self._model = model
        self._caches = start.caches
        if start.remaining:
            self.logits = self.step(start.remaining)
        elif start.logits is not None:
            self.logits = np.asarray(start.logits, np.float32)
        else:
            raise ModelError("no token remains to be run, and the source left no logits")

    def step(self, tokens: Sequence[int]) -> Logits:
        """Runs tokens and returns the logits after the last, in float32."""
        import mlx.core as mx

        out = self._model(mx.array([[int(t) for t in tokens]]), cache=self._caches)[0, -1]
        out = out.astype(mx.float32)
        mx.eval(out, [c.state for c in self._caches])
        self.logits = np.array(out)
        return self.logits


@dataclass
class Difference:
    """The first step at which the free continuations differ: index, and both sides' logits compared."""

    index: int
    step: Step
    logits: dict[str, list[float]]


@dataclass
class Walk:
    """What decoding side by side gave."""

    position: int
    steps: list[Step] = field(default_factory=list)
    reference: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    difference: Difference | None = None


def walk(
    model: Any,
    reference: Start,
    forced: Start,
    free: Start | None,
    max_tokens: int,
    ends: Collection[int] = (),
    tick: Callable[[], None] | None = None,
) -> Walk:
    """Decodes up to ``max_tokens`` tokens on all sides; the reference's end of the answer ends it for all.

    ``forced`` and ``free`` are two hand-offs of the same cache. All three decode one token a step, greedily,
    so that none differs from another by how its work was cut.
    """
    teacher, pupil = Decode(model, reference), Decode(model, forced)
    alone = None if free is None else Decode(model, free)
    done = Walk(position=reference.position + len(reference.remaining))
    while True:
        step = compare(teacher.logits, pupil.logits)
        done.steps.append(step)
        done.reference.append(step.token)
        if alone is not None and (not done.free or done.free[-1] not in ends):
            _free_step(done, teacher.logits, alone.logits)
        if len(done.reference) == max_tokens or step.token in ends:
            break
        teacher.step([step.token])
        pupil.step([step.token])
        if alone is not None and done.free[-1] not in ends:
            alone.step([done.free[-1]])
        if tick is not None:
            tick()
    return done


def _free_step(done: Walk, reference: Logits, candidate: Logits) -> None:
    token = likeliest(candidate)
    done.free.append(token)
    if done.difference is None and token != done.reference[-1]:
        step = compare(reference, candidate)
        both = (step.token, step.candidate)
        logits = {
            "reference": [float(reference[t]) for t in both],
            "candidate": [float(candidate[t]) for t in both],
        }
        done.difference = Difference(len(done.free) - 1, step, logits)

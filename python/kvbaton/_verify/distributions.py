"""How far one step's logits are from another's."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Step:
    """One step: ``kl`` of the candidate from the reference in nats, the share of the reference's five likeliest
    tokens among the candidate's, the largest difference of a logit, and both likeliest tokens.

    ``margin`` is by how much the reference prefers its token to the candidate's, in logits; so is
    ``candidate_margin`` the other way round.
    """

    kl: float
    top5: float
    difference: float
    token: int
    candidate: int
    margin: float
    candidate_margin: float

    @property
    def agrees(self) -> bool:
        """Whether the likeliest token is the same."""
        return self.token == self.candidate


def compare(reference: Logits, candidate: Logits) -> Step:
    """Compares two steps' logits of one vocabulary. A logit that is not a number is infinitely far."""
    r, c = reference.astype(np.float64), candidate.astype(np.float64)
    token, other = likeliest(reference), likeliest(candidate)
    if not np.isfinite(candidate).all() or not np.isfinite(reference).all():
        return Step(math.inf, 0.0, math.inf, token, other, math.inf, math.inf)
    p, q = log_softmax(r), log_softmax(c)
    # Rounding can leave a distance of nothing below zero.
    kl = max(0.0, float(np.sum(np.exp(p) * np.subtract(p, q, out=q))))
    count = min(5, len(r))
    best, found = (set(np.argpartition(x, len(x) - count)[-count:].tolist()) for x in (reference, candidate))
    return Step(
        kl=kl,
        top5=len(best & found) / count,
        difference=max(float(np.max(r - c)), float(np.max(c - r))),
        token=token,
        candidate=other,
        margin=float(r[token] - r[other]),
        candidate_margin=float(c[other] - c[token]),
    )


def likeliest(logits: Logits) -> int:
    """The likeliest token, the first among equals, as ``argmax`` takes it; numbers that are none come last."""
    return int(np.argmax(np.where(np.isnan(logits), -np.inf, logits)))


def log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Logarithms of the probabilities."""
    shifted = logits - logits.max()
    shifted -= np.log(np.sum(np.exp(shifted)))
    return np.asarray(shifted)

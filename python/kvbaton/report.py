"""What happened, in numbers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Activation", "Activations", "HandoffReport", "Overflow", "PrefillReport"]


@dataclass(frozen=True)
class PrefillReport:
    """What a prefill did: ``tokens`` of the prompt (padding not counted) in ``seconds`` (loading apart).

    ``compute_units`` are those that Core ML was loaded for; ``notes`` say what it did otherwise than asked.
    """

    engine: str
    function: str
    tokens: int
    seconds: float
    tokens_per_second: float
    compute_units: str | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> PrefillReport:
        """Reads the native module's report."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Activation:
    """A value, the operation and result that it is in, and its layer and position in the prompt where known."""

    value: float
    op: str
    output: str
    layer: int | None
    position: int | None
    index: list[int]


@dataclass(frozen=True)
class Overflow:
    """A result with values that are infinite, no number, or beyond fp16."""

    op: str
    output: str
    layer: int | None
    infinite: int
    nan: int
    beyond_half: int


@dataclass(frozen=True)
class Activations:
    """What the activations of one prefill are like.

    Results that a mask was added to (``masked_results``) are left out until a softmax or an exponential has read
    them; rows of padding are left out of results that have a dimension as long as the function.
    ``beyond_half`` counts finite values that fp16 cannot hold, which only a run in ``f32`` has. ``layers`` has the
    largest activation of each layer that names of weights tell.
    """

    functions: list[str]
    tokens: int
    numerics: str
    results: int
    masked_results: int
    largest: Activation | None
    infinite: int
    nan: int
    beyond_half: int
    first_overflow: Overflow | None
    layers: list[Activation]

    @classmethod
    def from_json(cls, text: str) -> Activations:
        """Reads the native module's report."""
        found = json.loads(text)
        largest, first = found.pop("largest"), found.pop("first_overflow")
        layers = [Activation(**a) for a in found.pop("layers")]
        return cls(
            largest=None if largest is None else Activation(**largest),
            first_overflow=None if first is None else Overflow(**first),
            layers=layers,
            **found,
        )


@dataclass
class HandoffReport:
    """What a hand-off did.

    ``bytes`` are live bytes written to the target; the rate counts bytes read and written over
    ``copy_seconds``, the fill alone, while ``seconds`` has allocation in it. ``memcpy_ratio`` is the time of
    a memcpy that moves as many bytes on the same threads, over ``copy_seconds``; ``None`` for no bytes.
    ``first_step_copied_bytes`` is known once the decoder has run a step. ``touched_share`` is the share of
    the target's pages that existed before, ``allocation`` how MLX's arrays were made: ``reserved`` without a
    pass over them, or ``zeroed``. ``streamed`` is there when rows moved while the prefill ran: how many
    ``pieces``, and where the time went; ``seconds`` are then those of all that was done, of which
    ``exposed_seconds`` delayed the first token. ``because`` says why this path was taken, and how that is
    known, where there was another.
    """

    path: str
    bytes: int
    copies: int
    seconds: float
    copy_seconds: float
    exposed_seconds: float
    gigabytes_per_second: float
    memcpy_ratio: float | None
    first_step_copied_bytes: int | None
    rows: int
    overflow: int
    nan: int
    infinity: int
    touched_share: float | None = None
    allocation: str | None = None
    yardstick_seconds: float = 0.0
    streamed: dict[str, Any] | None = None
    note: str | None = None
    because: str | None = None

    @classmethod
    def from_json(cls, text: str) -> HandoffReport:
        """Reads the native module's report."""
        return cls(**json.loads(text))

    @classmethod
    def empty(cls, seconds: float) -> HandoffReport:
        """Nothing to hand over."""
        return cls("fill", 0, 0, seconds, 0.0, seconds, 0.0, None, None, 0, 0, 0, 0)

    def to_dict(self) -> dict[str, Any]:
        """All figures under their JSON names."""
        return asdict(self)

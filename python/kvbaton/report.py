"""What happened, in numbers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["HandoffReport", "PrefillReport"]


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
    ``exposed_seconds`` delayed the first token.
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

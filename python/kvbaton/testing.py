"""The fake engine: Core ML's habits on any machine, for tests of code that hands caches over."""

from __future__ import annotations

import json
from collections.abc import Sequence

from . import _native
from .prefill import Prefill

__all__ = ["FakePrefill", "element"]


class FakePrefill(Prefill):
    """A prefill engine that computes nothing.

    Every element of its cache says where it is (see :func:`element`), so a hand-off that mixes up heads, rows
    or lanes is caught by its values; rows of no token and padding are NaN. Like Core ML it writes into the
    same buffers at every prediction, and refuses to while a view of the last one is held; pads rows to
    ``row_align_bytes``; takes fresh buffers when it ``ignores_backings``; and fails at the predictions that
    ``fails_at`` lists.

    Its prefill streams chunks of ``chunk_tokens``, each in buffers that no view holds, and layer by layer with
    ``by_layer``; it fails once ``fails_after_pieces`` are out, by a panic where it ``panics``. A token takes
    ``token_seconds`` at least.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        lengths: Sequence[int] = (128, 512),
        row_align_bytes: int = 0,
        ignores_backings: bool = False,
        fails_at: Sequence[int] = (),
        chunk_tokens: int = 0,
        by_layer: bool = False,
        fails_after_pieces: int | None = None,
        panics: bool = False,
        token_seconds: float = 0.0,
    ) -> None:
        layer = {"kind": "full", "kv_heads": kv_heads, "key_dim": head_dim, "value_dim": head_dim}
        self._native = _native.NativePrefill.fake(
            json.dumps([layer] * layers),
            list(lengths),
            row_align_bytes,
            ignores_backings,
            list(fails_at),
            chunk_tokens,
            by_layer,
            fails_after_pieces,
            panics,
            token_seconds,
        )


def element(part: str, layer: int, head: int, row: int, lane: int, token: int) -> float:
    """What the engine stores for an element of ``part`` (``key`` or ``value``)."""
    value = float((31 * layer + 17 * head + 7 * row + 3 * lane + token) % 2039)
    return value if part == "key" else -value - 1.0

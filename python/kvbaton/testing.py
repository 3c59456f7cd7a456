"""Fake engines: Core ML's habits on any machine, for tests of code that hands caches over."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence

from . import _arguments as arguments
from . import _native
from .prefill import Prefill, _facts

__all__ = ["FakeCoreML", "FakePrefill", "element"]


_MOST_ALIGN = 1 << 20


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
        kv_heads, head_dim = (
            arguments.whole(kv_heads, "kv_heads", least=1),
            arguments.whole(head_dim, "head_dim", least=1),
        )
        layer = {"kind": "full", "kv_heads": kv_heads, "key_dim": head_dim, "value_dim": head_dim}
        self._native = _native.NativePrefill.fake(
            json.dumps([layer] * arguments.whole(layers, "layers")),
            arguments.wholes(lengths, "lengths"),
            arguments.whole(row_align_bytes, "row_align_bytes", most=_MOST_ALIGN),
            ignores_backings,
            arguments.wholes(fails_at, "fails_at"),
            arguments.whole(chunk_tokens, "chunk_tokens"),
            by_layer,
            arguments.maybe_whole(fails_after_pieces, "fails_after_pieces"),
            panics,
            arguments.seconds(token_seconds, "token_seconds") or 0.0,
        )


class FakeCoreML(Prefill):
    """A package, or a chain of them, run as on Core ML: a fake in its place, and the executor behind that.

    The arguments up to ``model`` are those of :class:`kvbaton.Prefill`, the others habits, as with
    :class:`FakePrefill`. Each package of a chain has them for itself: of its predictions, counted from 0, those
    in ``fails_at`` fail and those in ``hangs_at`` return after ``hang_seconds``, as does loading for the compute
    units in ``hangs_loading``.
    """

    def __init__(
        self,
        package: str | os.PathLike[str],
        *,
        compute_units: str | None = None,
        engine_timeout: float | None = None,
        prediction_timeout: float | None = None,
        on_wait: Callable[[str, float], None] | None = None,
        layout: str | os.PathLike[str] | None = None,
        model: str | os.PathLike[str] | None = None,
        row_align_bytes: int = 0,
        ignores_backings: bool = False,
        fails_at: Sequence[int] = (),
        hangs_at: Sequence[int] = (),
        hangs_loading: Sequence[str] = (),
        hang_seconds: float = 0.2,
    ) -> None:
        self._native = _native.NativePrefill.on_fake(
            os.fspath(package),
            compute_units,
            engine_timeout,
            prediction_timeout,
            on_wait,
            None if layout is None else arguments.layout(layout),
            _facts(model),
            row_align_bytes,
            ignores_backings,
            list(fails_at),
            list(hangs_at),
            list(hangs_loading),
            hang_seconds,
        )


def element(part: str, layer: int, head: int, row: int, lane: int, token: int) -> float:
    """What the engine stores for an element of ``part`` (``key`` or ``value``)."""
    value = float((31 * layer + 17 * head + 7 * row + 3 * lane + token) % 2039)
    return value if part == "key" else -value - 1.0

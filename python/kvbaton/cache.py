"""Caches in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _native
from .errors import UsageError

__all__ = ["CacheView", "LayerView"]

_NUMPY = {"float16": np.float16, "bfloat16": np.uint16, "float32": np.float32, "int8": np.int8}


@dataclass(frozen=True)
class LayerView:
    """One layer of a cache.

    ``kind`` is ``full``, ``sliding``, ``recurrent`` or ``shared``; ``positions`` are those of the live rows,
    oldest first; ``offset`` is the position of the next token; ``window`` and ``keep`` are a sliding layer's.
    """

    kind: str
    positions: range
    offset: int
    window: int | None
    keep: int | None
    _view: _native.NativeView
    _index: int

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Copies in canonical order: ``key`` and ``value`` of shape (kv_heads, rows, head_dim).

        bfloat16 has no numpy type and comes as uint16.
        """
        parts = {"full": ("key", "value"), "sliding": ("key", "value"), "recurrent": ("conv", "state")}
        return {part: _canonical(self._view, self._index, part)[0] for part in parts.get(self.kind, ())}


def _canonical(view: _native.NativeView, layer: int, part: str) -> tuple[npt.NDArray[Any], int]:
    data, dtype, shape, first = view.canonical(layer, part)
    return np.frombuffer(data, dtype=_NUMPY[dtype]).reshape(shape), first


class CacheView:
    """Memory, a layout and the live rows: a cache as its producer left it.

    Made by :class:`kvbaton.Prefill` or by :meth:`from_arrays`; nothing is copied to make it.
    """

    def __init__(self, native: _native.NativeView) -> None:
        self._native = native

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, Any],
        layout: str,
        *,
        cache: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        tokens_seen: int | None = None,
        live: int | None = None,
        pad: int | None = None,
        ring_start: int | None = None,
        conv_start: int | None = None,
        sequence: int | None = None,
        block_table: Sequence[int] | None = None,
        dtypes: Mapping[str, str] | None = None,
    ) -> CacheView:
        """A view of ``arrays`` by name, laid out as ``layout`` (a preset's name or TOML text).

        ``cache`` says what each layer keeps, as ``kvbaton.model``'s ``layers`` do; it may be left out where
        the layout and the shapes say it, for layers of full attention. ``tokens`` are the ids
        that the rows belong to and imply ``tokens_seen``. The arrays stay where they are: do not write to
        them while the view lives. Strides are honoured. bfloat16 arrays come as uint16 with their type in
        ``dtypes``.
        """
        if tokens is not None and tokens_seen is not None and tokens_seen != len(tokens):
            raise UsageError(
                f"{len(tokens)} tokens were given, and tokens_seen={tokens_seen}",
                fields={"tokens": len(tokens), "tokens_seen": tokens_seen},
            )
        seen = len(tokens) if tokens is not None else tokens_seen
        if seen is None:
            raise UsageError("say which rows are live", hint="give tokens= or tokens_seen=")
        rows = {
            "tokens_seen": seen,
            "live": live,
            "pad": pad,
            "ring_start": ring_start,
            "conv_start": conv_start,
            "sequence": sequence,
            "block_table": None if block_table is None else list(block_table),
        }
        named = [(name, array, _dtype(name, array, dtypes)) for name, array in arrays.items()]
        ids = None if tokens is None else [int(t) for t in tokens]
        spec = None if cache is None else json.dumps(list(cache))
        native = _native.NativeView.from_arrays(named, layout, spec, json.dumps(rows), ids)
        return cls(native)

    @property
    def tokens_seen(self) -> int:
        """Tokens that the cache has seen: the position of the next one."""
        return self._native.tokens_seen

    @property
    def tokens(self) -> list[int] | None:
        """Ids of those tokens, where they are known."""
        return self._native.tokens

    @property
    def layout(self) -> str:
        """The layout, as TOML."""
        return self._native.layout

    @property
    def model(self) -> dict[str, Any] | None:
        """What is known of the model."""
        text = self._native.model
        return None if text is None else json.loads(text)

    @property
    def layers(self) -> list[LayerView]:
        """The layers, in the model's order."""
        layers = []
        for index, spec in enumerate(json.loads(self._native.cache)):
            window = spec.get("window") or {}
            positions = range(0)
            if spec["kind"] in ("full", "sliding"):
                keys, first = _canonical(self._native, index, "key")
                positions = range(first, first + keys.shape[1])
            layers.append(
                LayerView(
                    kind=spec["kind"],
                    positions=positions,
                    offset=self.tokens_seen,
                    window=window.get("size"),
                    keep=window.get("keep"),
                    _view=self._native,
                    _index=index,
                )
            )
        return layers

    def __repr__(self) -> str:
        layers = len(json.loads(self._native.cache))
        return f"CacheView({layers} layers, {self.tokens_seen} tokens seen)"


def _dtype(name: str, array: Any, dtypes: Mapping[str, str] | None) -> str:
    if dtypes and name in dtypes:
        return dtypes[name]
    dtype = str(getattr(array, "dtype", "")).rpartition(".")[2]
    if dtype not in ("float16", "bfloat16", "float32", "int8", "uint32"):
        raise UsageError(
            f"array `{name}` has elements of type {dtype or type(array).__name__}",
            hint="float16, bfloat16 (as uint16, named in dtypes=), float32, int8 and uint32 are known",
            fields={"array": name, "dtype": dtype},
        )
    return dtype

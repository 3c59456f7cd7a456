"""Caches in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from . import _arguments as arguments
from . import _native
from ._coreml.slots import Rules
from .errors import ModelError, UsageError

__all__ = ["CacheView", "Finding", "LayerView", "Scan"]

_NUMPY = {"float16": np.float16, "bfloat16": np.uint16, "float32": np.float32, "int8": np.int8}


_PARTS = {"full": ("key", "value"), "sliding": ("key", "value"), "recurrent": ("conv", "state")}


@dataclass(frozen=True)
class LayerView:
    """One layer of a cache.

    ``kind`` is ``full``, ``sliding``, ``recurrent`` or ``shared``; ``positions`` are those of the live rows,
    oldest first: a ``range``, or a tuple where rows that stay and rows that move have a gap between them.
    ``offset`` is the position of the next token; ``window`` and ``keep`` are a sliding layer's; ``encoding``
    says how its rows are stored.
    """

    kind: str
    positions: Sequence[int]
    offset: int
    window: int | None
    keep: int | None
    encoding: str
    _view: _native.NativeView
    _index: int
    _parts: tuple[str, ...]

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Copies in canonical order: ``key`` and ``value`` of shape (kv_heads, rows, head_dim), ``conv`` of
        (1, steps, channels), ``state`` of (heads, value_dim, key_dim). Codes are decoded.

        bfloat16 has no numpy type and comes as uint16.
        """
        return {part: _canonical(self._view, self._index, part)[0] for part in self._parts}


@dataclass(frozen=True)
class Finding:
    """A value that a cache should not hold: ``kind`` is ``nan``, ``infinity`` or ``overflow``; ``row`` is the
    position of the token."""

    kind: str
    tensor: str
    layer: int
    head: int
    row: int
    lane: int
    value: float


@dataclass(frozen=True)
class Scan:
    """What :meth:`CacheView.scan` found: counts, the largest finite magnitude and the first places."""

    nan: int
    infinity: int
    overflow: int
    largest: float
    places: tuple[Finding, ...]


def _canonical(view: _native.NativeView, layer: int, part: str) -> tuple[npt.NDArray[Any], int]:
    data, dtype, shape, first = view.canonical(layer, part)
    return np.frombuffer(data, dtype=_NUMPY[dtype]).reshape(shape), first


class _GivenAway:
    """Stands where a view was that MLX has taken over."""

    def __getattr__(self, name: str) -> Any:
        raise UsageError("this cache was given to MLX: its memory is the decoder's now")


class CacheView:
    """Memory, a layout and the live rows: a cache as its producer left it.

    Made by :class:`kvbaton.Prefill`, :func:`kvbaton.from_mlx` or :meth:`from_arrays`; nothing is copied to
    make it. ``logits`` are those after its last token, where they are known: a decoder with recurrent states
    can go on from them alone.
    """

    def __init__(self, native: _native.NativeView, logits: npt.NDArray[np.float32] | None = None) -> None:
        self._native = native
        self.logits = logits
        self.overflow = 0
        # Slots at which rings of mlx-lm start, by layer: a ring handed on as it lies sums in the same order.
        self.rings: dict[int, int] = {}
        # Whether the memory is its producer's own and nobody else's: then MLX may take it over.
        self.adoptable = False

    def _give_away(self) -> None:
        """The memory is somebody else's now, who writes there: nothing of it may be read any more."""
        self._native = cast(_native.NativeView, _GivenAway())

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, Any],
        layout: str | os.PathLike[str],
        *,
        cache: Sequence[Mapping[str, Any]] | None = None,
        model: str | os.PathLike[str] | None = None,
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
        """A view of ``arrays`` by name, laid out as ``layout`` (a preset's name, or TOML: a file or its text).

        ``model`` is the folder of the model that made the arrays: what its layers keep, its rope and its
        vocabulary are then known, and checked when the cache is handed over. ``cache`` says instead what each
        layer keeps, as ``kvbaton.model``'s ``layers`` do; both may be left out where the layout and the shapes
        say it, for layers of full attention. ``tokens`` are the ids that the rows belong to and imply
        ``tokens_seen``. Arrays are numpy's, anything with the buffer protocol, or anything with DLPack. They
        stay where they are: do not write to them while the view lives. Strides are honoured. bfloat16 arrays
        come as uint16 with their type in ``dtypes``.
        """
        layout = arguments.layout(layout)
        described = None if model is None else _describe(model)
        if described is not None and cache is None:
            cache = described["layers"]
        ids = None if tokens is None else arguments.ids(tokens)
        seen = arguments.maybe_whole(tokens_seen, "tokens_seen")
        if ids is not None and seen is not None and seen != len(ids):
            raise UsageError(
                f"{len(ids)} tokens were given, and tokens_seen={seen}",
                fields={"tokens": len(ids), "tokens_seen": seen},
            )
        seen = len(ids) if ids is not None else seen
        if seen is None:
            raise UsageError("say which rows are live", hint="give tokens= or tokens_seen=")
        rows = {
            "tokens_seen": seen,
            "live": arguments.maybe_whole(live, "live"),
            "pad": arguments.maybe_whole(pad, "pad"),
            "ring_start": arguments.maybe_whole(ring_start, "ring_start"),
            "conv_start": arguments.maybe_whole(conv_start, "conv_start"),
            "sequence": arguments.maybe_whole(sequence, "sequence"),
            "block_table": None if block_table is None else arguments.ids(block_table, "block_table"),
        }
        _check_said(layout, rows)
        _check_mappings(arrays, dtypes)
        named = [(name, _buffer(name, array), _dtype(name, array, dtypes)) for name, array in arrays.items()]
        spec = None if cache is None else arguments.document(cache, "cache")
        facts = None if described is None else json.dumps(described)
        native = _native.NativeView.from_arrays(named, layout, spec, json.dumps(rows), ids, facts)
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
            parts = _parts(spec)
            positions: Sequence[int] = range(0)
            if spec["kind"] in ("full", "sliding"):
                runs = [range(*run) for run in _native.view_rows(self._native, index, "key")]
                positions = runs[0] if len(runs) == 1 else tuple(p for run in runs for p in run)
            layers.append(
                LayerView(
                    kind=spec["kind"],
                    positions=positions or range(0),
                    offset=self.tokens_seen,
                    window=window.get("size"),
                    keep=window.get("keep"),
                    encoding=_native.view_encoding(self._native, index),
                    _view=self._native,
                    _index=index,
                    _parts=parts,
                )
            )
        return layers

    def trim(self, tokens: int) -> CacheView:
        """The same cache without its last ``tokens`` tokens. Nothing is copied, and this view stays as it is.

        All layers are trimmed or none. A recurrent state cannot lose a token, and a window that has moved on
        no longer has the rows that an earlier token read.

        Raises:
            UsageError: the cache cannot go back that far.
        """
        return self._shorter(_native.view_trim, tokens)

    def prefix(self, tokens: int) -> CacheView:
        """The same cache as it was after its first ``tokens`` tokens; otherwise as :meth:`trim`."""
        return self._shorter(_native.view_prefix, tokens)

    def _shorter(self, cut: Any, tokens: int) -> CacheView:
        tokens = arguments.whole(tokens, "tokens", least=-arguments.LARGEST)
        if tokens < 0:
            raise UsageError(f"{tokens} tokens are fewer than none", fields={"tokens": tokens})
        native = cut(self._native, tokens)
        return CacheView(native, self.logits if native.tokens_seen == self.tokens_seen else None)

    def cast(self, dtype: str, on_overflow: str = "error") -> CacheView:
        """A copy whose elements are ``float16``, ``bfloat16`` or ``float32``; codes are decoded.

        ``on_overflow`` says what becomes of finite values that the type cannot hold: ``error`` refuses,
        ``clamp`` takes the largest value there is, ``count`` writes infinity. ``overflow`` of the copy counts
        them.

        Raises:
            OverflowInCacheError: with ``error``, naming the count and the first place.
        """
        native, overflow = _native.view_cast(
            self._native, str(dtype).rpartition(".")[2], arguments.text(on_overflow, "on_overflow")
        )
        copy = CacheView(native, self.logits)
        copy.overflow = overflow
        return copy

    def quantize(self, bits: int = 8, group_size: int = 64) -> CacheView:
        """A copy with keys and values of full layers in MLX's affine codes.

        Windows and recurrent states keep their type, because mlx-lm has no quantised caches for them; each
        layer's ``encoding`` says what it got.

        Raises:
            UsageError: no layer can be quantised.
            LayoutError: there are no such codes, or the groups do not divide the heads.
        """
        bits = arguments.whole(bits, "bits", most=255)
        group_size = arguments.whole(group_size, "group_size")
        return CacheView(_native.view_quantize(self._native, bits, group_size), self.logits)

    def scan(self, dtype: str = "float16", limit: int = 16) -> Scan:
        """Looks at every live value: not a number, infinite, or too large for ``dtype``; names ``limit``."""
        limit = arguments.whole(limit, "limit")
        found = json.loads(_native.view_scan(self._native, str(dtype).rpartition(".")[2], limit))
        places = tuple(Finding(**{**p, "value": _number(p)}) for p in found.pop("places"))
        return Scan(places=places, **{**found, "largest": _float32(found["largest"])})

    def __repr__(self) -> str:
        layers = len(json.loads(self._native.cache))
        return f"CacheView({layers} layers, {self.tokens_seen} tokens seen)"


def _parts(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """The parts that a layer keeps; a recurrent layer may lack either."""
    if spec["kind"] != "recurrent":
        return _PARTS.get(spec["kind"], ())
    return tuple(part for part, size in (("conv", "conv_steps"), ("state", "heads")) if spec[size])


def _number(finding: Mapping[str, Any]) -> float:
    """The value of a finding; JSON has no infinities."""
    unwritten = {"nan": float("nan"), "infinity": float("inf")}
    return unwritten.get(finding["kind"]) or _float32(finding["value"])


def _float32(written: float) -> float:
    """The float32 that was written with as few digits as tell it from its neighbours."""
    return float(np.float32(written))


def _describe(folder: str | os.PathLike[str]) -> dict[str, Any]:
    from ._export.config import read_model_spec
    from ._export.errors import ExportError

    try:
        return read_model_spec(Path(arguments.path(folder, "model")))
    except ExportError as error:
        raise ModelError(str(error), fields=error.fields) from error


_SAID = {
    "pad": ("left-padded",),
    "ring_start": ("ring-indexed", "ring-from"),
    "conv_start": ("ring-from",),
    "block_table": ("paged",),
}
"""Placements that take what may be said of rows."""


def _check_said(layout: str, rows: Mapping[str, Any]) -> None:
    """Refuses what the layout would not listen to: rows would be read from slots that the caller did not mean."""
    said = [name for name in (*_SAID, "sequence") if rows[name]]
    if not said:
        return
    rules = Rules.read(layout)
    placements = rules.placements()
    for name in said:
        heard = rules.batches() if name == "sequence" else not placements.isdisjoint(_SAID[name])
        if not heard:
            raise UsageError(
                f"{name}={rows[name]} is said, and layout `{rules.parsed['name']}` has no "
                + ("axis `batch`" if name == "sequence" else f"rows that are {' or '.join(_SAID[name])}"),
                fields={"argument": name, "value": rows[name], "placements": sorted(placements)},
            )


def _check_mappings(arrays: Any, dtypes: Any) -> None:
    if not isinstance(arrays, Mapping):
        raise UsageError(f"arrays are a {type(arrays).__name__}, not arrays by name")
    for name in arrays:
        arguments.text(name, "an array's name")
    if dtypes is not None and not isinstance(dtypes, Mapping):
        raise UsageError(f"dtypes are a {type(dtypes).__name__}, not types by name")


def _buffer(name: str, array: Any) -> Any:
    """``array``, or what it lends through DLPack where it has no buffer of its own."""
    if isinstance(array, np.ma.MaskedArray):
        raise UsageError(
            f"array `{name}` is masked, and a cache has no place for a mask",
            hint="give its .data, or .filled()",
            fields={"array": name},
        )
    try:
        memoryview(array)
    except (TypeError, ValueError, BufferError):
        if hasattr(array, "__dlpack__"):
            try:
                return np.from_dlpack(array)
            except Exception as error:
                raise UsageError(
                    f"array `{name}` lends no memory: {' '.join(str(error).split())}", fields={"array": name}
                ) from error
    return array


def _dtype(name: str, array: Any, dtypes: Mapping[str, str] | None) -> str:
    if dtypes and name in dtypes:
        return arguments.text(dtypes[name], f"dtypes[{name!r}]")
    dtype = str(getattr(array, "dtype", "")).rpartition(".")[2]
    if dtype not in ("float16", "bfloat16", "float32", "int8", "uint32"):
        raise UsageError(
            f"array `{name}` has elements of type {dtype or type(array).__name__}",
            hint="float16, bfloat16 (as uint16, named in dtypes=), float32, int8 and uint32 are known",
            fields={"array": name, "dtype": dtype},
        )
    return dtype

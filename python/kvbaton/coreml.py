"""Tensors for Core ML: a cache in any layout, beside the mask and the position that go in with it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _arguments as arguments
from . import _native
from ._coreml.memory import zeros
from ._coreml.slots import Rules, holds_layer, mask, moving_layers, positions, row_slots
from .cache import CacheView
from .errors import CapacityError, UsageError
from .report import HandoffReport

__all__ = ["CoreMLInputs", "GrowingCache", "to_coreml"]

AWAY = -1e4
"""What masks add to scores that are not read: fp16 holds it, and so does the Neural Engine."""

LADDER = (8192, 16384, 24576, 32768, 49152, 65536)


class CoreMLInputs(NamedTuple):
    """A cache as Core ML takes it.

    ``arrays`` are the tensors by name; slots without a live row are zero. ``mask`` is what the next token
    adds to its scores over the slots of a full layer, (1, 1, 1, slots) float16: 0 where a row is read,
    −10,000 elsewhere; ``sliding_mask`` the same for layers with a window. Either is ``None`` where there is
    no such layer or no single row axis. ``positions`` is the position of the next token, (1,) int32.
    ``live``, ``layout``, ``cache`` and ``dtypes`` say how to read the arrays back.
    """

    arrays: dict[str, npt.NDArray[Any]]
    mask: npt.NDArray[np.float16] | None
    sliding_mask: npt.NDArray[np.float16] | None
    positions: npt.NDArray[np.int32]
    tokens_seen: int
    capacity: int
    layout: str
    cache: list[dict[str, Any]]
    live: dict[str, Any]
    dtypes: dict[str, str]
    report: HandoffReport

    def view(self, tokens: Sequence[int] | None = None, model: Mapping[str, Any] | None = None) -> CacheView:
        """The arrays as a cache again; nothing is copied. Do not write to them while the view lives."""
        named = [
            (name, array, self.dtypes[name]) for name, array in self.arrays.items() if name in self.dtypes
        ]
        ids = None if tokens is None else arguments.ids(tokens)
        if ids is not None and len(ids) != self.tokens_seen:
            raise UsageError(
                f"{len(ids)} tokens were given, the tensors have {self.tokens_seen}",
                fields={"tokens": len(ids), "tokens_seen": self.tokens_seen},
            )
        native = _native.NativeView.from_arrays(
            named,
            self.layout,
            json.dumps(self.cache),
            json.dumps(self.live),
            ids,
            None if model is None else arguments.facts(model, "model"),
        )
        return CacheView(native)


def to_coreml(
    cache: CacheView,
    layout: str | os.PathLike[str] = "kvbaton-stacked",
    capacity: int | None = None,
    *,
    dtype: str = "float16",
    pad: int | None = None,
    ring_start: int | None = None,
    conv_start: int | None = None,
    block_table: Sequence[int] | None = None,
    block_rows: int = 16,
    row_stride_bytes: int | None = None,
    into: CoreMLInputs | None = None,
    threads: int = 0,
) -> CoreMLInputs:
    """Fills the tensors of ``layout`` with ``cache``: Core ML's inputs or states.

    ``layout`` is a preset's name, or TOML: a file or its text.

    ``capacity`` is the number of slots of layers that keep the whole context; windows have their own size.
    ``dtype`` is the element type where the layout names none. The other settings are the layout's, where it
    has them: padding slots before the rows, the slots at which rings start, physical blocks of a paged cache
    and slots in one, bytes from row to row.

    With ``into``, the tensors that an earlier call made for a shorter past of the same tokens, only the rows
    that they lack are copied, and they are changed. Where rows move when tokens are added (right-aligned
    ones, rings kept by an index), those layers are copied whole.

    Raises:
        CapacityError: more rows than slots.
        LayoutError: the layout does not fit the model.
        IncompatibleError: the cache lacks rows that the layout wants.
    """
    start = time.perf_counter()
    arguments.instance(cache, CacheView, "cache")
    if into is not None:
        arguments.instance(into, CoreMLInputs, "into")
    dtype, layout = arguments.text(dtype, "dtype"), arguments.layout(layout)
    threads = arguments.threads(threads)
    capacity = arguments.maybe_whole(capacity, "capacity")
    pad = arguments.maybe_whole(pad, "pad")
    ring_start = arguments.maybe_whole(ring_start, "ring_start")
    conv_start = arguments.maybe_whole(conv_start, "conv_start")
    block_rows = arguments.whole(block_rows, "block_rows", least=1)
    row_stride_bytes = arguments.maybe_whole(row_stride_bytes, "row_stride_bytes")
    block_table = None if block_table is None else arguments.ids(block_table, "block_table")
    rules = Rules.read(layout) if into is None else Rules.read(into.layout)
    spec = json.loads(cache._native.cache)
    seen = cache.tokens_seen
    if into is None:
        slots = _capacity(seen, capacity, pad or 0)
        live = _live(rules, seen, slots, pad, ring_start, conv_start, block_table, block_rows)
        tensors = _native.layout_tensors(
            rules.text, json.dumps(spec), slots, dtype, block_rows, row_stride_bytes
        )
        arrays = {name: zeros(shape, strides, size, kind) for name, kind, shape, strides, size in tensors}
        dtypes = {name: kind for name, kind, *_ in tensors}
        rows, whole = None, []
    else:
        _check_extends(cache, spec, into, capacity)
        slots, arrays, dtypes = into.capacity, into.arrays, into.dtypes
        live = {**into.live, "tokens_seen": seen}
        rows, whole = (into.tokens_seen, seen), moving_layers(rules, spec, seen)
    lost = sorted(dtypes.keys() - arrays.keys())
    if lost:
        raise UsageError(f"the tensors lack `{lost[0]}`", fields={"missing": lost})
    targets = [(name, arrays[name], kind) for name, kind in dtypes.items()]
    report = HandoffReport.from_json(
        _native.view_fill(
            cache._native,
            targets,
            rules.text,
            json.dumps(live),
            json.dumps(spec),
            rows,
            whole,
            threads=threads,
        )
    )
    report.seconds = report.exposed_seconds = time.perf_counter() - start
    masks = {kind: _mask(rules, spec, kind, arrays, seen, live) for kind in ("full", "sliding")}
    return CoreMLInputs(
        arrays=arrays,
        mask=masks["full"],
        sliding_mask=masks["sliding"],
        positions=np.array([seen], np.int32),
        tokens_seen=seen,
        capacity=slots,
        layout=rules.text,
        cache=spec,
        live=live,
        dtypes=dtypes,
        report=report,
    )


def _capacity(seen: int, capacity: int | None, pad: int) -> int:
    if capacity is None:
        return max(1, pad + seen)
    if capacity < 1:
        raise UsageError(f"a capacity of {capacity} slots holds nothing", fields={"capacity": capacity})
    return capacity


def _live(
    rules: Rules,
    seen: int,
    slots: int,
    pad: int | None,
    ring_start: int | None,
    conv_start: int | None,
    block_table: Sequence[int] | None,
    block_rows: int,
) -> dict[str, Any]:
    """What a target must say of its rows; where nothing was asked for, the plainest choice."""
    placements = rules.placements()
    live: dict[str, Any] = {
        "tokens_seen": seen,
        "pad": pad,
        "ring_start": ring_start,
        "conv_start": conv_start,
    }
    if "left-padded" in placements and pad is None:
        live["pad"] = 0
    if "ring-from" in placements:
        live["conv_start"] = conv_start or 0
        if ring_start is None and "ring-indexed" not in placements:
            live["ring_start"] = 0
    if "paged" in placements:
        blocks = slots if rules.single_row_blocks() else -(-slots // block_rows)
        live["block_table"] = list(range(blocks) if block_table is None else block_table)
    return live


def _check_extends(
    cache: CacheView, spec: list[dict[str, Any]], into: CoreMLInputs, capacity: int | None
) -> None:
    if spec != into.cache:
        raise UsageError("the tensors were made for a cache of other layers")
    if cache.tokens_seen < into.tokens_seen:
        raise UsageError(
            f"the tensors have {into.tokens_seen} tokens, the cache has seen {cache.tokens_seen}",
            fields={"tensors": into.tokens_seen, "tokens_seen": cache.tokens_seen},
        )
    if capacity not in (None, into.capacity):
        raise UsageError(
            f"the tensors have {into.capacity} slots, {capacity} were asked for",
            hint="move them with GrowingCache",
            fields={"capacity": into.capacity, "asked": capacity},
        )


def _mask(
    rules: Rules,
    spec: list[dict[str, Any]],
    kind: str,
    arrays: Mapping[str, npt.NDArray[Any]],
    seen: int,
    live: Mapping[str, Any],
) -> npt.NDArray[np.float16] | None:
    """The mask of the first layer of a kind."""
    for index, layer in enumerate(spec):
        found = rules.of_layer(index, layer) if layer["kind"] == kind else None
        if found is None:
            continue
        rule, placement = found
        holder = next((a for n, a in arrays.items() if holds_layer(n, rule["name"], index)), None)
        slots = None if holder is None else row_slots(rule, holder.shape)
        if slots is None:
            return None
        return mask(positions(placement, slots, seen, layer, live), seen, layer, AWAY)
    return None


class GrowingCache:
    """A cache in Core ML's layout that moves to larger tensors when it outgrows its own.

    Capacities are the steps of ``ladder``. A move keeps rows, position and recurrent states, and ``carried``
    arrays as they are: what a program keeps beside its cache and no layout describes, such as rows that are
    not committed yet. The old tensors are given back at once, unless somebody else still holds them.
    """

    def __init__(
        self,
        cache: CacheView,
        layout: str | os.PathLike[str] = "kvbaton-stacked",
        ladder: Sequence[int] = LADDER,
        *,
        dtype: str = "float16",
        carried: Mapping[str, npt.NDArray[Any]] | None = None,
        threads: int = 0,
    ) -> None:
        """Fills the smallest tensors that hold ``cache``."""
        arguments.instance(cache, CacheView, "cache")
        self.ladder = tuple(sorted(set(arguments.wholes(ladder, "ladder"))))
        if not self.ladder:
            raise UsageError("the ladder has no step", fields={"ladder": []})
        self._dtype, self._threads, self._layout = dtype, threads, arguments.layout(layout)
        self._carried = dict(carried or {})
        self.inputs = self._made(cache, self._step(cache.tokens_seen))

    @property
    def capacity(self) -> int:
        """Slots of layers that keep the whole context."""
        return self.inputs.capacity

    @property
    def tokens_seen(self) -> int:
        """Tokens that the cache has seen."""
        return self.inputs.tokens_seen

    def extend(self, cache: CacheView) -> None:
        """Takes over what ``cache``, a longer past of the same tokens, has more."""
        self.reserve(arguments.instance(cache, CacheView, "cache").tokens_seen)
        longer = to_coreml(cache, into=self.inputs, threads=self._threads)
        self.inputs = longer

    def reserve(self, rows: int) -> None:
        """Moves to tensors that hold ``rows`` rows, if these do not."""
        if arguments.whole(rows, "rows") > self.capacity:
            self.move(self._step(rows))

    def move(self, capacity: int) -> None:
        """Moves to tensors of ``capacity`` slots, larger or smaller.

        Raises:
            CapacityError: the rows do not fit.
        """
        if arguments.whole(capacity, "capacity") != self.capacity:
            self.inputs = self._made(self.inputs.view(), capacity)

    def view(self, tokens: Sequence[int] | None = None) -> CacheView:
        """The cache as it is now; it must be gone before the next move or extension."""
        return self.inputs.view(tokens)

    def _step(self, rows: int) -> int:
        for step in self.ladder:
            if step >= rows:
                return step
        raise CapacityError(
            f"{rows} rows do not fit the largest capacity of {self.ladder[-1]}",
            fields={"rows": rows, "capacity": self.ladder[-1]},
        )

    def _made(self, cache: CacheView, capacity: int) -> CoreMLInputs:
        made = to_coreml(cache, self._layout, capacity, dtype=self._dtype, threads=self._threads)
        taken = sorted(self._carried.keys() & made.arrays.keys())
        if taken:
            raise UsageError(
                f"`{taken[0]}` is carried, and is a tensor of the layout", fields={"names": taken}
            )
        made.arrays.update(self._carried)
        return made

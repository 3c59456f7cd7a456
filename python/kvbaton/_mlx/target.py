"""Filling caches: what each class wants for so many rows, and how it is told that it has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import CapacityError, IncompatibleError, UsageError
from .slots import Slot, Spec

_STEP = 256  # rows by which mlx-lm's caches grow

Shapes = dict[str, tuple[tuple[int, ...], str]]


@dataclass
class Want:
    """What a fresh cache wants: its spec, shapes and types by part, and where its rows go.

    ``finish`` gives the cache its arrays and counters; until then it is untouched.
    """

    spec: Spec
    arrays: Shapes
    finish: Callable[[dict[str, Any]], None]
    placement: str = "left"
    live: dict[str, Any] = field(default_factory=dict)
    encoding: tuple[int, int] | None = None


def want(
    slot: Slot, kept: Spec, dtypes: dict[str, str], rows: int, spare: int, ring: int | None = None
) -> Want:
    """What ``slot``, which is empty, wants for the past of ``rows`` tokens and ``spare`` more.

    ``kept`` is what is kept there: its window is the source's, or else the decoder's. ``dtypes`` are the
    element types of its parts. ``ring`` is the slot at which the source's ring starts, where it is one of
    mlx-lm's: a ring of the same class stays where it turns, so that attention sums in the same order.

    Raises:
        CapacityError: the cache drops rows that the decoder still reads.
        UsageError: it is a batch.
    """
    wanted = _WRITERS[slot.kind](slot.cache, slot, kept, dtypes, rows, spare)
    if ring is not None and slot.kind in ("RotatingKVCache", "BatchRotatingKVCache"):
        _turn(wanted, slot, rows, ring)
    return wanted


def _turn(wanted: Want, slot: Slot, rows: int, ring: int) -> None:
    """Leaves a ring that is full, of rows or of a batch's padding too, with its oldest row at ``ring``."""
    cache, size = slot.cache, slot.cache.max_size
    batch = slot.kind == "BatchRotatingKVCache"
    buffered = rows + (_only_padding(cache, slot) if batch else 0)
    if buffered <= size or not getattr(cache, "keep", 0) < ring < size:
        return
    live = min(rows, size)
    wanted.placement = "ring-from" if batch else "ring-indexed"
    wanted.live = {"ring_start": ring, "live": live} if batch else {"ring_start": ring}
    fill = wanted.finish

    def finish(arrays: dict[str, Any]) -> None:
        fill(arrays)
        cache._idx = (ring + live) % size if batch else ring
        if batch:
            cache.rotated = True

    wanted.finish = finish


def capacity(rows: int, spare: int) -> int:
    """Slots for ``rows`` rows and ``spare`` more: whole steps, as mlx-lm grows."""
    return rows if spare == 0 else -(-(rows + spare) // _STEP) * _STEP


def _pair(kept: Spec, dtypes: dict[str, str], slots: int) -> Shapes:
    return {
        part: ((1, kept["kv_heads"], slots, kept[f"{part}_dim"]), dtypes[part]) for part in ("key", "value")
    }


def _full(kept: Spec) -> Spec:
    return {"kind": "full", **{k: kept[k] for k in ("kv_heads", "key_dim", "value_dim")}}


def _sliding(kept: Spec, size: int, keep: int) -> Spec:
    return {**_full(kept), "kind": "sliding", "window": {"size": size, "keep": keep}}


def _set(cache: Any, **attributes: Any) -> Callable[[dict[str, Any]], None]:
    """Gives a cache its keys and values, then ``attributes``."""

    def finish(arrays: dict[str, Any]) -> None:
        cache.keys, cache.values = arrays["key"], arrays["value"]
        for name, value in attributes.items():
            setattr(cache, name, value)

    return finish


def _rows(cache: Any, slot: Slot, kept: Spec, dtypes: dict[str, str], rows: int, spare: int) -> Want:
    return Want(_full(kept), _pair(kept, dtypes, capacity(rows, spare)), _set(cache, offset=rows))


def _concatenated(cache: Any, slot: Slot, kept: Spec, dtypes: dict[str, str], rows: int, spare: int) -> Want:
    return Want(_full(kept), _pair(kept, dtypes, rows), _set(cache, offset=rows))


def _rotating(cache: Any, slot: Slot, kept: Spec, dtypes: dict[str, str], rows: int, spare: int) -> Want:
    """The buffer of a window is never longer than the window: mlx-lm would drop rows of its front."""
    size = cache.max_size
    _check_window(slot, kept, size, cache.keep, rows)
    return Want(
        _sliding(kept, size, cache.keep),
        _pair(kept, dtypes, min(size, capacity(rows, spare))),
        _set(cache, offset=rows, _idx=min(rows, size)),
        "ring-indexed",
    )


def _chunked(cache: Any, slot: Slot, kept: Spec, dtypes: dict[str, str], rows: int, spare: int) -> Want:
    size = cache.chunk_size
    _check_window(slot, kept, size, 0, rows)
    start = max(0, rows - size)
    return Want(
        _sliding(kept, size, 0),
        _pair(kept, dtypes, capacity(rows - start, spare)),
        _set(cache, offset=rows, start_position=start),
        live={"live": rows - start},
    )


def _quantized(cache: Any, slot: Slot, kept: Spec, dtypes: dict[str, str], rows: int, spare: int) -> Want:
    bits, group = cache.bits, cache.group_size
    slots = capacity(rows, spare)
    arrays: Shapes = {}
    for part in ("key", "value"):
        dim = kept[f"{part}_dim"]
        if dim % group:
            fits = next((g for g in (128, 64, 32) if dim % g == 0), None)
            raise UsageError(
                f"{slot.place}: groups of {group} do not divide the {dim} lanes of its {part}s",
                hint=None if fits is None else f"groups of {fits} would",
                fields={"group_size": group, "head_dim": dim, "place": slot.place},
            )
        shape = (1, kept["kv_heads"], slots)
        arrays[part] = ((*shape, dim * bits // 32), "uint32")
        for companion in ("scale", "bias"):
            arrays[f"{part}_{companion}"] = ((*shape, dim // group), dtypes[part])

    def finish(filled: dict[str, Any]) -> None:
        names = ("", "_scale", "_bias")
        cache.keys = [filled[f"key{n}"] for n in names]
        cache.values = [filled[f"value{n}"] for n in names]
        cache.offset = rows

    return Want(_full(kept), arrays, finish, encoding=(bits, group))


def _batch(cache: Any, slot: Slot, kept: Spec, dtypes: dict[str, str], rows: int, spare: int) -> Want:
    import mlx.core as mx

    pad = _only_padding(cache, slot)
    return Want(
        _full(kept),
        _pair(kept, dtypes, capacity(pad + rows, spare)),
        _set(cache, offset=mx.array([rows]), _idx=pad + rows),
        "left-padded",
        {"pad": pad},
    )


def _batch_rotating(
    cache: Any, slot: Slot, kept: Spec, dtypes: dict[str, str], rows: int, spare: int
) -> Want:
    import mlx.core as mx

    size, pad = cache.max_size, _only_padding(cache, slot)
    _check_window(slot, kept, size, 0, rows)
    buffered = pad + rows
    index = min(buffered, size)
    # Rows that fell out of the window were padding first.
    left = pad - (buffered - index)
    finish = _set(
        cache,
        offset=mx.array([rows]),
        left_padding=mx.array([left]),
        _offset=buffered,
        _idx=index,
        rotated=False,
    )
    if buffered <= size:
        slots, placement, live = min(size, capacity(buffered, spare)), "left-padded", {"pad": pad}
    else:
        slots, placement, live = size, "right", {"live": min(rows, size)}
    return Want(_sliding(kept, size, 0), _pair(kept, dtypes, slots), finish, placement, live)


def _only_padding(cache: Any, slot: Slot) -> int:
    padding = [int(n) for n in cache.left_padding.tolist()]
    if len(padding) != 1:
        raise UsageError(
            f"{slot.place} is a batch of {len(padding)}: one sequence is handed over at a time",
            fields={"place": slot.place, "sequences": len(padding)},
        )
    return padding[0]


def _states(cache: Any, slot: Slot, kept: Spec, dtypes: dict[str, str], rows: int, spare: int) -> Want:
    arrays: Shapes = {}
    if slot.conv is not None:
        arrays["conv"] = ((1, kept["conv_steps"], kept["conv_channels"]), dtypes["conv"])
    if slot.state is not None:
        heads = () if slot.one_head else (kept["heads"],)
        arrays["state"] = ((1, *heads, kept["value_dim"], kept["key_dim"]), dtypes["state"])

    def finish(filled: dict[str, Any]) -> None:
        for part, at in (("conv", slot.conv), ("state", slot.state)):
            if at is not None:
                cache.cache[at] = filled[part]

    return Want(kept, arrays, finish)


def _check_window(slot: Slot, kept: Spec, size: int, keep: int, rows: int) -> None:
    """A cache that is shorter than the decoder's own window must not have dropped rows yet."""
    own = kept.get("window")
    if own is None and rows > size:
        raise CapacityError(
            f"{slot.place} keeps {size} rows, {rows} are to be handed over",
            hint="make the caches larger, or prefill fewer tokens",
            fields={"place": slot.place, "rows": rows, "capacity": size},
        )
    if own is not None and (own["size"] > size or own["keep"] != keep):
        raise IncompatibleError(
            f"{slot.place} keeps {size} rows of which {keep} stay, the source's window has {own['size']} and "
            f"{own['keep']}",
            fields={"place": slot.place, "window": own["size"], "capacity": size},
        )


_WRITERS: dict[str, Callable[[Any, Slot, Spec, dict[str, str], int, int], Want]] = {
    "KVCache": _rows,
    "ConcatenateKVCache": _concatenated,
    "RotatingKVCache": _rotating,
    "ChunkedKVCache": _chunked,
    "QuantizedKVCache": _quantized,
    "BatchKVCache": _batch,
    "BatchRotatingKVCache": _batch_rotating,
    "ArraysCache": _states,
    "MambaCache": _states,
}

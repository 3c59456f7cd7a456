"""Reading caches: which slots of a cache's memory hold which tokens, class by class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import IncompatibleError, UsageError
from .slots import Slot

Live = dict[str, Any]


@dataclass
class Held:
    """Arrays of one slot by role (``key``, ``key_scale``, ``conv``, …) and where its rows lie.

    ``seen`` is ``None`` where a cache does not count tokens.
    """

    arrays: dict[str, Any]
    seen: int | None
    placement: str = "left"
    live: Live = field(default_factory=dict)
    encoding: tuple[int, int] | None = None


def hold(slot: Slot, sequence: int | None) -> Held:
    """What ``slot`` holds; its arrays are the cache's own.

    Raises:
        IncompatibleError: the cache is in a state that holds no rows in any known order.
        UsageError: it holds a batch and ``sequence`` does not name one of its sequences.
    """
    if slot.recurrent:
        return _states(slot, sequence)
    _check_batch(slot, sequence)
    return _READERS[slot.kind](slot, sequence or 0)


def _check_batch(slot: Slot, sequence: int | None) -> None:
    keys = slot.cache.keys
    batch = (keys[0] if isinstance(keys, list | tuple) else keys).shape[0]
    if sequence is None and batch != 1:
        raise UsageError(
            f"{slot.place} holds {batch} sequences",
            hint="say which one with sequence=",
            fields={"place": slot.place, "sequences": batch},
        )
    if sequence is not None and not 0 <= sequence < batch:
        raise UsageError(
            f"{slot.place} holds {batch} sequences, none has the number {sequence}",
            fields={"place": slot.place, "sequences": batch, "sequence": sequence},
        )


def _pair(cache: Any) -> dict[str, Any]:
    return {"key": cache.keys, "value": cache.values}


def _rows(slot: Slot, _: int) -> Held:
    return Held(_pair(slot.cache), slot.cache.offset)


def _concatenated(slot: Slot, _: int) -> Held:
    # Its trim lowers the offset and keeps the rows, which the next step would read again.
    cache = slot.cache
    rows = cache.keys.shape[2]
    if cache.offset != rows:
        raise _unreadable(slot, f"offset {cache.offset}, and arrays of {rows} rows that it would all read")
    return Held(_pair(cache), rows)


def _rotating(slot: Slot, _: int) -> Held:
    cache = slot.cache
    slots, index, seen = cache.keys.shape[2], cache._idx, cache.offset
    if not 0 <= index <= slots or (index < seen < slots):
        raise _unreadable(slot, f"offset {seen} and index {index} in {slots} slots")
    live: Live = {}
    if index < slots and seen > index:
        # Turning: the next token's slot holds the oldest row that moves.
        live["ring_start"] = max(index, cache.keep)
    elif seen > slots:
        live["ring_start"] = cache.keep
    return Held(_pair(cache), seen, "ring-indexed", live)


def _chunked(slot: Slot, _: int) -> Held:
    cache = slot.cache
    live = cache.offset - cache.start_position
    if not 0 <= live <= cache.keys.shape[2]:
        # mlx-lm before 0.32 cuts its buffer where it should cut its rows.
        found = f"offset {cache.offset} and start {cache.start_position} in {cache.keys.shape[2]} slots"
        raise _unreadable(slot, found, "mlx-lm 0.32 keeps chunks right")
    return Held(_pair(cache), cache.offset, "left", {"live": live})


def _quantized(slot: Slot, _: int) -> Held:
    cache = slot.cache
    names = ("", "_scale", "_bias")
    arrays = {f"key{n}": a for n, a in zip(names, cache.keys, strict=True)}
    arrays |= {f"value{n}": a for n, a in zip(names, cache.values, strict=True)}
    return Held(arrays, cache.offset, encoding=(cache.bits, cache.group_size))


def _batch(slot: Slot, sequence: int) -> Held:
    cache = slot.cache
    pad = int(cache.left_padding[sequence].item())
    return Held(_pair(cache), cache._idx - pad, "left-padded", {"pad": pad})


def _batch_rotating(slot: Slot, sequence: int) -> Held:
    cache = slot.cache
    seen, index, slots = int(cache.offset[sequence].item()), cache._idx, cache.keys.shape[2]
    if not 0 <= index <= slots:
        raise _unreadable(slot, f"offset {seen} and index {index} in {slots} slots")
    if not cache.rotated:
        pad = max(0, index - seen)
        return Held(_pair(cache), seen, "left-padded", {"pad": pad, "live": index - pad})
    oldest = index % slots
    live = min(seen, slots)
    return Held(
        _pair(cache), seen, "ring-from", {"ring_start": (oldest + slots - live) % slots, "live": live}
    )


def _states(slot: Slot, sequence: int | None) -> Held:
    cache = slot.cache
    if getattr(cache, "lengths", None) is not None:
        raise _unreadable(slot, "a padded prefill that is not finished")
    parts = {"conv": slot.conv, "state": slot.state}
    arrays = {part: cache.cache[at] for part, at in parts.items() if at is not None}
    for array in arrays.values():
        if sequence is None and array.shape[0] != 1:
            raise UsageError(
                f"{slot.place} holds {array.shape[0]} sequences",
                hint="say which one with sequence=",
                fields={"place": slot.place, "sequences": array.shape[0]},
            )
    return Held(arrays, None)


_READERS: dict[str, Callable[[Slot, int], Held]] = {
    "KVCache": _rows,
    "ConcatenateKVCache": _concatenated,
    "RotatingKVCache": _rotating,
    "ChunkedKVCache": _chunked,
    "QuantizedKVCache": _quantized,
    "BatchKVCache": _batch,
    "BatchRotatingKVCache": _batch_rotating,
}


def _unreadable(
    slot: Slot, found: str, hint: str = "a window that has turned cannot be trimmed in mlx-lm"
) -> IncompatibleError:
    return IncompatibleError(
        f"{slot.place}: a {slot.kind} with {found}: which slot holds which token cannot be told",
        hint=hint,
        fields={"place": slot.place, "class": slot.kind},
    )

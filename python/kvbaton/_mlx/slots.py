"""What a list of caches keeps: one slot for each attention cache, one for each pair of recurrent states.

A model's caches and its layers need not match: layers may share a cache, and a layer may keep a state beside
its rows (``CacheList``). Slots are the caches' own order, flattened; a cache spec has one entry a slot, and
one for each layer that shares another's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import IncompatibleError

Spec = dict[str, Any]
"""What one layer keeps, in the form of ``kvbaton.model``'s ``layers``."""

ATTENTION = (
    "KVCache",
    "RotatingKVCache",
    "ChunkedKVCache",
    "QuantizedKVCache",
    "ConcatenateKVCache",
    "BatchKVCache",
    "BatchRotatingKVCache",
)
ARRAYS = ("ArraysCache", "MambaCache")
"""mlx-lm 0.30 has a ``MambaCache`` that is an ``ArraysCache`` of two."""


@dataclass(frozen=True)
class Slot:
    """One thing that a list of caches keeps.

    ``place`` says where, for messages. For recurrent states, ``conv`` and ``state`` are indices of
    ``cache.cache``; either may be absent, and a state of one head may have no axis for it.
    """

    place: str
    cache: Any
    conv: int | None = None
    state: int | None = None
    one_head: bool = False

    @property
    def kind(self) -> str:
        """The cache's class."""
        return type(self.cache).__name__

    @property
    def recurrent(self) -> bool:
        """Whether it is a recurrent state."""
        return self.kind in ARRAYS


def flatten(caches: Sequence[Any], like: Sequence[Slot] | None = None) -> list[Slot]:
    """The slots of ``caches``.

    Which array of an ``ArraysCache`` is what shows in its arrays; an empty one is read ``like`` another.

    Raises:
        IncompatibleError: a cache is of a class that is not known.
    """
    members = list(_members(caches))
    pattern = None if like is None else _by_cache(like)
    slots: list[Slot] = []
    for number, (place, cache) in enumerate(members):
        name = type(cache).__name__
        if name in ATTENTION:
            slots.append(Slot(place, cache))
        elif name in ARRAYS:
            own = [a for a in cache.cache if a is not None]
            if own:
                slots += _states(place, cache)
            elif pattern is not None and number < len(pattern):
                slots += [replace(s, place=place, cache=cache) for s in pattern[number]]
            else:
                slots.append(Slot(place, cache))
        else:
            raise IncompatibleError(
                f"unsupported cache class {name} at {place}", fields={"class": name, "place": place}
            )
    return slots


def _members(caches: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for index, cache in enumerate(caches):
        if type(cache).__name__ == "CacheList":
            for number, member in enumerate(cache.caches):
                yield f"cache {index}, member {number}", member
        else:
            yield f"cache {index}", cache


def _by_cache(slots: Sequence[Slot]) -> list[list[Slot]]:
    grouped: list[list[Slot]] = []
    for slot in slots:
        if grouped and grouped[-1][0].cache is slot.cache:
            grouped[-1].append(slot)
        else:
            grouped.append([slot])
    return grouped


def _states(place: str, cache: Any) -> list[Slot]:
    """Pairs of convolution and recurrent state: (B, steps, channels) and (B, heads, value_dim, key_dim).

    A second array of three axes is the state of a model with one head, (B, value_dim, key_dim).
    """
    slots: list[Slot] = []
    conv: int | None = None
    for index, array in enumerate(cache.cache):
        if array is None:
            raise IncompatibleError(
                f"{place}: array {index} is missing beside others", fields={"place": place}
            )
        if array.ndim not in (3, 4) or not _is_float(array):
            raise IncompatibleError(
                f"{place}: array {index} of shape {list(array.shape)} and type {_name(array.dtype)} is no "
                "convolution or recurrent state that can be handed over",
                fields={"place": place, "array": index, "shape": list(array.shape)},
            )
        if array.ndim == 4 or (conv is not None and len(cache.cache) == 2):
            slots.append(Slot(place, cache, conv, index, one_head=array.ndim == 3))
            conv = None
        else:
            if conv is not None:
                slots.append(Slot(place, cache, conv, None))
            conv = index
    if conv is not None:
        slots.append(Slot(place, cache, conv, None))
    return slots


def _is_float(array: Any) -> bool:
    return _name(array.dtype) in ("float16", "bfloat16", "float32")


def _name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


def spec_of(slot: Slot) -> Spec | None:
    """What a slot that holds something keeps; ``None`` for an empty one."""
    cache = slot.cache
    if slot.recurrent:
        if slot.conv is None and slot.state is None:
            return None
        conv = None if slot.conv is None else cache.cache[slot.conv]
        state = None if slot.state is None else cache.cache[slot.state]
        if conv is None and state is None:
            return None
        _, steps, channels = (0, 0, 0) if conv is None else conv.shape
        heads, value_dim, key_dim = (0, 0, 0) if state is None else ((1, *state.shape[1:])[-3:])
        return {
            "kind": "recurrent",
            "conv_steps": steps,
            "conv_channels": channels,
            "heads": heads,
            "value_dim": value_dim,
            "key_dim": key_dim,
        }
    if cache.keys is None:
        return None
    keys, values = cache.keys, cache.values
    quantized = slot.kind == "QuantizedKVCache"
    for name, part in (("keys", keys), ("values", values)):
        triple = isinstance(part, list | tuple) and len(part) == 3
        if not (triple if quantized else getattr(part, "ndim", 0) == 4):
            expected = "codes, scales and biases" if quantized else "one array of four dimensions"
            raise IncompatibleError(
                f"{slot.place}: the {name} of a {slot.kind} are {expected}, these are not",
                fields={"place": slot.place, "class": slot.kind, "part": name},
            )
    if quantized:
        heads = keys[0].shape[1]
        dims = [part[1].shape[-1] * cache.group_size for part in (keys, values)]
    else:
        heads, dims = keys.shape[1], [keys.shape[-1], values.shape[-1]]
    return attention_spec(slot, heads, dims[0], dims[1])


def attention_spec(slot: Slot, kv_heads: int, key_dim: int, value_dim: int) -> Spec:
    """What a slot keeps whose heads are known."""
    sizes = {"kv_heads": kv_heads, "key_dim": key_dim, "value_dim": value_dim}
    window = window_of(slot.cache)
    if window is None:
        return {"kind": "full", **sizes}
    return {"kind": "sliding", **sizes, "window": {"size": window[0], "keep": window[1]}}


def window_of(cache: Any) -> tuple[int, int] | None:
    """Rows that a cache keeps at most, and how many of the first stay; ``None`` where it keeps all."""
    name = type(cache).__name__
    if name == "RotatingKVCache":
        return cache.max_size, cache.keep
    if name == "BatchRotatingKVCache":
        return cache.max_size, 0
    if name == "ChunkedKVCache":
        return cache.chunk_size, 0
    return None


def owners(layers: Sequence[Spec]) -> list[Spec]:
    """The layers that keep something."""
    return [layer for layer in layers if layer["kind"] != "shared"]


_SIZES = ("kv_heads", "key_dim", "value_dim", "heads", "conv_steps", "conv_channels")


def check_geometry(place: str, source: Spec, decoder: Spec) -> None:
    """Refuses a source whose heads, lanes or states are not the decoder's.

    Windows are not compared: whether the rows that a cache wants are there is the plan's to say.
    """
    kinds = ["state" if spec["kind"] == "recurrent" else "rows" for spec in (source, decoder)]
    if kinds[0] != kinds[1]:
        raise IncompatibleError(
            f"{place} keeps a {source['kind']} layer, the decoder a {decoder['kind']} one",
            fields={
                "field": "layer kind",
                "place": place,
                "source": source["kind"],
                "decoder": decoder["kind"],
            },
        )
    for field in _SIZES:
        here, there = source.get(field), decoder.get(field)
        if here != there:
            raise IncompatibleError(
                f"{place}: {field} is {here}, the decoder's is {there}",
                fields={"field": field, "place": place, "source": here, "decoder": there},
            )

"""From mlx-lm's caches to a view of their memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .. import _arguments as arguments
from .. import _native
from ..cache import CacheView
from ..errors import IncompatibleError, UsageError
from .decoder import Decoder, describe, with_shared
from .rules import Lies, layout_toml
from .slots import Slot, Spec, attention_spec, check_geometry, flatten, spec_of
from .source import Held, hold


def from_mlx(
    caches: Sequence[Any],
    model: Any | None = None,
    *,
    tokens: Sequence[int] | None = None,
    tokens_seen: int | None = None,
    sequence: int | None = None,
) -> CacheView:
    """A view of mlx-lm's caches, of any class: live rows alone, in canonical order. Nothing is copied.

    ``model`` is the decoder that filled them; with it the view can be checked against another decoder's
    geometry, rope and vocabulary, and empty caches can be read. ``tokens`` are the ids the rows belong to.
    Models without attention do not count tokens: say ``tokens`` or ``tokens_seen``. ``sequence`` chooses one
    of a batch.

    The view shares the caches' memory and pins it. While it lives, the caches' next step copies its arrays
    instead of writing in place, so the view never changes: ``del`` it before going on where that costs too
    much.

    Raises:
        IncompatibleError: a cache is of an unknown class, or in a state without a known order of rows.
        UsageError: caches are empty and no model says what they keep, or they disagree on the tokens seen.
    """
    import mlx.core as mx

    if not isinstance(caches, Iterable):
        raise UsageError(f"caches are a {type(caches).__name__}, not mlx-lm's caches")
    caches = list(caches)
    if not caches:
        raise UsageError("there are no caches to read")
    ids = None if tokens is None else arguments.ids(tokens)
    tokens_seen = arguments.maybe_whole(tokens_seen, "tokens_seen")
    sequence = arguments.maybe_whole(sequence, "sequence")
    decoder = None if model is None else describe(model)
    slots = flatten(caches, None if decoder is None else decoder.slots)
    specs = _specs(slots, decoder)
    held = [None if spec_of(slot) is None else hold(slot, sequence) for slot in slots]
    mx.eval([list(one.arrays.values()) for one in held if one is not None])
    seen = _tokens_seen(slots, held, ids, tokens_seen)

    named: list[tuple[str, Any, str]] = []
    lies: list[Lies] = []
    live: dict[str, Any] = {"tokens_seen": seen, "sequence": sequence, "layers": {}}
    for layer, (spec, one) in enumerate(zip(specs, held, strict=True)):
        one = one or _empty(spec)
        for part, array in one.arrays.items():
            dtype = str(array.dtype).rpartition(".")[2]
            named.append((f"{part}_{layer}", _pinned(array), dtype))
            lies.append(Lies(layer, part, one.placement, one.encoding, part == "state" and array.ndim == 3))
        if one.live:
            live["layers"][str(layer)] = one.live
    layers = specs if model is None else with_shared(model, specs)
    description = None if decoder is None else json.dumps(decoder.model)
    native = _native.NativeView.from_arrays(
        named, layout_toml(lies), json.dumps(layers), json.dumps(live), ids, description
    )
    view = CacheView(native)
    view.rings = {
        layer: one.live["ring_start"]
        for layer, one in enumerate(held)
        if one is not None and one.placement.startswith("ring-") and "ring_start" in one.live
    }
    return view


def _specs(slots: Sequence[Slot], decoder: Decoder | None) -> list[Spec]:
    if decoder is not None and len(slots) != len(decoder.kept):
        raise IncompatibleError(
            f"the model keeps {len(decoder.kept)} things, the caches hold {len(slots)}",
            fields={"model": len(decoder.kept), "caches": len(slots)},
        )
    specs: list[Spec] = []
    for number, slot in enumerate(slots):
        spec = spec_of(slot)
        if spec is None:
            if decoder is None:
                raise UsageError(
                    f"{slot.place} is empty: what it keeps cannot be told",
                    hint="give model=",
                    fields={"place": slot.place},
                )
            spec = decoder.kept[number].spec
            if not slot.recurrent:
                spec = attention_spec(slot, spec["kv_heads"], spec["key_dim"], spec["value_dim"])
        elif decoder is not None:
            check_geometry(slot.place, spec, decoder.kept[number].spec)
        specs.append(spec)
    return specs


def _tokens_seen(
    slots: Sequence[Slot], held: Sequence[Held | None], tokens: Sequence[int] | None, said: int | None
) -> int:
    counts = {
        slot.place: 0 if one is None else one.seen
        for slot, one in zip(slots, held, strict=True)
        if not slot.recurrent
    }
    if tokens is not None:
        counts["tokens="] = len(tokens)
    if said is not None:
        counts["tokens_seen="] = said
    if not counts:
        raise UsageError(
            "recurrent states do not count tokens", hint="say how many they have seen with tokens_seen="
        )
    (first, seen), *others = counts.items()
    for place, other in others:
        if other != seen:
            raise UsageError(
                f"{first} has seen {seen} tokens, {place} {other}",
                fields={"tokens_seen": seen, "other": other, "place": place},
            )
    assert seen is not None
    return seen


def _pinned(array: Any) -> Any:
    """Another reference to the same memory: the cache's next write cannot go there while it lives."""
    return array if isinstance(array, np.ndarray) else array[...]


def _empty(spec: Spec) -> Held:
    """No rows, or the zeros that a recurrent state starts with."""
    if spec["kind"] == "recurrent":
        arrays = {}
        if spec["conv_steps"]:
            arrays["conv"] = np.zeros((1, spec["conv_steps"], spec["conv_channels"]), np.float32)
        if spec["heads"]:
            shape = (1, spec["heads"], spec["value_dim"], spec["key_dim"])
            arrays["state"] = np.zeros(shape, np.float32)
        return Held(arrays, None)
    shapes = [(1, spec["kv_heads"], 0, spec[dim]) for dim in ("key_dim", "value_dim")]
    return Held({"key": np.zeros(shapes[0], np.float32), "value": np.zeros(shapes[1], np.float32)}, 0)

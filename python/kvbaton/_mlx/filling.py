"""From a view to mlx-lm's caches."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import _arguments as arguments
from .. import _native
from .._reserve import Wanted, reserve, size_bytes
from ..cache import CacheView
from ..errors import CapacityError, IncompatibleError, UsageError
from ..report import HandoffReport
from .decoder import Decoder, make_caches
from .rows import Source
from .rules import Lies, layout_toml
from .slots import Slot, Spec, check_geometry, flatten, owners, spec_of
from .source import hold
from .target import Shapes, Want, want

_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Remaining:
    """The contract about the last token: rows to hand over, tokens that remain to be run.

    With none remaining, the first new token comes from the source's logits.
    """

    rows: int
    tokens: list[int]


def remaining(cache: CacheView, tokens: Sequence[int] | None) -> Remaining:
    """What a decoder needs: all rows and one more token, or one row less and the last token again.

    A recurrent state has no rows to leave out: there, the source's logits must stand in for the last token.

    Raises:
        UsageError: ``tokens`` are not the cache's, or none can remain.
    """
    seen, known = cache.tokens_seen, cache.tokens
    if tokens is None:
        if known is None:
            raise UsageError("the ids of the cache's tokens are not known", hint="give tokens=")
        tokens = known
    ids = arguments.numbers(tokens)
    if len(ids) not in (seen, seen + 1):
        raise UsageError(
            f"the cache has seen {seen} tokens, {len(ids)} were given",
            hint="give the cache's own tokens, or those and one more",
            fields={"tokens_seen": seen, "tokens": len(ids)},
        )
    if known is not None and ids[:seen] != known:
        at = next(i for i, (a, b) in enumerate(zip(ids, known, strict=False)) if a != b)
        raise UsageError(
            f"token {at} is {ids[at]}, the cache was made from {known[at]}",
            fields={"position": at, "token": ids[at], "cache_token": known[at]},
        )
    if not ids:
        raise UsageError("no tokens: a decoder needs one to run")
    if len(ids) == seen + 1:
        return Remaining(seen, ids[-1:])
    layers = json.loads(cache._native.cache)
    recurrent = next((i for i, spec in enumerate(layers) if spec["kind"] == "recurrent"), None)
    if recurrent is None:
        return Remaining(seen - 1, ids[-1:])
    if cache.logits is not None:
        return Remaining(seen, [])
    raise UsageError(
        f"layer {recurrent} keeps a recurrent state, which holds all {seen} tokens: "
        "the last cannot be run again",
        hint="give one token more in tokens=, or set the cache's logits",
        fields={"layer": recurrent, "tokens_seen": seen},
    )


@dataclass
class Filled:
    """Caches that hold the rows."""

    caches: list[Any]
    report: HandoffReport
    quantized_layers: int


def fill(
    source: Source,
    decoder: Decoder,
    model: Any,
    rows: int,
    *,
    prompt_cache: Sequence[Any] | None,
    dtype: Any | None,
    spare_rows: int,
    kv_bits: int | None,
    kv_group_size: int,
    threads: int,
) -> Filled:
    """Fills fresh caches, or lengthens those that hold a shorter past.

    Everything is checked before anything is copied, and no cache is touched before all rows are there.
    """
    if spare_rows < 0:
        raise UsageError(f"spare_rows={spare_rows} is negative", fields={"spare_rows": spare_rows})
    caches, quantized = _given(model, prompt_cache, kv_bits, kv_group_size)
    slots = flatten(caches, decoder.slots)
    _check_distinct(slots)
    layers = _layers(source, decoder, slots)
    past = _past(slots, decoder)
    if past > rows:
        raise UsageError(
            f"the caches have seen {past} tokens, {rows} are to be handed over",
            fields={"caches": past, "rows": rows},
        )
    if rows == past:
        return Filled(caches, HandoffReport.empty(0.0), quantized)
    if past and not source.keeps_rows:
        raise UsageError(
            f"the caches have seen {past} tokens: a streamed prefill fills empty ones",
            hint="prefill first, and hand the result over with to_mlx",
            fields={"caches": past},
        )
    job = _Job(source, decoder, slots, layers, dtype, spare_rows, threads)
    return Filled(caches, job.lengthen(past, rows) if past else job.fill(rows), quantized)


def empty(
    decoder: Decoder, model: Any, prompt_cache: Sequence[Any] | None, kv_bits: int | None, kv_group_size: int
) -> Filled:
    """Caches for a prompt of one token, which has no rows to hand over: as :func:`fill` checks and makes them."""
    caches, quantized = _given(model, prompt_cache, kv_bits, kv_group_size)
    slots = flatten(caches, decoder.slots)
    _check_distinct(slots)
    if len(slots) != len(decoder.kept):
        raise IncompatibleError(
            f"the decoder keeps {len(decoder.kept)} things, there are {len(slots)} caches",
            fields={"decoder": len(decoder.kept), "caches": len(slots)},
        )
    past = _past(slots, decoder)
    if past:
        raise UsageError(
            f"the caches have seen {past} tokens: a streamed prefill fills empty ones",
            hint="prefill first, and hand the result over with to_mlx",
            fields={"caches": past},
        )
    for slot, kept in zip(slots, decoder.kept, strict=True):
        # What cannot be filled cannot be decoded into either.
        want(slot, kept.spec, dict.fromkeys(kept.dtypes, "float16"), 0, 0)
    return Filled(caches, HandoffReport.empty(0.0), quantized)


def _given(
    model: Any, prompt_cache: Sequence[Any] | None, bits: int | None, group_size: int
) -> tuple[list[Any], int]:
    """The caches to fill, and how many of them were made quantised."""
    if prompt_cache is not None and not isinstance(prompt_cache, Iterable):
        raise UsageError(f"prompt_cache is a {type(prompt_cache).__name__}, not mlx-lm's caches")
    caches = make_caches(model) if prompt_cache is None else list(prompt_cache)
    return caches, 0 if bits is None else _quantize(caches, bits, group_size)


def _quantize(caches: list[Any], bits: int, group_size: int) -> int:
    """Puts quantised caches where mlx-lm's own ``kv_bits`` does: for full attention. Counts them."""
    from mlx_lm.models.cache import QuantizedKVCache

    bits = arguments.whole(bits, "kv_bits")
    group_size = arguments.whole(group_size, "kv_group_size")
    if bits not in _BITS or group_size not in _GROUPS:
        raise UsageError(
            f"there are no codes of {bits} bits in groups of {group_size}",
            hint="2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128",
            fields={"kv_bits": bits, "kv_group_size": group_size},
        )
    count = 0
    for index, cache in enumerate(caches):
        if type(cache).__name__ == "KVCache" and cache.keys is None:
            caches[index] = QuantizedKVCache(group_size=group_size, bits=bits)
            count += 1
    if count == 0:
        kinds = sorted({type(cache).__name__ for cache in caches})
        raise UsageError(
            f"no cache can be quantised: the decoder has {', '.join(kinds)}",
            hint="mlx-lm quantises caches of full attention alone",
            fields={"classes": kinds},
        )
    return count


def _layers(source: Source, decoder: Decoder, slots: Sequence[Slot]) -> list[tuple[int, Spec]]:
    """The view's layers that keep something, in the order of the slots."""
    spec = source.layers
    kept = [(layer, one) for layer, one in enumerate(spec) if one["kind"] != "shared"]
    if len(kept) != len(slots):
        raise IncompatibleError(
            f"the cache has {len(kept)} layers that keep rows, the decoder has {len(slots)} caches",
            fields={"layers": len(kept), "caches": len(slots)},
        )
    for (layer, one), own in zip(kept, decoder.kept, strict=True):
        check_geometry(f"layer {layer}", one, own.spec)
    return kept


def check_model(source: dict[str, Any] | None, decoder: Decoder) -> None:
    """Refuses a cache that another model made: layers, heads, windows, rope or vocabulary differ.

    Layers that keep nothing of their own are left out: which layer reads which cache is the decoder's matter.
    """
    if source is None:
        return
    sides = [{**side, "layers": owners(side["layers"])} for side in (source, decoder.model)]
    _native.check_compatible(json.dumps(sides[0]), json.dumps(sides[1]), False)


def _check_memory(wanted: Wanted, spare_rows: int) -> None:
    """Refuses caches that no memory of this machine holds, before the system looks for a process to end."""
    need = size_bytes(wanted)
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > have:
        raise CapacityError(
            f"caches with {spare_rows} spare rows take {need} bytes, this machine has {have}",
            hint="fewer spare_rows",
            fields={"bytes": need, "memory": have, "spare_rows": spare_rows},
        )


def _check_distinct(slots: Sequence[Slot]) -> None:
    """Refuses one cache in two places: the last layer that is written there would be read by both."""
    places: dict[int, str] = {}
    for slot in slots:
        first = places.setdefault(id(slot.cache), slot.place)
        if first != slot.place:
            raise UsageError(
                f"{first} and {slot.place} are the same object",
                hint="every layer needs a cache of its own",
                fields={"place": first, "other": slot.place},
            )


def _past(slots: Sequence[Slot], decoder: Decoder) -> int:
    """Tokens that the caches have seen, an empty one none; a state alone does not say.

    Refuses caches that cannot take rows: of other heads, of a batch, or in no known order.
    """
    seen: dict[str, int] = {}
    for slot, kept in zip(slots, decoder.kept, strict=True):
        spec = None if slot.recurrent else spec_of(slot)
        if spec is not None:
            check_geometry(slot.place, spec, kept.spec)
            seen[slot.place] = hold(slot, None).seen or 0
    if any(seen.values()):
        seen |= {s.place: 0 for s in slots if not s.recurrent and s.place not in seen}
    if not seen:
        states = [s for s in slots if s.recurrent and any(a is not None for a in s.cache.cache)]
        if states:
            raise UsageError(
                f"{states[0].place} already holds a state, and does not say of how many tokens",
                hint="hand over to fresh caches",
                fields={"place": states[0].place},
            )
        return 0
    if len(set(seen.values())) > 1:
        raise UsageError("the caches have seen different numbers of tokens", fields={"tokens_seen": seen})
    return next(iter(seen.values()))


@dataclass
class _Job:
    source: Source
    decoder: Decoder
    slots: list[Slot]
    layers: list[tuple[int, Spec]]
    dtype: Any | None
    spare_rows: int
    threads: int

    def fill(self, rows: int) -> HandoffReport:
        """Fresh arrays of MLX, filled, then given to the caches."""
        return self._made(rows, [self._want(number, rows) for number in range(len(self.slots))], None)

    def lengthen(self, past: int, rows: int) -> HandoffReport:
        """Only the rows that the caches lack; the caches take them as they take a step's."""
        import mlx.core as mx

        wanted = [self._missing(number, past, rows) for number in range(len(self.slots))]
        report = self._made(rows, wanted, (past, rows))
        mx.eval([_arrays_of(slot) for slot in self.slots])
        return report

    def _made(self, rows: int, wanted: list[Want], only: tuple[int, int] | None) -> HandoffReport:
        named = [(number, part) for number, one in enumerate(wanted) for part in one.arrays]
        shapes = [wanted[number].arrays[part] for number, part in named]
        _check_memory(shapes, self.spare_rows)
        made, allocation = reserve(shapes)
        arrays: list[dict[str, Any]] = [{} for _ in wanted]
        for (number, part), array in zip(named, made, strict=True):
            arrays[number][part] = array
        del made
        report = self._copy(rows, wanted, arrays, only)
        report.allocation = allocation
        for one, own in zip(wanted, arrays, strict=True):
            one.finish(own)
        return report

    def _want(self, number: int, rows: int) -> Want:
        slot, kept = self.slots[number], self.decoder.kept[number]
        layer, own = self.layers[number]
        spec = {**kept.spec, "window": own["window"]} if "window" in own else kept.spec
        ring = self.source.rings.get(layer) if rows == self.source.tokens_seen else None
        return want(slot, spec, self._dtypes(number), rows, self.spare_rows, ring)

    def _missing(self, number: int, past: int, rows: int) -> Want:
        """Rows ``past..rows`` of an attention cache by themselves; a state whole."""
        slot = self.slots[number]
        if slot.recurrent:
            return self._want(number, rows)
        spec, dtypes = self.decoder.kept[number].spec, self._dtypes(number)
        window = self.layers[number][1].get("window")
        oldest = self.source.tokens_seen - (window["size"] - window["keep"] if window else 0)
        if window is not None and past < oldest:
            raise CapacityError(
                f"{slot.place} has seen {past} tokens, and the source's window of {window['size']} "
                f"no longer holds the rows from there to {rows}",
                hint="hand over to fresh caches",
                fields={"place": slot.place, "caches": past, "rows": rows, "window": window["size"]},
            )
        shapes: Shapes = {
            part: ((1, spec["kv_heads"], rows - past, spec[f"{part}_dim"]), dtypes[part])
            for part in ("key", "value")
        }
        plain = {k: spec[k] for k in ("kv_heads", "key_dim", "value_dim")}

        def finish(arrays: dict[str, Any]) -> None:
            slot.cache.update_and_fetch(arrays["key"], arrays["value"])

        return Want({"kind": "full", **plain}, shapes, finish, live={"live": rows - past})

    def _dtypes(self, number: int) -> dict[str, str]:
        """Element types by part: those that the decoder writes, unless another was asked for.

        A recurrent state keeps its own: it adds up over all tokens, and models hold it in float32.
        """
        own = {
            part: str(dtype).rpartition(".")[2] for part, dtype in self.decoder.kept[number].dtypes.items()
        }
        if self.dtype is None:
            return own
        name = str(self.dtype).rpartition(".")[2]
        if name not in ("float16", "bfloat16", "float32"):
            raise UsageError(
                f"a cache cannot have elements of type {name}",
                hint="float16, bfloat16 or float32",
                fields={"dtype": name},
            )
        return {part: dtype if part == "state" else name for part, dtype in own.items()}

    def _copy(
        self, rows: int, wanted: list[Want], arrays: list[dict[str, Any]], only: tuple[int, int] | None
    ) -> HandoffReport:
        spec = list(self.source.layers)
        live: dict[str, Any] = {"tokens_seen": rows, "layers": {}}
        targets, lies = [], []
        for (layer, _), one, filled in zip(self.layers, wanted, arrays, strict=True):
            spec[layer] = one.spec
            if one.live:
                live["layers"][str(layer)] = one.live
            for part, (shape, dtype) in one.arrays.items():
                targets.append((f"{part}_{layer}", filled[part], dtype))
                lies.append(
                    Lies(layer, part, one.placement, one.encoding, part == "state" and len(shape) == 3)
                )
        documents = (layout_toml(lies), json.dumps(live), json.dumps(spec))
        return self.source.fill(targets, documents, only, self.threads)


def _arrays_of(slot: Slot) -> list[Any]:
    if slot.recurrent:
        return [a for a in slot.cache.cache if a is not None]
    return [slot.cache.keys, slot.cache.values]

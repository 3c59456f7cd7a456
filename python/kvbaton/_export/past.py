"""What attention sees besides the rows being computed: nothing, the cache so far as inputs, or states.

Columns of scores, and what masks them:

- A prefill of its own sees its S rows: a constant causal mask.
- A chunk sees its own rows, then the slots of the past. The chunk comes first, so that what is visible is a
  prefix: slots that hold nothing yet are at the end.
- A decode step writes its row into the states and sees their slots.

Full layers keep position p in slot p. Layers with a window are rings of as many slots as the window has:
position p is in slot p mod slots, so that no row ever moves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

from .config import ModelConfig, Rope
from .layout import KvGroup
from .rope import tables

Var = Any


@dataclass(frozen=True)
class Kind:
    """Constants of the layers of one kind: rotary factors, and the mask of full or sliding attention."""

    cos: Var
    sin: Var
    mask: Var


class Past(ABC):
    """Where rows of earlier tokens come from. ``rows`` is the number of rows being computed."""

    grouped = True
    """Whether queries of one KV head are rows of one product; otherwise K and V are repeated for them."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    @abstractmethod
    def kind(self, rope: Rope, window: int | None, prefix: str) -> Kind:
        """The constants of one kind of layers; ``prefix`` goes before their names."""

    @abstractmethod
    def seen(self, layer: int, k: Var, v: Var) -> tuple[Var, Var]:
        """Keys and values that the rows attend to, (1, kv_heads, columns, head_dim)."""

    def outputs(self, keys: dict[int, Var], values: dict[int, Var]) -> list[Var]:
        """What of the cache leaves the function as outputs."""
        return []


class NoPast(Past):
    """A prompt from its start."""

    grouped = False

    def kind(self, rope: Rope, window: int | None, prefix: str) -> Kind:
        """Tables of the positions 0..S and a constant mask."""
        cos, sin = tables(rope, self.rows)
        return Kind(
            mb.const(val=cos[None, None], name=f"{prefix}rope_cos"),
            mb.const(val=sin[None, None], name=f"{prefix}rope_sin"),
            mb.const(val=causal(self.rows, window)[None, None], name=f"{prefix}causal_mask"),
        )

    def seen(self, layer: int, k: Var, v: Var) -> tuple[Var, Var]:
        """The prompt's own rows."""
        return k, v


class _Positioned(Past):
    """After ``position`` tokens, in a context of ``context``."""

    def __init__(self, rows: int, context: int, position: Var) -> None:
        super().__init__(rows)
        self.context, self.position = context, position

    def rotary(self, rope: Rope, prefix: str) -> tuple[Var, Var]:
        """Rows of the tables from the position on; rows beyond the context, which are padding, repeat the last."""
        cos, sin = tables(rope, self.context)
        offsets = np.arange(self.rows, dtype=np.int32)
        at = mb.add(x=self.position, y=offsets)
        at = mb.minimum(x=at, y=np.int32(self.context - 1), name=f"{prefix}rope_rows")
        found = []
        for table, name in ((cos, "cos"), (sin, "sin")):
            const = mb.const(val=table, name=f"{prefix}rope_{name}_table")
            taken = mb.gather(x=const, indices=at, axis=0)
            shape = [1, 1, self.rows, rope.dims]
            found.append(mb.reshape(x=taken, shape=shape, name=f"{prefix}rope_{name}"))
        return found[0], found[1]

    def slots(self, window: int | None) -> int:
        """Slots of a layer."""
        return slots(self.context, window)


class PastInputs(_Positioned):
    """A chunk of a prompt: the rows before it come in as inputs and stay as they are."""

    def __init__(
        self, config: ModelConfig, rows: int, context: int, groups: list[KvGroup], inputs: dict[str, Var]
    ) -> None:
        super().__init__(rows, context, inputs["position"])
        self.sources = {
            layer: (inputs[group.past_key], inputs[group.past_value], index, len(group.layers))
            for group in groups
            for index, layer in enumerate(group.layers)
        }

    def kind(self, rope: Rope, window: int | None, prefix: str) -> Kind:
        """Tables from the position on; a mask over the chunk's rows and the slots of the past."""
        cos, sin = self.rotary(rope, prefix)
        count = self.slots(window)
        slot = np.arange(count, dtype=np.int32).reshape(1, 1, 1, count)
        if window is None:
            shown = mb.less(x=slot, y=self.position)
            past = mb.tile(x=_additive(shown), reps=[1, 1, self.rows, 1])
        else:
            # Tokens between the one in a slot and the newest: a slot without one has more than there are.
            newest = mb.add(x=self.position, y=np.int32(count - 1))
            age = mb.mod(x=mb.sub(x=newest, y=slot), y=np.int32(count))
            held = mb.less(x=age, y=self.position)
            reach = (window - 1 - np.arange(self.rows, dtype=np.int32)).reshape(1, 1, self.rows, 1)
            past = _additive(mb.logical_and(x=mb.less(x=age, y=reach), y=held))
        own = mb.const(val=causal(self.rows, window)[None, None], name=f"{prefix}causal_mask")
        return Kind(cos, sin, mb.concat(values=[own, past], axis=-1, name=f"{prefix}mask"))

    def seen(self, layer: int, k: Var, v: Var) -> tuple[Var, Var]:
        """The chunk's rows, then the slots of the past."""
        past_k, past_v, index, count = self.sources[layer]
        if count > 1:
            past_k, past_v = (_layer_of(past, index) for past in (past_k, past_v))
        return mb.concat(values=[k, past_k], axis=2), mb.concat(values=[v, past_v], axis=2)


class States(_Positioned):
    """A decode step: the row is written into the states, in place.

    Each state is read once and every later read is the result of the update before: coremltools merges
    repeated reads into the first, and later layers would start from what it saw.
    """

    def __init__(
        self, config: ModelConfig, rows: int, context: int, groups: list[KvGroup], inputs: dict[str, Var]
    ) -> None:
        super().__init__(rows, context, inputs["position"])
        self.places = {layer: (group, index) for group in groups for index, layer in enumerate(group.layers)}
        self.windows = {
            layer: config.windows.size if config.windows and config.has_window(layer) else None
            for layer in self.places
        }
        self.inputs = inputs
        self.read: dict[str, Var] = {}
        self.slot: dict[int, Var] = {}

    def kind(self, rope: Rope, window: int | None, prefix: str) -> Kind:
        """Tables of the position; a mask over the slots, the step's own among them."""
        cos, sin = self.rotary(rope, prefix)
        count = self.slots(window)
        slot = np.arange(count, dtype=np.int32).reshape(1, 1, 1, count)
        if window is None:
            shown = mb.less_equal(x=slot, y=self.position)
        else:
            now = mb.add(x=self.position, y=np.int32(count))
            age = mb.mod(x=mb.sub(x=now, y=slot), y=np.int32(count))
            shown = mb.less_equal(x=age, y=self.position)
        return Kind(cos, sin, mb.identity(x=_additive(shown), name=f"{prefix}mask"))

    def seen(self, layer: int, k: Var, v: Var) -> tuple[Var, Var]:
        """All slots of the layer, after the row has been written."""
        group, index = self.places[layer]
        return self._written(group.key, layer, index, k), self._written(group.value, layer, index, v)

    def _written(self, name: str, layer: int, index: int, row: Var) -> Var:
        state = self.inputs[name]
        so_far = self.read.get(name)
        if so_far is None:
            so_far = mb.read_state(input=state)
        _, heads, _, lanes = so_far.shape
        first = self._slot(self.slots(self.windows[layer]))
        after = mb.add(x=first, y=np.int32(1))
        low, high = (np.array([value], np.int32) for value in (index, index + 1))
        begin = mb.concat(values=[low, np.zeros(1, np.int32), first, np.zeros(1, np.int32)], axis=0)
        ends = [high, np.array([heads], np.int32), after, np.array([lanes], np.int32)]
        end = mb.concat(values=ends, axis=0)
        update = mb.slice_update(x=so_far, update=row, begin=begin, end=end)
        self.read[name] = mb.coreml_update_state(state=state, value=update)
        return _layer_of(self.read[name], index)

    def _slot(self, count: int) -> Var:
        """The slot of the step's row: its position, around in rings."""
        if count == self.context:
            return self.position
        if count not in self.slot:
            self.slot[count] = mb.mod(x=self.position, y=np.int32(count))
        return self.slot[count]


def slots(context: int, window: int | None) -> int:
    """Slots that a layer needs for a context: a window keeps as many rows as it attends to."""
    return context if window is None else min(context, window)


def past_shapes(config: ModelConfig, context: int, groups: list[KvGroup]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that hold the cache of a context, by the names of the groups' outputs."""
    shapes = {}
    for group in groups:
        windowed = config.windows is not None and config.has_window(group.layers[0])
        count = slots(context, config.windows.size if windowed and config.windows else None)
        shape = (len(group.layers), config.kv_heads, count, config.head_dim)
        shapes[group.key] = shapes[group.value] = shape
    return shapes


def causal(rows: int, window: int | None) -> Any:
    """What rows add to their scores over each other, (S, S) float16: 0 where they read, -inf elsewhere."""
    position = np.arange(rows)
    unread = position[None, :] > position[:, None]
    if window is not None:
        unread |= position[None, :] <= position[:, None] - window
    return np.where(unread, -np.inf, 0).astype(np.float16)


def _additive(shown: Var) -> Var:
    shape = tuple(shown.shape)
    return mb.select(cond=shown, a=np.zeros(shape, np.float16), b=np.full(shape, -np.inf, np.float16))


def _layer_of(stacked: Var, index: int) -> Var:
    """Layer ``index`` of (layers, kv_heads, slots, head_dim)."""
    layers, heads, count, lanes = stacked.shape
    if layers == 1:
        return stacked
    return mb.slice_by_index(x=stacked, begin=[index, 0, 0, 0], end=[index + 1, heads, count, lanes])


INT32, FLOAT16 = types.int32, types.fp16

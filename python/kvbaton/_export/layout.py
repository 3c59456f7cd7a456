"""Names, shapes and the declared layout of the cache outputs: one place for program, metadata and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .config import ModelConfig
from .errors import ExportError
from .function import Kind, Part

KvOutputs = Literal["stacked", "grouped", "per-layer"]

SURFACE_ROWS = 16_384
"""Rows that every IOSurface can have; an output has one for each index of all its axes but the last."""


@dataclass(frozen=True)
class KvGroup:
    """One pair of cache outputs and the layers it holds, in order along its first axis."""

    key: str
    value: str
    layers: tuple[int, ...]

    @property
    def past_key(self) -> str:
        """The input of a chunk that holds the earlier rows of ``key``."""
        return self.key.replace("key_cache", "past_key")

    @property
    def past_value(self) -> str:
        """The same for ``value``."""
        return self.value.replace("value_cache", "past_value")


def kv_groups(
    kv_outputs: KvOutputs, config: ModelConfig, rows: int, parts: Sequence[Part] | None = None
) -> list[KvGroup]:
    """Splits the layers into outputs; every function of a package gets the same split.

    ``rows`` is the most that an output holds of a layer. No output crosses two ``parts``. Layers of full
    attention and layers with windows never share an output. ``grouped`` takes as many layers as keep
    ``layers * kv_heads * rows`` within :data:`SURFACE_ROWS`, and at least one.

    Raises:
        ExportError: an unknown ``kv_outputs`` (``output``).
    """
    whole = parts is None or len(parts) == 1
    runs = [range(config.layers)] if parts is None else [range(part.first, part.end) for part in parts]
    held: list[tuple[str, list[int]]] = []
    for run in runs:
        kinds = {
            "full": [layer for layer in run if not config.has_window(layer)],
            "sliding": [layer for layer in run if config.has_window(layer)],
        }
        held += [(kind, layers) for kind, layers in kinds.items() if layers]
    if kv_outputs == "stacked" and whole:
        marks = {kind: f"_{kind}" if len(held) > 1 else "" for kind, _ in held}
        return [
            KvGroup(f"key_cache{marks[kind]}", f"value_cache{marks[kind]}", tuple(layers))
            for kind, layers in held
        ]
    if kv_outputs == "stacked":
        groups: list[tuple[int, ...]] = [tuple(layers) for _, layers in held]
    elif kv_outputs == "per-layer":
        groups = [(layer,) for layer in range(config.layers)]
    elif kv_outputs == "grouped":
        size = max(1, SURFACE_ROWS // (config.kv_heads * rows))
        groups = [
            tuple(layers[start : start + size]) for _, layers in held for start in range(0, len(layers), size)
        ]
    else:
        raise ExportError(
            "output",
            f"unknown kv_outputs {kv_outputs!r}, wanted one of {', '.join(get_args(KvOutputs))}",
            kv_outputs=kv_outputs,
        )
    return [
        KvGroup(f"key_cache_{index}", f"value_cache_{index}", layers) for index, layers in enumerate(groups)
    ]


def layout_toml(
    kv_outputs: KvOutputs,
    groups: list[KvGroup],
    kind: Kind = "prefill",
    *,
    part: Part | None = None,
    past: bool = False,
    chunks: bool = False,
) -> str:
    """A layout description kept in the package: which tensor holds which part of the cache.

    Of a prefill package, its outputs; with ``past``, the inputs that hold the cache so far. Of a decode
    package, its states. ``chunks``: some functions take a past. A ``part`` of a model is described with the
    layers that it has.
    """
    whole = part is None or (part.embeds and part.ends)
    held = past or kind == "decode"
    lines = [
        f'name = "kvbaton-{kv_outputs}{"-past" if past else ""}"',
        'placement = "left"',
        *(['sliding_placement = "ring"'] if held else []),
        *([] if whole else ["partial = true"]),
    ]
    if not past:
        embeds, ends = part is None or part.embeds, part is None or part.ends
        lines += ["", "[inputs]", 'tokens = "input_ids"' if embeds else 'hidden = "hidden_states"']
        lines += ['last_index = "last_index"'] if kind == "prefill" and ends else []
        lines += ['position = "position"'] if kind == "decode" or chunks else []
        lines += ["", "[outputs]", 'logits = "logits"' if ends else 'hidden = "output_hidden_states"']
    key, value = ("past_key", "past_value") if past else ("key_cache", "value_cache")
    tensors: list[tuple[str, str, str, list[int] | None]] = []
    if kv_outputs == "per-layer":
        axes = "batch kv_head row head_dim"
        layers = None if whole else [layer for group in groups for layer in group.layers]
        names = (f"{key}_{{layer}}", f"{value}_{{layer}}")
        tensors = [(names[0], "key", axes, layers), (names[1], "value", axes, layers)]
    else:
        axes = "layer kv_head row head_dim"
        for group in groups:
            layers = None if kv_outputs == "stacked" and whole and len(groups) == 1 else list(group.layers)
            names = (group.past_key, group.past_value) if past else (group.key, group.value)
            tensors += [(names[0], "key", axes, layers), (names[1], "value", axes, layers)]
    for name, holds, axes, layers in tensors:
        lines += ["", "[[tensor]]", f'name = "{name}"', f'holds = "{holds}"', f'axes = "{axes}"']
        lines.append('dtype = "float16"')
        if layers is not None:
            lines.append(f"layers = {layers}")
    return "\n".join(lines) + "\n"

"""Names, shapes and the declared layout of the cache outputs: one place for program, metadata and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .config import ModelConfig
from .errors import ExportError

KvOutputs = Literal["stacked", "grouped", "per-layer"]

SURFACE_ROWS = 16_384
"""Rows that every IOSurface can have; an output has one for each index of all its axes but the last."""


@dataclass(frozen=True)
class KvGroup:
    """One pair of cache outputs and the layers it holds, in order along its first axis."""

    key: str
    value: str
    layers: tuple[int, ...]


def kv_groups(kv_outputs: KvOutputs, config: ModelConfig, largest_bucket: int) -> list[KvGroup]:
    """Splits the layers into outputs; every function of a package gets the same split.

    Layers of full attention and layers with windows never share an output. ``grouped`` takes as many layers
    as keep ``layers * kv_heads * rows`` within :data:`SURFACE_ROWS` at the largest bucket, and at least one.

    Raises:
        ExportError: an unknown ``kv_outputs`` (``output``).
    """
    kinds = {
        "full": [layer for layer in range(config.layers) if not config.has_window(layer)],
        "sliding": [layer for layer in range(config.layers) if config.has_window(layer)],
    }
    held = {kind: layers for kind, layers in kinds.items() if layers}
    if kv_outputs == "stacked":
        marks = {kind: f"_{kind}" if len(held) > 1 else "" for kind in held}
        return [
            KvGroup(f"key_cache{marks[kind]}", f"value_cache{marks[kind]}", tuple(layers))
            for kind, layers in held.items()
        ]
    if kv_outputs == "per-layer":
        groups: list[tuple[int, ...]] = [(layer,) for layer in range(config.layers)]
    elif kv_outputs == "grouped":
        size = max(1, SURFACE_ROWS // (config.kv_heads * largest_bucket))
        groups = [
            tuple(layers[start : start + size])
            for layers in held.values()
            for start in range(0, len(layers), size)
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


def layout_toml(kv_outputs: KvOutputs, groups: list[KvGroup]) -> str:
    """The layout description kept in the package: which output holds which part of the cache."""
    lines = [
        f'name = "kvbaton-{kv_outputs}"',
        'placement = "left"',
        "",
        "[inputs]",
        'tokens = "input_ids"',
        'last_index = "last_index"',
        "",
        "[outputs]",
        'logits = "logits"',
    ]
    tensors: list[tuple[str, str, str, list[int] | None]] = []
    if kv_outputs == "per-layer":
        tensors = [
            (f"{part}_cache_{{layer}}", part, "batch kv_head row head_dim", None) for part in ("key", "value")
        ]
    else:
        axes = "layer kv_head row head_dim"
        for group in groups:
            held = None if kv_outputs == "stacked" and len(groups) == 1 else list(group.layers)
            tensors += [(group.key, "key", axes, held), (group.value, "value", axes, held)]
    for name, holds, axes, layers in tensors:
        lines += ["", "[[tensor]]", f'name = "{name}"', f'holds = "{holds}"', f'axes = "{axes}"']
        lines.append('dtype = "float16"')
        if layers is not None:
            lines.append(f"layers = {layers}")
    return "\n".join(lines) + "\n"

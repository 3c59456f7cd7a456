"""Names, shapes and the declared layout of the cache outputs: one place for program, metadata and tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .errors import ExportError

KvOutputs = Literal["stacked", "grouped", "per-layer"]

SURFACE_ROWS = 16_384
"""Rows that every IOSurface can have; an output has one for each index of all its axes but the last."""


@dataclass(frozen=True)
class KvGroup:
    """One pair of cache outputs and the consecutive layers it holds, in order along its first axis."""

    key: str
    value: str
    layers: range


def kv_groups(kv_outputs: KvOutputs, layers: int, kv_heads: int, largest_bucket: int) -> list[KvGroup]:
    """Splits the layers into outputs; every function of a package gets the same split.

    ``grouped`` takes as many layers as keep ``layers * kv_heads * rows`` within :data:`SURFACE_ROWS` at the
    largest bucket, and at least one.

    Raises:
        ExportError: an unknown ``kv_outputs`` (``output``).
    """
    if kv_outputs == "stacked":
        return [KvGroup("key_cache", "value_cache", range(layers))]
    if kv_outputs == "per-layer":
        size = 1
    elif kv_outputs == "grouped":
        size = max(1, SURFACE_ROWS // (kv_heads * largest_bucket))
    else:
        raise ExportError(
            "output",
            f"unknown kv_outputs {kv_outputs!r}, wanted one of {', '.join(get_args(KvOutputs))}",
            kv_outputs=kv_outputs,
        )
    starts = range(0, layers, size)
    return [
        KvGroup(f"key_cache_{index}", f"value_cache_{index}", range(start, min(start + size, layers)))
        for index, start in enumerate(starts)
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
            held = None if kv_outputs == "stacked" else list(group.layers)
            tensors += [(group.key, "key", axes, held), (group.value, "value", axes, held)]
    for name, holds, axes, layers in tensors:
        lines += ["", "[[tensor]]", f'name = "{name}"', f'holds = "{holds}"', f'axes = "{axes}"']
        lines.append('dtype = "float16"')
        if layers is not None:
            lines.append(f"layers = {layers}")
    return "\n".join(lines) + "\n"

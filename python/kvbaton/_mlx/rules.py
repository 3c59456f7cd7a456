"""The layout of a list of slots as TOML: slots that lie alike share a rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_AXES = {
    "conv": "batch row channel",
    "state": "batch kv_head value_dim key_dim",
    "state-of-one-head": "batch value_dim key_dim",
}
_ROLES = {"": "elements", "_scale": "scale", "_bias": "bias"}


@dataclass(frozen=True)
class Lies:
    """How one part of a slot lies in its array."""

    layer: int
    part: str  # key, key_scale, …, value, …, conv, state
    placement: str = "left"
    encoding: tuple[int, int] | None = None
    one_head: bool = False


def layout_toml(lies: Sequence[Lies]) -> str:
    """A layout in which the array of part P of layer L is called ``P_L``."""
    groups: dict[tuple[str, str, tuple[int, int] | None, bool], list[int]] = {}
    for one in lies:
        groups.setdefault((one.part, one.placement, one.encoding, one.one_head), []).append(one.layer)
    lines = ['name = "mlx-lm-caches"', 'description = "The caches of one mlx-lm model"']
    for (part, placement, encoding, one_head), layers in groups.items():
        holds, mark, companion = part.partition("_")
        axes = _AXES.get("state-of-one-head" if one_head else holds, "batch kv_head row head_dim")
        lines += ["", "[[tensor]]", f'name = "{part}_{{layer}}"', f'holds = "{holds}"', f'axes = "{axes}"']
        lines.append(f"layers = {layers}")
        if holds in ("key", "value", "conv"):
            lines.append(f'placement = "{placement}"')
        if encoding is not None:
            lines.append(f"encoding = {{ bits = {encoding[0]}, group_size = {encoding[1]} }}")
            lines.append(f'role = "{_ROLES[mark + companion]}"')
    return "\n".join(lines) + "\n"

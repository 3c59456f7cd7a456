"""Stacked bars: what a whole is made of, bar by bar."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .chart import _svg, colour_of
from .markup import Markup, join, tag

_WIDTH, _BAR, _GAP, _TOP = 640, 20, 8, 4


@dataclass(frozen=True)
class Bar:
    """A named bar and its parts, in the order of the names that all bars share."""

    name: str
    parts: Sequence[float]


def stacked(
    bars: Sequence[Bar],
    names: Sequence[str],
    *,
    show: Callable[[float], str] = lambda v: f"{v:.3g}",
    title: str = "",
) -> Markup:
    """Bars lying on their side, all on one scale; every part carries its value as a tooltip."""
    longest = max((sum(bar.parts) for bar in bars), default=0.0)
    if not (longest > 0 and math.isfinite(longest)):
        return tag("p", "Nothing to draw.", class_="soft")
    left = 14 + 7 * max(len(bar.name) for bar in bars)
    right = 14 + 7 * max(len(show(sum(bar.parts))) for bar in bars)
    scale = (_WIDTH - left - right) / longest
    parts: list[Markup] = []
    for number, bar in enumerate(bars):
        top = _TOP + number * (_BAR + _GAP)
        parts.append(tag("text", bar.name, x=left - 6, y=top + 15, text_anchor="end"))
        at = float(left)
        for index, value in enumerate(bar.parts):
            width = value * scale
            parts.append(
                tag(
                    "rect",
                    tag("title", f"{bar.name}, {names[index]}: {show(value)}"),
                    x=f"{at:.2f}",
                    y=top,
                    width=f"{width:.2f}",
                    height=_BAR,
                    style=f"fill:{colour_of(index)}",
                )
            )
            at += width
        parts.append(tag("text", show(sum(bar.parts)), x=f"{at + 6:.1f}", y=top + 15))
    height = _TOP + len(bars) * (_BAR + _GAP)
    legend = tag(
        "p",
        join(
            (
                tag("span", tag("span", "■", style=f"color:{colour_of(i)}"), f" {name}")
                for i, name in enumerate(names)
            ),
            Markup(" &nbsp; "),
        ),
        class_="soft",
    )
    return join([_svg(_WIDTH, height, parts, title or ", ".join(names)), legend])

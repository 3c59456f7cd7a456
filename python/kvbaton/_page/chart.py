"""Charts as inline SVG: curves over numbers, and heat maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .markup import Markup, join, tag

_WIDTH, _HEIGHT = 640, 300
# The last label below the axis is centred on its end.
_LEFT, _RIGHT, _TOP, _BOTTOM = 82, 24, 12, 42
_COLOURS = 8


def colour_of(number: int) -> str:
    """The colour of a curve or bar by its number: eight, then the same again."""
    return f"var(--c{number % _COLOURS})"


@dataclass(frozen=True)
class Series:
    """A named curve of ``(x, y)``; points without a y leave a gap. ``marks`` shows the points."""

    name: str
    points: Sequence[tuple[float, float | None]]
    marks: bool = False


def lines(
    series: Sequence[Series],
    x: str,
    y: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    y_range: tuple[float, float] | None = None,
    title: str = "",
    legend_inside: bool = False,
) -> Markup:
    """Curves over one pair of axes. On a logarithmic axis, values of zero and below stand at its lower end.

    Names of several curves stand below the drawing; ``legend_inside`` draws them, for a file of its own.
    """
    known = [(px, py) for s in series for px, py in s.points if py is not None and math.isfinite(py)]
    if not known or (log_y and not any(py > 0 for _, py in known)):
        return tag("p", "All zero." if known else "Nothing to draw.", class_="soft")
    across = _Axis([px for px, _ in known], _LEFT, _WIDTH - _RIGHT, log_x)
    up = _Axis(list(y_range) if y_range else [py for _, py in known], _HEIGHT - _BOTTOM, _TOP, log_y)
    parts = [_frame(across, up, x, y)]
    for number, one in enumerate(series):
        colour = colour_of(number)
        points = [(across.at(px), up.at(py)) for px, py in one.points if py is not None and math.isfinite(py)]
        path = " ".join(f"{'L' if i else 'M'}{px:.1f} {py:.1f}" for i, (px, py) in enumerate(points))
        parts.append(tag("path", class_="line", d=path, style=f"stroke:{colour}"))
        if one.marks:
            parts += [
                tag("circle", cx=f"{px:.1f}", cy=f"{py:.1f}", r=3.5, style=f"fill:{colour}")
                for px, py in points
            ]
    named = [(colour_of(i), s.name) for i, s in enumerate(series)] if len(series) > 1 else []
    if legend_inside:
        parts += [_key(i, colour, name) for i, (colour, name) in enumerate(named)]
    height = _HEIGHT + (20 * len(named) if legend_inside else 0)
    drawing = _svg(_WIDTH, height, parts, title or f"{y} over {x}")
    if not named or legend_inside:
        return drawing
    spans = (tag("span", tag("span", "■", style=f"color:{colour}"), f" {name}") for colour, name in named)
    return join([drawing, tag("p", join(spans, " &nbsp; "), class_="soft")])


def _key(number: int, colour: str, name: str) -> Markup:
    """A line of a legend below the axes."""
    top = _HEIGHT + 20 * number
    mark = tag("rect", x=_LEFT, y=top, width=12, height=12, style=f"fill:{colour}")
    return mark + tag("text", name, x=_LEFT + 20, y=top + 11)


def heat_map(
    values: Sequence[Sequence[float | None]],
    rows: str,
    columns: str,
    *,
    row_names: Sequence[str],
    column_names: Sequence[str],
    mark: tuple[int, int] | None = None,
    show: Callable[[float], str] = lambda v: f"{v:.2g}",
    title: str = "",
) -> Markup:
    """Cells coloured by the logarithm of their value: larger is hotter; ``None`` is not a number, and hottest.

    ``mark`` frames one cell, ``(row, column)``. Every cell carries its value as a tooltip.
    """
    positive = [v for row in values for v in row if v is not None and v > 0]
    low, high = (math.log10(min(positive)), math.log10(max(positive))) if positive else (0.0, 0.0)
    across = max((len(row) for row in values), default=0)
    left = 14 + 7 * max((len(n) for n in row_names), default=0)
    size = max(8.0, min(34.0, (_WIDTH - left) / max(across, 1)))
    tall = min(size, 22.0)
    width, height = left + size * across + 2, 34 + tall * len(values) + 4
    parts = [tag("text", f"{columns} →", x=left, y=12)]
    step = math.ceil(across / max(1, int((width - left) / 30)))
    parts += [
        tag("text", name, x=f"{left + size * (i + 0.5):.1f}", y=28, text_anchor="middle")
        for i, name in enumerate(column_names)
        if i % step == 0
    ]
    for r, row in enumerate(values):
        top = 34 + tall * r
        if tall >= 12 or r % math.ceil(12 / tall) == 0:
            parts.append(
                tag("text", row_names[r], x=left - 6, y=f"{top + tall * 0.5 + 4:.1f}", text_anchor="end")
            )
        for c, value in enumerate(row):
            share = _share(value, low, high)
            framed = (r, c) == mark
            said = "not a number" if value is None else show(value)
            parts.append(
                tag(
                    "rect",
                    tag("title", f"{rows} {row_names[r]}, {columns} {column_names[c]}: {said}"),
                    x=f"{left + size * c:.1f}",
                    y=f"{top:.1f}",
                    width=f"{size - 1:.1f}",
                    height=f"{tall - 1:.1f}",
                    id="fault" if framed else None,
                    style=f"fill:color-mix(in srgb, var(--hot) {100 * share:.0f}%, var(--cold))"
                    + (";stroke:var(--ink);stroke-width:2" if framed else ""),
                )
            )
    return _svg(width, height, parts, title or f"{rows} by {columns}")


def _share(value: float | None, low: float, high: float) -> float:
    if value is None or math.isinf(value):
        return 1.0
    if value <= 0:
        return 0.0
    return 0.08 + 0.92 * (math.log10(value) - low) / (high - low) if high > low else 0.5


class _Axis:
    """Values to pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float, log: bool) -> None:
        self._start, self._end, self._log = start, end, log
        positive = [v for v in values if v > 0]
        if log:
            low, high = min(positive, default=1.0), max(positive, default=10.0)
            self.low, self.high = (low / 2, high * 2) if low == high else (low, high)
        else:
            low, high = min(values), max(values)
            pad = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
            self.low, self.high = (low - pad if low < 0 or low == high else min(low, 0.0) or low), high
            if self.low == self.high:
                self.low, self.high = low - pad, high + pad

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self._log:
            value = max(value, low)
            share = (math.log10(value) - math.log10(low)) / (math.log10(high) - math.log10(low))
        else:
            share = (value - low) / (high - low)
        return self._start + min(1.0, max(0.0, share)) * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Round numbers between both ends."""
        if self._log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            if last - first >= 2:
                step = math.ceil((last - first) / 6)
                return [10.0**n for n in range(first, last + 1, step)]
            return [self.low * (self.high / self.low) ** (i / 3) for i in range(4)]
        span = self.high - self.low
        step = 10 ** math.floor(math.log10(span / 4))
        step = next(s for s in (step, 2 * step, 5 * step, 10 * step) if span / s <= 6)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _frame(across: _Axis, up: _Axis, x: str, y: str) -> Markup:
    parts = []
    for value in up.ticks():
        at = f"{up.at(value):.1f}"
        parts.append(tag("path", class_="axis", d=f"M{_LEFT} {at}H{_WIDTH - _RIGHT}"))
        parts.append(tag("text", _number(value), x=_LEFT - 6, y=f"{float(at) + 4:.1f}", text_anchor="end"))
    for value in across.ticks():
        at = f"{across.at(value):.1f}"
        parts.append(tag("path", class_="axis", d=f"M{at} {_HEIGHT - _BOTTOM}v4"))
        parts.append(tag("text", _number(value), x=at, y=_HEIGHT - _BOTTOM + 18, text_anchor="middle"))
    parts.append(tag("text", x, x=(_LEFT + _WIDTH) / 2, y=_HEIGHT - 6, text_anchor="middle"))
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    turned = f"rotate(-90 12 {middle})"
    parts.append(tag("text", y, x=12, y=middle, text_anchor="middle", transform=turned))
    return join(parts)


def _number(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 10000 or abs(value) < 0.001:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


def _svg(width: float, height: float, parts: Sequence[object], title: str) -> Markup:
    return tag(
        "svg",
        tag("title", title),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{width:.0f}",
        height=f"{height:.0f}",
        role="img",
    )

"""Markup that is built, never pasted: every value that is no markup is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Markup(str):
    """Text that is markup already."""


def text(value: object) -> Markup:
    """Escapes ``value``, unless it is markup."""
    return value if isinstance(value, Markup) else Markup(html.escape(str(value)))


def join(parts: Iterable[object], between: str = "") -> Markup:
    """Several values after another."""
    return Markup(between.join(text(part) for part in parts))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element. ``class_`` stands for ``class``, underscores in names for hyphens; ``None`` leaves one out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def table(head: Sequence[object], rows: Iterable[Sequence[object]], numbers: Iterable[int] = ()) -> Markup:
    """A table that scrolls by itself where it is wider than the page; columns in ``numbers`` stand right."""
    right = set(numbers)

    def cells(kind: str, row: Sequence[object]) -> Markup:
        return tag("tr", *(tag(kind, c, class_="n" if i in right else None) for i, c in enumerate(row)))

    body = tag("tbody", *(cells("td", row) for row in rows))
    return tag("div", tag("table", tag("thead", cells("th", head)), body), class_="scroll")


def facts(pairs: Iterable[tuple[object, object]]) -> Markup:
    """Names and their values; those without a value are left out."""
    known = [(name, value) for name, value in pairs if value is not None and value != ""]
    return tag("dl", *(tag("dt", n) + tag("dd", v) for n, v in known)) if known else Markup("")

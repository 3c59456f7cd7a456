"""Self-contained HTML pages: a frame with its style sheet, and charts as inline SVG.

A page needs no network and no script. It follows the reader's colour scheme, fits a phone and prints. Colours
come from CSS variables, so that charts change with the scheme, too.

    body = section("Cost", chart.lines([Series("warm", points)], x="tokens", y="seconds"))
    html = page("kvbaton bench", body)

Everything that is not already markup is escaped by :func:`markup.text`; functions that return markup return
:class:`markup.Markup`.
"""

from __future__ import annotations

from . import chart, markup
from .chart import Series
from .frame import figure, page, section, standalone
from .markup import Markup

__all__ = ["Markup", "Series", "chart", "figure", "markup", "page", "section", "standalone"]

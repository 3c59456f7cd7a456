"""The frame of a page: head, style sheet, sections."""

from __future__ import annotations

from .markup import Markup, join, tag, text

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1b1f24; --soft: #5c6670; --line: #d5dae0;
  --panel: #f5f7f9; --good: #14733a; --warn: #8a5a00; --bad: #b3261e; --c0: #1f5fbf; --c1: #b3541e;
  --c2: #2b7a4b; --c3: #7b3fa0; --c4: #8a6d00; --c5: #0c8599; --c6: #c2188b; --c7: #6b7280;
  --hot: #c2261b; --cold: #eef2f6; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --ink: #e6e9ec; --soft: #9aa5b0; --line: #363d45; --panel: #1d2226;
    --good: #5fca86; --warn: #e2b04a; --bad: #ff8a80; --c0: #7db0ff; --c1: #f0a06a; --c2: #76cf9b;
    --c3: #cda0ee; --c4: #dcc25a; --c5: #5ad1e0; --c6: #ff8fd0; --c7: #a7b0ba;
    --hot: #ff6d5f; --cold: #20272d; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1rem 1rem 3rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); padding-bottom: .25rem; }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
bdi { overflow-wrap: anywhere; } td bdi { display: inline-block; min-width: 6rem; }
p { margin: .5rem 0; }
code, pre, .mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .875em; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .75rem;
  white-space: pre-wrap; overflow-wrap: anywhere; margin: .5rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .5rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } .n { text-align: right; font-variant-numeric: tabular-nums; }
.soft { color: var(--soft); } .good { color: var(--good); }
.warn { color: var(--warn); } .bad { color: var(--bad); }
.verdict { border: 2px solid currentColor; border-radius: 8px; padding: .75rem 1rem; margin: 1rem 0; }
.verdict b { font-size: 1.6rem; display: block; line-height: 1.2; }
.verdict span { color: var(--ink); }
figure { margin: .75rem 0; } figcaption { color: var(--soft); font-size: .875rem; margin-top: .25rem; }
svg { max-width: 100%; height: auto; display: block; overflow: visible; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg .axis { stroke: var(--line); stroke-width: 1; fill: none; }
svg .line { fill: none; stroke-width: 2; }
details { border-bottom: 1px solid var(--line); padding: .35rem 0; } summary { cursor: pointer; }
@media (max-width: 40rem) {
  main { padding: .75rem .75rem 2rem; } h1 { font-size: 1.25rem; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .4rem; } svg text { font-size: 16px; }
  .stacks thead { display: none; } .stacks td { display: block; border: 0; padding: .1rem 0; }
  .stacks tr { display: block; border-bottom: 1px solid var(--line); padding: .4rem 0; } }
@media print {
  :root { color-scheme: light; --page: #fff; --ink: #000; --soft: #444; --line: #bbb; --panel: #fff;
    --good: #14733a; --warn: #7a5000; --bad: #a02018; --c0: #1f5fbf; --c1: #b3541e; --c2: #2b7a4b;
    --c3: #7b3fa0; --c4: #8a6d00; --c5: #0c8599; --c6: #c2188b; --c7: #6b7280;
    --hot: #c2261b; --cold: #eef2f6; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  main { max-width: none; padding: 0; } figure, tr, .verdict { break-inside: avoid; }
  h2, h3 { break-after: avoid; } .scroll { overflow: visible; } body { font-size: 10.5pt; } }
"""


def page(title: str, *body: object) -> str:
    """A whole document, with nothing to load from anywhere."""
    head = join(
        [
            Markup('<meta charset="utf-8">'),
            Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            # Without an icon of its own a browser asks the server for one.
            Markup('<link rel="icon" href="data:,">'),
            tag("title", title),
            tag("style", Markup(_STYLE)),
        ],
        "\n",
    )
    main = tag("main", *body)
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{main}\n</body>\n</html>\n'


def standalone(drawing: Markup) -> str:
    """A chart as an SVG file: the colours that a page would give it are put inside."""
    colours = _STYLE[: _STYLE.index("* {")]
    lines = _STYLE[_STYLE.index("svg text") : _STYLE.index("details {")]
    style = tag("style", Markup(colours + lines))
    head, end, rest = drawing.partition(">")
    return f"{head}{end}{style}{rest}\n"


def section(title: str, *body: object, id_: str | None = None) -> Markup:
    """A titled part of a page."""
    return tag("section", tag("h2", title), *body, id=id_)


def figure(drawing: Markup, caption: object) -> Markup:
    """A drawing and what it shows."""
    return tag("figure", drawing, tag("figcaption", text(caption)))

"""The report as a page: the verdict first, then where, how much, and for which prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .._page import Markup, Series, chart, figure, page, section
from .._page.markup import facts, join, table, tag, text

_CLASS = {"pass": "good", "tie": "warn", "incomplete": "warn", "fail": "bad", "not_run": "warn"}
_NAMES = {
    "bytes": "bytes",
    "values": "values",
    "logits": "logits",
    "teacher_forced": "teacher-forced tokens",
    "free_running": "free-running tokens",
}
_MEANS = {
    "bytes": "what arrived is what left",
    "values": "it is what the reference computed",
    "logits": "the decoder's distributions are the reference's",
    "teacher_forced": "the likeliest token is the reference's, along its own continuation",
    "free_running": "the continuations are the same",
}

Json = dict[str, Any]

# A page of many prompts stays small: of the others, the table says what matters.
_SHOWN = 200


def render(document: Json) -> str:
    """The document of ``kvbaton verify --json`` as one self-contained page."""
    verdict = document["verdict"]
    box = tag(
        "div",
        tag("b", verdict),
        tag("span", document["reason"]),
        class_=f"verdict {_CLASS[verdict]}",
        id="verdict",
    )
    return page(
        f"kvbaton verify: {verdict}",
        tag("h1", "Does the hand-off change the answer?"),
        box,
        _ladder(document),
        _heat_maps(document),
        _positions(document),
        _contexts(document),
        _differences(document),
        _prompts(document),
        _run(document),
    )


def _ladder(document: Json) -> Markup:
    rows = []
    for rung in document["rungs"]:
        name = tag("b", _NAMES[rung["name"]]) + tag("div", _MEANS[rung["name"]], class_="soft")
        status = rung["status"].replace("_", " ")
        if rung["tie"]:
            status += ", with ties"
        mark = tag("span", status, class_=_CLASS[rung["status"]])
        place = _place(rung["where"])
        note = rung["note"] or ""
        what = tag("div", place, class_="mono", id=f"where-{rung['name']}") if place else Markup("")
        figures = tag("div", _figures(rung), class_="soft")
        rows.append([name, mark, join([what, tag("div", note) if note else "", figures])])
    return section(
        "The ladder", table(["rung", "result", "where, why, how much"], rows, stacks=True), id_="ladder"
    )


def _place(where: Json | None) -> str:
    if not where:
        return ""
    order = ("prompt", "tensor", "layer", "head", "row", "lane")
    return ", ".join(
        str(where[key]) if key == "tensor" else f"{key} {where[key]}"
        for key in order
        if where.get(key) is not None
    )


def _figures(rung: Json) -> str:
    parts = []
    if rung.get("passed", 0) + rung.get("failed", 0) + rung.get("not_run", 0) > 1:
        parts.append(f"{rung['passed']} prompts passed, {rung['failed']} failed, {rung['not_run']} not run")
    said = {
        "elements": "{:,} elements",
        "differing": "{:,} differ",
        "min_cosine": "smallest cosine {:.7f}",
        "max_norm_error": "norm off by {:.2g} at most",
        "max_row_error": "a row by {:.2g}",
        "max_abs": "largest difference {:.3g}",
        "nan": "{} not a number",
        "infinity": "{} infinite",
        "overflow": "{} too large",
        "max_kl": "divergence {:.2g} nats at most",
        "max_difference": "a logit by {:.2g}",
        "steps": "{:,} steps",
        "agreed": "{:,} agree",
        "near_ties": "{} near ties",
        "identical": "{} continuations identical",
        "ties": "{} prompts part at a near tie",
    }
    rare = ("nan", "infinity", "overflow", "near_ties", "ties")
    known = {key: rung[key] for key in said if rung.get(key) is not None and (key not in rare or rung[key])}
    parts += [said[key].format(value) for key, value in known.items()]
    return "; ".join(parts)


def _of(document: Json, name: str) -> Iterator[tuple[int, Json]]:
    for index, prompt in enumerate(document["prompts"]):
        for rung in prompt["rungs"]:
            if rung["name"] == name and rung["status"] != "not_run":
                yield index, rung


def _heat_maps(document: Json) -> Markup:
    """The worst relative error of every head of every layer, over all prompts."""
    worst: dict[str, dict[tuple[int, int], float | None]] = {}
    for _, rung in _of(document, "values"):
        for entry in rung.get("layers", []):
            cells = worst.setdefault(entry["tensor"], {})
            for head, found in enumerate(entry["heads"]):
                at, error = (entry["layer"], head), found["relative"]
                known = cells.get(at, 0.0)
                cells[at] = None if error is None or known is None else max(known, error)
    fault = _first_place(document)
    drawings = []
    for tensor, cells in worst.items():
        layers = sorted({layer for layer, _ in cells})
        heads = sorted({head for _, head in cells})
        mark = None
        if (
            fault
            and fault.get("tensor") == tensor
            and fault.get("layer") in layers
            and fault.get("head") in heads
        ):
            mark = (heads.index(fault["head"]), layers.index(fault["layer"]))
        drawing = chart.heat_map(
            [[cells.get((layer, head), 0.0) for layer in layers] for head in heads],
            "head",
            "layer",
            row_names=[str(h) for h in heads],
            column_names=[str(layer) for layer in layers],
            mark=mark,
            title=f"{tensor}: relative error by layer and head",
        )
        framed = "; the frame is the first failure's place" if mark else ""
        caption = (
            f"{tensor}: relative error by layer (across) and head (down), the worst of all prompts{framed}."
        )
        drawings.append(figure(drawing, caption))
    if not drawings:
        return Markup("")
    return section("Error by layer and head", *drawings, id_="heat")


def _first_place(document: Json) -> Json | None:
    for rung in document["rungs"]:
        if rung["status"] == "fail" and rung["where"] and rung["where"].get("tensor"):
            return dict(rung["where"])
    return None


def _positions(document: Json) -> Markup:
    curves: dict[str, dict[int, float]] = {}
    unbounded: set[int] = set()
    for _, rung in _of(document, "values"):
        for tensor, points in rung.get("positions", {}).items():
            curve = curves.setdefault(tensor, {})
            for position, error in points:
                if error is None:
                    unbounded.add(position)
                else:
                    curve[position] = max(curve.get(position, 0.0), error)
    series = [Series(name, _thin(sorted(c.items()))) for name, c in curves.items() if c]
    if not series:
        return Markup("")
    drawing = chart.lines(series, "position of the token", "error of a row", log_y=True)
    caption = "The largest relative error of a row over all layers and heads, and all prompts."
    if unbounded:
        caption += f" Not numbers: rows at {', '.join(map(str, sorted(unbounded)[:8]))}."
    return section("Error against position", figure(drawing, caption))


def _thin(points: list[tuple[int, float]], most: int = 256) -> list[tuple[float, float | None]]:
    size = -(-len(points) // most)
    return [
        (float(points[i][0]), max(error for _, error in points[i : i + size]))
        for i in range(0, len(points), size)
    ]


def _contexts(document: Json) -> Markup:
    """Agreement of every prompt over its length."""
    points = []
    for index, rung in _of(document, "teacher_forced"):
        length = document["prompts"][index].get("prompt_tokens")
        if length and rung.get("steps"):
            points.append((float(length), rung["agreed"] / rung["steps"]))
    if len({length for length, _ in points}) < 2:
        return Markup("")
    means = []
    for length in sorted({length for length, _ in points}):
        found = [share for at, share in points if at == length]
        means.append((length, sum(found) / len(found)))
    low = min(share for _, share in points)
    series = [Series("agreement", means, marks=True)]
    drawing = chart.lines(
        series, "tokens of the prompt", "agreement", log_x=True, y_range=(min(0.9, low - 0.02), 1.0)
    )
    caption = "Share of teacher-forced steps at which the likeliest token is the reference's."
    return section("Agreement against context length", figure(drawing, caption))


def _differences(document: Json) -> Markup:
    """The first difference of every prompt that has one."""
    shown, written = [], 0
    for index, rung in _of(document, "free_running"):
        written += 1
        found = rung.get("first_difference")
        if found:
            shown.append((index, found))
    if not shown:
        says = "No continuation differs." if written else "No continuation was written."
        return section("First differences", tag("p", says, class_="soft"))
    blocks = [_difference(document["prompts"][index], index, found) for index, found in shown[:_SHOWN]]
    return section("First differences", *blocks, id_="differences")


def _difference(prompt: Json, index: int, found: Json) -> Markup:
    tokens, logits = found["tokens"], found["logits"]
    tie = tag("span", "near tie", class_="warn") if found["near_tie"] else tag("span", "no tie", class_="bad")
    rows = [
        [
            side,
            *(_number(v) for v in logits[side]),
            _number(found["margin" if side == "reference" else "candidate_margin"]),
        ]
        for side in ("reference", "candidate")
    ]
    head = ["logits of", f"token {tokens['reference']}", f"token {tokens['candidate']}", "margin"]
    around = found.get("text")
    words: object = ""
    if around:
        words = join(
            tag("pre", around["before"], tag("b", around[side], class_=colour), title=side, dir="auto")
            for side, colour in (("reference", "good"), ("candidate", "bad"))
        )
    return tag(
        "article",
        tag("h3", f"Prompt {index}: ", _name(prompt), f", step {found['step']} ", tie),
        words,
        table(head, rows, numbers=(1, 2, 3)),
    )


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.5f}"


def _prompts(document: Json) -> Markup:
    prompts = document["prompts"]
    rows = []
    for index, prompt in enumerate(prompts[: 5 * _SHOWN]):
        rungs = {r["name"]: r for r in prompt["rungs"]}
        cells = [_mark(rungs[name]) for name in _NAMES]
        verdict = tag("span", prompt["verdict"], class_=_CLASS[prompt["verdict"]])
        rows.append([index, _name(prompt), prompt.get("prompt_tokens", ""), verdict, *cells])
    head = ["", "prompt", "tokens", "verdict", "bytes", "values", "logits", "forced", "free"]
    return section(f"Prompts ({len(prompts)})", table(head, rows, numbers=(0, 2)))


def _name(prompt: Json) -> Markup:
    """A prompt's name, of any length and in any script: it orders and moves nothing beside it."""
    return tag("bdi", prompt.get("name", ""))


def _mark(rung: Json) -> Markup:
    shown = {"pass": "✓", "fail": "✗", "not_run": "–"}[rung["status"]]
    if rung["tie"]:
        shown += " tie"
    return tag("span", shown, class_=_CLASS[rung["status"]], title=rung["note"] or rung["status"])


def _run(document: Json) -> Markup:
    parts: list[object] = []
    command = document.get("command")
    if command:
        parts.append(tag("pre", command))
    for name in ("settings", "thresholds", "versions", "fingerprints"):
        values = document.get(name)
        if values:
            parts += [
                tag("h3", name.capitalize()),
                facts((k.replace("_", " "), _value(v)) for k, v in values.items() if v is not None),
            ]
    return section("The run", *parts)


def _value(value: Any) -> Markup:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return text(", ".join(map(str, value)))
    return tag("span", value, class_="mono")

"""Tables and plots of the study, written into its page between two marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cells import CONTEXTS, MODELS, SETTINGS, Cell
from kvbaton._page import Series, chart, standalone
from kvbaton._verify.rungs import Thresholds
from kvbaton.verification import write_text
from nearer import sentence

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/study-token-agreement.md"
PLOTS = ROOT / "docs/study"
BEGIN, END = "<!-- results: written by study/render.py -->", "<!-- end of results -->"

Result = dict[str, Any]
TIE = Thresholds().tie


def render(found: Sequence[Result], caches: dict[str, Result], missing: Sequence[Cell]) -> None:
    """Writes the page and its plots."""
    text = PAGE.read_text()
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"{PAGE} has lost the marks between which results go")
    cells = len(found) + len(missing)
    parts = [_transport(found, cells)] if found else [f"None of {cells} cells has run."]
    parts += [_by_setting(found), _by_verdict(found)] if found else []
    parts += [_caches(caches)] if caches else []
    parts += [_model(model, [r for r in found if r["model"] == model]) for model in MODELS]
    parts.append(_missing(missing))
    write_text(PAGE, before + BEGIN + "\n\n" + "\n\n".join(p for p in parts if p) + "\n\n" + END + after)


def _transport(found: Sequence[Result], cells: int) -> str:
    """How much was handed over, and whether it arrived."""
    prompts = [p for r in found for p in r["prompts"]]
    equal = sum(p["bytes"] == "pass" for p in prompts)
    elements = sum(p["elements"] for p in prompts)
    lacking = sum(len(r["prompts"]) < Cell(r["model"], r["context"]).prompts for r in found)
    some = f", {lacking} of them with fewer prompts than asked for" if lacking else ""
    arrived = "all" if equal == len(prompts) else f"{equal:,} of them"
    return (
        f"{len(found)} of {cells} cells have run{some}: {len(prompts):,} caches of {elements:,} live elements were "
        f"handed over, and {arrived} arrived bit for bit. At {_own_rounding(prompts)} the reference, fed its own "
        "continuation, prefers another token by its own rounding."
    )


def _own_rounding(prompts: Sequence[dict[str, Any]]) -> str:
    steps, parts = sum(p["steps"] for p in prompts), sum(p["reference_parts"] for p in prompts)
    return f"{parts:,} of {steps:,} steps"


def failed_rungs(prompt: dict[str, Any], decoder: str) -> list[str]:
    """The rungs of a prompt that `kvbaton verify` would call failed, at what is usual for its decoder."""
    limits = Thresholds.usual(decoder)
    fails = {
        "bytes": prompt["bytes"] != "pass",
        "values": prompt["min_cosine"] < limits.min_cosine
        or prompt["max_norm_error"] > limits.max_norm_error
        or prompt["max_row_error"] > limits.max_row_error,
        "logits": max(prompt["kl"]) > limits.max_kl,
        "teacher_forced": any(margin >= limits.tie for margin in prompt["margins"]),
    }
    return [rung for rung, failed in fails.items() if failed]


def _by_verdict(found: Sequence[Result]) -> str:
    """How many prompts of each setting pass, and which rungs fail the others."""
    rungs = ("values", "logits", "teacher_forced")
    head = (
        "What `kvbaton verify` says of a prompt at the thresholds that are usual for its decoder's type, and which "
        "rungs fail; a prompt can fail on several.\n\n"
        "| model | varied | pass | tie | fail | values | logits | teacher-forced |\n"
        "|---|---|---:|---:|---:|---:|---:|---:|"
    )
    rows = []
    for model, setting in dict.fromkeys((r["model"], _varied(r)) for r in sorted(found, key=_as_listed)):
        chosen = [r for r in found if (r["model"], _varied(r)) == (model, setting)]
        prompts = [(p, failed_rungs(p, r["decoder"])) for r in chosen for p in r["prompts"]]
        ties = sum(not failed and bool(p["margins"]) for p, failed in prompts)
        fails = sum(bool(failed) for _, failed in prompts)
        counts = [len(prompts) - ties - fails, ties, fails]
        counts += [sum(rung in failed for _, failed in prompts) for rung in rungs]
        rows.append("| " + " | ".join(map(str, [model, setting, *counts])) + " |")
    return "\n".join([head, *rows]) + "\n\n" + _in_words(found)


def _in_words(found: Sequence[Result]) -> str:
    """What the text below says of all models together."""
    coarse = [p for r in found if _varied(r) == "decoder bfloat16" for p in r["prompts"]]
    fine = sum(bool(failed_rungs(p, "float32")) for p in coarse)
    base = [p for r in found if _varied(r) == "–" for p in r["prompts"]]
    kl, moved = (sorted(x for p in base for x in p[name]) for name in ("kl", "difference"))
    if not kl:
        return ""
    return (
        f"By a float32 decoder's thresholds {fine} of the {len(coarse)} prompts of a bfloat16 decoder would fail. "
        f"At a step of the base the logit that moves most moves by {moved[len(moved) // 2]:.3f} in the median; "
        f"99 of 100 steps diverge by less than {kl[99 * len(kl) // 100]:.1e} nats."
    )


def _as_listed(result: Result) -> tuple[int, int]:
    """Orders results as models and settings are listed."""
    settings = [_varied(Cell(result["model"], CONTEXTS[0], **s).to_dict()) for s in SETTINGS]
    return list(MODELS).index(result["model"]), settings.index(_varied(result))


def _by_setting(found: Sequence[Result]) -> str:
    """What each setting does, over all contexts of a model that have it and the base."""
    head = (
        "| model | varied | contexts | steps agreed | base, same prompts | near ties | largest margin overruled "
        "| prompts that part | median divergence | largest divergence |\n"
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    rows = []
    for model in MODELS:
        of_model = [r for r in found if r["model"] == model]
        base = {r["context"]: r for r in of_model if _varied(r) == "–"}
        settings = list(dict.fromkeys(_varied(Cell(model, CONTEXTS[0], **s).to_dict()) for s in SETTINGS))
        for setting in settings:
            chosen = [r for r in of_model if _varied(r) == setting and r["context"] in base]
            if not chosen:
                continue
            prompts = [p for r in chosen for p in r["prompts"]]
            same = [p for r in chosen for p in _like(r, base[r["context"]])]
            margins = [m for p in prompts for m in p["margins"]]
            kl = sorted(k for p in prompts for k in p["kl"])
            cells = [
                model,
                setting,
                len(chosen),
                _share(prompts),
                _share(same),
                sum(m < TIE for m in margins),
                f"{max(margins):.3f}" if margins else "–",
                f"{sum(p['first_difference'] is not None for p in prompts)} of {len(prompts)}",
                f"{kl[len(kl) // 2]:.1e}",
                f"{kl[-1]:.1e}",
            ]
            rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([head, *rows])


def _caches(found: dict[str, Result]) -> str:
    """Both caches of a bfloat16 decoder against float32's."""
    context = next(iter(found.values()))["context"]
    said = "; ".join(sentence(model, one["prompts"]) for model, one in found.items())
    what = f"How far a bfloat16 decoder's cache is from float32's, at {context} tokens, relative to its norm"
    return f"{what}: {said}."


def _like(result: Result, base: Result) -> list[dict[str, Any]]:
    """The base cell's prompts that another cell has, too."""
    passages = {p["passage"] for p in result["prompts"]}
    return [p for p in base["prompts"] if p["passage"] in passages]


def _share(prompts: Sequence[dict[str, Any]]) -> str:
    steps, agreed = sum(p["steps"] for p in prompts), sum(p["agreed"] for p in prompts)
    return f"{agreed:,} of {steps:,} ({100 * agreed / steps:.2f} %)"


def _model(model: str, results: Sequence[Result]) -> str:
    if not results:
        return f"### {model}\n\nNo cell has run."
    order = {context: i for i, context in enumerate(CONTEXTS)}
    rows = [
        _row(r) for r in sorted(results, key=lambda r: (order[r["context"]], _varied(r) != "–", _varied(r)))
    ]
    head = (
        "| context | varied | prompts | bytes equal | steps agreed | near ties | largest margin overruled "
        "| prompts that part | smallest cosine | largest row error | largest difference of a logit "
        "| median divergence | largest divergence |\n"
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    plots = [
        _plot(model, "agreement", "steps that agree", results, _agreement),
        _plot(model, "divergence", "largest divergence (nats)", results, _largest, log_y=True),
        _positions(model, results),
    ]
    return "\n\n".join([f"### {model}", "\n".join([head, *rows]), *(p for p in plots if p)])


def _varied(result: Result) -> str:
    """What differs from the base cell."""
    base = Cell(result["model"], result["context"])
    names = {"package": "package", "numerics": "numerics", "decoder": "decoder"}
    changed = [
        f"{label} {result[name]}" for name, label in names.items() if result[name] != getattr(base, name)
    ]
    return ", ".join(changed) or "–"


def _row(result: Result) -> str:
    prompts = result["prompts"]
    steps, agreed = sum(p["steps"] for p in prompts), sum(p["agreed"] for p in prompts)
    margins = [m for p in prompts for m in p["margins"]]
    ties = sum(m < TIE for m in margins)
    parted = sum(p["first_difference"] is not None for p in prompts)
    kl = sorted(k for p in prompts for k in p["kl"])
    cells = [
        f"{result['context']:,}",
        _varied(result),
        _prompts(result),
        sum(p["bytes"] == "pass" for p in prompts),
        f"{agreed:,} of {steps:,}",
        ties,
        f"{max(margins):.3f}" if margins else "–",
        parted,
        f"{min(p['min_cosine'] for p in prompts):.7f}",
        f"{max(p['max_row_error'] for p in prompts):.3f}",
        f"{max(d for p in prompts for d in p['difference']):.3f}",
        f"{kl[len(kl) // 2]:.1e}",
        f"{kl[-1]:.1e}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def _prompts(result: Result) -> str:
    """How many prompts have run; of how many, where some are missing."""
    have, asked = len(result["prompts"]), Cell(result["model"], result["context"]).prompts
    return str(have) if have == asked else f"{have} of {asked}"


def _agreement(result: Result) -> float:
    prompts = result["prompts"]
    return sum(p["agreed"] for p in prompts) / sum(p["steps"] for p in prompts)


def _largest(result: Result) -> float:
    return max(k for p in result["prompts"] for k in p["kl"])


def _plot(
    model: str, name: str, says: str, results: Sequence[Result], value: Any, log_y: bool = False
) -> str | None:
    """A figure over contexts, one curve a setting; ``None`` of a single context."""
    curves: dict[str, list[tuple[float, float | None]]] = {}
    for result in sorted(results, key=lambda r: r["context"]):
        setting = _varied(result)
        label = "fp16, f16-storage, float32" if setting == "–" else setting
        curves.setdefault(label, []).append((float(result["context"]), float(value(result))))
    if len({x for points in curves.values() for x, _ in points}) < 2:
        return None
    series = [Series(label, points, marks=True) for label, points in curves.items()]
    return _written(model, name, series, "context (tokens)", says, log_x=True, log_y=log_y)


def _positions(model: str, results: Sequence[Result]) -> str | None:
    """Divergence along the continuation, for the base cells."""
    series = []
    for result in sorted(results, key=lambda r: r["context"]):
        if _varied(result) == "–":
            steps = zip(*(p["kl"] for p in result["prompts"]), strict=True)
            points: list[tuple[float, float | None]] = [(float(i), _mean(kl)) for i, kl in enumerate(steps)]
            series.append(Series(f"context {result['context']:,}", points))
    if not series:
        return None
    return _written(model, "steps", series, "step of the continuation", "mean divergence (nats)", log_y=True)


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)


def _written(model: str, name: str, series: list[Series], x: str, y: str, **axes: bool) -> str:
    PLOTS.mkdir(parents=True, exist_ok=True)
    file = PLOTS / f"{model}-{name}.svg"
    drawing = chart.lines(series, x, y, title=f"{model}: {y} over {x}", legend_inside=True, **axes)
    write_text(file, standalone(drawing))
    return f"![{model}: {y} over {x}](study/{file.name})"


def _missing(missing: Sequence[Cell]) -> str:
    if not missing:
        return ""
    by_model = []
    for model in MODELS:
        lacking = [cell for cell in missing if cell.model == model]
        contexts = sorted({cell.context for cell in lacking})
        if lacking:
            listed = []
            for context in contexts:
                settings = [_varied({**c.to_dict()}) for c in lacking if c.context == context]
                words = ["base" if s == "–" else s for s in settings]
                listed.append(f"  - {context:,}: {'all' if len(words) == 6 else ', '.join(words)}")
            by_model.append(f"- {model}\n" + "\n".join(listed))
    return "### Cells that have not run\n\n" + "\n".join(by_model)

"""Reports of benches as pages."""

from __future__ import annotations

from typing import Any

from ._page import Bar, Markup, Series, chart, figure, page, section, stacked
from ._page.markup import facts, join, table, tag

Json = dict[str, Any]


def render(document: Json) -> str:
    """The document of ``kvbaton bench run --json`` as one self-contained page."""
    rows = document["rows"]
    return page(
        "kvbaton bench run",
        tag("h1", "What does the hand-off cost?"),
        _answer(rows),
        section("Time to the first token", _bars(rows), id_="parts"),
        section("What is exposed", _share(rows), id_="exposed"),
        section("Speed of the copy", _speed(document), id_="speed"),
        section("All figures", _table(rows), id_="figures"),
        section("This run", _run(document), id_="run"),
    )


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def _mode(row: Json) -> str:
    if row["route"] != "coreml-mlx":
        return str(row["route"])
    return ("streamed" if row["streamed"] else "after") + (", warm" if row["warm"] else ", cold")


def _answer(rows: list[Json]) -> Markup:
    handed = [row for row in rows if row["bytes"]]
    if not handed:
        return tag("p", "Nothing was handed over.")
    longest = max(row["context"] for row in handed)
    at = [row for row in handed if row["context"] == longest]
    best = min(at, key=lambda row: row["exposed_seconds"]["median"])
    exposed, first = best["exposed_seconds"]["median"], best["time_to_first_token_seconds"]["median"]
    said = (
        f"At {longest:,} tokens it adds {_seconds(exposed)} to {_seconds(first)} to the first token "
        f"({_mode(best)})."
    )
    return tag(
        "div", tag("b", f"{100 * best['exposed_share']:.2f} %"), tag("span", said), class_="verdict good"
    )


def _bars(rows: list[Json]) -> Markup:
    names = ["prefill", "exposed hand-off", "first step"]
    keys = ["prefill_seconds", "exposed_seconds", "first_step_seconds"]
    bars = [Bar(f"{row['context']:,} {_mode(row)}", [row[key]["median"] for key in keys]) for row in rows]
    return figure(
        stacked(bars, names, show=_seconds, title="time to the first token by its parts"),
        "Medians. “Streamed” rows move while the prefill runs, the others after it; “cold” memory was never "
        "written before.",
    )


def _series(rows: list[Json], value: str) -> list[Series]:
    modes = sorted({_mode(row) for row in rows}, reverse=True)
    return [
        Series(mode, [(row["context"], row[value]) for row in rows if _mode(row) == mode], marks=True)
        for mode in modes
    ]


def _share(rows: list[Json]) -> Markup:
    shares = [{**row, "percent": 100 * row["exposed_share"]} for row in rows]
    return figure(
        chart.lines(
            _series(shares, "percent"),
            "tokens of the prompt",
            "per cent of the time to the first token",
            log_x=len({row["context"] for row in rows}) > 2,
            title="exposed share of the time to the first token",
        ),
        "What the hand-off adds after the last rows are final, and what the prefill waited for it.",
    )


def _speed(document: Json) -> Markup:
    rows, memcpy = document["rows"], document["memcpy"]
    contexts = [row["context"] for row in rows]
    ends = [min(contexts), max(contexts)]
    limits = [
        Series(f"memcpy, {state}", [(n, memcpy[f"{state}_gigabytes_per_second"]) for n in ends])
        for state in ("warm", "cold")
    ]
    return figure(
        chart.lines(
            [*_series(rows, "gigabytes_per_second"), *limits],
            "tokens of the prompt",
            "GB/s read and written",
            log_x=len(set(contexts)) > 2,
            title="speed of the copy against memcpy",
        ),
        "libc's memcpy of 256 MiB on the same threads. Streamed rows are copied on one thread beside the "
        "prefill, all but the last piece.",
    )


def _table(rows: list[Json]) -> Markup:
    def spread(timing: Json) -> str:
        low, high = _seconds(timing["min"]), _seconds(timing["max"])
        return f"{_seconds(timing['median'])} ({low} to {high})"

    head = [
        "context",
        "mode",
        "prefill",
        "exposed",
        "hand-off in all",
        "first step",
        "first token",
        "decode",
        "bytes",
        "of memcpy",
        "tokens",
    ]
    cells = [
        [
            f"{row['context']:,}",
            _mode(row),
            spread(row["prefill_seconds"]),
            spread(row["exposed_seconds"]),
            spread(row["handoff_seconds"]),
            spread(row["first_step_seconds"]),
            spread(row["time_to_first_token_seconds"]),
            spread(row["decode_seconds"]),
            f"{row['bytes']:,}",
            "-" if row["memcpy_ratio"] is None else f"{row['memcpy_ratio']:.2f}",
            "the same" if row["same_tokens"] else "differ",
        ]
        for row in rows
    ]
    warnings = [
        tag("p", f"{row['context']:,} {_mode(row)}: {text}", class_="warn")
        for row in rows
        for text in row.get("warnings", ())
    ]
    return join([table(head, cells, numbers=(0, 8, 9)), *warnings])


def _run(document: Json) -> Markup:
    machine = document["machine"]
    gigabytes = machine["memory_bytes"] / 1e9 if machine["memory_bytes"] else None
    memcpy = document["memcpy"]
    return facts(
        [
            ("processor", machine["cpu"]),
            ("cores", machine["cores"]),
            ("GPU cores", machine.get("gpu_cores")),
            ("memory", gigabytes and f"{gigabytes:.1f} GB"),
            (
                "memcpy",
                f"{memcpy['warm_gigabytes_per_second']:.1f} GB/s warm, "
                f"{memcpy['cold_gigabytes_per_second']:.1f} GB/s cold",
            ),
            ("system", f"{machine['os']} {machine.get('os_version') or ''}, {machine['arch']}"),
            ("power mode", machine.get("power_mode")),
            ("speed limit", machine.get("speed_limit_percent") and f"{machine['speed_limit_percent']} %"),
            ("kvbaton", machine["kvbaton"]),
            *sorted(document["versions"].items()),
            ("prefill", f"{document['prefill']} on {document['prefill_engine']}"),
            ("decode", f"{document['decode']} on {document['decode_engine']}"),
            (
                "runs of each",
                f"{document['repeats']}, {document['cooldown_seconds']:g} s of rest before each",
            ),
        ]
    )

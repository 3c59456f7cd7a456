"""The page of ``bench run`` in a real browser: what the page of ``verify`` must do, it must do, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import test_verify_page as verify
from kvbaton import _bench_page
from test_verify_page import Open

# Collected here, over this module's page.
browser = verify.browser
test_dark_mode_is_dark = verify.test_dark_mode_is_dark
test_it_prints = verify.test_it_prints
test_nothing_is_wider_than_the_window = verify.test_nothing_is_wider_than_the_window
test_the_page_loads_nothing_and_stays_small = verify.test_the_page_loads_nothing_and_stays_small


def timing(seconds: float) -> dict[str, float]:
    return {"min": 0.9 * seconds, "median": seconds, "max": 1.2 * seconds}


def row(context: int, streamed: bool, warm: bool) -> dict[str, Any]:
    """Figures in round numbers: what is exposed is a millisecond for every 128 tokens, eight times as much cold."""
    exposed = context / 128e3 * (1 if warm else 8) / (4 if streamed else 1)
    prefill = context / 1e3
    return {
        "route": "coreml-mlx",
        "context": context,
        "streamed": streamed,
        "warm": warm,
        "function": "chunk_8192",
        "prefill_seconds": timing(prefill),
        "exposed_seconds": timing(exposed),
        "handoff_seconds": timing(2 * exposed),
        "copy_seconds": timing(exposed),
        "first_step_seconds": timing(0.03),
        "decode_seconds": timing(0.5),
        "decoded_tokens": 16,
        "time_to_first_token_seconds": timing(prefill + exposed + 0.03),
        "exposed_share": exposed / (prefill + exposed + 0.03),
        "bytes": 131072 * context,
        "gigabytes_per_second": 20.0 if warm else 5.0,
        "memcpy_ratio": 0.9 if context < 8192 else None,
        "pieces": 8 if streamed else 1,
        "same_tokens": True,
        "warnings": ["the machine was <noisy>"] if context == 4096 and not warm else [],
    }


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return {
        "machine": {
            "cpu": "A & B <processor>",
            "cores": 2,
            "os": "linux",
            "arch": "x86_64",
            "memory_bytes": 24_000_000_000,
            "kvbaton": "0.1.0",
        },
        "versions": {"mlx": "0.32.4", "mlx-lm": "0.32.2"},
        "prefill_engine": "cpu",
        "decode_engine": "mlx-cpu",
        "prefill": "prefill.mlpackage",
        "decode": "model",
        "repeats": 3,
        "cooldown_seconds": 1.5,
        "memcpy": {
            "bytes": 1 << 28,
            "warm_gigabytes_per_second": 22.0,
            "cold_gigabytes_per_second": 5.5,
        },
        "rows": [row(n, s, w) for n in (1024, 4096, 8192) for w in (True, False) for s in (True, False)],
    }


@pytest.fixture(scope="module")
def page(document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "report.html"
    path.write_text(_bench_page.render(document))
    return path


def test_the_figures_are_in_the_page(browser: Open, page: Path) -> None:
    dom, console = browser(page)
    assert console == []
    assert len(re.findall("<svg", dom)) == 3
    # A part of a bar says what it is.
    assert re.search(r"<title>8,192 streamed, warm, exposed hand-off: 16\.00 ms</title>", dom)
    for part in ("prefill", "exposed hand-off", "first step"):
        assert dom.count(f", {part}: ") == 12
    assert "A &amp; B &lt;processor&gt;" in dom
    assert "the machine was &lt;noisy&gt;" in dom
    assert re.search(r'class="verdict good"><b>0\.\d+ %</b>', dom)


def test_bars_are_as_long_as_their_figures(page: Path) -> None:
    text = page.read_text()
    bars = re.findall(r'<rect x="([\d.]+)"[^>]* width="([\d.]+)"[^>]*><title>([^<]*)</title>', text)
    widths = {title.rpartition(": ")[0]: float(width) for _, width, title in bars}
    long, short = (widths[f"{n} streamed, warm, prefill"] for n in ("8,192", "1,024"))
    assert long / short == pytest.approx(8, rel=1e-2)


def test_other_routes_have_their_rows(document: dict[str, Any]) -> None:
    alone = {**row(1024, False, True), "route": "mlx", "exposed_seconds": timing(0.0), "exposed_share": 0.0}
    text = _bench_page.render({**document, "rows": [*document["rows"], alone]})
    assert ">1,024 mlx</text>" in text

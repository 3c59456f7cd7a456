"""The report in a real browser: no console errors, the fault's place in the page, phone, dark mode and print."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvbaton
import pytest
import test_verify_faults as faults
from kvbaton._page import Series, chart, standalone

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
LIMIT = 2_000_000

Open = Callable[..., tuple[str, list[str]]]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Opens a file and returns the DOM after loading, and the lines of the console."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium: `make test` installs it where apt-get can; CHROMIUM names another")
    profile = tmp_path_factory.mktemp("profile")
    # What is preloaded under MLX is not meant for a browser.
    environment = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "LD_LIBRARY_PATH")}

    def run(page: Path, *flags: str) -> tuple[str, list[str]]:
        command = [
            found,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--no-first-run",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            f"--user-data-dir={profile}",
            *flags,
            "--dump-dom",
            page.as_uri(),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=240, env=environment
        )
        return done.stdout, re.findall(r"CONSOLE.*", done.stderr)

    return run


@pytest.fixture(scope="module")
def report(models: Any) -> kvbaton.VerifyReport:
    """One with a fault in a known place."""
    pipeline = faults.Pipeline(models("llama"))
    cache = pipeline.caches[1]

    def spoil(values: Any) -> None:
        values[0, 1, 13, 5] += 3

    cache.values = faults.changed(cache.values, spoil)
    return pipeline.verify()


@pytest.fixture(scope="module")
def page(report: kvbaton.VerifyReport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    report.save_html(path)
    return path


def asking(page: Path, question: str) -> Path:
    """A copy of the page that writes the answer to a question of JavaScript into its title."""
    copy = page.with_name("asking.html")
    script = f"<script>document.title = 'answer:' + JSON.stringify({question})</script>"
    copy.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    return copy


def answer(dom: str) -> str:
    found = re.search(r"answer:([^<]*)</title>", dom)
    assert found, dom[:2000]
    return found[1]


def test_the_page_loads_nothing_and_stays_small(page: Path) -> None:
    text = page.read_text()
    assert len(text.encode()) < LIMIT
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:,)""", text)
    assert "url(" not in text
    assert "@import" not in text
    assert "<script" not in text


def test_console_errors_would_be_seen(browser: Open, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text("<!doctype html><script>throw new Error('seen')</script>")
    assert any("seen" in line for line in browser(broken)[1])


def test_the_fault_s_place_is_in_the_page(browser: Open, page: Path) -> None:
    dom, console = browser(page)
    assert console == []
    assert re.search(r'id="verdict"[^>]*><b>fail</b>', dom)
    for rung in ("bytes", "values"):
        assert f'id="where-{rung}">value, layer 1, head 1, row 13, lane 5<' in dom
    framed = re.search(r'<rect[^>]*id="fault"[^>]*><title>([^<]*)</title>', dom)
    assert framed, "the heat map frames the fault"
    assert framed[1].startswith("head 1, layer 1: ")


def widths(browser: Open, page: Path, width: int) -> tuple[int, int]:
    """Of the content and the window, in a frame: the browser's own window is never as narrow as a phone."""
    frame = page.with_name("frame.html")
    frame.write_text(
        f'<!doctype html><title></title><iframe style="width:{width}px;border:0" '
        f'srcdoc="{html.escape(page.read_text())}" onload="'
        "const d = this.contentDocument.documentElement;"
        "document.title = 'answer:' + JSON.stringify([d.scrollWidth, this.contentWindow.innerWidth])"
        '"></iframe>'
    )
    dom, console = browser(frame)
    assert console == []
    content, window = map(int, answer(dom).strip("[]").split(","))
    return content, window


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_nothing_is_wider_than_the_window(browser: Open, page: Path, width: int) -> None:
    content, window = widths(browser, page, width)
    assert window == width
    assert content <= window


def named(report: kvbaton.VerifyReport, name: str, path: Path) -> Path:
    document = report.to_dict()
    prompts = [{**p, "name": name} for p in document["prompts"]]
    kvbaton.VerifyReport({**document, "prompts": prompts}).save_html(path)
    return path


def test_a_long_name_pushes_nothing_aside(
    browser: Open, report: kvbaton.VerifyReport, tmp_path: Path
) -> None:
    """Neither the page nor the table's last columns, which would be lost on paper."""
    path = named(report, "name_" * 60, tmp_path / "long.html")
    content, window = widths(browser, path, 320)
    assert content <= window
    question = "[...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth)"
    assert set(re.findall(r"\d+", answer(browser(asking(path, question))[0]))) == {"0"}


def test_a_name_from_right_to_left_turns_nothing_else(
    browser: Open, report: kvbaton.VerifyReport, tmp_path: Path
) -> None:
    """The word after the name in the heading of its difference is right of the one before."""
    path = named(report, "\u202e\u05e9\u05dc\u05d5\u05dd", tmp_path / "turned.html")
    question = (
        "(() => { const h = document.querySelector('h3'), r = document.createRange();"
        "const [a, b] = [h.firstChild, h.childNodes[2]];"
        "const left = (n, at) => { r.setStart(n, at); r.setEnd(n, at + 1);"
        "return r.getBoundingClientRect().left };"
        "return [left(a, 0), left(b, 2), left(b, 5)].map(Math.round) })()"
    )
    first, step, later = map(int, answer(browser(asking(path, question))[0]).strip("[]").split(","))
    assert first < step < later


def test_dark_mode_is_dark(browser: Open, page: Path) -> None:
    asked = asking(page, "getComputedStyle(document.body).backgroundColor")
    light = answer(browser(asked)[0])
    dark = answer(browser(asked, "--blink-settings=preferredColorScheme=0")[0])
    brightness = [sum(map(int, re.findall(r"\d+", colour))) for colour in (light, dark)]
    assert brightness[0] > 700
    assert 0 < brightness[1] < 150


def test_it_prints(browser: Open, page: Path, tmp_path: Path) -> None:
    printed = tmp_path / "report.pdf"
    browser(page, f"--print-to-pdf={printed}")
    assert printed.read_bytes().startswith(b"%PDF")


def test_text_of_prompts_is_never_markup(browser: Open, report: kvbaton.VerifyReport, tmp_path: Path) -> None:
    document = report.to_dict()
    evil = "<script>throw new Error('run')</script><img src=x onerror=alert(1)>"
    spoilt = {**document, "command": evil, "prompts": [{**p, "name": evil} for p in document["prompts"]]}
    path = tmp_path / "evil.html"
    kvbaton.VerifyReport(spoilt).save_html(path)
    dom, console = browser(path)
    assert console == []
    assert "<script>" not in dom
    assert "<img" not in dom


def test_a_page_of_many_prompts_stays_small(report: kvbaton.VerifyReport) -> None:
    """Of 64 prompts over a model of 30 layers with 8 heads."""
    document = report.to_dict()
    values = next(r for r in document["prompts"][0]["rungs"] if r["name"] == "values")
    entry = {**values["layers"][0], "heads": values["layers"][0]["heads"][:1] * 8}
    values = {**values, "layers": [{**entry, "layer": layer} for layer in range(30)] * 2}
    prompt = document["prompts"][0]
    rungs = [values if r["name"] == "values" else r for r in prompt["rungs"]]
    many = {**document, "prompts": [{**prompt, "rungs": rungs}] * 64}
    assert len(kvbaton.VerifyReport(many).to_html().encode()) < LIMIT


def test_what_was_not_run_is_not_said_to_be_equal(models: Any) -> None:
    source = faults.Pipeline(models("llama")).source
    alone = kvbaton.verify(source, source)
    assert alone.rung("free_running").status == "not_run"
    assert "No continuation was written." in alone.to_html()
    assert "No continuation differs" not in alone.to_html()
    assert "No continuation differs." in faults.Pipeline(models("llama")).verify().to_html()


def test_a_page_that_cannot_be_written_leaves_nothing(report: kvbaton.VerifyReport, tmp_path: Path) -> None:
    with pytest.raises(kvbaton.errors.StorageError, match="cannot write"):
        report.save_html(tmp_path / "none" / "report.html")
    (tmp_path / "taken").mkdir()
    with pytest.raises(kvbaton.errors.StorageError):
        report.save_html(tmp_path / "taken")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_a_link_stays_one_and_a_pipe_is_not_replaced(report: kvbaton.VerifyReport, tmp_path: Path) -> None:
    (tmp_path / "real.html").write_text("the one before")
    (tmp_path / "link.html").symlink_to("real.html")
    report.save_html(tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text() == report.to_html()
    # A device that takes everything, as a folder of one's own may hold a link to it.
    (tmp_path / "nowhere").symlink_to(os.devnull)
    report.save_html(tmp_path / "nowhere")
    assert Path(os.devnull).is_char_device()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.html", "nowhere", "real.html"]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(kvbaton.errors.StorageError, match="loop"):
        report.save_html(tmp_path / "loop")
    assert (tmp_path / "loop").is_symlink()


def test_curves_have_colours_of_their_own() -> None:
    """In the light, the dark and the printed palette: what two curves share says nothing."""
    names = [f"curve {n}" for n in range(8)]
    drawn = standalone(
        chart.lines([Series(n, [(1.0, 1.0), (2.0, 2.0)]) for n in names], "x", "y", legend_inside=True)
    )
    used = re.findall(r"stroke:var\((--c\d)\)", drawn)
    assert len(set(used)) == len(used) == len(names)
    palettes = [dict(re.findall(r"(--c\d): (#\w+)", block)) for block in drawn.split(":root")[1:]]
    assert len(palettes) == 2
    for palette in palettes:
        assert set(used) <= set(palette)
        assert len(set(palette.values())) == len(palette)

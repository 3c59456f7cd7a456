"""`kvbaton selftest`: what it runs, what it says it did not run, and the file it leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest


def document(text: str) -> Any:
    return json.loads(text.split("```json\n")[1].split("\n```")[0])


@pytest.mark.skipif(sys.platform == "darwin", reason="Core ML is there")
def test_on_linux_it_runs_what_it_can_and_lists_the_rest(kvbaton_cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "result.md"
    done = kvbaton_cli("selftest", "--rounds", "20", "--context", "64", "--out", out, "--json")
    assert done.code == 0, done.stderr
    report = done.json()
    assert report["verdict"] == "incomplete"
    status = {(p["group"], p["name"]): p["status"] for p in report["probes"]}
    assert "fail" not in status.values()
    assert status["fake", "hand-offs in a row"] == "pass"
    assert status["executor", "same bits on one thread and on all"] == "pass"
    assert status["mlx", "adoption of foreign memory"] == "pass"
    assert status["fake", "decode with states"] == "pass"
    assert status["fake", "a chain of packages"] == "pass"
    # The inverse runs against the fake, which says nothing of Core ML.
    assert status["fake", "writing into MLX's memory"] == "pass"
    assert status["mlx", "Core ML writing into MLX's memory"] == "not_run"
    coreml = [p for p in report["probes"] if p["group"] == "coreml"]
    assert len(coreml) == 14
    assert all(p["status"] == "not_run" and "needs macOS" in p["because"] for p in coreml)
    adoption = next(p for p in report["probes"] if p["name"] == "adoption of foreign memory")
    assert adoption["found"]["wraps"] is False
    text = out.read_text()
    assert text.startswith("# kvbaton selftest: incomplete\n")
    assert document(text) == report


def test_tokens_with_a_real_model(
    kvbaton_cli: Any, tmp_path: Path, package: Path, model_folder: Path
) -> None:
    out = tmp_path / "result.md"
    arguments = ("selftest", package, "--decode", model_folder, "--rounds", "5", "--context", "64")
    done = kvbaton_cli(*arguments, "--out", out, "--json")
    assert done.code == 0, done.stderr
    (agreement,) = (p for p in done.json()["probes"] if p["name"] == "tokens with and without the hand-off")
    assert agreement["status"] == "pass"
    assert agreement["found"]["same_tokens"] == agreement["found"]["of"] > 0
    assert agreement["found"]["first_step_copied_bytes"] == 0


def test_the_file_goes_through_a_link_and_leaves_its_neighbours_alone(
    kvbaton_cli: Any, tmp_path: Path
) -> None:
    link, file, beside = tmp_path / "result.md", tmp_path / "elsewhere", tmp_path / "result.md.part"
    file.write_text("of an earlier run")
    link.symlink_to(file)
    beside.write_text("mine")
    kvbaton_cli("selftest", "--rounds", "1", "--context", "16", "--out", link)
    assert link.is_symlink()
    assert file.read_text().startswith("# kvbaton selftest")
    assert beside.read_text() == "mine"


def test_wrong_requests_end_at_once_and_write_nothing(kvbaton_cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "result.md"
    for arguments in (
        ("--rounds", "0"),
        ("--context", "0"),
        ("--decode", tmp_path),
        ("--layout", "kvbaton-stacked"),
        (tmp_path / "none.mlpackage",),
    ):
        done = kvbaton_cli("selftest", *arguments, "--out", out, "--json")
        assert done.code == 2, arguments
        assert done.json()["error"]["kind"] == "usage"
        assert not out.exists()
    done = kvbaton_cli("selftest", "--out", tmp_path / "nowhere" / "result.md")
    assert done.code == 2
    assert "a folder that does not exist" in done.stderr

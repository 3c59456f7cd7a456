"""The macOS workflow, which cannot run here: that what it calls exists."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
# What a workflow may use, in the version whose inputs are those that it sets.
ACTIONS = {
    "actions/checkout@v6": set(),
    "actions/setup-python@v6": {"python-version"},
    "actions/cache@v5": {"path", "key"},
    "actions/upload-artifact@v7": {"name", "path"},
    "actions/download-artifact@v8": {"name"},
}
RUNNERS = {"macos-15", "macos-26", "ubuntu-24.04"}


@pytest.fixture(scope="module", params=WORKFLOWS, ids=lambda p: p.name)
def workflow(request: pytest.FixtureRequest) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(request.param.read_text())
    return found


def steps(workflow: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def commands(workflow: dict[Any, Any]) -> Iterator[list[str]]:
    """Every simple command, as words without what is piped or redirected."""
    for step in steps(workflow):
        for line in step.get("run", "").splitlines():
            for command in re.split(r"&&|[|;]", line.split("#")[0]):
                words = command.split(">")[0].split()
                if words:
                    yield words


@cache
def help_of(verb: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "kvbaton", verb, "--help"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"there is no verb `{verb}`: {ran.stderr}"
    return ran.stdout


def test_there_is_a_workflow() -> None:
    assert [p.name for p in WORKFLOWS] == ["macos.yml"]


def test_jobs_run_somewhere_after_jobs_that_exist(workflow: dict[Any, Any]) -> None:
    jobs = workflow["jobs"]
    # YAML 1.1 reads the key `on` as true.
    assert {"workflow_dispatch", "push", "pull_request"} <= set(workflow[True])
    for name, job in jobs.items():
        runners = job.get("strategy", {}).get("matrix", {}).get("runner", [job["runs-on"]])
        assert set(runners) <= RUNNERS, name
        assert job.get("needs", next(iter(jobs))) in jobs, name
        assert job["timeout-minutes"] <= 90, name


def test_every_step_is_one_command_or_one_known_action(workflow: dict[Any, Any]) -> None:
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step), step
        if "uses" in step:
            assert set(step.get("with", {})) <= ACTIONS[step["uses"]], step


def test_commands_targets_flags_and_files_exist(workflow: dict[Any, Any]) -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text())) | {".venv/.native"}
    seen = set()
    for program, *arguments in commands(workflow):
        name = Path(program).name
        seen.add(name)
        if name == "make":
            assert set(a for a in arguments if "=" not in a and "2" not in a) <= targets, arguments
        elif name == "kvbaton":
            text = help_of(arguments[0])
            flags = [a.split("=")[0] for a in arguments if a.startswith("--")]
            missing = [f for f in flags if not re.search(rf"(?m)^ +(-\w, )?{f}\b", text)]
            assert not missing, f"`kvbaton {arguments[0]}` has no {missing}"
        files = [a for a in arguments if re.match(r"(scripts|demo)/[\w./-]+\.(py|sh|txt)$", a)]
        assert [f for f in files if not (ROOT / f).is_file()] == []
    assert {"make", "kvbaton", "cargo", "pip"} <= seen


def test_a_step_that_fails_is_seen_and_stops_no_other(workflow: dict[Any, Any]) -> None:
    # Without a shell by name, GitHub runs bash without `pipefail`, and a pipe ends as `tee` does.
    assert workflow["defaults"]["run"]["shell"] == "bash"
    own = workflow["jobs"]["selftest"]["steps"]
    installed = next(i for i, step in enumerate(own) if step.get("name") == "Install")
    first, *rest = own[installed + 1 :]
    assert "selftest" in first["run"], "what the machine says comes before the tests"
    assert all(step.get("if") in ("${{ !cancelled() }}", "always()") for step in rest)


def test_what_is_kept_is_what_the_steps_write(workflow: dict[Any, Any]) -> None:
    written = " ".join(step.get("run", "") for step in steps(workflow))
    kept = [s["with"]["path"] for s in steps(workflow) if "upload-artifact" in s.get("uses", "")]
    assert len(kept) == len(workflow["jobs"]), "every job keeps something"
    for path in kept:
        if path == "dist/*.whl":
            assert "make wheel-macos" in written
        else:
            assert path in written, path
    for out in re.findall(r"--out (\S+)", written):
        assert any(out.startswith(path) for path in kept), f"{out} is not kept"

"""What a prefill takes of memory, computed at load, beside what the system counts; on the demo's real package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

RUN = """
import json, sys
import kvbaton

def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def start():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the highest resident size starts anew
    return status("VmRSS")

package, weights, tokens, limit, small = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]
kvbaton.Prefill(small)([1, 2, 3])  # code, threads: what the first prefill of a process takes, whatever its size
before = start()
engine = kvbaton.Prefill(package, weights=weights, **({} if limit == "none" else {"max_memory": int(limit)}))
opened = start()
try:
    logits, error = len(engine(list(range(3, 3 + tokens))).logits), None
except kvbaton.KvbatonError as refused:
    logits, error = None, str(refused)
peak = status("VmHWM")
print(json.dumps({"taken": peak - before, "after_opening": peak - opened, "logits": logits, "error": error}))
"""

TINY = ROOT / "crates/kvbaton/testdata/prefill.mlpackage"

SMALL = 24 << 20
"""What does not grow with the sizes of values: the programs of all functions as they are read, graphs, names."""


def prefill(package: Path, weights: str, tokens: int, limit: int | None) -> dict[str, Any]:
    command = [sys.executable, "-c", RUN, str(package), weights, str(tokens), str(limit or "none"), str(TINY)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def needed(error: str) -> int:
    """The computed sum, from the error that names it."""
    words = error.split()
    return int(words[words.index("bytes") - 1])


@pytest.mark.skipif(sys.platform != "linux", reason="counts are read from /proc")
def test_what_is_computed_bounds_what_the_system_counts(package: Path) -> None:
    tokens = 500
    refused = prefill(package, "resident", tokens, 1)
    assert refused["logits"] is None
    computed = needed(refused["error"])
    # Nothing is allocated before it is refused.
    assert refused["after_opening"] < SMALL / 4, refused
    taken = prefill(package, "resident", tokens, computed)
    assert taken["logits"], taken
    print(f"{taken['taken'] / 1e6:.0f} MB taken, {computed / 1e6:.0f} MB computed")
    assert taken["taken"] < computed + SMALL
    assert computed < 1.25 * taken["taken"]
    assert prefill(package, "resident", tokens, computed - 1)["error"] == refused["error"].replace(
        " 1 bytes", f" {computed - 1} bytes"
    )

#!/usr/bin/env python3
"""Counts the lines that only a Mac can run, by group: all of `crates/coreml`, and what is `cfg(macos)` elsewhere.

Blank lines, comments and `use` lines are not counted: nothing runs in them. With `--check` it ends with 1 when
there are more than the limit, or when docs/macos.md quotes other numbers.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 900
GROUPS = {
    "compile and load": ["crates/coreml/src/model.rs"],
    "inputs, descriptions, handlers": ["crates/coreml/src/arrays.rs"],
    "surfaces, heap blocks, locks": ["crates/coreml/src/storage.rs"],
    "prediction": ["crates/coreml/src/predict.rs"],
    "states": ["crates/coreml/src/state.rs"],
    "compute plan": ["crates/coreml/src/plan.rs"],
    "the trait's calls, versions": ["crates/coreml/src/lib.rs"],
    "opening a session": ["crates/kvbaton/src/apple.rs"],
}


def code(text: str) -> int:
    """Lines that do something."""
    text = re.sub(r"(?m)^(pub )?use (?s:.*?);$", "", text)
    lines = (line.strip() for line in text.splitlines())
    return sum(bool(line) and not line.startswith(("//", "#!", "#[")) for line in lines)


def gated() -> int:
    """Lines of items behind `cfg(target_os = "macos")` in files that other systems compile too."""
    total = 0
    listed = {f for files in GROUPS.values() for f in files}
    for path in sorted((ROOT / "crates").rglob("src/**/*.rs")):
        if str(path.relative_to(ROOT)) in listed:
            continue
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if line.strip() != '#[cfg(target_os = "macos")]':
                continue
            end = number + 1
            if not lines[end].rstrip().endswith(";"):
                indent = len(line) - len(line.lstrip())
                while lines[end] != " " * indent + "}":
                    end += 1
            total += code("\n".join(lines[number + 1 : end + 1]))
    return total


def main() -> int:
    """Prints the counts and returns the exit code."""
    counts = {name: sum(code((ROOT / f).read_text()) for f in files) for name, files in GROUPS.items()}
    counts["behind cfg in shared files"] = gated()
    total = sum(counts.values())
    for name, count in [*counts.items(), ("all", total)]:
        print(f"{count:5}  {name}")
    if "--check" not in sys.argv:
        return 0
    page = (ROOT / "docs/macos.md").read_text()
    stale = [name for name, count in [*counts.items(), ("all", total)] if f"| {name} | {count} |" not in page]
    for name in stale:
        print(f"docs/macos.md does not say what `{name}` counts", file=sys.stderr)
    if total > LIMIT:
        print(f"{total} lines are more than {LIMIT}", file=sys.stderr)
    return int(bool(stale) or total > LIMIT)


sys.exit(main())

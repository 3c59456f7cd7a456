"""Counts regions of ``llvm-cov export`` on stdin: coverage.py TARGET FILES ONLY.

FILES is a pattern of file names, ONLY a part that names of functions must have (empty for all). A generic function
is reached where any of its instances is. Prints one line, and the files with the regions that nothing reached.
"""

import json
import re
import sys

CODE = 0  # the kind of a region that holds code; others are gaps, expansions and skipped lines


def main() -> int:
    """Reads, counts, prints."""
    target, files, only = sys.argv[1:]
    wanted = re.compile(files + "$")
    reached: dict[tuple[str, int, int, int, int], bool] = {}
    for function in json.load(sys.stdin)["data"][0]["functions"]:
        if only and only not in function["name"]:
            continue
        names = function["filenames"]
        for line, column, end_line, end_column, count, file, _, kind in function["regions"]:
            if kind == CODE and wanted.search(names[file]):
                place = (names[file], line, column, end_line, end_column)
                reached[place] = reached.get(place, False) or count > 0
    if not reached:
        print(f"{target}: no region of {files}", file=sys.stderr)
        return 1
    share = sum(reached.values()) / len(reached)
    print(f"{target}: {sum(reached.values())} of {len(reached)} regions reached, {share:.1%}")
    for name in sorted({place[0] for place in reached}):
        missed = sorted({place[1] for place, hit in reached.items() if place[0] == name and not hit})
        own = [hit for place, hit in reached.items() if place[0] == name]
        short = name[name.rindex("crates/") :]
        lines = ", ".join(map(str, missed))
        print(f"  {short}: {sum(own)} of {len(own)}" + (f"; not lines {lines}" if missed else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())

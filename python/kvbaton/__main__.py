"""``python -m kvbaton``: the command line."""

from __future__ import annotations

import os
import sys

from . import _native
from ._host import Host


def main() -> int:
    """Runs the command line and returns its exit code."""
    # Libraries that load models talk on stderr; their advice is not for users of this program.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    return _native.main(["kvbaton", *sys.argv[1:]], Host())


if __name__ == "__main__":
    sys.exit(main())

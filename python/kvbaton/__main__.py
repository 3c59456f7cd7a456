"""``python -m kvbaton``: the command line."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

from . import _native
from ._host import Host


def main() -> NoReturn:
    """Runs the command line and ends the process with its exit code."""
    # Libraries that load models talk on stderr; their advice is not for users of this program.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    code = _native.main(["kvbaton", *sys.argv[1:]], Host())
    # A stream that was closed before we began is None.
    for stream in filter(None, (sys.stdout, sys.stderr)):
        # Nobody may be reading any more.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Not by way of the interpreter's end: threads that MLX has just started may still be starting, and taking
    # their library down under them aborts the process.
    os._exit(code)


if __name__ == "__main__":
    main()

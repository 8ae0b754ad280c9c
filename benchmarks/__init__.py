"""Benchmarks. Ctrl+C ends each program with exit status 130 and one line that names the results written so far."""

import sys
from pathlib import Path
from types import TracebackType

kept: dict[Path, None] = {}
"""Files with results written by this process, in order."""


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Called with an uncaught exception, after all child processes have ended."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    what = f"what was measured until then is in {', '.join(map(str, kept))}" if kept else "no results were written"
    print(f"stopped; {what}", file=sys.stderr)
    sys.exit(130)


# This module is imported while Python looks for the module of `python -m benchmarks.NAME`, and only then. A hook in
# main() would be too late, because importing torch takes seconds.
if sys.argv[0] == "-m":
    sys.excepthook = _end

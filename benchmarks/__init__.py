"""What is measured. Ctrl+C ends each of the programs in one line, which says what is kept, and with exit status 130."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

kept: dict[Path, None] = {}
"""Where this process has written results, in order."""


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Called with what nobody has caught, when all that was started has been ended on its way up."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    what = f"what was measured until then is in {', '.join(map(str, kept))}" if kept else "no results were written"
    print(f"stopped; {what}", file=sys.stderr)
    sys.exit(130)


# So the program is called while Python looks for the module of `python -m benchmarks.NAME`, and only then. A main
# function would come too late: seconds go by until torch is imported.
if sys.argv[0] == "-m":
    sys.excepthook = _end

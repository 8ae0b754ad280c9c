"""`averaging …` with a clock that is so many seconds ahead: `python -m tests.network.clock_apart SECONDS peer …`.

Only Python's clock is set, so TLS itself still goes by this machine's.
"""

from __future__ import annotations

import sys
import time

if __name__ == "__main__":
    ahead, right = float(sys.argv.pop(1)), time.time
    time.time = lambda: right() + ahead
    from averaging.cli import main  # after the clock was set, of which modules keep a reference

    main()

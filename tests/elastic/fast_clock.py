"""torchrun on a machine whose clock is wrong: the first argument says how many seconds it is fast."""

from __future__ import annotations

import datetime
import sys
import time
from typing import Any

SECONDS = float(sys.argv.pop(1))
true_time = time.time
time.time = lambda: true_time() + SECONDS  # before anybody takes it as a default

from torch.distributed import run  # noqa: E402
from torch.distributed.elastic.rendezvous import dynamic_rendezvous  # noqa: E402


class FastDatetime(datetime.datetime):
    """The class through which torch reads the clock for its heartbeats."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime.datetime.now(tz) + datetime.timedelta(seconds=SECONDS)


if __name__ == "__main__":
    setattr(dynamic_rendezvous, "datetime", FastDatetime)  # noqa: B010 - mypy knows it as a class
    run.main()

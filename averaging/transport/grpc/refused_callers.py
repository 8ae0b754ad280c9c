"""Logs refused calls at the callee, because its operator cannot see the error that the caller gets."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from urllib.parse import unquote

from averaging.common.sanitize import counted
from averaging.errors import printable

logger = logging.getLogger("averaging.transport")

PERIOD = 60.0
"""Minimum seconds between two log lines about one host."""

MAX_HOSTS = 64
"""Maximum number of hosts logged in one period. Calls of further hosts are counted in the next line."""


class Refusals:
    """Logs at most one line per host and `PERIOD`, for a bounded number of hosts.

    Args:
        clock: a monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: dict[str, float] = {}  # time by host, earliest first
        self._not_logged = 0

    def note(self, host: str, why: str) -> None:
        """Records that a call from `host`, in the form of `host_of`, was refused for the reason `why`."""
        now = self._clock()
        while self._logged and now - next(iter(self._logged.values())) >= PERIOD:
            del self._logged[next(iter(self._logged))]
        if host in self._logged:
            return
        if len(self._logged) >= MAX_HOSTS:
            self._not_logged += 1
            return
        self._logged[host] = now
        more = f" ({counted(self._not_logged, 'call')} from further hosts before)" if self._not_logged else ""
        self._not_logged = 0
        logger.warning("refused a call from %s: %s%s", _readable(host), printable(why, 300), more)


def _readable(host: str) -> str:
    """Formats `ipv6:%5B::1%5D` as `[::1]`."""
    return printable(unquote(host.removeprefix("ipv4:").removeprefix("ipv6:")), 100)

"""Tells the owner of a peer whose calls it refuses: the caller's owner may be somebody else, and has no log here."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from urllib.parse import unquote

from averaging.common.sanitize import counted
from averaging.errors import printable

logger = logging.getLogger("averaging.transport")

PERIOD = 60.0
"""Seconds between two lines about one host."""

MOST_HOSTS = 64
"""Hosts that are named in one period; of further ones only the number is told, in the next line."""


class Refusals:
    """Logs one line per host and minute, for a bounded number of hosts.

    Args:
        clock: seconds from any beginning.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._named: dict[str, float] = {}  # when, the earliest first
        self._unnamed = 0

    def note(self, host: str, why: str) -> None:
        """A call from `host`, as `security.host_of` writes it, was refused for the reason `why`."""
        now = self._clock()
        while self._named and now - next(iter(self._named.values())) >= PERIOD:
            del self._named[next(iter(self._named))]
        if host in self._named:
            return
        if len(self._named) >= MOST_HOSTS:
            self._unnamed += 1
            return
        self._named[host] = now
        more = f" ({counted(self._unnamed, 'call')} from further hosts before)" if self._unnamed else ""
        self._unnamed = 0
        logger.warning("refused a call from %s: %s%s", _readable(host), printable(why, 300), more)


def _readable(host: str) -> str:
    """`ipv6:%5B::1%5D` as `[::1]`."""
    return printable(unquote(host.removeprefix("ipv4:").removeprefix("ipv6:")), 100)

"""What a register and a feed, named by the user, say of themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Protocol

from averaging.elastic import GrpcRegister
from averaging.errors import AveragingError, ConfigError, RefusalCause, refusal_cause
from averaging.monitor.snapshot import ServiceView
from averaging.rpc import Credentials, RpcChannel

FEED_SECONDS = 3.0
"""Time limit of a request to a feed."""

MAX_FEED_BYTES = 1 << 20
"""Limit of its answer."""

MAX_VALUES = 32
"""Values of its answer that are shown."""


class NamedService(Protocol):
    """A service that the user has named."""

    async def ask(self) -> ServiceView:
        """Asks it once. It raises nothing; the view says why there is no answer."""

    async def close(self) -> None: ...


class NamedRegister:
    """A register of elastic torchrun jobs.

    Args:
        endpoint: `host:port` of the register, or of a peer that serves one.
        credentials: certificates and tokens.
    """

    def __init__(self, endpoint: str, credentials: Credentials) -> None:
        self._channel = RpcChannel(endpoint, credentials=credentials)

    async def ask(self) -> ServiceView:
        began = time.monotonic()
        try:
            kept = await GrpcRegister(self._channel).listing()
        except AveragingError as error:
            is_none = refusal_cause(error) is RefusalCause.NOT_SERVED
            reason = "serves no register that lists its entries" if is_none else error.reason
            return ServiceView(self._channel.endpoint, error=reason)
        values = {
            "entries": len(kept),
            "bytes": sum(each.bytes for each in kept),
            "last_write_seconds": min((each.age for each in kept), default=None),
        }
        return ServiceView(self._channel.endpoint, values=values, round_trip_seconds=time.monotonic() - began)

    async def close(self) -> None:
        await self._channel.close()


class NamedFeed:
    """A feed of batches.

    Args:
        url: see `averaging.rl.feed.Connection`, like the other arguments.

    Raises:
        ConfigError: the address is invalid, or the packages of `averaging[rl]` are missing.
    """

    def __init__(self, url: str, **files: Any) -> None:
        try:
            from averaging.rl.feed import Connection
        except ModuleNotFoundError as error:
            raise ConfigError(f"a feed needs the package {error.name}: pip install 'averaging[rl]'") from None
        self._connection = Connection(url, timeout=FEED_SECONDS, max_bytes=MAX_FEED_BYTES, **files)

    async def ask(self) -> ServiceView:
        began = time.monotonic()
        try:
            answer = await asyncio.to_thread(self._connection.request_once, "GET", "/status", dict[str, Any])
        except AveragingError as error:
            return ServiceView(self._connection.url, error=error.reason)
        values: Mapping[str, Any] = dict(list(answer.items())[:MAX_VALUES])
        return ServiceView(self._connection.url, values=values, round_trip_seconds=time.monotonic() - began)

    async def close(self) -> None:
        self._connection.close()

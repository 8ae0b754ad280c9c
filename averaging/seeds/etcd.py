"""A key of an etcd cluster under which the peers of a run write their addresses, each under a lease of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from averaging.common import CLIENT_PREFIX, SeedSource, is_endpoint
from averaging.errors import AveragingError
from averaging.security import Credentials
from averaging.transport.grpc import EtcdCluster, RpcChannel

LEASE_SECONDS, RENEW_SECONDS = 9.0, 3.0
"""Time for which an address stays after the death of its peer, and the interval at which the lease is renewed. A peer
that was killed and starts again alone finds its old address gone before the default `join_timeout` ends."""

CALL_SECONDS = 3.0
LEAVE_SECONDS = 1.0
"""Time limit for the removal of this peer's address when it leaves."""


class EtcdSeeds:
    """Reads the addresses under the key, and writes this peer's own."""

    def __init__(
        self, source: SeedSource, credentials: Credentials, most: int, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._prefix, self._most = f"{source.name}/".encode(), most
        self._monotonic = monotonic
        channels = [RpcChannel(member, credentials=Credentials(tls=credentials.tls)) for member in source.members]
        self._cluster = EtcdCluster(channels, CALL_SECONDS)
        self._lease: int | None = None
        self._renewed = 0.0
        self._busy = asyncio.Lock()  # the loop that renews, and a look-up, may publish at the same time

    async def read(self) -> list[str]:
        """Returns the addresses; what is no address is left out."""
        found = await self._cluster.list_values(self._prefix, self._most)
        return [address for pair in found.values if (address := _address(pair.value))]

    async def publish(self, endpoint: str) -> None:
        """Writes the address of this peer, or renews its lease if that is due."""
        async with self._busy:
            now = self._monotonic()
            if self._lease is not None and now < self._renewed + RENEW_SECONDS:
                return
            if self._lease is None or not await self._cluster.keep_alive(self._lease):
                self._lease = None
                lease = await self._cluster.grant(LEASE_SECONDS)
                await self._cluster.change({self._prefix + endpoint.encode(): endpoint.encode()}, lease)
                self._lease = lease
            self._renewed = now

    async def close(self) -> None:
        """Removes the address of this peer, if etcd answers in time, and closes the connections."""
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(AveragingError, TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self._cluster.revoke(lease)
        await self._cluster.close()


def _address(value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeError:
        return ""
    return text if is_endpoint(text) and not text.startswith(CLIENT_PREFIX) else ""

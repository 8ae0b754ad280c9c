"""The connections a peer has opened, one per endpoint, shared by all calls to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import quote

import grpc

from averaging.common.addresses import CLIENT_PREFIX, is_endpoint, parse_address, parse_ip
from averaging.errors import ClosedError, PeerUnreachableError, ProtocolViolationError
from averaging.security.credentials import Credentials
from averaging.transport.grpc.authentication import call_metadata, channel_credentials
from averaging.transport.grpc.channel_options import UNUSED_SECONDS, Options
from averaging.transport.grpc.dialling import Dialling

MAX_IDLE = 256
"""Channels kept open without a call in progress; beyond it the one unused for longest is closed."""


@dataclass(slots=True, eq=False)
class PeerConnection:
    """A channel to one endpoint, and how many calls are on it."""

    channel: grpc.aio.Channel
    users: int = 0
    unused_since: float = 0.0


class Channels:
    """Opens channels as they are needed, and closes those that are broken or have long been unused.

    Attributes:
        metadata: goes with every call.
    """

    def __init__(
        self,
        options: Options,
        max_idle: int = MAX_IDLE,
        *,
        credentials: Credentials | None = None,
        dialling: Dialling | None = None,
    ) -> None:
        credentials = credentials or Credentials()
        self._options = options
        self._credentials = channel_credentials(credentials.tls) if credentials.tls else None
        self._dialling = dialling or Dialling()
        self.metadata = call_metadata(credentials.tokens)
        self._max_idle = max_idle
        self._lines: dict[str, PeerConnection] = {}  # the least recently used first
        self._replaced: set[PeerConnection] = (
            set()
        )  # broken or long unused, to be closed when their last call has ended
        self._closed = False

    @asynccontextmanager
    async def call(self, endpoint: str) -> AsyncIterator[PeerConnection]:
        """A channel to `endpoint` for one call.

        A channel on which a call finds the peer unreachable is not used again: a new one dials at once, whereas the old
        one would go on dialling for ever and answer with its last failure meanwhile.

        Raises:
            ProtocolViolationError: nobody can be called by this name, or may be.
            ClosedError: `close` was called.
        """
        self._distrust_unused(endpoint)
        if endpoint not in self._lines:
            target(endpoint)  # before any look-up
            await self._dialling.check(endpoint)
        line = self._line_to(endpoint)
        line.users += 1
        try:
            yield line
        except PeerUnreachableError:
            if self._lines.get(endpoint) is line:
                del self._lines[endpoint]
                self._replaced.add(line)
            raise
        finally:
            line.users -= 1
            line.unused_since = asyncio.get_running_loop().time()
            await self._tidy()

    def _distrust_unused(self, endpoint: str) -> None:
        """Takes no channel for a call on which there was none for long: a router may have forgotten its connection."""
        line = self._lines.get(endpoint)
        if line and not line.users and asyncio.get_running_loop().time() - line.unused_since > UNUSED_SECONDS:
            self._replaced.add(self._lines.pop(endpoint))

    def _line_to(self, endpoint: str) -> PeerConnection:
        if self._closed:
            raise ClosedError(f"{endpoint} cannot be called: this peer has been closed")
        line = self._lines.pop(endpoint, None)
        if line is None:
            line = PeerConnection(self._open(target(endpoint)))
        self._lines[endpoint] = line
        return line

    def _open(self, where: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(where, self._options)
        return grpc.aio.secure_channel(where, self._credentials, self._options)

    async def _tidy(self) -> None:
        for line in [line for line in self._replaced if not line.users]:
            self._replaced.discard(line)
            await line.channel.close()
        idle = [endpoint for endpoint, line in self._lines.items() if not line.users]
        for endpoint in idle[: max(0, len(idle) - self._max_idle)]:
            await self._lines.pop(endpoint).channel.close()

    async def close(self) -> None:
        """Closes all channels; calls in progress end."""
        self._closed = True
        lines = [*self._lines.values(), *self._replaced]
        self._lines.clear()
        self._replaced.clear()
        for line in lines:
            await line.channel.close()


def target(endpoint: str) -> str:
    """The gRPC target of a peer; nothing that a stranger can put in a name makes it more than a host and a port.

    Raises:
        ProtocolViolationError: nobody can be called by this name.
    """
    if endpoint.startswith(CLIENT_PREFIX):
        raise ProtocolViolationError(f"{endpoint} is a client, which is never dialled")
    if not is_endpoint(endpoint):
        raise ProtocolViolationError(f"{endpoint!r} is not the address of a peer; it must be HOST:PORT")
    host, port = parse_address(endpoint)
    if (address := parse_ip(host)) is None:
        return f"dns:///{quote(host)}:{port}"
    # Other schemes than dns need no resolver.
    return f"ipv4:{address}:{port}" if address.version == 4 else f"ipv6:{quote(f'[{address}]:{port}')}"

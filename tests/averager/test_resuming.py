"""A download that is cut goes on where it ended: what travels again, and whom the reader believes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
import torch

from averaging import Peer
from averaging.protocol.messages import DownloadData, Resume
from averaging.state import manifest as packing
from averaging.state.assembler import StateAssembler
from averaging.state.downloads import download
from averaging.state.manifest import CHUNK_BYTES
from averaging.transport.grpc import GrpcTransport
from tests.state.test_download import Donors, equal, state
from tests.support.listening import closed, listening

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

TENSORS = {"a": torch.randn(1 << 20), "b": torch.randn(2 << 20)}
TOTAL = 12 << 20
CUT, PASSED = 5 << 20, 9 << 20
"""The connection is cut when the reader has so much of what was passed on."""
OVERHEAD = 64 << 10
"""Of HTTP/2, metadata and frames included."""


class Relay:
    """Hands connections on to a peer; the first passes so many bytes from there, and is then cut when it is told.

    Attributes:
        counts: bytes that came from the peer, for each connection.
        cut: to be set.
    """

    def __init__(self, endpoint: str) -> None:
        self._host, _, port = endpoint.partition(":")
        self._port = int(port)
        self.counts: list[int] = []
        self.cut = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.counts)
        self.counts.append(0)
        from_peer, to_peer = await asyncio.open_connection(self._host, self._port)
        up = asyncio.create_task(self._up(reader, to_peer))
        try:
            while (number or self.counts[0] < PASSED) and (piece := await from_peer.read(1 << 12)):
                self.counts[number] += len(piece)
                writer.write(piece)
                await writer.drain()
            if not number:
                await self.cut.wait()
        except ConnectionError:
            return  # the reader has gone
        finally:
            up.cancel()
            await asyncio.wait({up})
            await closed(to_peer)

    @staticmethod
    async def _up(reader: asyncio.StreamReader, to_peer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            to_peer.write(piece)
            await to_peer.drain()


@asynccontextmanager
async def relaying(endpoint: str) -> AsyncIterator[tuple[Relay, str]]:
    relay = Relay(endpoint)
    async with listening(relay.handle) as address:
        yield relay, address


async def test_after_a_cut_only_the_rest_travels() -> None:
    readers: list[StateAssembler] = []
    async with Peer(TENSORS, run_id="run", stall_timeout=5.0) as donor, relaying(donor.endpoint) as (relay, endpoint):

        def read(reader: StateAssembler) -> None:
            readers.append(reader)
            if reader.received >= CUT:
                relay.cut.set()

        caller = GrpcTransport(None, max_message_bytes=4 << 20)
        try:
            found, _ = await download(caller, [endpoint], donor.schema, silence=10.0, on_progress=read)
        finally:
            await caller.close()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in TENSORS.items())
    assert len(relay.counts) == 2
    assert relay.counts[1] <= TOTAL - CUT + CHUNK_BYTES + OVERHEAD
    assert readers[-1].received == TOTAL


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "CHUNK_BYTES", 8)
    monkeypatch.setattr(packing, "MAX_JOINED", 1)


async def test_a_donor_that_has_moved_on_with_the_same_bytes_gives_its_own_version(small_messages: None) -> None:
    donors = Donors({"x:1": [state(1, version=3)], "y:1": [state(1, version=5)]}, cuts={"x:1": [3]}, resumes=True)
    found, donor = await donors.fetch()
    assert donor == "y:1"
    assert equal(found, state(1, version=5))


class Spoiling(Donors):
    """The first donor sends zeros instead of the last bytes before it is cut."""

    async def download_state(self, endpoint: str, resume: Resume | None = None) -> AsyncGenerator[DownloadData, None]:
        async with aclosing(super().download_state(endpoint, resume)) as messages:
            number = 0
            async for message in messages:
                number += 1
                part = message.tensor_part
                if endpoint == "x:1" and number == self.cuts[endpoint][0] and part is not None:
                    message = replace(message, tensor_part=replace(part, buffer=bytes(len(part.buffer))))
                yield message


async def test_wrong_bytes_before_a_cut_are_thrown_away_and_harm_no_sound_donor(small_messages: None) -> None:
    """The cut is in the midst of a tensor, so that nobody has verified them."""
    donors = Spoiling({"x:1": [state(1)], "y:1": [state(1)]}, cuts={"x:1": [5]}, resumes=True)
    found, donor = await donors.fetch()
    assert donors.calls == ["x:1", "y:1", "y:1"]
    assert donor == "y:1"
    assert equal(found, state(1))

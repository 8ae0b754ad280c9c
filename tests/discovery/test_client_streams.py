"""The streams of records to clients."""

from __future__ import annotations

import asyncio

import pytest

from averaging.discovery.gossip.access import GossipSettings
from averaging.discovery.gossip.rumours import ClientStreams
from averaging.errors import CallRefusedError
from averaging.protocol.messages import Record

RECORD = Record("run.x", "b:1", b"", 1, 1e9, owner=bytes(32), claimed=1)


@pytest.mark.asyncio
async def test_end_sends_the_waiting_records_and_refuses_new_streams() -> None:
    streams = ClientStreams(GossipSettings())
    async with asyncio.timeout(5.0):
        with streams.open() as stream:
            closed = asyncio.create_task(streams.wait_closed())
            streams.publish(RECORD)
            streams.end()
            records = stream.records()
            assert await anext(records) == (RECORD,)
            with pytest.raises(CallRefusedError, match="this peer leaves"):
                await anext(records)
            assert not closed.done()
        await closed
    with pytest.raises(CallRefusedError, match="leaves the run; try another peer"), streams.open():
        pass

"""The streams of records to clients."""

from __future__ import annotations

import asyncio

import pytest

from averaging.discovery.gossip.client_streams import ClientStreams
from averaging.discovery.gossip.settings import GossipSettings
from averaging.errors import CallRefusedError
from averaging.protocol.messages import Record

RECORD = Record("run.x", "b:1", b"", 1, 1e9, owner=bytes(32), claimed=1)


@pytest.mark.asyncio
async def test_who_leaves_ends_its_streams_after_what_waits_and_begins_no_other() -> None:
    followers = ClientStreams("a:1", GossipSettings())
    async with asyncio.timeout(5.0):
        with followers.follow() as follower:
            gone = asyncio.create_task(followers.gone())
            followers.publish(RECORD)
            followers.end()
            records = follower.records()
            assert await anext(records) == (RECORD,)
            with pytest.raises(CallRefusedError, match="this peer leaves"):
                await anext(records)
            assert not gone.done()
        await gone
    with pytest.raises(CallRefusedError, match="leaves the run; try another peer"), followers.follow():
        pass

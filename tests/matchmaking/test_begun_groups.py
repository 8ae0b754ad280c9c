"""A peer whose leader has begun asks no other peer, even if that leader suggests one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from typing import cast

import pytest
import torch

from averaging.matchmaking import Matchmaking, SearchConfig
from averaging.matchmaking.rules import pack_looking
from averaging.protocol.group import Group, Mode, pack_gather
from averaging.protocol.messages import JoinRequest, MessageCode, MessageFromLeader
from averaging.tensors.schema import describe
from averaging.testing import virtual_time
from averaging.testing.discovery import MemoryDiscovery, MemoryRegistry
from averaging.transport.base import Transport
from tests.support.fake_transport import OneLane


class WillingLeaders(OneLane):
    """A transport to peers that accept and begin without delay.

    Attributes:
        asked: the peers that were asked to lead.
    """

    def __init__(self, suggested: str) -> None:
        self.suggested = suggested
        self.asked: list[str] = []

    async def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        self.asked.append(endpoint)
        yield MessageFromLeader(MessageCode.ACCEPTED)
        members = (endpoint, request.endpoint)
        yield MessageFromLeader(MessageCode.BEGIN_ALLREDUCE, b"g" * 20, self.suggested, members, (b"", b""))


@pytest.mark.parametrize("suggested", ["", "second:1", "third:1"])
def test_no_peer_is_asked_once_the_group_has_begun(suggested: str) -> None:
    leaders = WillingLeaders(suggested)

    async def find_group() -> Group:
        async with MemoryDiscovery(MemoryRegistry(clock=virtual_time.clock)) as discovery:
            now = virtual_time.clock()
            await discovery.store("run.0b", "first:1", pack_looking(True), now + 1)
            await discovery.store("run.0b", "second:1", pack_looking(True), now + 2)
            await discovery.store("run.others", "third:1", b"", now + 60)
            matchmaking = Matchmaking(
                SearchConfig("run", "me:1", 2, 2, 10.0, virtual_time.clock, random.Random(1)),
                describe(["w"], [torch.ones(4)], part_size_bytes=1024),
                cast("Transport", leaders),
                discovery,
            )
            async with asyncio.timeout(30):
                return await matchmaking.find_group(pack_gather(1.0, None, Mode.NODE), now + 60)

    group: Group = virtual_time.run(find_group())
    assert group.endpoints == ("first:1", "me:1")
    assert leaders.asked == ["first:1"]

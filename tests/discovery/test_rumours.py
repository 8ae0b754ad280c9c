"""Rumours to members that do not answer."""

from __future__ import annotations

import asyncio
import random
from typing import cast

from averaging.discovery.gossip.access import GossipAccess, GossipSettings
from averaging.discovery.gossip.membership import BroadcastBranch, Membership
from averaging.discovery.gossip.rumours import Rumours
from averaging.protocol.messages import Record, Refusal, Rumour
from averaging.testing import virtual_time
from averaging.transport.base import Transport
from tests.support import leaks
from tests.support.simulated import in_virtual_time


class Silent:
    """The network and its members, none of which ever answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.suspected: list[str] = []

    async def push(self, endpoint: str, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        self.asked.append(endpoint)
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    def branches(self, start: int, end: int, fanout: int) -> list[BroadcastBranch]:
        return [BroadcastBranch(start, end, ("one:1", "other:1") if start == 1 else ("other:1",))]

    def suspect(self, endpoint: str, now: float, why: str, *, refused: bool) -> None:
        self.suspected.append(endpoint)


@in_virtual_time
async def test_a_rumour_that_timed_out_in_the_queue_is_removed() -> None:
    silent, settings = Silent(), GossipSettings(push_timeout=2.0, rumour_timeout=3.0)
    access = GossipAccess("run", "me:1", cast(Transport, silent), settings, virtual_time.clock, random.Random(0))
    rumours = Rumours(access, cast(Membership, silent), lambda *_: None)
    before = leaks.sizes(rumours)
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(rumours.run(tasks.create_task))
        rumours.spread(Record("first", "me:1", b"", 1, virtual_time.clock() + 60.0), 1, 9)
        await asyncio.sleep(1.5)
        rumours.spread(Record("second", "me:1", b"", 1, virtual_time.clock() + 60.0), 11, 19)
        await asyncio.sleep(10.0)
        sending.cancel()
    assert silent.asked == ["one:1", "other:1"]  # the first rumour waited in the queue until its timeout
    assert silent.suspected == silent.asked  # they are tried after all others
    grown = leaks.sizes(rumours) - before
    assert set(grown) == {"Rumours._sent"}  # until the records expire

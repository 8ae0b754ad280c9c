"""Discovery in memory, beyond the contract of discovery."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

import pytest

from averaging.discovery.gossip.record import RecordLimits
from averaging.errors import DiscoveryError
from averaging.testing import virtual_time
from averaging.testing.discovery import MemoryDiscovery, MemoryRegistry

KEY = "run.0b"


def test_other_peers_see_a_change_after_the_delay_and_its_owner_at_once() -> None:
    async def scenario() -> None:
        registry = MemoryRegistry(clock=virtual_time.clock, delay=0.5, rng=random.Random(0))
        async with MemoryDiscovery(registry) as one, MemoryDiscovery(registry) as other:
            async with aclosing(one.watch(KEY)) as mine, aclosing(other.watch(KEY)) as theirs:
                assert await anext(mine) == {}
                assert await anext(theirs) == {}
                await one.store(KEY, "a:1", b"1", virtual_time.clock() + 10)
                assert (await anext(mine))["a:1"].value == b"1"
                assert (one.knows("a:1"), other.knows("a:1")) == (True, False)
                start = virtual_time.clock()
                assert (await anext(theirs))["a:1"].value == b"1"
                assert virtual_time.clock() - start == pytest.approx(0.5, abs=0.01)
                await one.store(KEY, "a:1", b"2", virtual_time.clock() + 10)
                await one.withdraw(KEY, "a:1")
                assert await anext(mine) == {}
                assert other.get(KEY)["a:1"].value == b"1"
                assert await anext(theirs) == {}
            await one.store(KEY, "a:1", b"3", virtual_time.clock() + 0.2)
            await asyncio.sleep(0.3)
            assert one.get(KEY) == {}  # expired in transit
            await asyncio.sleep(0.3)
            assert other.get(KEY) == {}

    virtual_time.run(scenario())


def test_a_full_table_raises() -> None:
    async def scenario() -> None:
        registry = MemoryRegistry(clock=virtual_time.clock, limits=RecordLimits(records=2))
        async with MemoryDiscovery(registry) as peer:
            for name in ("a:1", "b:1"):
                await peer.store(KEY, name, b"", virtual_time.clock() + 10)
            with pytest.raises(DiscoveryError, match="the table is full"):
                await peer.store(KEY, "c:1", b"", virtual_time.clock() + 10)
            await peer.store(KEY, "a:1", b"new", virtual_time.clock() + 10)

    virtual_time.run(scenario())

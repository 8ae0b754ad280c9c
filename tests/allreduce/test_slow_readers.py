"""Readers of a state that read it too slowly: they keep their places as long as nobody else wants one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest
import torch

from averaging import Peer
from averaging.errors import BusyError
from averaging.peer.service import DOWNLOADS_PER_HOST, MAX_DOWNLOADS
from averaging.protocol.messages import DownloadData
from averaging.state.manifest import CHUNK_BYTES
from averaging.testing import virtual_time
from averaging.testing.discovery import MemoryDiscovery
from tests.support.swarm import Swarm

MESSAGES = 64
IDLE = 75.0
"""Seconds in which a transport waits until a reader takes a message."""

Download = Callable[[str], AsyncGenerator[DownloadData, None]]


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("averaging.state.snapshots.INLINE_BYTES", 1 << 30)


def play(test: Callable[[Download], Coroutine[Any, Any, None]]) -> None:
    """With a donor of 16 MiB."""
    swarm = Swarm(1)

    async def main() -> None:
        donor = Peer(
            {"w": torch.zeros(MESSAGES * CHUNK_BYTES // 4)},
            run_id="run",
            transport=swarm.network.transport("donor:1"),
            discovery=lambda endpoint, transport: MemoryDiscovery(swarm.registry),
            clock=virtual_time.clock,
        )
        async with donor:
            await test(lambda host: donor._entered.service.download_state(None, host))

    swarm.simulate(main())


async def read(download: AsyncGenerator[DownloadData, None], pause: float) -> tuple[int, str]:
    """Takes a message every so many seconds; returns how many came, and why not all."""
    count = 0
    try:
        async with aclosing(download):
            async for _ in download:
                count += 1
                await asyncio.sleep(pause)
    except BusyError as error:
        return count, str(error)
    return count, ""


ALL = (MESSAGES, "")


async def fill(download: Download, pause: float, tasks: asyncio.TaskGroup) -> list[asyncio.Task[tuple[int, str]]]:
    """Four hosts take all places, one after the other."""
    slow: list[asyncio.Task[tuple[int, str]]] = []
    for number in range(MAX_DOWNLOADS):
        slow.append(tasks.create_task(read(download(f"slow{number // DOWNLOADS_PER_HOST}"), pause)))
        await asyncio.sleep(pause / MAX_DOWNLOADS)
    return slow


def test_a_peer_that_takes_too_little_makes_room_for_who_waits() -> None:
    async def main(download: Download) -> None:
        async with asyncio.TaskGroup() as tasks:
            slow = await fill(download, IDLE, tasks)
            assert await read(download("honest"), 0.1) == ALL
            (lost,) = [one for one in slow if one.done()]
            for one in slow:
                one.cancel()
        count, reason = lost.result()
        assert count == 1
        assert (
            "others wait for the state of donor:1, and you read it too slowly: delivered 262144 bytes in 30 s" in reason
        )

    play(main)


def test_a_peer_that_takes_enough_keeps_its_place_while_others_wait() -> None:
    async def main(download: Download) -> None:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            slow = await fill(download, CHUNK_BYTES / 32e3, tasks)  # 256 kbit/s
            for _ in range(3):
                waiting = await stack.enter_async_context(aclosing(download("honest")))
                with pytest.raises(BusyError, match="16 downloads of the state of donor:1 are in progress"):
                    await anext(waiting)
        assert [one.result() for one in slow] == [ALL] * MAX_DOWNLOADS

    play(main)


def test_a_peer_that_takes_little_keeps_its_place_if_nobody_waits() -> None:
    async def main(download: Download) -> None:
        async with asyncio.TaskGroup() as tasks:
            slow = [tasks.create_task(read(download("slow"), IDLE)) for _ in range(DOWNLOADS_PER_HOST)]
            others = [tasks.create_task(read(download(f"other{number}"), 1.0)) for number in range(8)]
        assert {one.result() for one in (*slow, *others)} == {ALL}

    play(main)

"""The state of whole peers on real gRPC and gossip: what donors offer, and what newcomers take over."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest
import torch
from msgspec import msgpack

from averaging.errors import StateError
from averaging.protocol.group import donors_key
from averaging.state import ExtraState
from averaging.tensors.shared_tensors import in_thread
from tests.support.peers import average, enter, told


async def test_downloads_that_wait_for_the_tensors_leave_threads_to_a_round() -> None:
    threads = ThreadPoolExecutor(2)
    asyncio.get_running_loop().set_default_executor(threads)
    async with AsyncExitStack() as stack:
        peer = await enter(stack, {"x": torch.zeros(3)})
        service = peer._entered.service
        with peer.replacing():
            downloads = [service.download_state(None, f"192.0.2.{number}") for number in range(8)]
            waiting = [asyncio.ensure_future(anext(download)) for download in downloads]
            await asyncio.sleep(0)  # until they wait for the lock
            async with asyncio.timeout(60):
                await in_thread(lambda: None)
            assert not any(task.done() for task in waiting)
        assert all(message.metadata for message in await asyncio.gather(*waiting))


async def test_versions_grow_and_a_newcomer_takes_the_state_over() -> None:
    momentum = torch.full((2,), 5.0)
    tensors = [{"w": torch.zeros(3)}, {"w": torch.full((3,), 4.0)}]
    async with AsyncExitStack() as stack:
        founder = await enter(
            stack,
            tensors[0],
            group_size=2,
            extra_state=lambda: ExtraState({"momentum": momentum, "steps": torch.tensor(7)}, {"step": 7}),
        )
        other = await enter(stack, tensors[1], group_size=2, join=[founder.endpoint], share_state=False)
        for _ in range(2):
            await average(founder, other)
        assert founder.version == other.version == 2
        newcomer_tensors = {"w": torch.full((3,), -1.0)}
        newcomer = await enter(stack, newcomer_tensors, join=[founder.endpoint])
        assert [name for _, name in newcomer.donors] == [founder.endpoint]  # its priority is announced once a second
        state = await newcomer.download_state()
        assert state.version == newcomer.version == 2
        assert state.user == {"step": 7}
        assert list(state.tensors) == ["w", "momentum", "steps"]
        assert state.tensors["momentum"].tolist() == [5.0, 5.0]
        assert newcomer_tensors["w"].tolist() == [2.0] * 3
        # It was the state at the commit that was shared, not what the application has made of it since.
        with founder.tensors() as locked:
            locked[0].fill_(100.0)
        assert (await newcomer.download_state()).tensors["w"].tolist() == [2.0] * 3
        await newcomer.commit(1)
        assert newcomer.version == 2


async def test_if_the_application_cannot_take_the_state_nothing_changes() -> None:
    async with AsyncExitStack() as stack:
        mine = {"w": torch.ones(1)}
        founder = await enter(stack, {"w": torch.zeros(1)})
        newcomer = await enter(stack, mine, join=[founder.endpoint])

        def refuse(state: object) -> None:
            raise StateError("not for me")

        with pytest.raises(StateError, match="not for me"):
            await newcomer.download_state(refuse)
        assert mine["w"].item() == 1.0


async def test_what_the_application_writes_to_its_dict_later_is_not_in_the_state() -> None:
    user: dict[str, Any] = {"epoch": 1, "losses": [0.5]}
    async with AsyncExitStack() as stack:
        donor = await enter(stack, {"w": torch.zeros(1)}, extra_state=lambda: ExtraState({}, user))
        newcomer = await enter(stack, {"w": torch.ones(1)}, join=[donor.endpoint])
        await told(newcomer, donors_key("run"), donor.endpoint)
        user["epoch"] = 2
        with donor.tensors() as [tensor]:
            tensor.fill_(7.0)
            user["losses"].append(0.25)
        state = await newcomer.download_state()
        assert (state.tensors["w"].item(), state.user) == (0.0, {"epoch": 1, "losses": [0.5]})
        await donor.commit()
        state = await newcomer.download_state()
        assert (state.tensors["w"].item(), state.user) == (7.0, {"epoch": 2, "losses": [0.5, 0.25]})


async def test_a_donor_that_was_killed_and_started_anew_is_not_taken_for_its_earlier_self() -> None:
    mine = {"w": torch.zeros(1)}
    async with AsyncExitStack() as stack:
        founder = await enter(stack, {"w": torch.full((1,), 2.0)})
        await founder.commit(5)
        anew = await enter(stack, {"w": torch.full((1,), -1.0)}, join=[founder.endpoint])
        newcomer = await enter(stack, mine, join=[founder.endpoint])
        # What its earlier self declared holds until it expires.
        await anew.discovery.store(donors_key("run"), anew.endpoint, msgpack.encode(6.0), time.time() + 60)
        async with asyncio.timeout(60), aclosing(newcomer.discovery.watch(donors_key("run"))) as changes:
            async for _ in changes:
                if newcomer.donors == [(6.0, anew.endpoint), (5.0, founder.endpoint)]:
                    break
        assert (await newcomer.download_state()).version == 5
    assert mine["w"].item() == 2.0

"""Strangers who call a synchronizer or a publisher cannot shut out the trainer, the explorers and the followers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress

import grpc
import pytest
import torch

from averaging import WeightPublisher
from averaging.errors import AveragingError, CallRefusedError, StateError
from averaging.rl.synchronizer import (
    RunningStatus,
    Synchronizer,
    SynchronizerConfig,
    WeightReceiver,
    methods,
    service,
)
from averaging.rl.synchronizer.remote import RemoteSynchronizer
from averaging.rpc import RpcChannel, RpcServer
from averaging.weights import publisher as publishing
from averaging.weights.layout import FETCH, FOLLOW
from averaging.weights.receiver import FollowerOptions, VersionReceiver
from averaging.wire import synchronizer_pb2 as wire
from averaging.wire import weights_pb2
from tests.transport.test_limits import NARROW, called_from

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

LIMIT = 20.0
"""Seconds for what takes a moment."""

STATE = {"w": torch.ones(1 << 16)}


def head_of(state: dict[str, torch.Tensor]) -> wire.StateHead:
    tensors = [wire.Tensor(name=name, dtype="float32", shape=tensor.shape) for name, tensor in state.items()]
    return wire.StateHead(has_tensors=True, tensors=tensors)


class Uploads:
    """States of strangers that never end.

    Args:
        pause: Seconds between two bytes of a state; None if nothing comes.
    """

    def __init__(self, pause: float | None = None) -> None:
        self.begun = asyncio.Semaphore(0)
        self._pause = pause

    async def parts(self, stranger: RemoteSynchronizer) -> AsyncGenerator[wire.StatePart, None]:
        assert stranger._session is not None
        yield wire.StatePart(head=head_of(STATE), session=stranger._session.number, step=1)
        self.begun.release()
        while self._pause is not None:
            await asyncio.sleep(self._pause)
            yield wire.StatePart(data=b"\0")
        await asyncio.Event().wait()

    async def send(self, endpoint: str, *, trains: bool = False) -> None:
        """Sends one. It may be refused."""
        async with Synchronizer.connect(endpoint, name="stranger") as stranger, RpcChannel(endpoint) as channel:
            if trains:
                await stranger.set_trainer_status("running")
            await channel.call(methods.SET_MODEL_STATE_DICT.rpc, self.parts(stranger), LIMIT)


@asynccontextmanager
async def served(config: SynchronizerConfig | None = None) -> AsyncGenerator[tuple[Synchronizer, str], None]:
    async with Synchronizer(config=config) as synchronizer, RpcServer("127.0.0.1:0", [synchronizer]) as server:
        yield synchronizer, server.endpoint


@asynccontextmanager
async def running(*calls: object) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.ensure_future(call) for call in calls]  # type: ignore[call-overload]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.asyncio
async def test_the_trainer_does_not_wait_for_the_states_of_strangers() -> None:
    async with served() as (_, endpoint), Synchronizer.connect(endpoint, name="trainer") as trainer:
        await trainer.set_trainer_status("running")
        uploads = Uploads(pause=0.1)
        async with running(*(uploads.send(endpoint) for _ in range(service.MAX_UPLOADS))) as strangers:
            for _ in strangers:
                await uploads.begun.acquire()
            for step in range(1, 4):
                assert await trainer.set_model_state_dict(STATE, step) == step
            done, _ = await asyncio.wait(strangers, timeout=LIMIT, return_when=asyncio.FIRST_COMPLETED)
            with pytest.raises(CallRefusedError, match="the state of another caller is received instead"):
                done.pop().result()


@pytest.mark.asyncio
async def test_the_trainer_does_not_wait_for_states_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if those who do not send them call themselves trainers, and it does not, and came later."""
    monkeypatch.setattr(service, "LATE_SECONDS_OF_TRAINER", 0.0)
    async with served() as (_, endpoint):
        uploads = Uploads()
        async with running(*(uploads.send(endpoint, trains=True) for _ in range(service.MAX_UPLOADS))) as strangers:
            for _ in strangers:
                await uploads.begun.acquire()
            async with Synchronizer.connect(endpoint, name="trainer") as trainer:
                assert await trainer.set_model_state_dict(STATE, 1) == 1


@pytest.mark.asyncio
async def test_the_trainer_does_not_wait_for_those_who_came_later_and_call_themselves_trainers() -> None:
    async with served() as (_, endpoint), Synchronizer.connect(endpoint, name="trainer") as trainer:
        await trainer.set_trainer_status("running")
        uploads = Uploads()
        async with running(*(uploads.send(endpoint, trains=True) for _ in range(service.MAX_UPLOADS))) as strangers:
            for _ in strangers:
                await uploads.begun.acquire()
            assert await trainer.set_model_state_dict(STATE, 1) == 1


@pytest.mark.asyncio
async def test_a_state_that_drips_ends() -> None:
    async with served(SynchronizerConfig(silence_timeout=1.0)) as (synchronizer, endpoint):
        with pytest.raises(CallRefusedError, match="stopped arriving: in 1 s less than 16 KiB/s"):
            await Uploads(pause=0.1).send(endpoint)
        assert synchronizer.get_model_state_dict() == (None, 0)


@pytest.mark.asyncio
async def test_one_address_cannot_take_all_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("MAX_SESSIONS", 8), ("MAX_SESSIONS_PER_HOST", 6), ("MAX_SESSIONS_PER_CONNECTION", 5)):
        monkeypatch.setattr(service, name, most)

    async def attend(channel: RpcChannel) -> None:
        async def messages() -> AsyncGenerator[wire.FromModule, None]:
            yield wire.FromModule(hello=wire.Hello(name="stranger", explorers_running=1))
            await asyncio.Event().wait()

        async with aclosing(channel.stream(methods.ATTEND.rpc, messages())) as answers:
            async for _ in answers:
                pass

    async with AsyncExitStack() as stack:
        synchronizer, endpoint = await stack.enter_async_context(served())
        first = await stack.enter_async_context(RpcChannel(endpoint))
        elsewhere = await stack.enter_async_context(called_from("127.0.0.2", endpoint))
        other = await stack.enter_async_context(RpcChannel(elsewhere))
        strangers = await stack.enter_async_context(running(*(attend(first) for _ in range(7))))
        done, _ = await asyncio.wait(strangers, return_when=asyncio.FIRST_COMPLETED, timeout=LIMIT)
        with pytest.raises(CallRefusedError, match="there are 5 sessions here"):
            done.pop().result()
        explorers = [Synchronizer.connect(endpoint, name=f"explorer {number}") for number in range(2)]
        for explorer in explorers:  # of the same address, and the second takes a place of the stranger
            await stack.enter_async_context(explorer)
            await explorer.set_explorer_status(RunningStatus.RUNNING)
        await stack.enter_async_context(running(*(attend(other) for _ in range(3))))
        async with asyncio.timeout(LIMIT):
            while synchronizer.explorer_status_counts[RunningStatus.RUNNING] != 8:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for explorer in explorers:
            await explorer.set_explorer_status(RunningStatus.RUNNING)


class Member(WeightReceiver):
    """An explorer that notes where it is called to."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    async def setup_weight_sync_group(self, master_address: str, *others: object) -> None:
        self.called.append(master_address)


@pytest.mark.asyncio
async def test_explorers_are_not_called_to_addresses_at_which_no_trainer_can_be() -> None:
    async with AsyncExitStack() as stack:
        synchronizer, endpoint = await stack.enter_async_context(served())
        explorer, stranger = [await stack.enter_async_context(Synchronizer.connect(endpoint)) for _ in range(2)]
        member = Member()
        await explorer.add_module(member)
        async with asyncio.timeout(LIMIT):
            while not synchronizer.module_count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(CallRefusedError, match="not dialled: 169.254.169.254 is a link-local address"):
            await stranger.setup_weight_sync_group("169.254.169.254", 80)
        with pytest.raises(StateError, match="a link-local address"):  # the synchronizer itself is not trusted
            await synchronizer.setup_weight_sync_group("169.254.169.254", 80)
        assert not member.called
        await stranger.setup_weight_sync_group("127.0.0.1", 80)
        assert member.called == ["127.0.0.1"]


@pytest.mark.asyncio
async def test_a_call_that_says_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HELLO_SECONDS", 0.1)

    async def nothing() -> AsyncGenerator[wire.FromModule, None]:
        await asyncio.Event().wait()
        yield wire.FromModule()

    async with served() as (_, endpoint), RpcChannel(endpoint) as channel:
        with pytest.raises(CallRefusedError, match=r"a call without a message for 0\.1 s"):
            async for _ in channel.stream(methods.ATTEND.rpc, nothing()):
                pass


@pytest.mark.asyncio
async def test_one_connection_cannot_take_all_places_of_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("MAX_FOLLOWERS", 8), ("MAX_FOLLOWERS_PER_HOST", 4), ("MAX_FOLLOWERS_PER_CONNECTION", 4)):
        monkeypatch.setattr(publishing, name, most)
    publisher = WeightPublisher(run_id="run")

    async def follow(channel: RpcChannel, number: int) -> None:
        request = weights_pb2.FollowRequest(run_id="run", follower=bytes([number]))
        async with aclosing(channel.stream(FOLLOW, request)) as announcements:
            async for _ in announcements:
                pass

    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(RpcServer("127.0.0.1:0", [publisher]))
        channel = await stack.enter_async_context(RpcChannel(server.endpoint))
        strangers = await stack.enter_async_context(running(*(follow(channel, number) for number in range(5))))
        done, others = await asyncio.wait(strangers, return_when=asyncio.FIRST_COMPLETED, timeout=LIMIT)
        with pytest.raises(CallRefusedError, match="there are 4 followers here"):
            done.pop().result()
        options = FollowerOptions(join=[server.endpoint], run_id="run")
        follower = await stack.enter_async_context(VersionReceiver(options))
        assert follower.connected
        done, _ = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED, timeout=LIMIT)
        with pytest.raises(CallRefusedError, match="your host has the most followers"):
            done.pop().result()


@pytest.mark.asyncio
async def test_fetches_that_nobody_reads_do_not_keep_followers_from_the_weights() -> None:
    """From one address, over eight connections, each with as many as are taken."""
    publisher = WeightPublisher(run_id="run")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(RpcServer("127.0.0.1:0", [publisher]))
        await publisher.publish({"w": torch.randn(1 << 18)}, 1)
        assert publisher.digest is not None
        request = weights_pb2.FetchRequest(
            run_id="run", follower=b"x", name=publisher.digest, pieces=[weights_pb2.Range(count=1)], local=True
        ).SerializeToString()
        begun = publisher.bytes_sent
        narrow = [*NARROW, ("grpc.use_local_subchannel_pool", 1)]
        for _ in range(8):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.endpoint, narrow))
            fetch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(FETCH.path)
            for _ in range(9):
                call = fetch(request)
                stack.callback(call.cancel)
        async with asyncio.timeout(LIMIT):
            while publisher.bytes_sent - begun < 40 << 20:  # noqa: ASYNC110 - of the calls
                await asyncio.sleep(0.01)
        options = FollowerOptions(join=[server.endpoint], run_id="run")
        follower = await stack.enter_async_context(VersionReceiver(options))
        for version in (1, 2):
            async with asyncio.timeout(LIMIT):
                await follower.wait_newer(version - 1, None)
            assert follower.newest is not None
            assert follower.newest.manifest.version == version
            with suppress(AveragingError):
                await publisher.publish({"w": torch.randn(1 << 18)}, version + 1)

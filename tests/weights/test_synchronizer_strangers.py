"""One host cannot take all of a synchronizer or a publisher, and calls that say nothing end."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import torch

from averaging import WeightPublisher
from averaging.errors import CallRefusedError, StateError
from averaging.rl.synchronizer import Synchronizer, SynchronizerConfig, WeightReceiver, methods, service
from averaging.rpc import RpcChannel, RpcServer
from averaging.weights import FollowerOptions, ModelReceiver, publisher as publishing
from averaging.wire import synchronizer_pb2 as wire

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

LIMIT = 20.0
"""Seconds for what takes a moment."""

STATE = {"w": torch.ones(1 << 16)}


def head_of(state: dict[str, torch.Tensor]) -> wire.StateHead:
    tensors = [wire.Tensor(name=name, dtype="float32", shape=tensor.shape) for name, tensor in state.items()]
    return wire.StateHead(has_tensors=True, tensors=tensors)


@asynccontextmanager
async def served(config: SynchronizerConfig | None = None) -> AsyncGenerator[tuple[Synchronizer, str], None]:
    async with Synchronizer(config=config) as synchronizer, RpcServer("127.0.0.1:0", [synchronizer]) as server:
        yield synchronizer, server.endpoint


async def test_a_state_that_stops_arriving_ends() -> None:
    async def parts(session: bytes) -> AsyncGenerator[wire.StatePart, None]:
        yield wire.StatePart(head=head_of(STATE), session=session, step=1)
        await asyncio.Event().wait()

    async with (
        served(SynchronizerConfig(silence_timeout=0.2)) as (synchronizer, endpoint),
        Synchronizer.connect(endpoint) as sender,
        RpcChannel(endpoint) as channel,
    ):
        assert sender._session is not None
        with pytest.raises(CallRefusedError, match="stopped arriving: silent for"):
            await channel.call(methods.SET_MODEL_STATE_DICT.rpc, parts(sender._session.number), LIMIT)
        assert synchronizer.get_model_state_dict() == (None, 0)


async def test_a_host_has_a_quota_of_sessions_and_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_SESSIONS_PER_HOST", 1)
    monkeypatch.setattr(publishing, "MAX_FOLLOWERS_PER_HOST", 1)
    publisher = WeightPublisher()
    async with AsyncExitStack() as stack:
        _, endpoint = await stack.enter_async_context(served())
        await stack.enter_async_context(Synchronizer.connect(endpoint))
        with pytest.raises(CallRefusedError, match="there are 1 sessions of your host here"):
            await stack.enter_async_context(Synchronizer.connect(endpoint))
        server = await stack.enter_async_context(RpcServer("127.0.0.1:0", [publisher]))
        options = FollowerOptions(join=[server.endpoint], run_id="", join_timeout=0.5)
        async with ModelReceiver(options):
            with pytest.raises(StateError, match="there are 1 followers of your host here"):
                await stack.enter_async_context(ModelReceiver(options))


class Member(WeightReceiver):
    """An explorer that notes where it is called to."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    async def setup_weight_sync_group(self, master_address: str, *others: object) -> None:
        self.called.append(master_address)


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


async def test_a_call_that_says_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HELLO_SECONDS", 0.1)

    async def nothing() -> AsyncGenerator[wire.FromModule, None]:
        await asyncio.Event().wait()
        yield wire.FromModule()

    async with served() as (_, endpoint), RpcChannel(endpoint) as channel:
        with pytest.raises(CallRefusedError, match=r"a call without a message for 0\.1 s"):
            async for _ in channel.stream(methods.ATTEND.rpc, nothing()):
                pass

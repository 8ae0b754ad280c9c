"""`averaging.synchronizer.v1.Synchronizer` between processes and loops: methods, sessions, cuts, TLS, tokens."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from averaging import ConfigError, DecentralizedAverager, LocalSGD, Peer, TLSFiles
from averaging.errors import CallRefusedError, PeerUnreachableError, WaitTimeoutError
from averaging.rl.synchronizer import (
    RunningStatus,
    Synchronizer,
    SynchronizerConfig,
    WeightReceiver,
    methods,
    synchronizer as synchronizing,
)
from averaging.rl.synchronizer.service import SynchronizerService
from averaging.rpc import RpcChannel, RpcServer
from averaging.wire import synchronizer_pb2 as wire
from tests.support.certificates import TOKEN, write
from tests.support.fault_proxy import Fault, FaultProxy
from tests.synchronizer.worker import until

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

RUNNING, REQUIRE_SYNC, STOPPED = RunningStatus

T = TypeVar("T")

LIMIT = 20.0
"""Seconds for what takes a moment."""


def state(value: float = 1.0, count: int = 6) -> dict[str, torch.Tensor]:
    return {
        "w": torch.full((count,), value),
        "empty": torch.zeros(0, 3),
        "half": torch.full((2, 2), value, dtype=torch.bfloat16),
        "step": torch.tensor(7),
    }


def same(found: object, expected: dict[str, torch.Tensor]) -> bool:
    assert isinstance(found, dict)
    return list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


@asynccontextmanager
async def served(config: SynchronizerConfig | None = None) -> AsyncGenerator[tuple[Synchronizer, str], None]:
    """A synchronizer and the endpoint at which it is served."""
    async with Synchronizer(config=config) as synchronizer, RpcServer("127.0.0.1:0", [synchronizer]) as server:
        yield synchronizer, server.endpoint


async def once_connected(call: Callable[[], Awaitable[T]]) -> T:
    """Repeats a call until the connection is back."""
    async with asyncio.timeout(LIMIT):
        while True:
            with suppress(PeerUnreachableError):
                return await call()


def test_the_table_has_each_method_of_the_service_with_the_arguments_that_it_takes() -> None:
    table = [each for each in vars(methods).values() if isinstance(each, methods.SynchronizerMethod)]
    service = wire.DESCRIPTOR.services_by_name["Synchronizer"]
    assert sorted(method.rpc.name for method in table) == sorted(method.name for method in service.methods)
    for method in table:
        if not (method.rpc.requests_stream or method.rpc.replies_stream):
            arguments = dict.fromkeys([*method.argument_names, *(["member"] if method.member else [])])
            inspect.signature(getattr(Synchronizer, method.name)).bind(None, **arguments)


async def test_all_methods_from_elsewhere() -> None:
    async with AsyncExitStack() as stack:
        synchronizer, endpoint = await stack.enter_async_context(served())
        trainer = await stack.enter_async_context(Synchronizer.connect(endpoint, name="trainer"))
        explorer = await stack.enter_async_context(Synchronizer.connect(endpoint, name="explorer"))
        assert await trainer.trainer_requires_weight_sync() is False
        with pytest.raises(ConfigError, match="old_status must be one of"):
            await trainer.set_explorer_status("running", "ready")
        await trainer.set_trainer_status("RUNNING")
        assert await trainer.trainer_requires_weight_sync() is False
        await explorer.set_explorer_status(RUNNING)
        assert await explorer.explorer_requires_sync() is False
        assert await explorer.get_state_dict_meta() is None
        assert await explorer.get_model_state_dict() == (None, 0)

        waiting = asyncio.ensure_future(explorer.wait_new_model_state_dict(0))
        await until(synchronizer.explorer_requires_sync)
        assert await trainer.set_model_state_dict(state(), 3) == 3
        assert await waiting == 3
        found, version = await explorer.get_model_state_dict()
        assert version == 3
        assert same(found, state())
        assert [name async for name, _ in explorer.get_model_state_dict_iterator()] == list(state())
        assert await explorer.get_state_dict_meta() == await synchronizer.get_state_dict_meta()
        assert await explorer.get_latest_model_version() == 3
        assert await explorer.get_latest_model_path() is None

        waiting = asyncio.ensure_future(explorer.wait_new_model_state_dict(3))
        await until(synchronizer.explorer_requires_sync)
        await trainer.notify_no_new_model_state_dict()
        assert await waiting == 3
        with pytest.raises(WaitTimeoutError):
            await explorer.wait_new_model_state_dict(3, timeout=0.05)
        assert synchronizer.explorer_status_counts[RUNNING] == 1

        ready = (trainer.ready_to_nccl_sync("trainer", 4), explorer.ready_to_nccl_sync("explorer", 0))
        assert list(await asyncio.gather(*ready)) == [4, 4]
        await explorer.set_explorer_status(STOPPED, RUNNING)
        assert await trainer.ready_to_nccl_sync("trainer", 5) is None
        await trainer.set_model_state_dict("s3://weights", 6)
        assert await explorer.get_model_state_dict() == ("s3://weights", 6)
        with pytest.raises(ConfigError, match="is a path"):
            await anext(explorer.get_model_state_dict_iterator())
        with pytest.raises(CallRefusedError, match="no explorer of 'explorer 2' is running"):
            await explorer.wait_new_model_state_dict(6)
        with pytest.raises(CallRefusedError, match="'trainer' or 'explorer'"):
            await explorer.ready_to_nccl_sync("judge", 0)


async def test_on_a_peer_with_tls_and_token_and_by_namespace(tmp_path: Path) -> None:
    files = write(tmp_path, "127.0.0.1")
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(TOKEN)
    peer = Peer({"w": torch.ones(3)}, run_id="demo", token_file=tokens, **files)  # type: ignore[arg-type]
    first = Synchronizer(peer)
    tls = TLSFiles(files["tls_ca"], files["tls_cert"], files["tls_key"])
    async with peer, first, AsyncExitStack() as stack:
        other = Synchronizer.get_actor(SynchronizerConfig(namespace="other"), peer=peer)
        assert Synchronizer.get_actor(namespace="other", peer=peer) is other
        assert Synchronizer.get_actor(namespace="", peer=peer) is first
        stack.push_async_callback(other.close)
        with pytest.raises(ConfigError, match="namespace 'other' already"):
            Synchronizer(peer, SynchronizerConfig(namespace="other"))

        remote = await stack.enter_async_context(
            Synchronizer.connect(peer.endpoint, namespace="other", tls=tls, token_file=tokens)
        )
        await remote.set_model_state_dict(state(), 5)
        assert await remote.get_latest_model_version() == 5
        assert first.model_version == 0
        with pytest.raises(CallRefusedError, match="token"):
            async with Synchronizer.connect(peer.endpoint, tls=tls):
                pass
        with pytest.raises(PeerUnreachableError):
            async with Synchronizer.connect(peer.endpoint, token_file=tokens, timeout=2.0):
                pass
        with pytest.raises(CallRefusedError, match="no synchronizer in namespace 'third' here; there are '', 'other'"):
            async with Synchronizer.connect(peer.endpoint, namespace="third", tls=tls, token_file=tokens):
                pass
    with pytest.raises(ConfigError, match="before `async with`"):
        async with Peer([torch.ones(1)], run_id="demo") as running:
            Synchronizer(running)
    with pytest.raises(ConfigError, match="mode 'node'"):
        Synchronizer(Peer([torch.ones(1)], run_id="demo", mode="client", join=["127.0.0.1:1"]))


async def test_the_versions_of_a_peer_are_handed_out_until_a_trainer_sets_a_state() -> None:
    weights = torch.ones(3)
    peer = Peer({"w": weights}, run_id="demo")
    synchronizer = Synchronizer(peer)
    async with peer, synchronizer, Synchronizer.connect(peer.endpoint) as explorer:
        await explorer.set_explorer_status(RUNNING)
        await until(lambda: synchronizer.model_state_dict is not None)
        assert same((await explorer.get_model_state_dict())[0], {"w": torch.ones(3)})
        with peer.tensors():
            weights.fill_(2.0)
        await peer.commit()
        version = await explorer.wait_new_model_state_dict(0)
        assert version == peer.version == 1
        assert same((await explorer.get_model_state_dict())[0], {"w": torch.full((3,), 2.0)})
        await synchronizer.set_model_state_dict(state(), 8)
        await peer.commit()
        assert await explorer.wait_new_model_state_dict(1) == 8
        assert synchronizer.trainer_requires_weight_sync() is None, "the peer is no trainer any more"


async def test_weights_of_the_peer_that_are_being_copied_do_not_follow_the_state_of_a_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    async def held(action: Callable[[], object]) -> object:
        started.set()
        await release.wait()
        return action()

    monkeypatch.setattr(synchronizing, "in_thread", held)
    peer = Peer({"w": torch.ones(3)}, run_id="demo")
    synchronizer = Synchronizer(peer)
    async with peer, synchronizer:
        await started.wait()
        assert await synchronizer.set_model_state_dict(state(), 5) == 5
        release.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert synchronizer.model_version == 5
        assert same(synchronizer.get_model_state_dict()[0], state())


async def test_a_peer_whose_versions_are_handed_out_is_no_side_of_a_transfer() -> None:
    peer = Peer({"w": torch.ones(3)}, run_id="demo")
    synchronizer = Synchronizer(peer)
    async with peer, synchronizer:
        await synchronizer.set_explorer_status(RUNNING)
        trainer = asyncio.ensure_future(synchronizer.ready_to_nccl_sync("trainer", 4))
        await until(lambda: synchronizer.trainer_status is REQUIRE_SYNC)
        assert await synchronizer.ready_to_nccl_sync("explorer", 0) == await trainer == 4


async def test_on_the_port_of_an_averager() -> None:
    """It runs in the averager's own event loop, in which nobody enters it."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    synchronizer = Synchronizer()
    averager = DecentralizedAverager(optimizer, run_id="demo", strategy=LocalSGD(sync_every=9), services=[synchronizer])
    try:
        async with (
            Synchronizer.connect(averager.endpoint) as trainer,
            Synchronizer.connect(averager.endpoint) as explorer,
        ):
            await trainer.add_module(WeightReceiver())
            await explorer.set_explorer_status(RUNNING)
            assert await trainer.set_model_state_dict(state(), 4) == 4
            assert same((await explorer.get_model_state_dict())[0], state())
    finally:
        await asyncio.to_thread(averager.close)
    assert synchronizer.ended


@pytest.mark.parametrize("end", ["closed", "cancelled"])
async def test_nothing_of_a_session_that_ends_is_left_counted(end: str) -> None:
    async with served() as (synchronizer, endpoint):
        await synchronizer.set_trainer_status(RUNNING)
        explorer = Synchronizer.connect(endpoint)
        await explorer.__aenter__()
        await explorer.set_explorer_status(RUNNING)
        waiting = asyncio.ensure_future(explorer.wait_new_model_state_dict(0))
        await until(synchronizer.explorer_requires_sync)
        if end == "cancelled":
            waiting.cancel()
            await until(lambda: synchronizer.explorer_status_counts[RUNNING])
        await explorer.__aexit__()
        with pytest.raises((PeerUnreachableError, asyncio.CancelledError)):
            await waiting
        await until(lambda: not any(synchronizer.explorer_status_counts.values()))


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.HALF_OPEN])
async def test_waits_end_when_the_link_is_cut_and_the_session_comes_back(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("averaging.rl.synchronizer.remote.SILENCE_SECONDS", 2.0)
    config = SynchronizerConfig(silence_timeout=2.0)
    with FaultProxy() as proxy:
        async with (
            Synchronizer(config=config) as synchronizer,
            RpcServer(f"127.0.0.1:{proxy.target}", [synchronizer]),
            Synchronizer.connect(f"127.0.0.1:{proxy.port}") as explorer,
        ):
            await synchronizer.set_trainer_status(RUNNING)
            await explorer.set_explorer_status(RUNNING)
            waiting = asyncio.ensure_future(explorer.wait_new_model_state_dict(0))
            await until(synchronizer.explorer_requires_sync)
            proxy.arm(fault)
            with pytest.raises(PeerUnreachableError):
                await waiting
            await until(lambda: not any(synchronizer.explorer_status_counts.values()))
            await synchronizer.set_model_state_dict(state(), 1)
            proxy.heal()
            assert await once_connected(lambda: explorer.wait_new_model_state_dict(0)) == 1
            assert synchronizer.explorer_status_counts == {RUNNING: 1, REQUIRE_SYNC: 0, STOPPED: 0}


async def test_a_state_that_is_cut_off_leaves_the_former_one() -> None:
    large = state(2.0, 1 << 21)
    with FaultProxy() as proxy:
        async with (
            Synchronizer(state_dict=state()) as synchronizer,
            RpcServer(f"127.0.0.1:{proxy.target}", [synchronizer]),
            Synchronizer.connect(f"127.0.0.1:{proxy.port}") as trainer,
        ):
            proxy.arm(Fault.CUT, after=3 << 20)
            with pytest.raises(PeerUnreachableError):
                await trainer.set_model_state_dict(large, 1)
            assert synchronizer.model_version == 0
            proxy.heal()
            assert await once_connected(lambda: trainer.set_model_state_dict(large, 1)) == 1
            assert same((await trainer.get_model_state_dict())[0], large)


class Pausing(SynchronizerService):
    """Stops in the middle of the first download until it is told to go on."""

    def __init__(self, synchronizer: Synchronizer) -> None:
        super().__init__([synchronizer])
        self.paused, self.goes_on = asyncio.Event(), asyncio.Event()

    async def _get_model_state_dict(self, request: wire.Request) -> AsyncGenerator[wire.StatePart, None]:
        async with aclosing(super()._get_model_state_dict(request)) as parts:
            async for part in parts:
                if part.data and not self.goes_on.is_set():
                    self.paused.set()
                    await self.goes_on.wait()
                yield part


@pytest.mark.parametrize("event", ["cut", "half open", "published"])
async def test_what_happens_in_the_middle_of_a_download(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with an error, or with exactly the version that it began with."""
    monkeypatch.setattr("averaging.rl.synchronizer.remote.SILENCE_SECONDS", 1.0)
    old, new = state(2.0, 1 << 18), state(3.0, 1 << 18)
    with FaultProxy() as proxy:
        async with Synchronizer() as synchronizer:
            await synchronizer.set_model_state_dict(old, 2)
            service = Pausing(synchronizer)
            async with (
                RpcServer(f"127.0.0.1:{proxy.target}", [service]),
                Synchronizer.connect(f"127.0.0.1:{proxy.port}") as explorer,
            ):
                reading = asyncio.ensure_future(explorer.get_model_state_dict())
                await service.paused.wait()
                await synchronizer.set_model_state_dict(new, 3)
                if event == "published":
                    service.goes_on.set()
                    found, version = await reading
                    assert version == 2
                    assert same(found, old)
                else:
                    proxy.arm(Fault.CUT if event == "cut" else Fault.HALF_OPEN)
                    with pytest.raises(PeerUnreachableError):
                        await reading
                    service.goes_on.set()
                    proxy.heal()
                found, version = await once_connected(explorer.get_model_state_dict)
                assert version == 3
                assert same(found, new)


async def test_messages_of_strangers_are_refused() -> None:
    head = wire.StateHead(has_tensors=True, tensors=[wire.Tensor(name="w", dtype="float32", shape=[2])])
    config = SynchronizerConfig(max_state_bytes=1000, silence_timeout=0.5)
    async with served(config) as (synchronizer, endpoint), RpcChannel(endpoint) as channel:

        async def send(*parts: wire.StatePart) -> AsyncGenerator[wire.StatePart, None]:
            for part in parts:
                yield part

        with pytest.raises(CallRefusedError, match="number of an open session"):
            await channel.call(methods.SET_MODEL_STATE_DICT.rpc, send(wire.StatePart(head=head)), LIMIT)
        calls = [
            each for each in vars(methods).values() if isinstance(each, methods.SynchronizerMethod) and each.session
        ]
        assert len(calls) == 7
        for method in calls:
            with pytest.raises(CallRefusedError, match="number of an open session"):
                await channel.call(method.rpc, method.rpc.request.FromString(b""), LIMIT)
        async with Synchronizer.connect(endpoint) as remote:
            assert remote._session is not None
            number = remote._session.number
            tensors = [wire.Tensor(name="w", dtype="float32", shape=[1 << 40])]
            large = wire.StatePart(head=wire.StateHead(has_tensors=True, tensors=tensors), session=number)
            for message, match in (
                (large, "at most 1000 are accepted"),
                (wire.StatePart(session=number), "without a head"),
            ):
                with pytest.raises(CallRefusedError, match=match):
                    await channel.call(methods.SET_MODEL_STATE_DICT.rpc, send(message), LIMIT)
            request = wire.StatusRequest(status=wire.UNSET, session=number)
            with pytest.raises(CallRefusedError, match="status must be one of"):
                await channel.call(methods.SET_TRAINER_STATUS.rpc, request, LIMIT)
        assert synchronizer.get_model_state_dict() == (None, 0)

        async def silent() -> AsyncGenerator[wire.FromModule, None]:
            yield wire.FromModule(hello=wire.Hello(explorers_running=1))
            await asyncio.Event().wait()

        with pytest.raises(CallRefusedError, match=r"nothing came from you for 0\.5 s"):
            async for _ in channel.stream(methods.ATTEND.rpc, silent()):
                pass
        assert not any(synchronizer.explorer_status_counts.values())

        async def many() -> AsyncGenerator[wire.FromModule, None]:
            yield wire.FromModule(hello=wire.Hello(explorers_running=1 << 31))

        with pytest.raises(CallRefusedError, match="at most 10000"):
            async for _ in channel.stream(methods.ATTEND.rpc, many()):
                pass
        assert not any(synchronizer.explorer_status_counts.values())

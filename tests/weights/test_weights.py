"""Publishers and followers on real sockets: what travels, who hands it on, and what is refused."""

import asyncio
import dataclasses
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait as wait_for
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging import (
    ClosedError,
    ConfigError,
    DecentralizedAverager,
    GradientAveraging,
    LocalSGD,
    Peer,
    StateError,
    Strategy,
    TensorError,
    TLSFiles,
    WeightFollower,
    WeightPublisher,
)
from averaging.errors import CallRefusedError, ListenError
from averaging.rpc import EventLoopThread, RpcServer, read_credentials
from averaging.weights import Staleness, publisher as publishing
from averaging.weights.receiver import FollowerOptions, ModelReceiver
from tests.support.certificates import token_file, write
from tests.support.ports import free_address, free_port

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

LIMIT = 30.0


def state(seed: int = 0, size: int = 1 << 20) -> dict[str, torch.Tensor]:
    """4 MiB of bfloat16 in two tensors, and two small ones."""
    torch.manual_seed(seed)
    return {
        "first": (0.02 * torch.randn(size)).bfloat16(),
        "second": (0.02 * torch.randn(size)).bfloat16(),
        "bias": torch.randn(7),
        "count": torch.tensor(seed),
    }


def stepped(before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """After a step of fine-tuning: `first` is frozen."""
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["second"] = (before["second"].float() + 2e-6 * torch.randn(before["second"].shape).sign()).bfloat16()
    after["count"] += 1
    return after


def same(weights: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


async def follow(stack: AsyncExitStack, *join: str, **options: Any) -> ModelReceiver:
    return await stack.enter_async_context(ModelReceiver(FollowerOptions(join=join, run_id="run", **options)))


async def has(follower: ModelReceiver, version: int) -> None:
    async with asyncio.timeout(LIMIT):
        await follower.wait_newer(version - 1, None)
    assert follower.newest is not None
    assert follower.newest.manifest.version == version


def holds(follower: ModelReceiver, weights: Mapping[str, torch.Tensor]) -> bool:
    return follower.newest is not None and same(follower.newest.tensors(), weights)


async def test_only_what_changed_travels() -> None:
    publisher, weights = WeightPublisher(run_id="run"), state()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(RpcServer("127.0.0.1:0", [publisher]))
        follower = await follow(stack, server.endpoint)
        assert follower.newest is None
        assert await publisher.publish(weights) == 0
        await has(follower, 0)
        assert holds(follower, weights)
        whole = follower.bytes_received
        assert whole == sum(tensor.nbytes for tensor in weights.values())
        await publisher.publish(weights, version=1)  # the same weights
        await has(follower, 1)
        assert follower.bytes_received == whole
        weights = stepped(weights)
        await publisher.publish(weights, version=5)
        await has(follower, 5)
        assert holds(follower, weights)
        assert 0 < follower.bytes_received - whole < weights["second"].nbytes / 10
        assert follower.bytes_received == publisher.bytes_sent


async def test_versions_never_go_back_and_keep_their_layout() -> None:
    publisher, weights = WeightPublisher(), state()
    assert await publisher.publish(weights, 7) == 7
    assert await publisher.publish(weights, 7) == 7, "the same once more"
    with pytest.raises(ConfigError, match="version 7 is not above 7"):
        await publisher.publish(stepped(weights), 7)
    with pytest.raises(ConfigError, match="version 6 is not above 7, which is published; versions never go back"):
        await publisher.publish(weights, 6)
    with pytest.raises(ConfigError, match="whole number"):
        await publisher.publish(weights, 7.5)  # type: ignore[arg-type]
    with pytest.raises(TensorError, match=r"'bias' is float32\[7\] in version 7 and float64\[7\] now"):
        await publisher.publish(weights | {"bias": torch.zeros(7, dtype=torch.float64)})
    with pytest.raises(ConfigError, match="nothing to publish"):
        await publisher.publish()
    assert await publisher.publish(stepped(weights)) == 8
    assert publisher.version == 8


async def test_a_restarted_publisher_with_older_versions_is_not_followed_until_it_is_past_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights, port = state(), free_port()
    async with AsyncExitStack() as stack:
        async with RpcServer(f"127.0.0.1:{port}", [publisher := WeightPublisher()], grace=0.0) as server:
            await publisher.publish(weights, 40)
            follower = await follow(stack, server.endpoint)
            await has(follower, 40)
        restarted = WeightPublisher()
        await restarted.publish(stepped(weights), 39)
        async with RpcServer(f"127.0.0.1:{port}", [restarted]):
            async with asyncio.timeout(LIMIT):
                await follower.changes.wait(lambda: "versions never go back" in caplog.text)
            await restarted.publish(stepped(weights), 40)
            assert holds(follower, weights)
            newest = stepped(stepped(weights))
            await restarted.publish(newest, 41)
            await has(follower, 41)
            assert holds(follower, newest)
            assert (
                follower.bytes_received
                < 1.2 * sum(tensor.nbytes for tensor in weights.values()) + newest["second"].nbytes
            )


async def test_32_followers_cost_the_publisher_few_copies() -> None:
    publisher, weights = WeightPublisher(run_id="run"), state()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(RpcServer("127.0.0.1:0", [publisher]))
        followers = [await follow(stack, server.endpoint) for _ in range(32)]
        nbytes, sent = sum(tensor.nbytes for tensor in weights.values()), 0
        for version in (1, 2):
            weights = stepped(weights)
            await publisher.publish(weights, version)
            for follower in followers:
                await has(follower, version)
                assert holds(follower, weights)
            one_copy = nbytes if version == 1 else followers[0].bytes_received - nbytes
            assert one_copy <= publisher.bytes_sent - sent <= 2 * one_copy
            sent = publisher.bytes_sent
        received = sum(follower.bytes_received for follower in followers)
        assert received == 32 * (nbytes + one_copy)
        assert sent + sum(follower.bytes_sent for follower in followers) == received


def test_a_script_updates_its_model() -> None:
    publisher, weights, model = WeightPublisher(), state(), state(1)
    with Publishing(publisher) as endpoint, WeightFollower(model, join=[endpoint], run_id="any") as follower:
        assert not follower.update()
        assert follower.version is None
        publisher.publish_now(weights, 3)
        assert follower.update(timeout=LIMIT)
        assert follower.version == follower.newest == 3
        assert follower.digest == publisher.digest
        assert same(model, weights)
        assert not follower.update()
        assert not follower.update(timeout=0.01)
        assert follower.staleness == Staleness()
    with pytest.raises(ClosedError):
        follower.update()
    with pytest.raises(ClosedError, match="inside `with`"):
        WeightFollower(model, join=["127.0.0.1:1"]).update()


async def test_asyncio_code_iterates_over_versions() -> None:
    publisher, weights = WeightPublisher(), state()
    module = torch.nn.ParameterDict({name: torch.nn.Parameter(t, requires_grad=False) for name, t in state(1).items()})
    seen = []
    async with (
        RpcServer("127.0.0.1:0", [publisher]) as server,
        WeightFollower(module, join=[server.endpoint]) as follower,
    ):
        await publisher.publish(weights, 1)
        async with asyncio.timeout(LIMIT), aclosing(aiter(follower)) as versions:
            async for version in versions:
                seen.append(version)
                assert same(dict(module.state_dict()), weights)
                if version == 3:
                    break
                weights = stepped(weights)
                await publisher.publish(weights)
    assert seen == [1, 2, 3]


class Publishing:
    """A server in a thread of its own."""

    def __init__(self, publisher: WeightPublisher) -> None:
        self._publisher = publisher

    def __enter__(self) -> str:
        server = RpcServer("127.0.0.1:0", [self._publisher], grace=0.0)
        self._thread = EventLoopThread(server, "a publisher")
        return server.endpoint

    def __exit__(self, *_: object) -> None:
        self._thread.close()


def test_the_weights_never_change_inside_the_lock() -> None:
    publisher, model = WeightPublisher(), state(1)
    with Publishing(publisher) as endpoint, WeightFollower(model, join=[endpoint]) as follower:
        publisher.publish_now(state(), 1)
        follower._thread.run(follower._receiver.wait_newer(None, LIMIT))  # type: ignore[union-attr]
        with ThreadPoolExecutor() as pool:
            with follower.locked():
                updating = pool.submit(follower.update)
                assert wait_for([updating], 0.2).not_done
                assert same(model, state(1))
            assert updating.result(LIMIT)
            assert same(model, state())


def test_another_model_is_refused_by_the_name_of_its_first_difference() -> None:
    publisher = WeightPublisher()
    publisher.publish_now(state(), 1)
    model = state(1) | {"bias": torch.zeros(8)}
    with Publishing(publisher) as endpoint:
        with pytest.raises(TensorError, match=r"tensor 'bias' is float32\[8\] here and float32\[7\] there"):
            WeightFollower(model, join=[endpoint]).__enter__()
        model.pop("bias")
        with pytest.raises(TensorError, match="'bias' .* is only there"):
            WeightFollower(model, join=[endpoint]).__enter__()
    assert same(model, {name: tensor for name, tensor in state(1).items() if name != "bias"})


def test_wrappers_at_either_side_change_no_name() -> None:
    published, followed = (torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)) for _ in range(2))
    compiled = torch.nn.Module()  # as `torch.compile` wraps it, without a compiler
    compiled.add_module("_orig_mod", published)
    publisher = WeightPublisher(torch.nn.DataParallel(compiled))
    publisher.publish_now(version=1)
    with (
        Publishing(publisher) as endpoint,
        WeightFollower(torch.nn.DataParallel(followed), join=[endpoint]) as follower,
    ):
        assert follower.update(timeout=LIMIT)
    assert same(followed.state_dict(), published.state_dict())


async def test_a_peer_that_publishes_nothing_is_named() -> None:
    async with Peer([torch.zeros(2)], run_id="run") as peer, AsyncExitStack() as stack:
        with pytest.raises(StateError, match=rf"{peer.endpoint} publishes no weights; .*services=\[WeightPublisher"):
            await follow(stack, peer.endpoint)


async def test_nobody_answers() -> None:
    async with AsyncExitStack() as stack:
        with pytest.raises(StateError, match=r"no publisher answered within 0.5 s \(.*connection refused"):
            await follow(stack, free_address(), join_timeout=0.5)
        for join in ("127.0.0.1:1", list[str]()):
            with pytest.raises(ConfigError, match="join must be a list"):
                FollowerOptions(join=join, run_id="")
        with pytest.raises(ConfigError, match="port 0"):
            FollowerOptions(join=["127.0.0.1:0"], run_id="")
        async with RpcServer("127.0.0.1:0", [WeightPublisher()]) as server:
            with pytest.raises(ListenError):
                await follow(stack, server.endpoint, listen=server.endpoint)


async def test_tls_and_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "COPIES", 1)
    files = write(tmp_path, "127.0.0.1")
    token = token_file(tmp_path)
    tls = TLSFiles(files["tls_ca"], files["tls_cert"], files["tls_key"])
    credentials = read_credentials(tls=tls, token_file=token)
    publisher, weights = WeightPublisher(), state()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(RpcServer("127.0.0.1:0", [publisher], credentials=credentials))
        followers = [await follow(stack, server.endpoint, credentials=credentials) for _ in range(2)]
        await publisher.publish(weights)
        for follower in followers:
            await has(follower, 0)
            assert holds(follower, weights)
        assert sum(follower.bytes_sent > 0 for follower in followers) == 1, "they hand on with TLS too"
        with pytest.raises(CallRefusedError, match="requires a token"):
            await follow(stack, server.endpoint, credentials=dataclasses.replace(credentials, tokens=()))
        with pytest.raises(StateError, match="TLS"):
            await follow(stack, server.endpoint, join_timeout=1.0)
        model = state(1)
        async with WeightFollower(model, join=[server.endpoint], token_file=token, tls=tls) as front:
            assert await asyncio.to_thread(front.update, LIMIT)
        assert same(model, weights)


def averager(publisher: WeightPublisher, model: torch.nn.Module, strategy: Strategy) -> DecentralizedAverager:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return DecentralizedAverager(
        optimizer, model=model, run_id="run", strategy=strategy, services=[publisher], round_timeout=20.0
    )


def train(optimizer: DecentralizedAverager, model: torch.nn.Module, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step(batch_size=4)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))


def received(follower: WeightFollower, version: int) -> None:
    """Versions in between may be left out."""
    while (follower.version or -1) < version:
        assert follower.update(timeout=LIMIT)
    assert follower.version == version


@pytest.mark.parametrize("strategy", [LocalSGD(sync_every=2), GradientAveraging(8)], ids=repr)
def test_an_averager_publishes_after_each_round_also_alone(strategy: Strategy) -> None:
    trained, mine = model(), model()
    versions = [2, 4, 6] if isinstance(strategy, LocalSGD) else [1, 2, 3]
    with (
        averager(WeightPublisher(trained), trained, strategy) as optimizer,
        WeightFollower(mine, join=[optimizer.endpoint], run_id="run") as follower,
    ):
        assert follower.update(timeout=LIMIT)
        assert follower.version == 0
        for version in versions:
            train(optimizer, trained, 2)
            received(follower, version)
            assert same(mine.state_dict(), trained.state_dict())
        with pytest.raises(CallRefusedError, match="belongs to run"):
            WeightFollower(mine, join=[optimizer.endpoint], run_id="other").__enter__()


def test_the_weights_of_a_round_with_another_peer() -> None:
    trained, other, mine = model(), model(), model().bfloat16()
    publisher = WeightPublisher(trained, dtype=torch.bfloat16)
    with (
        averager(publisher, trained, LocalSGD(sync_every=5)) as a,
        DecentralizedAverager(
            torch.optim.SGD(other.parameters(), lr=0.1),
            model=other,
            run_id="run",
            strategy=LocalSGD(sync_every=5),
            join=[a.endpoint],
            round_timeout=20.0,
        ) as b,
        WeightFollower(mine, join=[a.endpoint]) as follower,
    ):
        assert a.wait_for_peers(2, LIMIT)
        with ThreadPoolExecutor() as pool:
            list(pool.map(train, (a, b), (trained, other), (5, 5)))
        assert a.last_receipt is not None
        assert a.last_receipt.averaged
        received(follower, 5)
        kept = {name: t.bfloat16() if t.is_floating_point() else t for name, t in trained.state_dict().items()}
        assert same(mine.state_dict(), kept)

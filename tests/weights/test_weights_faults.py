"""Faults in the middle of a transfer: a follower ends with exactly one published version, bit for bit."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AsyncExitStack

import pytest
import torch

from averaging import WeightPublisher
from averaging.errors import CallRefusedError, StateError
from averaging.rpc import RpcChannel, RpcHandler, RpcServer
from averaging.weights import publisher as publishing
from averaging.weights.download import SourcePace, all_of
from averaging.weights.receiver import FollowerOptions, ModelReceiver
from averaging.weights.store import FETCH, Store
from averaging.wire import weights_pb2 as wire
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.processes import JsonProcess
from tests.weights.test_weights import LIMIT, follow, has, holds, state, stepped
from tests.weights.weights_worker import weights_of

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

RATE = 12e6
"""Bytes per second of the slow links: a version takes half a second."""


class Moment:
    """When a follower has received a share of a version.

    Args:
        share: of the bytes.
        action: called at once.
    """

    def __init__(self, share: float, action: Callable[[], object] = lambda: None) -> None:
        self._share, self._action = share, action
        self.reached = asyncio.Event()
        self.armed = False

    def __call__(self, received: int, total: int) -> None:
        if self.armed and received >= self._share * total:
            self.armed = False
            self._action()
            self.reached.set()

    async def comes(self) -> None:
        async with asyncio.timeout(LIMIT):
            await self.reached.wait()


async def tell(process: JsonProcess, event: str) -> None:
    await asyncio.to_thread(process.expect, event)


async def slow(stack: AsyncExitStack, proxy: FaultProxy, moment: Moment, **options: float) -> ModelReceiver:
    tasks = ModelReceiver(
        FollowerOptions(join=[f"127.0.0.1:{proxy.port}"], run_id="", listen=None, **options),  # type: ignore[arg-type]
        on_progress=moment,
    )
    return await stack.enter_async_context(tasks)


def worker(port: int, version: int) -> JsonProcess:
    return JsonProcess("python", "-m", "tests.weights.weights_worker", str(port), str(version))


@pytest.mark.parametrize("share", [0.5])
@pytest.mark.parametrize("first", [True, False], ids=["whole", "difference"])
async def test_the_publisher_is_killed(share: float, first: bool) -> None:
    version = 1 if first else 2
    with FaultProxy(RATE) as proxy, worker(proxy.target, 1) as trainer:
        # What is in the buffers of its machine is lost too.
        def die() -> None:
            trainer.kill()
            proxy.arm(Fault.CUT)

        moment = Moment(share, die)
        await tell(trainer, "published")
        async with AsyncExitStack() as stack:
            moment.armed = first
            follower = await slow(stack, proxy, moment)
            if not first:
                await has(follower, 1)
                moment.armed = True
                trainer.send("")
            await moment.comes()
            async with asyncio.timeout(LIMIT):
                await follower.changes.wait(lambda: not follower.connected)
            if first:
                assert follower.newest is None
            else:
                # On a busy machine the rest may come before the kill.
                assert any(holds(follower, weights_of(version)) for version in (1, 2))
            await asyncio.to_thread(trainer.wait)
            # It starts again from its checkpoint, with the version that was being published.
            with worker(proxy.target, version) as restarted:
                await tell(restarted, "published")
                await has(follower, version)
                assert holds(follower, weights_of(version))
                restarted.send("")
                await has(follower, version + 1)
                assert holds(follower, weights_of(version + 1))


@pytest.mark.parametrize(
    "fault", [Fault.CUT, Fault.STALL, Fault.HALF_OPEN, Fault.CORRUPT], ids=lambda fault: fault.value
)
async def test_the_link_fails_in_the_middle_of_a_difference(fault: Fault) -> None:
    publisher = WeightPublisher()
    with FaultProxy(RATE) as proxy:
        moment = Moment(0.3, lambda: proxy.arm(fault))
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(RpcServer(f"127.0.0.1:{proxy.target}", [publisher], grace=0.0))
            await publisher.publish(weights_of(1), 1)
            follower = await slow(stack, proxy, moment, stall_timeout=2.0)
            await has(follower, 1)
            whole, sent = follower.bytes_received, publisher.bytes_sent
            moment.armed = True
            await publisher.publish(weights_of(2), 2)
            await moment.comes()
            await asyncio.to_thread(proxy.struck.wait, LIMIT)
            assert holds(follower, weights_of(1))
            if fault in (Fault.STALL, Fault.HALF_OPEN):
                async with asyncio.timeout(LIMIT):
                    await follower.changes.wait(lambda: follower.retries > 0)
            proxy.heal()
            await has(follower, 2)
            assert holds(follower, weights_of(2))
            difference = follower.bytes_received - whole
            assert difference < 0.8 * whole
            assert publisher.bytes_sent - sent < 1.8 * difference, "what had arrived was not sent again"


class Silent:
    """Takes requests and sends nothing, or only that it waits itself."""

    def __init__(self, pause: float | None) -> None:
        self._pause = pause
        self.asked = 0

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        return [FETCH.streams(self.fetch)]

    async def fetch(self, _: wire.FetchRequest) -> AsyncGenerator[wire.Reply, None]:
        self.asked += 1
        while True:
            await asyncio.sleep(self._pause or 3600)
            yield wire.Reply()


@pytest.mark.parametrize("pause", [None, 0.05], ids=["silent", "always-waiting"])
async def test_one_of_many_silent_sources_is_tried_and_none_for_the_next_versions(
    pause: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "COPIES", 1)
    publisher, weights, silent = WeightPublisher(), state(), Silent(pause)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(RpcServer("127.0.0.1:0", [publisher], grace=0.0))
        others = [await stack.enter_async_context(RpcServer("127.0.0.1:0", [silent], grace=0.0)) for _ in range(6)]
        for number in range(6):
            await follow(stack, server.endpoint)
            list(publisher._followers.values())[number].endpoint = others[number].endpoint
        await publisher.publish(weights, 1)
        follower = await follow(stack, server.endpoint, stall_timeout=1.0)
        await has(follower, 1)
        asked, left = silent.asked, set(publisher._left)
        assert left
        for version in (2, 3):
            silent.asked, weights = 0, stepped(weights)
            await publisher.publish(weights, version)
            await has(follower, version)
            assert holds(follower, weights)
        assert silent.asked <= asked
        assert left <= set(publisher._left)


class Dripping:
    """Hands on one message, and the next ones very late."""

    def __init__(self, store: Store) -> None:
        self._store, self.sent = store, 0

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        return [FETCH.streams(self.fetch)]

    async def fetch(self, request: wire.FetchRequest) -> AsyncGenerator[wire.Reply, None]:
        async for reply in self._store.send(request):
            self.sent += 1
            yield reply
            await asyncio.sleep(3600)


async def test_a_source_that_sends_a_message_now_and_then_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "COPIES", 1)
    publisher, weights = WeightPublisher(), state()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(RpcServer("127.0.0.1:0", [publisher], grace=0.0))
        front = await follow(stack, server.endpoint)
        dripping = Dripping(front._first.store)
        other = await stack.enter_async_context(RpcServer("127.0.0.1:0", [dripping], grace=0.0))
        for each in publisher._followers.values():
            each.endpoint = other.endpoint
        await publisher.publish(weights, 1)
        await has(front, 1)
        follower = await follow(stack, server.endpoint, stall_timeout=2.0)
        await has(follower, 1)
        sent = dripping.sent
        assert sent > 0
        weights = stepped(weights)
        await publisher.publish(weights, 2)
        await has(follower, 2)
        assert holds(follower, weights)
        assert dripping.sent == sent, "it is not asked for the next version"


@pytest.mark.parametrize(
    ("nbytes", "every", "in_time"),
    [(1 << 20, 9.0, False), (0, 9.0, True), (0, 13.0, False), (1 << 20, 1.0, True), (8 << 10, 0.03, True)],
    ids=["drips", "waits itself", "waits for long", "slow link", "steady"],
)
def test_who_hands_on_as_fast_as_the_publisher_would(nbytes: int, every: float, in_time: bool) -> None:
    pace, now = SourcePace(256 << 10, 3.0, 0.0), 0.0
    if nbytes:
        for _ in range(10):
            now += every
            kept = pace.note(nbytes, now)
            if not kept:
                break
    else:
        kept = pace.note(0, every)
    assert kept is in_time


def test_a_source_has_no_credit_for_what_it_sent_before() -> None:
    pace = SourcePace(1e6, 3.0, 0.0)
    assert pace.note(1 << 30, 1.0)
    assert pace.left(1.0) == 3.0
    assert pace.left(5.0) == 0.0


async def test_a_receiver_that_ends_while_its_connection_fails_ends() -> None:
    async def receive() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise StateError("the connection is closed") from None

    receiving = asyncio.create_task(all_of([receive()]))
    await asyncio.sleep(0)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving


async def test_followers_go_on_with_another_publisher_of_the_same_weights() -> None:
    first, second, weights = WeightPublisher(), WeightPublisher(), state()
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(RpcServer("127.0.0.1:0", [second]))
        async with RpcServer("127.0.0.1:0", [first], grace=0.0) as server:
            await first.publish(weights, 1)
            await second.publish(weights, 1)
            follower = await follow(stack, server.endpoint, other.endpoint)
            await has(follower, 1)
        weights = stepped(weights)
        await second.publish(weights, 2)
        await has(follower, 2)
        assert holds(follower, weights)
        assert second.bytes_sent < 0.1 * first.bytes_sent, "a difference to what the other one has sent"


async def pieces_of(channel: RpcChannel, name: bytes, count: int) -> AsyncGenerator[int, None]:
    request = wire.FetchRequest(name=name, pieces=[wire.Range(count=count)])
    async for reply in channel.stream(FETCH, request):
        for piece in reply.pieces:
            yield piece.index


async def test_two_versions_that_newer_ones_have_replaced_are_sent_to_their_end() -> None:
    publisher, count = WeightPublisher(bases=0), 48
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(RpcServer("127.0.0.1:0", [publisher], grace=0.0))
        readers = []
        for version in range(4):
            await publisher.publish({"w": torch.randn(count << 18)}, version)
            assert publisher.digest is not None
            channel = await stack.enter_async_context(RpcChannel(server.endpoint))
            readers.append(pieces_of(channel, publisher.digest, count))
            assert await anext(readers[-1]) == 0, "then it waits, since nobody reads"
        with pytest.raises(CallRefusedError, match="not kept any more; ask for the newest"):
            async for _ in readers.pop(2):
                pass
        for reader in readers:
            assert [index async for index in reader] == list(range(1, count))


async def test_slow_followers_finish_versions_while_newer_ones_come() -> None:
    publisher = WeightPublisher(bases=1)
    with FaultProxy(20e6) as proxy:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(RpcServer(f"127.0.0.1:{proxy.target}", [publisher], grace=0.0))
            await publisher.publish(weights_of(1), 1)
            followers = [await slow(stack, proxy, Moment(1.0)) for _ in range(4)]
            version = 1
            while any(each.newest is None or each.newest.manifest.version < 6 for each in followers):
                version += 1
                assert version < 1000
                await publisher.publish(weights_of(version), version)
            for each in followers:
                assert await each.wait_newer(version - 1, LIMIT), "at last all have the newest"
                assert holds(each, weights_of(version))

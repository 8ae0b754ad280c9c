"""Versions that are sent while their digests are computed: nothing reaches the user before all of it is verified."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AsyncExitStack
from functools import partial

import pytest
import torch

from averaging import WeightPublisher
from averaging.common import pack
from averaging.errors import ProtocolViolationError
from averaging.rpc import RpcHandler, RpcServer
from averaging.weights import publisher as publishing
from averaging.weights.layout import PIECE_BYTES, WeightManifest, version_message
from averaging.weights.receiver import FollowerOptions, ModelReceiver
from averaging.weights.snapshot import OpenedVersion, begin_copy, seal
from averaging.weights.store import DESCRIBE, FETCH, FOLLOW
from averaging.wire import weights_pb2 as wire
from tests.weights.test_weights import LIMIT, follow, has, holds, state, stepped

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


def reference_digest(weights: dict[str, torch.Tensor]) -> bytes:
    """The digest of a version, computed in the plainest way."""
    tensors = [
        [name, str(each.dtype).removeprefix("torch."), list(each.shape), [], []] for name, each in weights.items()
    ]
    joined = b""
    for each in weights.values():
        content = each.reshape(-1).view(torch.uint8).numpy().tobytes()
        for start in range(0, len(content), PIECE_BYTES):
            joined += hashlib.sha256(content[start : start + PIECE_BYTES]).digest()
    return hashlib.sha256(pack([PIECE_BYTES, tensors]) + joined).digest()


async def until(follower: ModelReceiver, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        await follower.changes.wait(condition)


def has_more(follower: ModelReceiver, received: int) -> bool:
    return follower.bytes_received > received


async def test_pieces_pass_through_a_chain_of_followers_before_the_digests_are_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishing, "CHAIN_BYTES", 1)
    publisher, weights = WeightPublisher(), state()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(RpcServer("127.0.0.1:0", [publisher]))
        chain = [await follow(stack, server.endpoint) for _ in range(3)]
        await publisher.publish(weights, 1)
        for follower in chain:
            await has(follower, 1)
        before, weights = [each.bytes_received for each in chain], stepped(weights)
        opened = OpenedVersion(begin_copy(weights), 2, publisher._store.newest)
        describing = opened.describe()
        publisher._store.receiving(opened)
        for _ in range(3):
            next(describing)  # of the two pieces of `first`, which is frozen, and the first of `second`
        publisher._store.changes.happened()
        for follower, received in zip(chain, before, strict=True):
            await until(follower, partial(has_more, follower, received))
            assert follower.newest is not None
            assert follower.newest.manifest.version == 1
        list(describing)
        publisher._store.add(opened.finish())
        publisher._store.receiving(None)
        for follower in chain:
            await has(follower, 2)
            assert holds(follower, weights)
            assert follower.newest is not None
            assert follower.newest.manifest.digest == publisher.digest == reference_digest(weights)


def test_the_digests_are_those_of_the_plain_tensors() -> None:
    weights = {"turned": torch.arange(700_000.0).reshape(7, -1).T, **state()}
    opened = OpenedVersion(begin_copy(weights), 1, None)
    assert list(opened.describe())[-1] == sum(tensor.nbytes for tensor in weights.values())
    plain = {name: tensor.contiguous() for name, tensor in weights.items()}
    assert opened.finish().manifest.digest == seal(begin_copy(weights), 1, None).manifest.digest
    assert opened.finish().manifest.digest == reference_digest(plain)


class Scripted:
    """A publisher that announces a version and does what a test wants with its digests.

    Attributes:
        announce: whether the version is announced.
        describe: digests are sent when this is set.
        digest: what it says is the digest of the version.
    """

    def __init__(self, weights: dict[str, torch.Tensor], pause: float | None = None) -> None:
        self.whole = seal(begin_copy(weights), 1, None)
        self.manifest = WeightManifest(1, self.whole.manifest.layout, (), opened=b"o" * 16)
        self.describe = asyncio.Event()
        self.digest = self.whole.manifest.digest
        self._pause = pause

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        return [FOLLOW.streams(self.follow), FETCH.streams(self.fetch), DESCRIBE.streams(self.described)]

    async def follow(self, _: wire.FollowRequest) -> AsyncGenerator[wire.Version, None]:
        yield version_message(self.manifest)
        await asyncio.Event().wait()

    async def described(self, request: wire.DescribeRequest) -> AsyncGenerator[wire.Digests, None]:
        while not self.describe.is_set():
            try:
                async with asyncio.timeout(self._pause):
                    await self.describe.wait()
            except TimeoutError:
                yield wire.Digests()
        yield wire.Digests(pieces=b"".join(self.whole.manifest.piece_digests[request.first :]))
        yield wire.Digests(digest=self.digest)

    async def fetch(self, request: wire.FetchRequest) -> AsyncGenerator[wire.Reply, None]:
        for each in request.pieces:
            for index in range(each.first, each.first + each.count):
                yield wire.Reply(pieces=[wire.Piece(index=index, data=self.whole.piece(index).tobytes())])


async def follow_scripted(stack: AsyncExitStack, scripted: Scripted, **options: float) -> ModelReceiver:
    server = await stack.enter_async_context(RpcServer("127.0.0.1:0", [scripted], grace=0.0))
    settings = FollowerOptions(join=[server.endpoint], run_id="", **options)  # type: ignore[arg-type]
    return await stack.enter_async_context(ModelReceiver(settings))


@pytest.mark.parametrize("pause", [None, 0.05], ids=["silent", "always-waiting"])
async def test_digests_that_never_come_are_given_up(pause: float | None) -> None:
    async with AsyncExitStack() as stack:
        scripted = Scripted(weights := state(), pause)
        follower = await follow_scripted(stack, scripted, stall_timeout=0.2)
        await until(follower, lambda: follower.retries >= 2)
        assert follower.newest is None
        assert follower.bytes_received == 0
        scripted.describe.set()
        await has(follower, 1)
        assert holds(follower, weights)


async def test_a_digest_that_does_not_fit_reaches_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncExitStack() as stack:
        scripted = Scripted(state())
        scripted.digest = bytes(32)
        scripted.describe.set()
        follower = await follow_scripted(stack, scripted)
        await until(follower, lambda: follower.retries >= 2)
        assert follower.newest is None
        assert "does not match its pieces" in caplog.text
        scripted.digest = scripted.whole.manifest.digest
        await has(follower, 1)


@pytest.mark.parametrize(
    "message",
    [
        wire.Version(version=1, opened=bytes(16)),
        wire.Version(version=1, opened=bytes(15), piece_bytes=PIECE_BYTES),
        wire.Version(version=1 << 63, opened=bytes(16), piece_bytes=PIECE_BYTES),
    ],
    ids=["no-layout", "short-name", "version"],
)
async def test_a_malformed_announcement_is_refused(message: wire.Version) -> None:
    class Malformed(Scripted):
        async def follow(self, _: wire.FollowRequest) -> AsyncGenerator[wire.Version, None]:
            yield message

    async with AsyncExitStack() as stack:
        with pytest.raises(ProtocolViolationError, match="announces"):
            await follow_scripted(stack, Malformed(state()))

"""A download that is cut goes on where it ended: what travels again, and whom the reader believes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch

from averaging import Peer
from averaging.peer import PeerContext
from averaging.protocol.messages import DownloadData, Resume
from averaging.state import manifest as state
from averaging.state.downloads import download
from averaging.state.manifest import read_manifest
from averaging.state.snapshots import ExtraState
from averaging.testing import virtual_time
from averaging.testing.discovery import MemoryDiscovery
from tests.support.swarm import Swarm

CHUNK = 4096
SHAPES = {"a": (5000,), "empty": (0, 3), "b": (30_000,), "c": (7, 11)}
MOMENT = 9
TOTAL = 4 * (MOMENT + sum(torch.Size(shape).numel() for shape in SHAPES.values()))
CUT = 20_000 + 10 * CHUNK
"""Bytes after which the first donor is lost: in the midst of `b`."""


@dataclass
class Call:
    donor: str
    resume: Resume | None
    nbytes: int = 0
    skipped: int = 0


class Reader:
    """Downloads from real peers and counts what comes; `after_bytes` of the first call something happens."""

    def __init__(self, swarm: Swarm, happens: Callable[[], Any], after_bytes: int = CUT) -> None:
        self._transport = swarm.network.transport("reader:1")
        self.happens, self._after = happens, after_bytes
        self.calls: list[Call] = []
        self.hides = False
        self.lies: Callable[[Call], bool] = lambda call: False

    async def download_state(self, endpoint: str, resume: Resume | None = None) -> AsyncGenerator[DownloadData, None]:
        call = Call(endpoint, resume)
        self.calls.append(call)
        async with aclosing(self._transport.download_state(endpoint, None if self.hides else resume)) as messages:
            async for message in messages:
                if message.metadata:
                    call.skipped = read_manifest(message.metadata).skipped
                assert message.tensor_part is not None
                call.nbytes += len(message.tensor_part.buffer)
                yield spoilt(message) if self.lies(call) else message
                if call is self.calls[0] and call.nbytes >= self._after:
                    await self.happens()


def spoilt(message: DownloadData) -> DownloadData:
    assert message.tensor_part is not None
    zeros = bytes(len(message.tensor_part.buffer))
    return replace(message, tensor_part=replace(message.tensor_part, buffer=zeros))


def named(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def donor(swarm: Swarm, name: str, extra: float) -> Peer:
    extras = ExtraState({"moment": torch.full((MOMENT,), extra)}, {"of": name})
    return Peer(
        named(1),
        run_id="run",
        context=PeerContext(
            transport=swarm.network.transport(name),
            discovery=lambda endpoint, transport: MemoryDiscovery(swarm.registry),
            clock=virtual_time.clock,
        ),
        extra_state=lambda: extras,
        stall_timeout=3.0,
    )


class World:
    """Two donors that hold the same, but for what the application of the second adds behind it, and a reader.

    The first donor is lost on the way, unless a test has something else happen.
    """

    def __init__(self, extra: float) -> None:
        self.swarm = Swarm(1)
        self.one, self.other = donor(self.swarm, "x:1", 0.0), donor(self.swarm, "y:1", extra)
        self.reader = Reader(self.swarm, self.lose)

    async def lose(self) -> None:
        self.swarm.network.kill("x:1")

    async def cut(self) -> None:
        """The connection breaks, and can be made again at once."""
        self.swarm.network.cut(frozenset(["x:1"]), frozenset(["reader:1"]))
        self.swarm.network.heal()


def play(test: Callable[[World], Coroutine[Any, Any, None]], extra: float = 0.0) -> None:
    world = World(extra)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            for peer in (world.one, world.other):
                await stack.enter_async_context(peer)
                await peer.commit(4)
            await test(world)

    world.swarm.simulate(main())


async def fetch(reader: Reader, peer: Peer, names: tuple[str, ...] = ("x:1", "y:1")) -> state.State:
    found, _ = await download(cast(Any, reader), names, peer.schema, silence=3.0)
    return found


def check(found: state.State, seed: int = 1) -> None:
    for name, tensor in named(seed).items():
        assert torch.equal(found.tensors[name], tensor)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "CHUNK_BYTES", CHUNK)


@pytest.mark.parametrize("extra", [0.0, 1.0])
def test_of_the_next_donor_only_the_rest_is_read(extra: float) -> None:
    async def main(world: World) -> None:
        found = await fetch(world.reader, world.other)
        first, second = world.reader.calls
        assert second.resume is not None
        assert second.skipped == second.resume.offset >= CUT
        assert second.nbytes == TOTAL - second.skipped
        assert first.nbytes + second.nbytes <= TOTAL + CHUNK
        check(found)
        assert found.tensors["moment"].tolist() == [extra] * MOMENT
        assert found.user == {"of": "y:1"}

    play(main, extra)


def test_a_donor_that_has_moved_on_sends_all() -> None:
    async def main(world: World) -> None:
        async def moves_on() -> None:
            for peer in (world.one, world.other):
                with peer.tensors() as tensors:
                    for tensor, value in zip(tensors, named(2).values(), strict=True):
                        tensor.copy_(value)
                await peer.commit(5)
            await world.cut()

        world.reader.happens = moves_on
        found = await fetch(world.reader, world.one)
        check(found, 2)
        assert found.version == 5
        assert (world.reader.calls[-1].skipped, world.reader.calls[-1].nbytes) == (0, TOTAL)

    play(main)


def test_one_that_has_moved_on_with_the_same_bytes_sends_the_rest_and_its_own_version() -> None:
    async def main(world: World) -> None:
        async def moves_on() -> None:
            await world.other.commit(5)
            await world.lose()

        world.reader.happens = moves_on
        found = await fetch(world.reader, world.other)
        assert found.version == 5
        assert world.reader.calls[1].skipped >= CUT
        check(found)

    play(main)


def test_a_donor_that_does_not_know_the_question_sends_all() -> None:
    async def main(world: World) -> None:
        world.reader.hides = True
        check(await fetch(world.reader, world.other))
        second = world.reader.calls[1]
        assert second.resume is not None
        assert (second.skipped, second.nbytes) == (0, TOTAL)

    play(main)


def test_wrong_bytes_before_the_cut_are_thrown_away_and_harm_no_sound_donor() -> None:
    async def main(world: World) -> None:
        world.reader.lies = lambda call: call.donor == "x:1" and call.nbytes > 20_000
        check(await fetch(world.reader, world.other))
        assert [call.donor for call in world.reader.calls] == ["x:1", "y:1", "y:1"]
        assert world.reader.calls[2].skipped == 20_000  # of `a`, which was verified; `b` comes again

    play(main)

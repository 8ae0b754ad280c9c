"""Each side of each stream with arbitrary input from the other: honest peers end in time and answer correctly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any, TypeAlias, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from averaging import Outcome, Peer
from averaging.allreduce.round import Prepare
from averaging.errors import AveragingError, CallRefusedError, PeerUnreachableError, ProtocolViolationError, StateError
from averaging.matchmaking.rules import pack_looking
from averaging.protocol.group import Member, Mode, ReplyForm, pack_gather
from averaging.protocol.messages import AveragingData, DownloadData, JoinRequest, MessageCode, MessageFromLeader, Resume
from averaging.state.assembler import StateAssembler
from averaging.state.downloads import download
from averaging.state.manifest import State, pack, seal
from averaging.tensors.schema import Schema, describe
from averaging.testing import virtual_time
from tests.fuzz.material import ENDPOINTS, averaging_data, packed, states
from tests.support.fake_transport import OneLane
from tests.support.rounds import STALL_TIMEOUT, Simulation
from tests.support.selection import examples, rest_is_long
from tests.support.swarm import Swarm

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
SOME = settings(max_examples=examples(100), suppress_health_check=SLOW)

ERRORS: list[Exception] = [
    ProtocolViolationError("nonsense"),
    CallRefusedError("peer:3", "refused"),
    PeerUnreachableError("peer:3", "connection lost"),
]
ANSWERS = {
    MessageCode.AVERAGED_PART,
    MessageCode.PROTOCOL_VIOLATION,
    MessageCode.CANCELLED,
    MessageCode.INTERNAL_ERROR,
    MessageCode.BAD_GROUP_ID,
}
pauses = st.sampled_from([0.0, 0.0, 0.0, 0.3, 3 * STALL_TIMEOUT])


Plan: TypeAlias = "tuple[list[tuple[float, Any]], Exception | None]"
"""Plan of one stream: pauses and messages, and how it ends."""


def plans(messages: st.SearchStrategy[Any], most: int = 6) -> st.SearchStrategy[list[Plan]]:
    """Plans of several streams, drawn in advance, since concurrent code must not draw."""
    ends = st.sampled_from([None, None, *ERRORS])
    return st.lists(st.tuples(st.lists(st.tuples(pauses, messages), max_size=most), ends), min_size=1, max_size=8)


class Script:
    """Streams that follow the plans in order; silent when there are no more plans."""

    def __init__(self, plans: list[Plan]) -> None:
        self._plans = iter(plans)

    async def play(self) -> AsyncGenerator[Any, None]:
        """The next stream."""
        messages, error = next(self._plans, ([], None))
        for pause, message in messages:
            await asyncio.sleep(pause)
            yield message
        if error is not None:
            raise error


class Hostile:
    """Replaces the round of a member: sends planned messages to the others, and answers theirs with planned ones."""

    def __init__(self, simulation: Simulation, parts: list[Plan], answers: list[Plan]) -> None:
        self._network = simulation.network
        self._parts, self._replies = Script(parts), Script(answers)
        self.answers: list[AveragingData] = []

    async def run(self, prepare: Prepare, timeout: float) -> None:
        await asyncio.sleep(0.05)  # the others have begun their rounds
        await asyncio.gather(*(self._attack(name) for name in ("peer:1", "peer:2") for _ in range(2)))

    async def _attack(self, name: str) -> None:
        transport = self._network.transport("peer:3")
        try:
            async with aclosing(transport.aggregate_part(name, self._parts.play())) as replies:
                async for reply in replies:
                    self.answers.append(reply)
        except AveragingError:
            return

    async def aggregate_part(
        self, first: AveragingData, messages: AsyncIterator[AveragingData]
    ) -> AsyncGenerator[AveragingData, None]:
        async with aclosing(self._replies.play()) as replies:
            async for message in replies:
                yield message


# It does not use the names of others. A member could, since names are not proven within a round.
GROUP = Simulation(1, [Member(f"peer:{n + 1}") for n in range(3)], [(7, 3), (), (40,)]).group
PARTS = averaging_data([GROUP.group_id, GROUP.group_id, b"", b"x" * 20], (1, 5, 16, 8)).map(
    lambda message: replace(message, endpoint="peer:3") if message.endpoint in GROUP.endpoints else message
)


@pytest.mark.parametrize("reply", rest_is_long(ReplyForm))
@SOME
@given(plans(PARTS), plans(PARTS))
def test_a_round_with_a_hostile_member(reply: ReplyForm, parts: list[Plan], answers: list[Plan]) -> None:
    simulation = Simulation(1, GROUP.members, [(7, 3), (), (40,)], reply=reply)
    assert simulation.group == GROUP
    hostile = Hostile(simulation, parts, answers)
    simulation.rounds["peer:3"] = cast(Any, hostile)
    began = ended = 0.0

    async def watch(tasks: dict[str, asyncio.Task[Any]]) -> None:
        nonlocal began, ended
        began = asyncio.get_running_loop().time()
        await asyncio.wait([tasks["peer:1"], tasks["peer:2"]])
        ended = asyncio.get_running_loop().time()

    virtual_time.run(simulation.run(watch))
    assert set(simulation.failures) == {"peer:3"}  # it returns no result
    assert simulation.failures["peer:3"] is None
    assert ended - began < 30.0
    assert {answer.code for answer in hostile.answers} <= ANSWERS
    for name in ("peer:1", "peer:2"):
        assert {lost.endpoint for lost in simulation.results[name].dropped} <= {"peer:3"}
        assert all(torch.isfinite(tensor).all() for tensor in simulation.tensors[name])


class HostileLeader:
    """Answers join requests with drawn messages."""

    def __init__(self, plans: list[Plan]) -> None:
        self._script = Script(plans)
        self.asked = 0

    async def join_group(self, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        self.asked += 1
        async with aclosing(self._script.play()) as messages:
            async for message in messages:
                yield message

    async def aggregate_part(self, messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        async for _ in messages:
            yield AveragingData(MessageCode.AVERAGED_PART)

    def get_schema(self) -> Schema:
        raise CallRefusedError("peer:3", "refused")


names = st.sampled_from(["peer:3", "peer:3", "peer:1", "peer:1", "peer:2", *ENDPOINTS])
SOUND_GATHER = pack_gather(1.0, None, Mode.NODE)
LEADERS = st.builds(
    MessageFromLeader,
    code=st.sampled_from([MessageCode.ACCEPTED, MessageCode.BEGIN_ALLREDUCE, *MessageCode]),
    group_id=st.binary(max_size=20),
    suggested_leader=names,
    ordered_group_endpoints=st.lists(names, max_size=3).map(tuple),
    gathered=st.lists(st.one_of(st.just(SOUND_GATHER), packed), max_size=3).map(tuple),
)


@settings(SOME, max_examples=examples(80))
@given(plans(LEADERS, 3))
def test_a_hostile_leader(answers: list[Plan]) -> None:
    swarm = Swarm(1)
    peers = [
        swarm.peer(f"peer:{n + 1}", [torch.full((3,), float(n))], group_size=2, group_wait=3.0, round_timeout=12.0)
        for n in range(2)
    ]
    hostile = HostileLeader(answers)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            for peer in peers:
                await stack.enter_async_context(peer)
            leader = swarm.network.transport("peer:3")
            await leader.serve(cast(Any, hostile), None)
            for _ in range(2):
                now = virtual_time.clock()
                await peers[0].discovery.store("run.0b", "peer:3", pack_looking(True), now + 1.0)
                async with asyncio.timeout(3 * 12.0):
                    for receipt in await asyncio.gather(*(peer.average() for peer in peers)):
                        assert receipt.outcome in Outcome
            assert hostile.asked
            assert all(torch.isfinite(tensor).all() for peer in peers for tensor in peer._tensors.tensors)

    swarm.simulate(main())


@settings(SOME, max_examples=examples(80))
@given(
    st.lists(
        st.builds(
            JoinRequest,
            endpoint=st.sampled_from(ENDPOINTS),
            schema_hash=st.sampled_from([b"", b"x", b"hash"]),
            expiration=st.floats(),
            gather=packed,
            client_mode=st.booleans(),
        ),
        max_size=6,
    )
)
def test_hostile_followers(requests: list[JoinRequest]) -> None:
    swarm = Swarm(2)
    peers: list[Peer] = [
        swarm.peer(f"peer:{n + 1}", [torch.full((3,), float(n))], group_size=2, group_wait=3.0, round_timeout=9.0)
        for n in range(2)
    ]
    codes: list[MessageCode] = []

    async def ask(request: JoinRequest) -> None:
        stranger = swarm.network.transport("stranger:1")
        try:
            async with aclosing(stranger.join_group("peer:1", request)) as answers:
                codes.extend([answer.code async for answer in answers])
        except AveragingError:
            return

    async def main() -> None:
        async with AsyncExitStack() as stack:
            for peer in peers:
                await stack.enter_async_context(peer)
            asking = asyncio.gather(*map(ask, requests))
            receipts = await asyncio.gather(*(peer.average() for peer in peers))
            assert {receipt.outcome for receipt in receipts} == {Outcome.AVERAGED}
            await asking
            assert peers[0].excluded == {}  # any peer could have used these names

    swarm.simulate(main())
    assert MessageCode.ACCEPTED not in codes  # none has the hash of the schema


SOUND = list(pack(seal(State(3, {"w": torch.arange(6.0), "n": torch.tensor(1)}, {"step": 1}))))


@settings(SOME, max_examples=examples(200))
@given(
    st.lists(st.tuples(states(SOUND), st.lists(pauses, min_size=9, max_size=9), st.sampled_from([None, *ERRORS])),
             max_size=5),
)  # fmt: skip
def test_hostile_donors(given: list[tuple[list[DownloadData], list[float], Exception | None]]) -> None:
    schema = describe(["w"], [torch.zeros(6)], part_size_bytes=1024)
    read: list[StateAssembler] = []

    script = Script([(list(zip(times, messages, strict=False)), error) for messages, times, error in given])

    class Donor(OneLane):
        def download_state(self, endpoint: str, resume: Resume | None = None) -> AsyncGenerator[DownloadData, None]:
            return script.play()

        async def get_schema(self, endpoint: str) -> Schema:
            return schema

    async def main() -> None:
        try:
            state, _ = await download(cast(Any, Donor()), ["x:1", "y:1"], schema, silence=1.0, on_progress=read.append)
        except StateError:
            return
        assert [tensor.shape for tensor in state.tensors.values()][:1] == [(6,)]

    virtual_time.run(main())
    assert len(read) < 200

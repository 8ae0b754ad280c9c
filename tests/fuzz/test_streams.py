"""Each side of each stream with arbitrary input from the other: honest peers end in time and answer correctly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeAlias, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from averaging.allreduce.round import Prepare
from averaging.errors import AveragingError, CallRefusedError, PeerUnreachableError, ProtocolViolationError, StateError
from averaging.protocol.group import Member, ReplyForm
from averaging.protocol.messages import AveragingData, DownloadData, MessageCode, Resume
from averaging.state.assembler import StateAssembler
from averaging.state.downloads import download
from averaging.state.manifest import State, pack, seal
from averaging.tensors.schema import Schema, describe
from averaging.testing import virtual_time
from tests.fuzz.material import averaging_data, states
from tests.support.fake_transport import OneLane
from tests.support.rounds import STALL_TIMEOUT, Simulation
from tests.support.selection import examples, rest_is_long

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

"""One member has to copy its tensors before it can send them; the others do not."""

import asyncio
from functools import partial

import pytest

from averaging.allreduce import RoundResult
from averaging.protocol.group import ReplyForm
from averaging.testing import virtual_time
from averaging.timing.deadlines import Deadlines
from tests.support.rounds import STALL_TIMEOUT, Simulation, assert_close, nodes

PREPARING = STALL_TIMEOUT / 2
SLOWEST = "peer:2"


def simulated(reply: ReplyForm = ReplyForm.AVERAGE, deadlines: dict[str, Deadlines] | None = None) -> Simulation:
    shapes = [(200,), (7, 3)]
    simulation = Simulation(1, nodes(4), shapes, part_size_bytes=64, reply=reply, deadlines=deadlines)
    simulation.preparing[SLOWEST] = partial(asyncio.sleep, PREPARING)
    return simulation


@pytest.mark.parametrize("reply", list(ReplyForm))
def test_parts_of_others_are_accepted_while_a_member_prepares(reply: ReplyForm) -> None:
    simulation = simulated(reply)
    received = 0

    async def look(_: object) -> None:
        nonlocal received
        await asyncio.sleep(PREPARING * 0.9)
        received = simulation.rounds[SLOWEST].result().bytes_received

    virtual_time.run(simulation.run(look))
    assert received > 0
    for name, result in simulation.results.items():
        assert result.dropped == ()
        assert_close(simulation.tensors[name], simulation.mean(), 1e-6)


def test_the_deadline_of_a_first_part_begins_with_the_round_even_while_preparing() -> None:
    """Two members prepare equally long at first; then one takes longer by more than the shortest deadline."""
    deadlines = {member.endpoint: Deadlines(STALL_TIMEOUT, 30.0) for member in nodes(4)}
    for seconds in (5.0, 5.0, 5.0, 5.0, 6.5):
        simulation = simulated(deadlines=deadlines)
        simulation.preparing["peer:1"] = partial(asyncio.sleep, 5.0)
        simulation.preparing[SLOWEST] = partial(asyncio.sleep, seconds)
        virtual_time.run(simulation.run())
        assert [result.dropped for result in simulation.results.values()] == [()] * 4


def test_the_round_goes_on_without_a_member_that_dies_while_it_prepares() -> None:
    simulation = simulated()
    survivors = ["peer:1", SLOWEST, "peer:3"]

    async def leave(tasks: dict[str, asyncio.Task[RoundResult]]) -> None:
        await asyncio.sleep(PREPARING / 2)
        await simulation.cancel(tasks["peer:4"])

    virtual_time.run(simulation.run(leave))
    for name in survivors:
        assert [lost.endpoint for lost in simulation.results[name].dropped] == ["peer:4"]
        simulation.assert_between_the_means(name, survivors)

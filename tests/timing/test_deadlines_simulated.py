"""Deadlines learned in a few normal rounds, in virtual time: silent members cost little, slow ones are kept."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Coroutine
from typing import Any

import pytest

from averaging.allreduce import RoundResult
from averaging.allreduce.round import Prepare
from averaging.errors import AveragingError, CallRefusedError, RoundError
from averaging.protocol.group import Member, Mode
from averaging.protocol.messages import AveragingData, MessageCode
from averaging.receipts.receipt import DropCode
from averaging.tensors.schema import Schema
from averaging.testing import virtual_time
from averaging.timing.deadlines import Deadlines
from tests.support.rounds import STALL_TIMEOUT, Simulation, nodes
from tests.support.selection import one_in, rest_is_long
from tests.support.simulated import in_virtual_time

LOWER, UPPER = 0.2, 20.0
USUAL = 4
VICTIM, UNINFORMED = "peer:4", "peer:3"
SILENT = ["before opening", "first part", "last part", "replies"]
ELEMENTS = 800


def members(client: bool) -> list[Member]:
    last = Member("client::1", mode=Mode.CLIENT) if client else Member("peer:3")
    return [Member("peer:1"), Member("peer:2"), last, Member(VICTIM)]


class Rounds:
    """Successive rounds of the same members with learned deadlines."""

    def __init__(self, seed: int, *, client: bool = False, latency: tuple[float, float] = (0.001, 0.02)) -> None:
        self._seed, self.members, self.latency = seed, members(client), latency
        self.deadlines = {member.endpoint: Deadlines(LOWER, UPPER) for member in self.members}
        self.seconds: list[float] = []

    async def one(
        self, prepare: Callable[[Simulation], object] = lambda _: None, may_fail: Collection[str] = ()
    ) -> dict[str, RoundResult]:
        """The results of the next round; `prepare` may return a coroutine function that disturbs it."""
        self._seed += 1
        simulation = Simulation(self._seed, self.members, [(ELEMENTS,)], latency=self.latency, deadlines=self.deadlines)
        began = asyncio.get_running_loop().time()
        await simulation.run(prepare(simulation))  # type: ignore[arg-type]
        self.seconds.append(asyncio.get_running_loop().time() - began)
        assert simulation.failures.keys() <= set(may_fail)
        return simulation.results

    async def usual(self) -> float:
        """Runs normal rounds to learn from; returns the longest duration."""
        for _ in range(USUAL):
            assert all(not result.dropped for result in (await self.one()).values())
        return max(self.seconds[-USUAL:])


class Silent:
    """Makes the victim silent in a round until the others are done."""

    def __init__(self, when: str) -> None:
        self._when = when
        self.others_were_done = 0.0

    def prepare(self, simulation: Simulation) -> object:
        network, transport, round_ = simulation.network, simulation.transports[VICTIM], simulation.rounds[VICTIM]
        call, reduce = transport.aggregate_part, round_.aggregate_part
        reducers = sum(member.reduces for member in simulation.group.members)
        last = ELEMENTS // reducers // 16  # about the number of parts per reducer

        async def sent(messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
            number = 0
            async for message in messages:
                number += 1
                yield message
                if number == (1 if self._when == "first part" else last):
                    network.freeze(VICTIM)

        async def replied(
            first: AveragingData, messages: AsyncIterator[AveragingData]
        ) -> AsyncGenerator[AveragingData, None]:
            async for reply in reduce(first, messages):
                network.freeze(VICTIM)
                yield reply

        if self._when == "before opening":
            network.freeze(VICTIM)
        elif self._when == "replies":
            round_.aggregate_part = replied  # type: ignore[method-assign]
        else:
            transport.aggregate_part = lambda endpoint, messages: call(  # type: ignore[method-assign]
                endpoint, sent(messages)
            )

        async def disturb(tasks: dict[str, asyncio.Task[RoundResult]]) -> None:
            await asyncio.wait([task for name, task in tasks.items() if name != VICTIM])
            self.others_were_done = asyncio.get_running_loop().time()
            tasks[VICTIM].cancel()
            network.thaw(VICTIM)

        return disturb


def dead_leader(simulation: Simulation) -> object:
    """The victim has led the group and died before it announced the group to one of its followers."""

    async def never_begins(prepare: Prepare, timeout: float) -> RoundResult:
        raise RoundError("it is not in the round")

    async def unknown(
        first: AveragingData, messages: AsyncIterator[AveragingData]
    ) -> AsyncGenerator[AveragingData, None]:
        yield AveragingData(code=MessageCode.BAD_GROUP_ID)

    async def die(_: dict[str, asyncio.Task[RoundResult]]) -> None:
        simulation.network.kill(VICTIM)

    for name in (UNINFORMED, VICTIM):
        simulation.rounds[name].run = never_begins  # type: ignore[method-assign]
    simulation.rounds[UNINFORMED].aggregate_part = unknown  # type: ignore[method-assign]
    return die


@pytest.mark.parametrize(("when", "client"), one_in(2, zip(SILENT, (False, True, True, False), strict=True)))
@in_virtual_time
async def test_a_silent_member_costs_about_one_more_round(when: str, client: bool) -> None:
    rounds = Rounds(1, client=client)
    usual = await rounds.usual()
    for number in range(3):
        stop = Silent(when)
        began = asyncio.get_running_loop().time()
        results = await rounds.one(stop.prepare, may_fail={VICTIM})
        # A missed deadline is doubled, so a member that is silent repeatedly costs more.
        assert stop.others_were_done - began <= 2 * usual + 2 * LOWER * 2**number
        dropped = [lost for name in results if name != VICTIM for lost in results[name].dropped]
        assert {lost.endpoint for lost in dropped} == {VICTIM}
        assert {lost.code for lost in dropped} == {DropCode.SILENT}
        assert number or all("median" in lost.reason for lost in dropped)
        assert when != "last part" or not any("can it reach" in lost.reason for lost in dropped)  # it did


@in_virtual_time
async def test_an_unreachable_reducer_is_not_waited_for_as_a_sender() -> None:
    """Nothing is known yet, so senders may take 20 s to open their streams unless something is wrong."""
    rounds = Rounds(8)
    results = await rounds.one(dead_leader, may_fail={UNINFORMED, VICTIM})
    assert rounds.seconds[0] < 4 * LOWER  # each receives from only one of three, so time counts half
    for name in ("peer:1", "peer:2"):
        assert {lost.endpoint: lost.code for lost in results[name].dropped} == {
            UNINFORMED: DropCode.REFUSED,
            VICTIM: DropCode.CONNECTION_LOST,
        }


@pytest.mark.parametrize("latency", [(0.2, 0.8), (0.001, 0.02)])
@pytest.mark.parametrize("seed", rest_is_long(range(5)))
@in_virtual_time
async def test_newcomers_as_slow_as_the_others_are_kept(seed: int, latency: tuple[float, float]) -> None:
    rounds = Rounds(seed, latency=latency)
    newcomer = rounds.members.pop()
    await rounds.usual()
    rounds.members.append(newcomer)
    await rounds.usual()


@in_virtual_time
async def test_a_much_slower_newcomer_takes_part_after_a_few_rounds() -> None:
    rounds = Rounds(7)
    newcomer = rounds.members.pop()
    await rounds.usual()
    rounds.members.append(newcomer)
    dropped = []
    for _ in range(9):
        results = await rounds.one(lambda simulation: simulation.slow_down(VICTIM, 5 * LOWER), may_fail={VICTIM})
        dropped.append(any(lost.endpoint == VICTIM for result in results.values() for lost in result.dropped))
    assert dropped[0]
    assert not any(dropped[6:])


def slowly(ask: Callable[[str], Awaitable[Schema]], seconds: float) -> Callable[[str], Coroutine[Any, Any, Schema]]:
    async def asked(endpoint: str) -> Schema:
        await asyncio.sleep(seconds)
        return await ask(endpoint)

    return asked


@in_virtual_time
async def test_a_reducer_that_is_dead_in_the_first_round_is_dropped_after_the_longest_deadline() -> None:
    rounds = Rounds(10)
    rounds.members[-1] = Member(VICTIM, mode=Mode.AUXILIARY)
    results = await rounds.one(Silent("before opening").prepare, may_fail={VICTIM})
    for name in ("peer:1", "peer:2", "peer:3"):
        (lost,) = results[name].dropped
        assert (lost.endpoint, lost.code) == (VICTIM, DropCode.SILENT)
        assert "no answer to a ping" in lost.reason
        assert lost.waited is not None
        assert UPPER <= lost.waited <= UPPER + 2 * LOWER


@pytest.mark.parametrize("seed", rest_is_long(range(5)))
@in_virtual_time
async def test_no_member_is_dropped_when_the_network_gets_three_times_slower(seed: int) -> None:
    rounds = Rounds(seed, latency=(0.2, 0.3))
    await rounds.usual()
    rounds.latency = (0.6, 0.9)
    await rounds.usual()


@pytest.mark.parametrize("bytes_per_second", [100.0, 1e6])
def test_the_transfer_time_on_slow_links_is_added_to_the_round_timeout(
    bytes_per_second: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.rounds.ROUND_SECONDS", 3.0)
    monkeypatch.setattr("averaging.allreduce.round.SLOW_LINK", bytes_per_second)
    simulation = Simulation(1, nodes(2), [(200,)], part_size_bytes=64)
    simulation.slow_down("peer:2", 0.9 * STALL_TIMEOUT)  # for each of its seven parts
    virtual_time.run(simulation.run())
    dropped = [lost for result in simulation.results.values() for lost in result.dropped]
    if bytes_per_second == 100.0:
        assert dropped == []
        assert simulation.seconds > 6 * 0.9 * STALL_TIMEOUT
    else:
        (late,) = {lost.reason for lost in dropped if lost.code is DropCode.ROUND_DEADLINE}
        assert "3.0 s = round_timeout + 0.0 s for its bytes at 10 Mbit/s" in late
        assert simulation.seconds == pytest.approx(3.0, abs=0.1)


@pytest.mark.parametrize("refusal", [None, CallRefusedError("peer:1", "no")])
@in_virtual_time
async def test_a_reducer_that_waits_for_a_newcomer_is_not_dropped(refusal: AveragingError | None) -> None:
    """One reducer has learned nothing about the victim and waits long. It answers pings, so the others wait too."""

    def prepare(simulation: Simulation) -> object:
        for transport in simulation.transports.values():
            transport.get_schema = answering(transport.get_schema)  # type: ignore[method-assign,assignment]
        return Silent("before opening").prepare(simulation)

    def answering(ask: Callable[[str], Awaitable[Schema]]) -> Callable[[str], Coroutine[Any, Any, Schema]]:
        async def answer(endpoint: str) -> Schema:
            if refusal is not None and endpoint != VICTIM:
                raise refusal
            return await ask(endpoint)

        return answer

    rounds = Rounds(5)
    await rounds.usual()
    rounds.deadlines["peer:1"] = Deadlines(LOWER, 3.0)
    results = await rounds.one(prepare, may_fail={VICTIM})
    for name in ("peer:1", "peer:2", "peer:3"):
        assert {lost.endpoint for lost in results[name].dropped} == {VICTIM}


@in_virtual_time
async def test_no_member_is_dropped_over_narrow_links() -> None:
    """A part takes nearly its whole deadline, and the answer to a ping, which queues behind it, nearly as long."""
    everybody = members(client=False)
    deadlines = {member.endpoint: Deadlines(LOWER, UPPER) for member in everybody}
    for number in range(USUAL):
        simulation = Simulation(number, everybody, [(64,)], deadlines=deadlines)
        for name, transport in simulation.transports.items():
            simulation.slow_down(name, 0.9 * UPPER)
            transport.get_schema = slowly(transport.get_schema, 0.6 * UPPER)  # type: ignore[method-assign,assignment]
        await simulation.run()
        assert not simulation.failures
        assert all(not result.dropped for result in simulation.results.values())


@in_virtual_time
async def test_small_rounds_in_between_drop_no_member_from_large_ones() -> None:
    """A large round may take many times as long for each part. Nothing is known about it at first."""
    everybody = members(client=False)
    deadlines = {member.endpoint: Deadlines(LOWER, UPPER) for member in everybody}
    for number in range(12):
        large = number > USUAL and number % 3 == 0
        simulation = Simulation(number, everybody, [(256 if large else 16,)], deadlines=deadlines)
        for name in simulation.transports:
            simulation.slow_down(name, 3 * LOWER if large else LOWER / 10)
        await simulation.run()
        assert all(not result.dropped for result in simulation.results.values())


@in_virtual_time
async def test_a_reducer_of_a_small_shard_may_send_its_first_part_much_later_over_a_slow_link() -> None:
    everybody = [*(Member(name, bandwidth=100.0) for name in ("a:1", "b:1")), Member("slow:1", bandwidth=70.0)]
    deadlines = {member.endpoint: Deadlines(LOWER, UPPER) for member in everybody}
    for number in range(USUAL):
        simulation = Simulation(number, everybody, [(32,), (1,)], deadlines=deadlines)
        simulation.slow_down("slow:1", 0.4 * UPPER)
        await simulation.run()
        assert [account.share for account in simulation.results["a:1"].accounts][2] == pytest.approx(1 / 33)
        assert not simulation.failures
        assert all(not result.dropped for result in simulation.results.values())


@in_virtual_time
async def test_a_live_reducer_that_never_replies_is_dropped_after_two_stall_timeouts() -> None:
    """However long it takes to answer a ping."""

    async def never(
        first: AveragingData, messages: AsyncIterator[AveragingData]
    ) -> AsyncGenerator[AveragingData, None]:
        await asyncio.Event().wait()
        yield AveragingData()

    def prepare(simulation: Simulation) -> None:
        simulation.rounds[VICTIM].aggregate_part = never  # type: ignore[method-assign]
        for transport in simulation.transports.values():
            transport.get_schema = slowly(transport.get_schema, 0.9)  # type: ignore[method-assign,assignment]

    rounds = Rounds(10)
    rounds.members[-1] = Member(VICTIM, mode=Mode.AUXILIARY)
    rounds.deadlines = {member.endpoint: Deadlines(LOWER, 3.0) for member in rounds.members}
    results = await rounds.one(prepare, may_fail={VICTIM})
    for name in ("peer:1", "peer:2", "peer:3"):
        (lost,) = results[name].dropped
        assert "deadline 6.0 s = 2 × stall_timeout" in lost.reason
        assert lost.waited == pytest.approx(6.0, abs=LOWER)


@in_virtual_time
async def test_an_isolated_member_waits_twice_as_long() -> None:
    """A member's own link is down briefly: the others may drop it, but it drops no other for silence."""
    rounds = Rounds(4)
    await rounds.usual()

    def prepare(simulation: Simulation) -> object:
        async def hiccup(tasks: dict[str, asyncio.Task[RoundResult]]) -> None:
            simulation.network.freeze(VICTIM)
            await asyncio.sleep(1.5 * LOWER)
            simulation.network.thaw(VICTIM)

        return hiccup

    results = await rounds.one(prepare)
    assert all(lost.code is not DropCode.SILENT for lost in results[VICTIM].dropped), results[VICTIM].dropped

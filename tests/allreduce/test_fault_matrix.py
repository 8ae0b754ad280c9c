"""Every fault, of a peer in every role, at every moment: the others continue, agree, and account for their average."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import AsyncExitStack

import pytest
import torch

from averaging import Receipt
from averaging.matchmaking.rules import CLOCK_TOLERANCE
from averaging.receipts.receipt import DropCode, Outcome
from averaging.timing.deadlines import MIN_WAITS
from tests.allreduce.faults import DISCOVERY_DOWN, LOWER, STOPPED, TIMEOUT, UPPER, World
from tests.support import leaks, simulated_processes as processes
from tests.support.selection import one_in

FAULTS = [
    "killed",
    "stopped, then going on",
    "stuck loop",
    "half-open",
    "reset",
    "corrupted bytes",
    "truncated stream",
    "clock off by 30 s",
    "discovery unreachable",
    "port gone and back",
]
ROLES = ["leader", "follower", "sender", "reducer", "donor", "client"]
MOMENTS = ["matchmaking", "first part", "last part", "reply", "between rounds"]
IN_ROUND = {"first part", "last part", "reply"}


def is_possible(fault: str, role: str, moment: str) -> bool:
    if moment in IN_ROUND:
        if role in ("leader", "follower"):  # they are senders and reducers then
            return False
        if (role == "sender" and moment == "reply") or (role == "reducer" and moment != "reply"):
            return False
    elif role in ("sender", "reducer"):
        return False
    if role == "donor" and moment in ("matchmaking", "reply"):
        return False
    if fault in ("corrupted bytes", "truncated stream"):
        if moment == "between rounds":
            return False
        if moment == "matchmaking":
            return (role, fault) == ("leader", "truncated stream")
        if (role, moment) == ("client", "reply"):  # it accepts no stream
            return False
    if fault in ("clock off by 30 s", "discovery unreachable") and (moment in IN_ROUND or role == "donor"):
        return False  # neither a clock is read nor discovery asked then
    return fault != "port gone and back" or role != "client"


CELLS = [cell for cell in itertools.product(FAULTS, ROLES, MOMENTS) if is_possible(*cell)]
MAY_BE_LATE = ("stuck loop", "leader", "matchmaking")
"""The leader accepts a follower and gets stuck: the follower waits for its own declared time, the others less."""

ROUNDS = [cell for cell in CELLS if cell[1] != "donor"]
DOWNLOADS = [cell for cell in CELLS if cell[1] == "donor"]

IDLE = 60.0
"""Seconds after which all records of a round have expired."""

LOOKING = 2 * (3.0 + CLOCK_TOLERANCE) + 3.0
"""A follower waits for its leader's declared time plus the tolerance, perhaps twice, then searches again."""


def check(world: World, receipts: dict[str, Receipt], usual: float, moment: str, *, may_be_late: bool = False) -> None:
    """One round with a fault; `may_be_late`: a follower may be too late for the round of the others."""
    finished = {name: receipt for name, receipt in receipts.items() if receipt.averaged}
    late = set(world.others) - finished.keys()
    assert len(late) <= (1 if may_be_late else 0), {name: str(receipt) for name, receipt in receipts.items()}
    assert all(receipts[name].outcome is Outcome.NO_GROUP for name in late)
    for name in set(world.others) - late:
        receipt = receipts[name]
        assert receipt.allreduce_seconds <= 2 * usual + 2 * LOWER, str(receipt)
        assert receipt.seconds - receipt.allreduce_seconds <= (1.0 if moment in IN_ROUND else LOOKING)
        assert {lost.endpoint for lost in receipt.dropped} <= {world.victim}
    for group_id in {receipt.group_id for receipt in finished.values()}:
        group = {name: receipt for name, receipt in finished.items() if receipt.group_id == group_id}
        check_group(world, group, [receipt for receipt in receipts.values() if receipt.group_id == group_id])


def check_group(world: World, group: dict[str, Receipt], receipts: Collection[Receipt]) -> None:
    """Members of one group that finished agree, and hold the average of the members that their receipts name."""
    members = next(iter(group.values())).members
    for place in range(len(members)):
        assert len({receipt.accounts[place].digest for receipt in group.values()} - {""}) <= 1
    whole = [world.tensors[name] for name, receipt in group.items() if not receipt.kept_local]
    assert all(torch.equal(whole[0], tensor) for tensor in whole)
    # Each reducer's receipt lists, in order, the members it dropped, and averaged without from then on.
    absent = {frozenset(lost.endpoint for lost in r.dropped[:n]) for r in receipts for n in range(len(r.dropped) + 1)}
    means = [world.mean(*(name for name in members if name not in lost)) for lost in absent if lost < set(members)]
    for name, receipt in group.items():
        if name == world.victim:
            continue  # it may have dropped the others one by one
        allowed = [*means, world.before[name]] if receipt.kept_local else means
        off = torch.stack([(world.tensors[name] - mean).abs() for mean in allowed]).amin(dim=0)
        assert off.max() < 1e-12


def check_victim(fault: str, moment: str, receipt: Receipt, usual: float) -> None:
    """Its attempt ended in time without help, with a reason, and it drops no other for its own stop."""
    assert receipt.averaged or receipt.reason, receipt
    assert all(lost.reason for lost in receipt.dropped)
    stopped = STOPPED if fault.startswith("stopped") else 0.0
    assert receipt.seconds - receipt.allreduce_seconds <= TIMEOUT + CLOCK_TOLERANCE + stopped + 0.1
    assert receipt.allreduce_seconds <= 2 * UPPER + stopped + 0.1
    if fault in ("stopped, then going on", "stuck loop"):
        assert DropCode.SILENT not in {lost.code for lost in receipt.dropped}, str(receipt)
    if fault == "half-open" and moment in IN_ROUND:
        # It suspects its own link, so its clock runs at half speed; and it pings silent reducers.
        assert {lost.code for lost in receipt.dropped} == {DropCode.SILENT}, str(receipt)
        assert receipt.allreduce_seconds <= 2 * usual + 4 * LOWER, str(receipt)


class Remains:
    """The resources that exist while nothing happens."""

    def __init__(self, tasks: Counter[str], sizes: Mapping[str, Counter[str]], passing: Counter[str]) -> None:
        self.tasks, self.sizes, self.passing = tasks, sizes, passing

    @classmethod
    async def of(cls, world: World) -> Remains:
        """Waits until the deferred work of a round is done."""
        gc.collect()  # a task of the loop must close garbage generators
        await asyncio.sleep(IDLE)
        first = {name: leaks.sizes(world.peers[name]) for name in world.alive}
        await asyncio.sleep(1.0)  # a record that was just renewed has arrived
        sizes = {name: found & leaks.sizes(world.peers[name]) for name, found in first.items()}
        return cls(leaks.tasks(), sizes, leaks.passing())

    def check(self, before: Remains) -> None:
        """No resource exists that did not exist before the fault."""
        assert self.passing <= before.passing, self.passing - before.passing
        assert self.tasks <= before.tasks, self.tasks - before.tasks
        for name, found in self.sizes.items():
            grown = {path: size for path, size in found.items() if size > before.sizes[name][path]}
            assert not grown, (name, grown)


@pytest.fixture(scope="module", autouse=True)
def only_what_is_new() -> Iterator[None]:
    """Exempts imported objects from garbage collection after each cell, and keeps pytest from logging errors."""
    gc.collect()
    gc.freeze()
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    gc.unfreeze()


@pytest.mark.parametrize(("fault", "role", "moment"), one_in(6, ROUNDS))
def test_a_round(fault: str, role: str, moment: str) -> None:
    async def main() -> None:
        world = World(FAULTS.index(fault) * 100 + MOMENTS.index(moment), role)
        async with AsyncExitStack() as stack:
            await world.enter(stack)
            usual = 0.0
            for _ in range(MIN_WAITS):
                receipts = await world.round()
                assert all(len(r.members) == 4 and not r.dropped for r in receipts.values()), receipts
                usual = max(usual, *(r.allreduce_seconds for r in receipts.values()))
            before = await Remains.of(world)
            world.arm(fault, moment)
            receipts = await world.round()
            assert not world.transport.moment, "the fault did not happen"
            check(world, receipts, usual, moment, may_be_late=(fault, role, moment) == MAY_BE_LATE)
            if not world.dead:
                check_victim(fault, moment, receipts[world.victim], usual)
            await asyncio.sleep(DISCOVERY_DOWN if fault.startswith("discovery") else 2 * STOPPED)
            receipts = await world.round()
            assert receipts.keys() == set(world.alive)
            for receipt in receipts.values():
                assert receipt.outcome is Outcome.AVERAGED, str(receipt)
                assert (set(receipt.members), receipt.dropped) == (set(world.alive), ()), str(receipt)
            check_group(world, receipts, receipts.values())
            del receipts
            (await Remains.of(world)).check(before)
            world.network.heal()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert world.network.errors == []

    processes.run(main())


@pytest.mark.parametrize(("fault", "role", "moment"), DOWNLOADS)
def test_a_download(fault: str, role: str, moment: str) -> None:
    async def main() -> None:
        world = World(FAULTS.index(fault), role)
        async with AsyncExitStack() as stack:
            await world.enter(stack)
            for version, name in enumerate(["peer:1", "peer:2", world.victim], start=1):
                await world.peers[name].commit(version)
            before = await Remains.of(world)
            began = asyncio.get_running_loop().time()
            downloader = world.peers["peer:3"]
            assert downloader.donors[0][1] == world.victim
            world.arm(fault, moment)
            state = await downloader.download_state()
            assert not world.transport.moment, "the fault did not happen"
            assert asyncio.get_running_loop().time() - began <= UPPER + 1.0
            donor = world.victim if state.version == 3 else "peer:2"
            # A reset before the call breaks nothing that the call needs.
            assert (donor == world.victim) == ((fault, moment) == ("reset", "between rounds"))
            assert torch.equal(world.tensors["peer:3"], world.tensors[donor])
            world.all_well()
            await asyncio.sleep(2 * STOPPED)
            if not world.dead:
                await downloader.download_state(donors=[world.victim])
            del state
            (await Remains.of(world)).check(before)
            world.network.heal()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert world.network.errors == []

    processes.run(main())

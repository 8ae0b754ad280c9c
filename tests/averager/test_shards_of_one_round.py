"""A site whose model is divided adopts a round only if all its shards met the same rounds of the same sites."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from averaging.common import EventLoopThread
from averaging.protocol import Group, Member
from averaging.receipts import Outcome, Receipt
from averaging.training.site import Site
from averaging.training.takeover import PendingRound, end_of, wrapped

T = TypeVar("T")

HOME, OTHER, THIRD = "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"


class Rank(Site):
    """One of two ranks, which are threads of this process."""

    size = shards = 2

    def __init__(self, rank: int, barrier: threading.Barrier, shared: list[Any]) -> None:
        self.rank = self.shard = rank
        self.leads = rank == 0
        self._barrier, self._shared = barrier, shared

    def all_gather(self, work: Callable[[], T]) -> list[T]:
        self._shared[self.rank] = work()
        self._barrier.wait()
        gathered = list(self._shared)
        self._barrier.wait()
        return gathered


@asynccontextmanager
async def nothing() -> Any:
    yield


Sent = dict[str, Any] | None


def receipts(*groups: Sent | list[Sent]) -> list[Receipt]:
    """What each rank gets, whose groups have these members with what they sent, one after another; None for none."""
    barrier, shared = threading.Barrier(2, timeout=10.0), [None, None]

    def train(rank: int) -> Receipt:
        pending = PendingRound(Rank(rank, barrier, shared), [], 7)
        thread = EventLoopThread(nothing(), f"rank {rank}")
        found = groups[rank]
        coming = list(found) if isinstance(found, list) else [found]

        async def average() -> Receipt:
            if (sent := coming.pop(0) if coming else None) is None:
                return Receipt(1, Outcome.NO_GROUP, reason="nobody came")
            members = tuple(Member(f"{name[:-1]}{1 + rank}", user=user) for name, user in sent.items())
            reason = await pending.confirm(Group(bytes(20), members))
            outcome = Outcome.FAILED if reason else Outcome.AVERAGED
            names = tuple(member.endpoint for member in members)
            return Receipt(1, outcome, reason, members=names, gathered={one.endpoint: one.user for one in members})

        pending.receipt = thread.start(pending.run(average))
        try:
            return end_of(pending, thread)
        finally:
            thread.close()

    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(train, range(2)))


def group(**numbers: int) -> dict[str, Any]:
    """What the members have sent with the numbers of their rounds."""
    names = {"home": HOME, "other": OTHER, "third": THIRD}
    return {names[name]: wrapped(names[name], number, {"samples": 8}) for name, number in numbers.items()}


def test_shards_that_met_the_same_rounds_adopt_them() -> None:
    both = receipts(group(home=7, other=3), group(home=7, other=3))
    assert [receipt.averaged for receipt in both] == [True, True]
    assert both[0].gathered == {HOME: {"samples": 8}, OTHER: {"samples": 8}}


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ([group(home=7, other=number) for number in (1, 2, 3)], group(home=7, other=4), f"different rounds of {OTHER}"),
        ([group(home=7, other=3), group(home=7, other=5)], group(home=7, other=4), "shard 1 of this site was not"),
        ([group(home=7, other=3)], group(home=7, other=4), "nobody came"),
        (group(home=7, other=3), group(home=7, third=3), "found groups of different sites"),
        (group(home=7, other=3), None, "shard 1 of this site was not averaged: nobody came"),
    ],
)
def test_no_shard_adopts_what_another_one_cannot(
    first: Sent | list[Sent], second: Sent | list[Sent], reason: str
) -> None:
    """A site whose round has failed may send more samples in its next one, which only one shard of this site meets."""
    for receipt in receipts(first, second):
        assert not receipt.averaged
        assert reason in receipt.reason


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_a_shard_that_met_an_older_round_meets_the_next_one(ranks: tuple[int, int]) -> None:
    """Or both sites would begin anew, and each meet the round before of the other with one of its shards, forever."""
    late: list[Sent] = [group(home=7, other=3), group(home=7, other=4)]
    found: dict[int, Sent | list[Sent]] = {ranks[0]: late, ranks[1]: group(home=7, other=4)}
    both = receipts(found[0], found[1])
    assert [receipt.averaged for receipt in both] == [True, True]
    assert all(receipt.averaged for receipt in receipts(late, [group(home=7, other=2), group(home=7, other=4)]))

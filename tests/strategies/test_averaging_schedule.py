"""When a round is due."""

import asyncio

import torch

from averaging import Mode
from averaging.strategies.fragments import cut
from averaging.strategies.schedule import AveragingSchedule
from tests.support.swarm import Swarm, entered


def steps(schedule: AveragingSchedule, count: int, seconds: float, now: float = 0.0) -> float:
    for _ in range(count):
        now += seconds
        schedule.count(now)
    return now


def test_a_peer_comes_early_if_the_others_would_be_gone() -> None:
    schedule = AveragingSchedule(10)
    now = steps(schedule, 4, 1.0)  # six more steps take six seconds
    assert schedule.is_due(now, now + 5.0)
    assert not schedule.is_due(now, now + 10.0)
    assert not schedule.is_due(now, None)
    assert not schedule.is_due(now, now - 1.0)  # they have expired


def test_steps_that_become_slower_count_as_slower() -> None:
    schedule = AveragingSchedule(10)
    now = steps(schedule, 2, 3.0, steps(schedule, 4, 1.0))
    assert schedule.is_due(now, now + 8.0)
    assert not schedule.is_due(now, now + 9.0)


def test_the_time_of_a_round_is_no_steps_time() -> None:
    schedule = AveragingSchedule(10)
    now = steps(schedule, 5, 1.0)
    schedule.restart()
    now = steps(schedule, 5, 1.0, now + 1000.0)
    assert not schedule.is_due(now, now + 10.0)


def test_an_auxiliary_which_looks_for_a_group_all_the_time_is_no_reason_to_come_early() -> None:
    swarm = Swarm(1)
    trains, other, auxiliary = (
        swarm.peer(name, {"w": torch.zeros(3)}, mode=mode, group_size=3, min_group_size=3, group_wait=60.0)
        for name, mode in (("peer:1", Mode.NODE), ("peer:2", Mode.NODE), ("peer:3", Mode.AUXILIARY))
    )

    async def main() -> None:
        async with entered((trains, other, auxiliary)):
            topic = trains.topic("", {"w": torch.zeros(3)})
            other.progress.announce(b"it trains")
            async with asyncio.TaskGroup() as searches:
                looking = [searches.create_task(auxiliary.average())]
                await asyncio.sleep(5.0)
                assert trains.declared_until(topic) is None
                looking.append(searches.create_task(other.average()))
                await asyncio.sleep(5.0)
                assert trains.declared_until(topic) is not None
                for search in looking:
                    search.cancel()

    swarm.simulate(main())


def test_fragments_are_about_equal_and_none_is_empty() -> None:
    assert cut({"a": 10, "b": 10, "c": 10, "d": 10}, 2) == [["a", "b"], ["c", "d"]]
    assert cut({"a": 1, "b": 1, "c": 1}, 3) == [["a"], ["b"], ["c"]]
    assert cut({"a": 100, "b": 1, "c": 1}, 3) == [["a"], ["b"], ["c"]]
    assert cut({"a": 1, "b": 1, "c": 100}, 2) == [["a", "b", "c"][:2], ["c"]]
    assert cut({"a": 5}, 1) == [["a"]]

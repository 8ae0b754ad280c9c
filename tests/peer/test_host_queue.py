"""Which caller gets the next place: no host waits behind one that has many places."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.peer.service import HostQueue
from averaging.testing import virtual_time


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def begin(places: HostQueue, host: str, order: list[str], name: str = "") -> asyncio.Task[None]:
    async def enter() -> None:
        await places.enter(host)
        order.append(name or host)

    return asyncio.create_task(enter())


@pytest.mark.asyncio
async def test_a_host_has_a_part_of_the_places_and_the_others_have_the_rest() -> None:
    places, order = HostQueue(4, 2), list[str]()
    tasks = [begin(places, host, order) for host in ["a"] * 5 + ["b", "c", "d"]]
    await settled()
    assert order == ["a", "a", "b", "c"]
    assert places.wanted
    assert (places.taken_by("a"), places.taken_by("d")) == (2, 0)
    places.leave("b")
    await settled()
    assert order[4:] == ["d"]  # not the third of "a", who came before
    places.leave("a")
    await settled()
    assert order[5:] == ["a"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not places.wanted


@pytest.mark.asyncio
async def test_hosts_with_as_many_places_are_served_in_turn_and_those_of_one_host_as_they_came() -> None:
    places, order = HostQueue(1, 1), list[str]()
    await places.enter("x")
    tasks = [begin(places, host, order, name) for host, name in [("b", "b1"), ("a", "a1"), ("b", "b2"), ("a", "a2")]]
    await settled()
    for host in ("x", "b", "a", "b"):
        places.leave(host)
        await settled()
    assert order == ["b1", "a1", "b2", "a2"]
    await asyncio.gather(*tasks)
    assert not places.wanted


@pytest.mark.asyncio
async def test_who_gives_up_waiting_loses_nobody_s_place() -> None:
    places, order = HostQueue(1, 1), list[str]()
    await places.enter("x")
    gone, stays = begin(places, "a", order), begin(places, "b", order)
    await settled()
    places.leave("x")  # "a" is granted a place ...
    gone.cancel()  # ... and is cancelled before it resumes
    await settled()
    assert gone.cancelled()
    assert order == ["b"]
    places.leave("b")
    await places.enter("c")
    assert not places.wanted
    await stays


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=40),
)
def test_no_place_is_free_while_somebody_may_take_it(
    in_all: int, per_host: int, visits: list[tuple[str, int, int, bool]]
) -> None:
    async def main() -> None:
        places, inside, waiting = HostQueue(in_all, per_host), list[str](), list[str]()

        async def visit(host: str, start: int, seconds: int, impatient: bool) -> None:
            await asyncio.sleep(start)
            waiting.append(host)
            try:
                async with asyncio.timeout(2.5 if impatient else None):
                    await places.enter(host)
            except TimeoutError:
                return
            finally:
                waiting.remove(host)
            inside.append(host)
            await asyncio.sleep(seconds)
            inside.remove(host)
            places.leave(host)

        async def watch() -> None:
            await asyncio.sleep(0.3)  # between the moments at which somebody moves
            for _ in range(500):
                await asyncio.sleep(1.0)
                assert len(inside) <= in_all
                assert all(inside.count(host) == places.taken_by(host) <= per_host for host in "abcd")
                if len(inside) < in_all:
                    assert all(inside.count(host) == per_host for host in waiting)

        async with asyncio.TaskGroup() as tasks:
            for one in visits:
                tasks.create_task(visit(*one))
            tasks.create_task(watch())
        assert not inside
        assert not places.wanted

    virtual_time.run(main())

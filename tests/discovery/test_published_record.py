"""A record that is kept up to date: when it is stored, and how often."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from itertools import pairwise

import pytest

from averaging.discovery.base import MAX_VALUE_BYTES, PublishedRecord
from averaging.testing import virtual_time
from averaging.testing.discovery import MemoryDiscovery, MemoryRegistry

LIFETIME, REFRESH, PAUSE = 60.0, 20.0, 1.0


async def kept(value: Callable[[], bytes | None], changes: list[float], seconds: float) -> list[tuple[float, bytes]]:
    """The values that another peer reads, and when, while a record is kept and changes at these times."""
    now = asyncio.get_running_loop().time
    registry, begun = MemoryRegistry(clock=now), now()
    seen: list[tuple[float, bytes]] = []
    async with MemoryDiscovery(registry) as own, MemoryDiscovery(registry) as other:
        published = PublishedRecord(own, "key", "me", value, lifetime=LIFETIME, refresh=REFRESH, pause=PAUSE, clock=now)
        await published.store()

        async def read() -> None:
            async with aclosing(other.watch("key")) as changed:
                async for entries in changed:
                    moment = now() - begun
                    seen.append((moment, entries["me"].value))

        async def change() -> None:
            for moment in changes:
                await asyncio.sleep(begun + moment - now())
                published.changed()

        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
                for task in (published.keep(), read(), change()):
                    tasks.create_task(task)
    return seen


def test_a_change_is_stored_at_once_and_changes_soon_after_it_together() -> None:
    words = iter(range(100))
    seen = virtual_time.run(kept(lambda: b"%d" % next(words), [0.2, 0.3, 0.4, 0.9, 1.9, 7.5], 10.0))
    assert [word for _, word in seen] == [b"0", b"1", b"2", b"3", b"4"]
    assert [moment for moment, _ in seen] == pytest.approx([0.0, 0.2, 1.2, 2.2, 7.5])


def test_an_unchanged_record_does_not_expire() -> None:
    seen = virtual_time.run(kept(lambda: b"same", [], 300.0))
    assert {word for _, word in seen} == {b"same"}  # an expired record would raise KeyError
    moments = [moment for moment, _ in seen]
    assert all(later - earlier <= REFRESH + PAUSE for earlier, later in pairwise(moments))
    assert moments[-1] > 300.0 - REFRESH - PAUSE


@pytest.mark.parametrize("failing", [None, bytes(MAX_VALUE_BYTES + 1)])
def test_a_missing_or_unacceptable_value_does_not_end_keep(
    failing: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    words = iter([b"0", failing, b"2"])
    seen = virtual_time.run(kept(lambda: next(words), [2.0, 4.0], 10.0))
    assert [word for _, word in seen] == [b"0", b"2"]
    assert [moment for moment, _ in seen] == pytest.approx([0.0, 4.0])
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (failing is not None)  # a missing value is not a failure
    assert all(
        words.startswith("could not store this peer's record under key in discovery: cannot store 'me'")
        for words in told
    )

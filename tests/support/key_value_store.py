"""What a key-value store must do, see `averaging.transport.KeyValueStore`: held against the model and a real etcd."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import pytest

from averaging.transport import CompactedError, KeyValueStore, LeaseEndedError, StoredChanges, StoredValue

Compact = Callable[[], Awaitable[None]]
Scenario = Callable[[KeyValueStore, Compact], Awaitable[None]]


async def values_are_written_under_revisions(store: KeyValueStore, compact: Compact) -> None:
    """A change is one step with one revision; a range is read in the order of its keys."""
    lease = await store.grant(60.0)
    first = await store.change({b"a/2": b"2", b"a/1": b"1", b"b/1": b"other"}, lease)
    assert (await store.list_values(b"a/", 9)).values == (StoredValue(b"a/1", b"1"), StoredValue(b"a/2", b"2"))
    second = await store.change({b"a/2": b"two"}, lease)
    assert second == first + 1
    third = await store.change({b"a/1": None, b"a/3": b"3"}, lease)
    found = await store.list_values(b"a/", 9)
    assert found.revision == third
    assert found.complete
    assert found.values == (StoredValue(b"a/2", b"two"), StoredValue(b"a/3", b"3"))
    limited = await store.list_values(b"a/", 1)
    assert [value.key for value in limited.values] == [b"a/2"]
    assert not limited.complete
    later = await store.list_values(b"a/", 9, b"a/2\0")
    assert [value.key for value in later.values] == [b"a/3"]
    assert await store.change({b"a/nothing": None}, lease) == third  # nothing has changed


async def a_lease_takes_its_values_with_it(store: KeyValueStore, compact: Compact) -> None:
    """Whether it is ended or not renewed; and without it nothing is written."""
    lease, other = await store.grant(60.0), await store.grant(60.0)
    await store.change({b"a/1": b"1", b"a/2": b"2"}, lease)
    await store.change({b"a/2": b"2"}, other)
    assert await store.keep_alive(lease)
    await store.revoke(lease)
    assert [value.key for value in (await store.list_values(b"a/", 9)).values] == [b"a/2"]
    assert not await store.keep_alive(lease)
    with pytest.raises(LeaseEndedError):
        await store.change({b"a/3": b"3"}, lease)
    short = await store.grant(1.0)
    await store.change({b"a/4": b"4"}, short)
    async with asyncio.timeout(20), aclosing(store.watch(b"a/4", await _revision(store))) as changes:
        async for change in changes:
            if change.changes == (b"a/4",):
                break
    assert not await store.keep_alive(short)


async def a_watch_tells_all_changes_in_order(store: KeyValueStore, compact: Compact) -> None:
    """Also those since an earlier revision, and none of other keys."""
    lease = await store.grant(60.0)
    first = await store.change({b"a/1": b"1"}, lease)
    await store.change({b"b/1": b"1"}, lease)
    seen: list[StoredValue | bytes] = []

    async def collect(count: int, after: int) -> int:
        async with asyncio.timeout(20), aclosing(store.watch(b"a/", after)) as changes:
            async for change in changes:
                seen.extend(change.changes)
                if len(seen) >= count:
                    return change.revision
        raise AssertionError("the watch has ended")

    watching = asyncio.create_task(collect(4, first - 1))
    await asyncio.sleep(0.05)
    second = await store.change({b"a/1": b"2"}, lease)
    third = await store.change({b"a/1": None}, lease)
    await store.change({b"ab": b""}, lease)
    fourth = await store.change({b"a/1": b"3"}, lease)
    assert await watching == fourth
    assert seen == [StoredValue(b"a/1", b"1"), StoredValue(b"a/1", b"2"), b"a/1", StoredValue(b"a/1", b"3")]
    seen.clear()
    await collect(2, second)  # it goes on where another one has ended
    assert seen == [b"a/1", StoredValue(b"a/1", b"3")]
    assert third == second + 1


async def a_watch_does_not_skip_what_is_forgotten(store: KeyValueStore, compact: Compact) -> None:
    """It raises, and its reader reads all again."""
    lease = await store.grant(60.0)
    first = await store.change({b"a/1": b"1"}, lease)
    await store.change({b"a/1": b"2"}, lease)
    last = await store.change({b"a/1": b"3"}, lease)
    await compact()
    with pytest.raises(CompactedError):
        await anext(_only_changes(store, first))
    changes = _only_changes(store, last)
    reading = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0.05)
    fourth = await store.change({b"a/1": b"4"}, lease)
    assert (await reading).revision == fourth
    await changes.aclose()


SCENARIOS = (
    values_are_written_under_revisions,
    a_lease_takes_its_values_with_it,
    a_watch_tells_all_changes_in_order,
    a_watch_does_not_skip_what_is_forgotten,
)


async def _revision(store: KeyValueStore) -> int:
    return (await store.list_values(b"a/", 1)).revision


async def _only_changes(store: KeyValueStore, after: int) -> AsyncGenerator[StoredChanges, None]:
    async with asyncio.timeout(20), aclosing(store.watch(b"a/", after)) as changes:
        async for change in changes:
            if change.changes:
                yield change

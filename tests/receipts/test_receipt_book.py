"""Those who watch the receipts of a peer."""

import asyncio
from contextlib import aclosing

import pytest

from averaging.errors import CallRefusedError
from averaging.receipts.receipt_log import HISTORY, MAX_WATCHERS, ReceiptBook
from tests.receipts.made import receipt

RECEIPTS = [receipt(number=number) for number in range(200)]


async def watched(book: ReceiptBook, last: int) -> list[tuple[int, int]]:
    """All that is watched until the book is closed: the round's number, and how many were skipped before it."""
    return [(one.receipt.round, one.skipped) async for one in book.watch(last)]


@pytest.mark.parametrize(("last", "first"), [(0, 5), (2, 3), (99, 0)])
async def test_the_last_ones_first_and_then_each(last: int, first: int) -> None:
    book = ReceiptBook()
    for one in RECEIPTS[:5]:
        book.keep(one)
    assert book.last is RECEIPTS[4]
    watching = asyncio.create_task(watched(book, last))
    await asyncio.sleep(0)
    for one in RECEIPTS[5:8]:
        book.keep(one)
        await asyncio.sleep(0)
    book.close()
    assert await watching == [(number, 0) for number in range(first, 8)]


def test_the_last_receipts_after_a_round() -> None:
    book = ReceiptBook()
    assert book.recent(3) == ()
    for each in RECEIPTS[:5]:
        book.keep(each)
    assert [each.round for each in book.recent(3)] == [2, 3, 4]
    assert [each.round for each in book.recent(99, after_round=3)] == [4]
    assert book.recent(99, after_round=4) == ()
    assert book.recent(0) == ()


async def test_a_peer_remembers_so_many() -> None:
    book = ReceiptBook()
    for one in RECEIPTS:
        book.keep(one)
    book.close()
    assert [number for number, _ in await watched(book, 10**9)] == list(range(200 - HISTORY, 200))


async def test_a_peer_that_is_slow_skips_the_oldest_and_is_informed_how_many() -> None:
    book = ReceiptBook()
    book.keep(RECEIPTS[0])
    async with aclosing(book.watch(1)) as watching:
        assert (await anext(watching)).receipt is RECEIPTS[0]
        for one in RECEIPTS[1 : HISTORY + 4]:  # three too many
            book.keep(one)
        found = [await anext(watching) for _ in range(HISTORY)]
        assert [one.skipped for one in found] == [3] + [0] * (HISTORY - 1)
        assert [one.receipt.round for one in found] == list(range(4, HISTORY + 4))


async def test_there_is_an_end_to_watchers_and_room_when_one_leaves() -> None:
    book = ReceiptBook()
    book.keep(RECEIPTS[0])
    watchers = [book.watch(1) for _ in range(MAX_WATCHERS)]
    for watcher in watchers:
        await anext(watcher)
    with pytest.raises(CallRefusedError, match=f"it has {MAX_WATCHERS} watchers already"):
        await anext(book.watch(1))
    await watchers[0].aclose()
    late = book.watch(1)
    await anext(late)
    for watcher in [*watchers, late]:
        await watcher.aclose()

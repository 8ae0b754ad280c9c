"""One `average` at a time, and none that outlasts its peer."""

from __future__ import annotations

import asyncio

import pytest

from averaging.errors import ClosedError
from averaging.peer.peer import SingleAverage
from averaging.testing import virtual_time


def test_closing_waits_until_what_it_ends_has_ended() -> None:
    async def average(one: SingleAverage, ended: asyncio.Event) -> None:
        async with one.until_closed("a:1"):
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(1.0)  # for example to inform other peers
                ended.set()

    async def main() -> None:
        one, ended = SingleAverage(), asyncio.Event()
        averaging = asyncio.create_task(average(one, ended))
        await asyncio.sleep(0)
        assert one.in_progress
        closing = asyncio.create_task(one.close())
        await asyncio.sleep(0.5)  # it is ending
        await one.close()
        assert ended.is_set()
        await closing
        assert not one.in_progress
        with pytest.raises(ClosedError, match="a:1 was closed"):
            await averaging

    virtual_time.run(main())


@pytest.mark.asyncio
async def test_another_timeout_is_not_taken_for_the_end_of_the_peer() -> None:
    one = SingleAverage()
    with pytest.raises(TimeoutError, match="of its own"):
        async with one.until_closed("a:1"):
            raise TimeoutError("of its own")
    assert not one.in_progress
    await one.close()

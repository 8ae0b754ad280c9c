"""A timeout that several observers end at the same moment."""

import asyncio

import pytest

from averaging.timing.deadlines import expire


async def test_the_body_ends_once_however_many_end_it() -> None:
    ended = []

    async def body() -> None:
        async with asyncio.timeout(None) as limit:
            for _ in range(2):
                asyncio.get_running_loop().call_soon(expire, limit)
            try:
                await asyncio.Event().wait()
            finally:
                expire(limit)  # it is ending
                await asyncio.sleep(0)
                ended.append(limit)

    with pytest.raises(TimeoutError):
        await body()
    (limit,) = ended
    assert limit.expired()
    expire(limit)  # it has ended

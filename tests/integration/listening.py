"""Plain TCP servers of tests, whose connections have all ended when the test goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(handle: Handle) -> AsyncIterator[str]:
    """The address at which `handle` serves connections; whoever is still served at the end is cut off."""
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            await handle(reader, writer)
        except asyncio.CancelledError:
            return  # asyncio's own callback takes a cancelled task for an error
        finally:
            await closed(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def closed(writer: asyncio.StreamWriter) -> None:
    """Closes a connection, and waits until the loop has nothing more to do for it."""
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()

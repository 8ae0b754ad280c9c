"""Plain TCP servers of tests, whose connections have all ended when the test goes on."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(handle: Handle) -> AsyncIterator[str]:
    """The address at which `handle` serves connections; whoever is still served at the end is cut off.

    `asyncio.start_server` would forget whom it is just accepting when it is closed.
    """
    loop = asyncio.get_running_loop()
    connections: set[asyncio.Task[None]] = set()
    served: set[asyncio.Task[None]] = set()

    def accept() -> None:
        connections.add(loop.create_task(serve(listener.accept()[0])))

    async def serve(connection: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        reader, writer = await _streams(connection)
        served.add(task)
        try:
            if listener.fileno() != -1:
                await handle(reader, writer)
        finally:
            served.discard(task)  # what comes now must not be cut off
            await closed(writer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        loop.add_reader(listener, accept)
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            loop.remove_reader(listener)
    for task in served:
        task.cancel()
    for ended in await asyncio.gather(*connections, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended


async def _streams(connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    connected: asyncio.Future[asyncio.StreamWriter] = loop.create_future()
    reader = asyncio.StreamReader()
    await loop.connect_accepted_socket(
        lambda: asyncio.StreamReaderProtocol(reader, lambda _, writer: connected.set_result(writer)), connection
    )
    return reader, await connected


async def closed(writer: asyncio.StreamWriter) -> None:
    """Closes a connection, and waits until the loop has nothing more to do for it."""
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()

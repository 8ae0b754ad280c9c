"""Model workers without a network, for virtual time: killed, frozen and restarted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from averaging.errors import PeerUnreachableError
from averaging.rl.workers import DataManager, ModelWorker
from averaging.rl.workers.payload import FETCH_DATA
from averaging.rpc import RpcMethod


class MemoryWorkers:
    """Calls the handlers of workers directly.

    Attributes:
        calls: Number of open streams.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._serving: dict[str, dict[str, Callable[[Any], AsyncGenerator[Any, None]]]] = {}
        self._broken: dict[str, asyncio.Event] = {}
        self._thawed: dict[str, asyncio.Event] = {}

    def serve(self, endpoint: str, worker: ModelWorker) -> None:
        self._serving[endpoint] = {handler.method.path: handler.answer for handler in worker.rpc_handlers()}
        self._broken[endpoint] = asyncio.Event()

    def serve_data(self, endpoint: str, manager: DataManager) -> None:
        self._serving[endpoint] = {FETCH_DATA.path: manager.serve}
        self._broken[endpoint] = asyncio.Event()

    def replace(self, endpoint: str, path: str, answer: Callable[[Any], AsyncGenerator[Any, None]]) -> None:
        """Its process answers a method in another way from now on."""
        self._serving[endpoint][path] = answer

    def connect(self, endpoint: str) -> MemoryChannel:
        return MemoryChannel(self, endpoint)

    def kill(self, endpoint: str) -> None:
        """Its process has died: streams break, and nothing listens there."""
        del self._serving[endpoint]
        self.break_streams(endpoint)

    def break_streams(self, endpoint: str) -> None:
        """The network loses the connections to it."""
        self._broken[endpoint].set()
        self._broken[endpoint] = asyncio.Event()

    def freeze(self, endpoint: str) -> None:
        """No message arrives from it until `thaw`."""
        self._thawed[endpoint] = asyncio.Event()

    def thaw(self, endpoint: str) -> None:
        self._thawed.pop(endpoint).set()

    async def stream(
        self, endpoint: str, method: RpcMethod[Any, Any], request: Any | AsyncIterator[Any]
    ) -> AsyncGenerator[Any, None]:
        if endpoint not in self._serving:
            raise PeerUnreachableError(endpoint, "connection refused", refused=True)
        broken = asyncio.ensure_future(self._broken[endpoint].wait())
        self.calls += 1
        try:
            async with aclosing(self._serving[endpoint][method.path](request)) as replies:
                while True:
                    following = asyncio.ensure_future(_next(replies))
                    try:
                        await asyncio.wait([following, broken], return_when=asyncio.FIRST_COMPLETED)
                        while endpoint in self._thawed and not broken.done():
                            thawed = asyncio.ensure_future(self._thawed[endpoint].wait())
                            await asyncio.wait([thawed, broken], return_when=asyncio.FIRST_COMPLETED)
                            thawed.cancel()
                        if broken.done():
                            raise PeerUnreachableError(endpoint, "connection reset")
                    finally:
                        following.cancel()
                        await asyncio.wait([following])
                    if (reply := following.result()) is None:
                        return
                    yield reply
        finally:
            self.calls -= 1
            broken.cancel()


class MemoryChannel:
    def __init__(self, network: MemoryWorkers, endpoint: str) -> None:
        self._network, self._endpoint = network, endpoint

    def stream(self, method: RpcMethod[Any, Any], request: Any | AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        return self._network.stream(self._endpoint, method, request)

    async def close(self) -> None:
        pass


async def _next(replies: AsyncGenerator[Any, None]) -> Any:
    return await anext(replies, None)

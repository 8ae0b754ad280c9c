"""Model workers without a network, for virtual time: killed, frozen and restarted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from averaging.errors import PeerUnreachableError
from averaging.rl.workers import DataManager, ModelWorker
from averaging.rl.workers.requests import FETCH_DATA
from averaging.rpc import RpcMethod


class MemoryWorkers:
    """Calls the handlers of workers directly.

    Attributes:
        calls: Number of open streams.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._serving: dict[str, dict[str, Callable[[Any], Any]]] = {}
        self._broken: dict[str, asyncio.Event] = {}
        self._thawed: dict[str, asyncio.Event] = {}

    def serve(self, endpoint: str, worker: ModelWorker) -> None:
        self._serving[endpoint] = {handler.method.path: handler.answer for handler in worker.rpc_handlers()}
        self._broken[endpoint] = asyncio.Event()

    def serve_data(self, endpoint: str, manager: DataManager) -> None:
        self._serving[endpoint] = {FETCH_DATA.path: manager.serve}
        self._broken[endpoint] = asyncio.Event()

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

    async def call(self, endpoint: str, method: RpcMethod[Any, Any], request: Any) -> Any:
        with self._calling(endpoint) as broken:
            return await self._until_broken(endpoint, broken, self._serving[endpoint][method.path](request))

    async def stream(self, endpoint: str, method: RpcMethod[Any, Any], request: Any) -> AsyncGenerator[Any, None]:
        with self._calling(endpoint) as broken:
            async with aclosing(self._serving[endpoint][method.path](request)) as replies:
                while (reply := await self._until_broken(endpoint, broken, _next(replies))) is not None:
                    yield reply

    @contextmanager
    def _calling(self, endpoint: str) -> Iterator[asyncio.Event]:
        if endpoint not in self._serving:
            raise PeerUnreachableError(endpoint, "connection refused", refused=True)
        self.calls += 1
        try:
            yield self._broken[endpoint]
        finally:
            self.calls -= 1

    async def _until_broken(self, endpoint: str, broken: asyncio.Event, answer: Coroutine[Any, Any, Any]) -> Any:
        answering, breaking = asyncio.ensure_future(answer), asyncio.ensure_future(broken.wait())
        try:
            await asyncio.wait([answering, breaking], return_when=asyncio.FIRST_COMPLETED)
            while endpoint in self._thawed and not breaking.done():
                thawed = asyncio.ensure_future(self._thawed[endpoint].wait())
                await asyncio.wait([thawed, breaking], return_when=asyncio.FIRST_COMPLETED)
                thawed.cancel()
            if breaking.done():
                raise PeerUnreachableError(endpoint, "connection reset")
        finally:
            answering.cancel()
            breaking.cancel()
            await asyncio.wait([answering])
        return answering.result()


class MemoryChannel:
    def __init__(self, network: MemoryWorkers, endpoint: str) -> None:
        self._network, self._endpoint = network, endpoint

    async def call(self, method: RpcMethod[Any, Any], request: Any, timeout: float) -> Any:
        return await self._network.call(self._endpoint, method, request)

    def stream(self, method: RpcMethod[Any, Any], request: Any) -> AsyncGenerator[Any, None]:
        return self._network.stream(self._endpoint, method, request)

    async def close(self) -> None:
        pass


async def _next(replies: AsyncGenerator[Any, None]) -> Any:
    return await anext(replies, None)

"""What gossip and discovery in etcd have in common: the records of one peer, its tasks, entering and leaving."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Self

from averaging.common import CLIENT_PREFIX, is_endpoint
from averaging.discovery import Entry
from averaging.discovery.gossip.record import Author, Ed25519Identity, Identity, Reason, RecordLimits
from averaging.discovery.gossip.record_table import Change, RecordStore
from averaging.errors import ClosedError, ConfigError
from averaging.protocol import Record


class RecordDiscovery(ABC):
    """Implements most of `discovery.base.Discovery` on a table of signed records.

    Entering it joins the run; leaving it withdraws this peer's records. It can be entered once.
    """

    def __init__(
        self,
        run_id: str,
        endpoint: str,
        identity: Identity | None,
        limits: RecordLimits,
        clock: Callable[[], float],
        holds: Callable[[], bool] = lambda: False,
    ) -> None:
        if not is_endpoint(endpoint):
            raise ConfigError(f"{endpoint!r} cannot be a peer's endpoint; give HOST:PORT or {CLIENT_PREFIX}<uuid4>")
        self._run_id, self._endpoint, self._clock = run_id, endpoint, clock
        self._is_client = endpoint.startswith(CLIENT_PREFIX)
        self._author = Author(run_id, identity or Ed25519Identity(), limits)
        self._records = RecordStore(self._author, limits, clock, self._on_change, holds)
        self._group = asyncio.TaskGroup()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._entered = self._leaving = False

    @abstractmethod
    def _publish(self, record: Record) -> None:
        """Has other peers get a record of this peer, or a withdrawal."""

    @abstractmethod
    def _on_change(self, change: Change, expired: bool) -> None:
        """A record that is read has changed; `expired` if an expiration caused it."""

    @abstractmethod
    async def _join(self) -> None:
        """Joins the run, and begins the background tasks."""

    @abstractmethod
    async def _leave(self) -> None:
        """Has other peers learn that this peer leaves. All tasks are cancelled afterwards."""

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> None:
        if not self._entered or self._leaving:
            raise ClosedError("this peer is not in the run: enter its discovery with `async with` first")
        self._publish(self._records.write(key, subkey, value, expiration))

    async def withdraw(self, key: str, subkey: str) -> None:
        withdrawal = self._records.withdraw(key, subkey)
        if withdrawal is not None:
            self._publish(withdrawal)

    def get(self, key: str) -> Mapping[str, Entry]:
        return self._records.table().read(key)

    def watch(self, key: str) -> AsyncGenerator[Mapping[str, Entry], None]:
        return self._records.watchers.watch(key)

    def knows(self, endpoint: str) -> bool:
        return self._records.table().has_subkey(endpoint)

    def endpoints(self) -> frozenset[str]:
        return self._records.table().subkeys()

    def list_records(self, key: str) -> tuple[Record, ...]:
        return self._records.table().list_records(key)

    @property
    def refused(self) -> Mapping[Reason, int]:
        return dict(self._records.refused)

    def __repr__(self) -> str:
        state = "left" if self._leaving else "entered" if self._entered else "new"
        name, records = type(self).__name__, len(self._records.table())
        return f"<{name} {self._endpoint} of {self._run_id}: {state}, {records} records>"

    async def __aenter__(self) -> Self:
        """Joins the run; a JoinError says that nobody answered in time, or that all refuse and would do so again."""
        if self._entered:
            raise ClosedError("a discovery can be entered only once; make another one")
        await self._group.__aenter__()
        self._entered = True
        try:
            await self._join()
        except BaseException as error:
            # Withdraws the record of its presence, which others may have already.
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leaving = True  # a record written from here on would not be withdrawn
        try:
            await self._leave()
        finally:
            self._records.watchers.close()
            for task in list(self._tasks):
                task.cancel()
            # The task group may have caused a cancellation of the body; other errors of the body are not its own.
            if isinstance(error, asyncio.CancelledError):
                await self._group.__aexit__(kind, error, traceback)
            else:
                await self._group.__aexit__(None, None, None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

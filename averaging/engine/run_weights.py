"""`RunWeights`: follows a run, and gives each version to an engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from averaging.common import Backoff
from averaging.engine.engine import Engine, NewWeights
from averaging.errors import AveragingError, PeerUnreachableError, StateError, TensorError
from averaging.tensors import in_thread
from averaging.weights import DividedSnapshot, FollowerOptions, ModelReceiver, Staleness, StalenessWatch, WeightSnapshot

logger = logging.getLogger("averaging.engine")

MIN_PAUSE, MAX_PAUSE = 0.5, 10.0
"""Seconds between two attempts after no publisher answered, or the run's model did not fit."""

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WeightsStatus:
    """What is known of the run.

    Attributes:
        newest: the newest announced version; None before the first.
        connected: whether a publisher is connected.
        staleness: how old the weights of the engine are.
    """

    newest: int | None
    connected: bool
    staleness: Staleness


class RunWeights:
    """Receives each version beside the engine, which takes it between two requests.

    A publisher that is away, also at the start, costs nothing but age: the engine goes on with what it has, and the
    publisher is tried again for as long as this runs.

    Args:
        options: the run to follow.
        engine: gets the versions.
        on_event: receives each event that `averaging serve --json` prints of versions.
    """

    def __init__(self, options: FollowerOptions, engine: Engine, on_event: Callable[[Event], None]) -> None:
        self._options, self._engine, self._on_event = options, engine, on_event
        self._receiver: ModelReceiver | None = None
        self._watch = StalenessWatch(None)
        self._newest: int | None = None  # also while no publisher is connected
        self._reasons = set[str]()  # each is said once, however long it lasts

    def state(self) -> WeightsStatus:
        """What is known of the run now."""
        receiver = self._receiver
        if receiver is not None and receiver.announced is not None:
            self._newest = receiver.announced.version
        connected = receiver is not None and receiver.connected
        staleness, _ = self._watch.look(time.monotonic(), self._engine.version, self._newest, connected=connected)
        return WeightsStatus(self._newest, connected, staleness)

    async def run(self) -> None:
        """Follows until it is cancelled.

        Raises:
            AveragingError: before the first version: the publishers refuse this follower, or publish another model.
        """
        backoff = Backoff(MIN_PAUSE, MAX_PAUSE)
        while True:
            try:
                await self._follow(backoff)
            except AveragingError as error:
                away = isinstance(error, StateError | PeerUnreachableError)
                if not away and self._engine.version is None:
                    raise
                self._say(error)
            finally:
                self.state()
                self._receiver = None
            await asyncio.sleep(backoff.next_delay())

    def _say(self, error: AveragingError) -> None:
        if str(error) not in self._reasons:
            self._reasons.add(str(error))
            self._on_event({"event": "unfollowed", "message": str(error), "version": self._engine.version})

    async def _follow(self, backoff: Backoff) -> None:
        taken = self._engine.version
        options = self._options if taken is None else replace(self._options, min_version=taken)
        async with ModelReceiver(options) as receiver:
            self._receiver = receiver
            while True:
                if await receiver.wait_newer(taken, None) and receiver.newest is not None:
                    began, received = time.monotonic(), receiver.newest
                    whole = await in_thread(received.whole)
                    taken = whole.manifest.version  # also if it cannot be used
                    try:
                        await self._load(received, whole, began)
                    except StateError as error:
                        self._say(error)  # the engine keeps what it has, and gets the next one
                    backoff.reset()
                elif receiver.failure is not None:
                    raise receiver.failure

    async def _load(self, received: WeightSnapshot | DividedSnapshot, whole: WeightSnapshot, began: float) -> None:
        loop, version = asyncio.get_running_loop(), whole.manifest.version
        loaded: asyncio.Future[int | StateError | TensorError] = loop.create_future()

        def settle(result: int | StateError | TensorError) -> None:
            if not loaded.done():
                loaded.set_result(result)

        # That of the publisher; in `whole` the tensors are in another order.
        digest = (received if isinstance(received, WeightSnapshot) else whole).manifest.digest

        def report(result: int | StateError | TensorError) -> None:
            loop.call_soon_threadsafe(settle, result)

        self._engine.take(NewWeights(whole.tensors(), version, digest, report))
        result = await loaded
        if not isinstance(result, int):
            raise result
        self._on_event(
            {
                "event": "version",
                "version": version,
                "digest": digest.hex(),
                "bytes": whole.manifest.layout.nbytes,
                "of_folder": result,
                "seconds": round(time.monotonic() - began, 3),
            }
        )

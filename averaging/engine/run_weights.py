"""`RunWeights`: follows a run, and gives each version to an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from averaging.common import Backoff, counted, size
from averaging.engine.engine import Engine
from averaging.errors import AveragingError, PeerUnreachableError, StateError, printable
from averaging.tensors import in_thread
from averaging.weights import DividedSnapshot, FollowerOptions, ModelReceiver, WeightSnapshot

MIN_PAUSE, MAX_PAUSE = 0.5, 10.0  # seconds between two attempts after no publisher answered, or nothing fitted


@dataclass(frozen=True, slots=True)
class VersionLoaded:
    """A version is in the model; `of_folder` tensors are not published by the run."""

    version: int
    digest: str
    bytes: int
    of_folder: int
    seconds: float

    def __str__(self) -> str:
        rest = f", and {counted(self.of_folder, 'tensor')} of the folder" if self.of_folder else ""
        return f"version {self.version}: {size(self.bytes)}{rest}, in {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class Unfollowed:
    """No version comes, or one cannot be used, for this reason; it, or the next, is tried."""

    version: int | None  # the one that is served on
    message: str

    def __str__(self) -> str:
        served = "nothing is served yet" if self.version is None else f"version {self.version} is served on"
        return printable(f"{self.message}; {served}, and the run is followed on")


class RunWeights:
    """Receives each version beside the engine, which loads it between two batches.

    A publisher that is away, also at the start, costs nothing but age: the engine goes on with what it has, and the
    publisher is tried again for as long as this runs.

    Attributes:
        loaded: the version that was loaded last; None before the first.
    """

    def __init__(
        self, options: FollowerOptions, engine: Engine, on_event: Callable[[VersionLoaded | Unfollowed], None]
    ) -> None:
        self._options, self._engine, self._on_event = options, engine, on_event
        self._receiver: ModelReceiver | None = None
        self._reasons = set[str]()  # each is said once, however long it lasts
        self.loaded: VersionLoaded | None = None

    @property
    def newest(self) -> int | None:
        """The newest version that the publisher has announced, as far as is known."""
        announced = None if self._receiver is None else self._receiver.announced
        return self._engine.model.version if announced is None else announced.version

    @property
    def connected(self) -> bool:
        return self._receiver is not None and self._receiver.connected

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
                is_away = isinstance(error, StateError | PeerUnreachableError)
                if not is_away and self._engine.model.version is None:
                    raise
                self._say(error)
            await asyncio.sleep(backoff.next_delay())

    async def _follow(self, backoff: Backoff) -> None:
        taken = self._engine.model.version
        options = self._options if taken is None else replace(self._options, min_version=taken)
        async with ModelReceiver(options) as receiver:
            self._receiver = receiver
            while receiver.failure is None:
                if await receiver.wait_newer(taken, None) and receiver.newest is not None:
                    taken = receiver.newest.manifest.version  # also if it cannot be used
                    await self._load(receiver.newest)
                    backoff.reset()
            raise receiver.failure

    async def _load(self, received: WeightSnapshot | DividedSnapshot) -> None:
        began, manifest = time.monotonic(), received.manifest
        tensors = await in_thread(received.tensors)
        try:
            of_folder = await self._engine.load(tensors, manifest.version)
        except StateError as error:
            self._say(error)  # the engine keeps what it has, and gets the next one
            return
        seconds, nbytes = round(time.monotonic() - began, 3), sum(tensor.nbytes for tensor in tensors.values())
        self.loaded = VersionLoaded(manifest.version, manifest.digest.hex(), nbytes, of_folder, seconds)
        self._on_event(self.loaded)

    def _say(self, error: AveragingError) -> None:
        if str(error) not in self._reasons:
            self._reasons.add(str(error))
            self._on_event(Unfollowed(self._engine.model.version, str(error)))

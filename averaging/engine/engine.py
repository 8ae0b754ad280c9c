"""`Engine`: generates batch after batch in a thread, and takes new weights of a run between two of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch

from averaging.common import Backoff, HostQuota, counted, size
from averaging.engine.messages import GenerationJob, TextPiece
from averaging.errors import AveragingError, EngineError, PeerUnreachableError, StateError, printable
from averaging.tensors import in_thread
from averaging.weights import DividedSnapshot, FollowerOptions, ModelReceiver, WeightSnapshot

logger = logging.getLogger("averaging.engine")


class TextModel(Protocol):
    """A model with its tokenizer, as an engine needs them. `LanguageModel` is one, and says more of each."""

    version: int | None
    context: int
    vocabulary: int

    def load(self, tensors: Mapping[str, torch.Tensor], version: int) -> int: ...
    def encode(self, text: str) -> tuple[int, ...]: ...
    def encode_chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]: ...
    def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str: ...
    def generate(self, batch: Sequence[GenerationJob]) -> None: ...


class Engine:
    """Generates what is asked for while it is entered with `async with`, up to `batch` sequences at once.

    A sequence may have `context` tokens with its prompt. Of `queue` jobs that wait, one network may have half. With
    `needs_version` nothing is generated before the weights have a version.
    """

    def __init__(self, model: TextModel, *, batch: int, context: int, queue: int, needs_version: bool = False) -> None:
        self.model, self.batch, self.context, self._needs_version = model, batch, context, needs_version
        self.waiting: list[GenerationJob] = []
        self.running: list[GenerationJob] = []
        self._quota = HostQuota(queue, max(1, queue // 2))
        # Weights are loaded in the same thread. So that is between two batches, and one version makes all of a request.
        self._thread = ThreadPoolExecutor(1, "averaging engine")
        self._changed = asyncio.Event()
        self._closing = False

    async def __aenter__(self) -> Self:
        torch.seed()  # torch's own seed is the same in all processes, and so would be their samples
        self._working = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends at the next token. What has not ended gets an error."""
        self._closing = True
        for job in self.running:
            job.cancelled = True
        self._changed.set()
        await self._working
        self._thread.shutdown(wait=False)

    @property
    def ready(self) -> bool:
        """Whether it generates: not before the first version if that is needed."""
        return not self._closing and (not self._needs_version or self.model.version is not None)

    def submit(self, job: GenerationJob) -> AsyncGenerator[TextPiece, None]:
        """Queues a job. Returns its pieces; if the generator is closed before the end, the job ends."""
        if self._closing:
            raise _ending()
        if not self.ready:
            text = "no version of the run has arrived yet; send it again later"
            raise EngineError(text, 503, code="no_version", retry_after=1.0)
        if not self._quota.take(job.network):
            text = "too many requests wait already, in all or of this address; send it again later"
            raise EngineError(text, 429, code="queue_full", retry_after=1.0)
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[TextPiece | EngineError]()
        job.take = lambda piece: loop.call_soon_threadsafe(pieces.put_nowait, piece)
        self.waiting.append(job)
        self._changed.set()
        return self._pieces(job, pieces)

    async def load(self, tensors: Mapping[str, torch.Tensor], version: int) -> int:
        """Loads weights as soon as the running batch has ended, see `LanguageModel.load`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.model.load, tensors, version)

    async def _pieces(
        self, job: GenerationJob, pieces: asyncio.Queue[TextPiece | EngineError]
    ) -> AsyncGenerator[TextPiece, None]:
        left = job.sequences
        try:
            while left:
                piece = await pieces.get()
                if isinstance(piece, EngineError):
                    raise piece
                left -= piece.finish_reason is not None
                yield piece
        finally:
            job.cancelled = True
            if job in self.waiting:
                self._take_out(job)

    def _take_out(self, job: GenerationJob) -> None:
        self.waiting.remove(job)
        self._quota.leave(job.network)

    async def _work(self) -> None:
        while not self._closing:
            self._changed.clear()
            batch = next_batch(self.waiting, {job.network for job in self.running}, self.batch, self.context)
            for job in batch:
                self._take_out(job)
            self.running = batch
            if batch:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._generate, batch)
            else:
                await self._changed.wait()
        for job in self.waiting:
            job.take(_ending())

    def _generate(self, batch: list[GenerationJob]) -> None:
        error = None
        for job in batch:
            job.version = self.model.version
        try:
            self.model.generate(batch)
        except EngineError as failure:
            logger.warning("%s", failure)
            error = failure
        except Exception as failure:  # the next batch may succeed
            logger.exception("a batch has failed")
            error = EngineError(f"internal error of this server: {type(failure).__name__}; see its log")
        for job in batch if error is not None or self._closing else ():
            job.take(error or _ending())


def _ending() -> EngineError:
    return EngineError("this server is ending; send it again to another one, or later", 503, retry_after=5.0)


def next_batch(
    waiting: Sequence[GenerationJob], last: Collection[str], sequences: int, context: int
) -> list[GenerationJob]:
    """Returns which of the waiting jobs are generated next; never none if there are some.

    The oldest is among them, or the oldest of a network that had no part in the `last` batch. Others go with it if they
    sample alike and all fit into `sequences` of `context` tokens, as long as the longest. A job with a seed goes alone,
    since only then its result can be repeated.
    """
    batch = [job for job in waiting if job.network not in last][:1] or list(waiting[:1])
    for job in waiting if batch and batch[0].asked.seed is None else ():
        together = [*batch, job]
        if (
            job not in batch
            and job.asked.seed is None
            and job.sampling == batch[0].sampling
            and sum(each.sequences for each in together) <= sequences
            and max(each.longest for each in together) + max(each.max_tokens for each in together) <= context
        ):
            batch = together
    return batch


MIN_PAUSE, MAX_PAUSE = 0.5, 10.0  # seconds between two attempts after no publisher answered, or nothing fitted


@dataclass(frozen=True, slots=True)
class VersionLoaded:
    version: int
    digest: str
    bytes: int
    of_folder: int  # tensors that the run does not publish
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

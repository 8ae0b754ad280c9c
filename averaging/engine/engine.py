"""`Engine`: a thread generates batch after batch, and takes new weights between two of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch

from averaging.engine.batching import Generated, in_turns, next_batch
from averaging.errors import EngineError, StateError, TensorError

logger = logging.getLogger("averaging.engine")


class TextModel(Protocol):
    """A model with its tokenizer, as an engine needs them. `LanguageModel` is one, and says more of each."""

    version: int | None

    @property
    def context(self) -> int:
        """Tokens that a sequence may have; 0 if that is unknown."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""

    def load(self, tensors: Mapping[str, torch.Tensor], version: int) -> int:
        """Takes new weights, and returns how many tensors are not among them."""

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Returns the token ids of a text."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
        """Returns the token ids of a conversation."""

    def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Returns the text of token ids."""

    def generate(self, batch: Sequence[Generated]) -> None:
        """Generates a batch."""


class ServedWeights(NamedTuple):
    """What the model has.

    Attributes:
        version: its version; None if it has none.
        digest: its digest; None if the weights are those of the folder.
    """

    version: int | None
    digest: bytes | None


@dataclass(frozen=True, slots=True)
class NewWeights:
    """Weights that are here and not in the model yet.

    Attributes:
        tensors: by name.
        version: their version.
        digest: their digest, see `WeightPublisher.digest`.
        loaded: callback in the engine's thread with the number of tensors that stay those of the folder, or with the
            error if they cannot be used.
    """

    tensors: Mapping[str, torch.Tensor]
    version: int
    digest: bytes
    loaded: Callable[[int | StateError | TensorError], object]


class Engine:
    """Generates what is asked for while it is entered with `with`.

    New weights are taken as soon as the running batch has ended, before the next one begins. So all of a request is
    made by one version.

    Args:
        model: the model. Only this engine generates with it from now on.
        batch: sequences that are generated at once.
        context: tokens that a sequence may have with its prompt.
        queue: requests that may wait, of which one network may have half.
        needs_version: whether nothing is generated before the weights have a version.

    Attributes:
        served: what the model has; both values change at once.
    """

    def __init__(self, model: TextModel, *, batch: int, context: int, queue: int, needs_version: bool = False) -> None:
        self.model = model
        self._batch, self._context, self._queue, self._needs_version = batch, context, queue, needs_version
        self.served = ServedWeights(model.version, None)
        self._changed = threading.Condition()
        self._waiting: list[Generated] = []
        self._running: list[Generated] = []
        self._batches = 0
        self._served: dict[str, int] = {}  # the last batch of each network that waits
        self._weights: NewWeights | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="averaging engine", daemon=True)

    def __enter__(self) -> Self:
        torch.seed()  # torch's own seed is the same in all processes, and so would be their samples
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends at the next token. What has not ended gets an error."""
        with self._changed:
            self._closing = True
            for each in self._running:
                each.cancelled = True
            self._changed.notify()
        self._thread.join()

    @property
    def version(self) -> int | None:
        """The version in the model; None if it has none."""
        return self.served.version

    @property
    def ready(self) -> bool:
        """Whether it generates: not before the first version if that is needed."""
        return not self._closing and (not self._needs_version or self.version is not None)

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that are being generated."""
        return len(self._running)

    def submit(self, generated: Generated) -> None:
        """Queues a request.

        Raises:
            EngineError: it cannot be generated now, or never.
        """
        with self._changed:
            self._check(generated)
            if len(self._waiting) >= self._queue:
                raise EngineError(
                    f"{self._queue} requests wait already; send it again later", 429, code="queue_full", retry_after=1.0
                )
            own, share = sum(each.network == generated.network for each in self._waiting), max(1, self._queue // 2)
            if own >= share:
                text = f"{share} requests of this address wait already; send it again later"
                raise EngineError(text, 429, code="queue_full", retry_after=1.0)
            self._waiting.append(generated)
            self._changed.notify()

    def withdraw(self, generated: Generated) -> None:
        """Ends a request that nobody waits for any more."""
        generated.cancelled = True
        with self._changed:
            if generated in self._waiting:
                self._waiting.remove(generated)

    def take(self, weights: NewWeights) -> None:
        """Replaces the weights that wait, or else those of the model when the running batch has ended."""
        with self._changed:
            self._weights = weights
            self._changed.notify()

    def _check(self, generated: Generated) -> None:
        if self._closing:
            raise EngineError("this server is ending; send it again to another one, or later", 503, retry_after=5.0)
        if not self.ready:
            raise EngineError(
                "no version of the run has arrived yet; send it again later", 503, code="no_version", retry_after=1.0
            )
        wanted = generated.request.version
        if wanted is not None and wanted != self.version:
            raise EngineError(
                f"version {wanted} is not served, but {self.version}; leave out @{wanted} for the newest one",
                404,
                "model",
                code="model_not_found",
            )

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._weights is not None or self._waiting)
                if self._closing:
                    self._refuse_waiting()
                    return
                weights, self._weights = self._weights, None
            if weights is not None:
                self._load(weights)
            self._generate(self._next())

    def _next(self) -> list[Generated]:
        """Takes the next batch from those that wait, and refuses requests for another version than the model's."""
        with self._changed:
            for each in list(self._waiting):
                try:
                    self._check(each)
                except EngineError as error:
                    self._waiting.remove(each)
                    each.take(error)
            order = in_turns([each.network for each in self._waiting], self._served)
            waiting = [self._waiting[index] for index in order]
            chosen = next_batch([each.request for each in waiting], self._batch, self._context)
            batch = [waiting[index] for index in chosen]
            self._waiting = [each for each in self._waiting if each not in batch]
            self._batches += 1
            self._served |= {each.network: self._batches for each in batch}
            self._served = {each.network: self._served.get(each.network, -1) for each in self._waiting}
            for each in batch:
                each.version = self.version
            self._running = batch
        return batch

    def _generate(self, batch: list[Generated]) -> None:
        try:
            if batch:
                self.model.generate(batch)
        except EngineError as error:
            if error.status >= 500:
                logger.warning("%s", error)
            self._fail(batch, error)
        except Exception as error:
            logger.exception("a batch has failed")
            self._fail(batch, EngineError(f"internal error of this server: {type(error).__name__}; see its log"))
        finally:
            if self._closing:
                self._fail(batch, EngineError("this server is ending", 503, retry_after=5.0))
            with self._changed:
                self._running = []

    def _fail(self, batch: list[Generated], error: EngineError) -> None:
        for each in batch:
            each.take(error)

    def _refuse_waiting(self) -> None:
        self._fail(self._waiting, EngineError("this server is ending", 503, retry_after=5.0))
        self._waiting = []

    def _load(self, weights: NewWeights) -> None:
        try:
            of_folder = self.model.load(weights.tensors, weights.version)
        except (StateError, TensorError) as error:
            weights.loaded(error)
            return
        self.served = ServedWeights(weights.version, weights.digest)
        weights.loaded(of_folder)

"""What a strategy works with: the inner optimizer, its parameters, and the peer that averages them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Unpack

import torch

from averaging.common.shared_tensors import digest_of_tensors
from averaging.common.validation import check_weight
from averaging.config import NonFinite
from averaging.errors import TensorError
from averaging.observe.receipts import Receipt
from averaging.observe.step_rate import StepRate
from averaging.peer.peer import FetchedState, Peer
from averaging.peer.round_options import RoundOptions, all_of
from averaging.peer.topics import Topic, TopicOptions
from averaging.protocol.group import Mode
from averaging.state.packing import State
from averaging.training.cached_queries import CachedQueries
from averaging.training.event_loop_thread import EventLoopThread, on_loop
from averaging.training.signal_safe_future import SignalSafeFuture
from averaging.training.tensor_math import clip

logger = logging.getLogger("averaging.training")

TakeOver = Callable[[State], None]


class Fetch:
    """A download of the run's state that goes on while this peer trains.

    Attributes:
        donors: endpoints that are asked.
        began: when, see `Training.monotonic`.
        delivering: whether one of them has begun to send a state that was accepted so far.
    """

    def __init__(self, donors: Sequence[str], began: float) -> None:
        self.donors, self.began = tuple(donors), began
        self.delivering = False
        self.coming: SignalSafeFuture[FetchedState] = SignalSafeFuture()
        self.task: asyncio.Task[Any] | None = None  # in the peer's thread
        self.begun = asyncio.Event()  # likewise: it delivers

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.coming.done()


class Training:
    """One averager as its strategy sees it, from the training thread.

    Args:
        optimizer: the inner one.
        parameters: by name, in the optimizer's order.
        buffers: floating-point buffers of the model that are averaged along, by name.
        peer: of those tensors; not entered yet.
        note: called with the receipt of every round.
        check: called in the peer's thread with what a state that is being downloaded holds besides its tensors; it
            raises StateError if that cannot be taken over.
        take_over: called in the peer's thread with a downloaded state, before the tensors are overwritten.

    Attributes:
        local_step: steps made, those of the downloaded or loaded state included.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: dict[str, torch.Tensor],
        buffers: dict[str, torch.Tensor],
        peer: Peer,
        *,
        note: Callable[[Receipt], None],
        check: Callable[[Mapping[str, Any]], None],
        take_over: TakeOver,
    ) -> None:
        self.optimizer = optimizer
        self.parameters, self.buffers = parameters, buffers
        self.local_step = 0
        self._peer = peer
        self._note, self._check, self._take_over = note, check, take_over
        self._weight = 1.0
        self._warned = ""
        self._alone = False
        self._averaged = {name: tensor.detach() for name, tensor in self.tensors.items()}  # in the same memory
        self._groups = self._trained()
        self._answers = CachedQueries()
        self._rate = StepRate()
        self._running: EventLoopThread | None = None
        self._whole = self.topic("", self.tensors, commits=True)

    def run_in(self, thread: EventLoopThread) -> None:
        """From now on the peer lives in `thread`."""
        self._running = thread

    @property
    def _thread(self) -> EventLoopThread:
        if self._running is None:
            raise RuntimeError("the peer has not been started yet")
        return self._running

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The peer's own tensors: parameters and averaged buffers."""
        return self.parameters | self.buffers

    @property
    def weight(self) -> float:
        """Weight of this peer in averages where the strategy sets none; finite and at least 0."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._weight = check_weight(weight)

    @property
    def allows_non_finite(self) -> bool:
        """Whether NaN and infinity may be averaged."""
        return self._peer.config.non_finite is NonFinite.ALLOW

    @property
    def is_alone(self) -> bool:
        """Whether no other peer of the run is known."""
        return len(self._thread.run(on_loop(lambda: self._peer.peers))) == 1

    @property
    def donates(self) -> bool:
        """Whether others can download this peer's state."""
        return self._peer.config.share_state and self._peer.config.mode is not Mode.CLIENT

    @property
    def verify_donors(self) -> int:
        """So many donors must have the same state before one is believed."""
        return self._peer.config.verify_donors

    @property
    def group_size(self) -> int:
        """Members of a group at most."""
        return self._peer.config.group_size

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds of a clock that is not set back."""
        return time.monotonic()

    def statistics(self) -> dict[str, torch.Tensor]:
        """The optimizer's statistics of the shape of their parameter, such as momentum, by name.

        The number of steps is none, although it has the shape of a 0-dim parameter.
        """
        return {
            f"{key}/{name}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.shape == parameter.shape
            and key != "step"
        }

    # Steps

    def check_places(self) -> None:
        """Whether what is averaged is still what is trained: nothing moved since the start, added or replaced.

        Raises:
            TensorError: it is not.
        """
        for name, tensor in self.tensors.items():
            # Both move together where torch shares the memory with other processes, which changes nothing here.
            if tensor.data_ptr() != self._averaged[name].data_ptr():
                raise TensorError(
                    f"{name!r} has been moved in memory, as `model.to()` and `.data = ...` do; move the model first, "
                    "then make the averager, and write later values in place, with `copy_`"
                )
        if self._trained() != self._groups:
            raise TensorError(
                "the inner optimizer has other parameters than when the averager was made, which is what is averaged; "
                "add them before, or close this averager and make a new one"
            )

    def _trained(self) -> list[list[int]]:
        """The inner optimizer's parameters; those of the start live as long as this."""
        return [[id(parameter) for parameter in group["params"]] for group in self.optimizer.param_groups]

    def evaluate(self, closure: Callable[[], float] | None) -> float | None:
        """Calls a closure, if there is one, with gradients on, as optimizers do."""
        if closure is None:
            return None
        with self._own_work(), torch.enable_grad():
            return closure()

    def inner_step(self, closure: Callable[[], float] | None = None, max_norm: float | None = None) -> float | None:
        """One step of the inner optimizer under the tensors' lock, which is free until the optimizer changes something.

        Some training loops put the whole forward and backward pass into the closure; rounds in progress and newcomers
        need not wait for that. An optimizer that has begun to change the parameters when it evaluates the closure, as
        LBFGS does when it does so again, must find in them what it wrote.

        Args:
            closure: reevaluates the model and returns the loss.
            max_norm: gradients are clipped to this norm before they are used; None leaves them.
        """
        with self._own_work(), ExitStack() as lock:
            lock.enter_context(self._peer.tensors())
            if closure is None:
                self._clip(max_norm)
                loss = self.optimizer.step()
            else:
                loss = self.optimizer.step(self._freeing(lock, closure, max_norm))
            self.local_step += 1
        self._rate.count(1)
        return loss

    def _freeing(self, lock: ExitStack, closure: Callable[[], float], max_norm: float | None) -> Callable[[], float]:
        """The closure, evaluated without the lock as long as the parameters are what they are now."""
        untouched = self._versions()

        def evaluated() -> float:
            if self._versions() != untouched:
                loss = closure()
            else:
                lock.close()
                try:
                    loss = closure()
                finally:
                    lock.enter_context(self._peer.tensors())
            self._clip(max_norm)
            return loss

        return evaluated

    def _clip(self, max_norm: float | None) -> None:
        if max_norm is not None:
            clip((p.grad for p in self.parameters.values() if p.grad is not None), max_norm)

    def _versions(self) -> list[int]:
        """How often each parameter has been written to."""
        return [parameter._version for parameter in self.parameters.values()]

    def count_local_step(self, samples: int | None = None) -> None:
        """A step that was not the inner optimizer's.

        Args:
            samples: behind it, where the strategy counts them; then the step rate is that of samples.
        """
        self.local_step += 1
        self._rate.count(1 if samples is None else samples)

    @property
    def step_rate(self) -> float | None:
        """Local steps, or samples, per second of this peer's own work, without the time of rounds.

        None as long as it is not known.
        """
        return self._rate.per_second

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Around each call that may wait for others: the time between two of them is this peer's own work."""
        self._rate.begin(self.monotonic())
        try:
            yield
        finally:
            self._rate.end(self.monotonic())

    @contextmanager
    def _own_work(self) -> Iterator[None]:
        """Around what counts for the step rate inside of `step`."""
        began = self.monotonic()
        try:
            yield
        finally:
            self._rate.worked(self.monotonic() - began)

    def locked(self) -> AbstractContextManager[list[torch.Tensor]]:
        """The tensors' lock, see `Peer.tensors`."""
        return self._peer.tensors()

    def replacing(self) -> AbstractContextManager[list[torch.Tensor]]:
        """The tensors' lock; what they hold at the end is the new state, see `Peer.replacing`.

        Raises:
            ClosedError: the averager was closed, perhaps by `on_round` or a signal's handler, or its thread has failed.
        """
        self._thread.check()
        return self._peer.replacing()

    # Rounds

    def topic(self, name: str, tensors: Mapping[str, torch.Tensor], **options: Unpack[TopicOptions]) -> Topic:
        """Something that can be averaged, see `Peer.topic`; what has the name of a buffer is never compressed.

        Running variances and constants of a model are not what codes with one scale for large and small are for.
        """
        made = self._peer.topic(name, tensors, **options)
        exact = tensors.keys() & self.buffers.keys()
        return made.sending_exactly(exact) if exact else made

    def average(self, topic: Topic | None = None, **options: Unpack[RoundOptions]) -> Receipt:
        """Averages a topic with a group, and waits for the end of the round.

        Args:
            topic: from `topic`; the peer's own tensors if None.
            options: see `RoundOptions`.

        Returns:
            The receipt, also when no group was found or the round failed. A peer that is alone gets it at once.

        Raises:
            ConfigError: a weight or a gather that cannot work.
            TensorError: there is NaN or infinity in what is to be averaged, or it has been moved.
            ClosedError: the averager was closed, or its thread has failed.
        """
        return self._noted(self._thread.run(self._round(topic, options)))

    def begin(self, topic: Topic | None = None, **options: Unpack[RoundOptions]) -> SignalSafeFuture[Receipt]:
        """Like `average`, without waiting: `receipt_of` what this returns is the receipt."""
        return self._thread.start(self._round(topic, options))

    def receipt_of(self, begun: SignalSafeFuture[Receipt]) -> Receipt:
        """The receipt of a round that was begun; waits for its end."""
        return self._noted(self._thread.wait(begun))

    def _round(self, topic: Topic | None, options: RoundOptions) -> Coroutine[Any, Any, Receipt]:
        self.check_places()
        self._synchronize()
        config, weight = self._peer.config, self.weight
        # One declaration, and one more for each of the group bits that may have to be dropped.
        patience = min(config.matchmaking_time * (1 + len(config.group_bits)), config.timeout)

        awaited = options.get("awaited", frozenset)

        async def average() -> Receipt:
            alone = len(self._peer.peers) == 1
            told = self._peer.progress.told
            chosen: RoundOptions = {
                "weight": weight,
                "enough": all_of(awaited, told),
                "awaited": awaited,
                "patience": 0.0 if alone else patience,
            }
            if awaited(told) and ("awaited" in options or "patience" not in options):
                chosen["overtaken"] = lambda told: not awaited(told)  # all that it could wait for have left
            chosen.update(options)
            return await self._peer.average(topic or self._whole, **chosen)

        return average()

    def digest(self) -> str:
        """A digest of the model's weights, 16 hexadecimal digits: equal at all peers that hold the same bytes."""
        with self._peer.tensors() as tensors:
            return digest_of_tensors(tensors)

    def _synchronize(self) -> None:
        """Makes sure that the peer's thread sees what the training thread has computed."""
        for device in {tensor.device for tensor in self.tensors.values()}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def _noted(self, receipt: Receipt) -> Receipt:
        """Warns of a failed round, but not again and again for the same reason."""
        reason = "" if receipt.averaged else receipt.reason
        if reason and reason != self._warned:
            logger.warning("%s; training goes on, and rounds that fail like this are not reported again", receipt)
        self._warned = reason
        self._note(receipt)
        return receipt

    def say_alone(self, alone: bool) -> None:
        """Tells in the log when this peer begins to step alone, and when that is over."""
        if alone and not self._alone:
            logger.warning("%r is alone and trains on; peers that come are averaged with", self._peer)
        self._alone = alone

    def warn(self, what: str, error: Exception) -> None:
        """Warns of a failure after which training goes on, once for each."""
        told = f"{what}: {error}"
        if told != self._warned:
            logger.warning("%s; training goes on", told)
        self._warned = told

    # The others

    def tell(self, progress: bytes, *, soon: bool = True) -> None:
        """Announces to the other peers how far this one is, see `RunProgress.tell`; does not wait for its thread."""
        self._thread.start(on_loop(lambda: self._peer.progress.tell(progress, soon=soon)))

    def told(self, *, wait: bool = True) -> dict[str, bytes]:
        """How far the other peers are, by endpoint.

        Args:
            wait: for the peer's thread; if not, what it has said when it was asked last may be returned.
        """
        return self._answers.recent(self._thread, "told", lambda: self._peer.progress.told, wait=wait)

    def told_until(self, condition: Callable[[dict[str, bytes]], bool], seconds: float) -> dict[str, bytes]:
        """Waits until what the others tell fulfils `condition`, at most so long; returns what they tell."""
        return self._thread.run(self._peer.progress.until(condition, seconds))

    @property
    def matchmaking_time(self) -> float:
        """Seconds that one declaration of this peer lasts."""
        return self._peer.config.matchmaking_time

    def awaited_until(self, topic: Topic, phase: str = "") -> float | None:
        """Until when others that train wait for a group in this topic, seconds since the epoch; None if nobody does.

        It does not wait for the peer's thread: what that has said when it was asked last is returned.
        """
        what = (topic.schema.topic, phase)
        return self._answers.recent(self._thread, what, lambda: self._peer.awaited_until(topic, phase), wait=False)

    def fetch(self, donors: Sequence[str], check: Callable[[Mapping[str, Any]], None]) -> Fetch:
        """Begins to download the state of the first of `donors` that delivers one; training can go on meanwhile.

        Args:
            donors: endpoints.
            check: called with what the state holds of the strategy, as soon as a donor begins to send; it raises
                StateError if that is not what is wanted, and then the next donor is asked.
        """
        fetch = Fetch(donors, self.monotonic())

        def begun(user: Mapping[str, Any]) -> None:
            self._check(user)
            check(user["strategy"])
            fetch.delivering = True
            fetch.begun.set()

        async def download() -> FetchedState:
            fetch.task = asyncio.current_task()
            offering = {name for _, name in self._peer.donors}
            return await self._peer.fetch_state([name for name in fetch.donors if name in offering], begun)

        fetch.coming = self._thread.start(download())
        return fetch

    def wait_for_fetches(self, fetches: Sequence[Fetch], seconds: float | None) -> None:
        """Waits until one of them has ended, or begins to deliver if none does; at most so many seconds."""

        async def wait() -> None:
            begun = [asyncio.create_task(fetch.begun.wait()) for fetch in fetches if not fetch.delivering]
            ends = [fetch.task for fetch in fetches if fetch.task is not None]
            try:
                await asyncio.wait([*ends, *begun], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in begun:
                    one.cancel()

        self._thread.run(wait())

    def give_up(self, fetch: Fetch) -> None:
        """Ends a download that nobody waits for any more."""
        self._thread.start(on_loop(lambda: fetch.task is not None and fetch.task.cancel()))

    def receive(self, fetch: Fetch) -> Mapping[str, Any]:
        """Waits for a download; returns what the state holds of the strategy.

        Raises:
            StateError: nobody delivered a sound state.
            ClosedError: the averager was closed, or its thread has failed.
        """
        user: Mapping[str, Any] = self._thread.wait(fetch.coming).state.user["strategy"]
        return user

    def take_over(self, fetch: Fetch) -> None:
        """Takes over all of a state that was received.

        Raises:
            StateError: it does not fit; nothing was changed.
            RoundError: the application held the tensors' lock for more than `timeout`; nothing was changed.
        """
        self._thread.run(self._peer.take_over(self._thread.wait(fetch.coming), self._take_over))
        self.forget()

    def forget(self) -> None:
        """What the others have announced is asked for anew."""
        self._answers.forget()

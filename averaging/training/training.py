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


class Fetch:
    """A download of the run's state while this peer trains.

    Attributes:
        donors: endpoints that are asked.
        began: when it began, see `Training.monotonic`.
        delivering: whether a donor has started to send a state that was accepted so far.
    """

    def __init__(self, donors: Sequence[str], began: float) -> None:
        self.donors, self.began = tuple(donors), began
        self.delivering = False
        self.result: SignalSafeFuture[FetchedState] = SignalSafeFuture()
        self.task: asyncio.Task[Any] | None = None  # used by the peer's thread only
        self.started = asyncio.Event()  # also used by the peer's thread only; set together with `delivering`

    def done(self) -> bool:
        """Whether it has ended, with or without a state."""
        return self.result.done()


class Training:
    """What a strategy works with: an averager's optimizer and peer, seen from the training thread.

    Args:
        optimizer: the inner optimizer.
        parameters: the parameters by name, in the optimizer's order.
        buffers: the averaged floating-point buffers of the model, by name.
        peer: the peer of these tensors, not entered yet.
        on_receipt: called with the receipt of every round.
        check: called in the peer's thread with what a state holds besides its tensors, while that is downloaded; raises
            StateError if the state cannot be taken over.
        take_over: called in the peer's thread with a downloaded state, before the tensors are overwritten.

    Attributes:
        local_step: number of local steps, including those of a downloaded or loaded state.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: dict[str, torch.Tensor],
        buffers: dict[str, torch.Tensor],
        peer: Peer,
        *,
        on_receipt: Callable[[Receipt], None],
        check: Callable[[Mapping[str, Any]], None],
        take_over: Callable[[State], None],
    ) -> None:
        self.optimizer = optimizer
        self.parameters, self.buffers = parameters, buffers
        self.local_step = 0
        self._peer = peer
        self._on_receipt, self._check, self._take_over = on_receipt, check, take_over
        self._weight = 1.0
        self._warned = ""
        self._alone = False
        self._averaged = {name: tensor.detach() for name, tensor in self.tensors.items()}  # sharing their memory
        self._initial_ids = self._parameter_ids()
        self._queries = CachedQueries()
        self._rate = StepRate()
        self._running: EventLoopThread | None = None
        self._model_topic = self.topic("", self.tensors, commits=True)

    def run_in(self, thread: EventLoopThread) -> None:
        """Sets the thread in which the peer runs."""
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
        """Weight of this peer in rounds for which the strategy sets none; finite and at least 0."""
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
        """Whether other peers can download this peer's state."""
        return self._peer.config.share_state and self._peer.config.mode is not Mode.CLIENT

    @property
    def verify_donors(self) -> int:
        """Number of donors that must have the same state before a download is accepted."""
        return self._peer.config.verify_donors

    @property
    def group_size(self) -> int:
        """Maximum number of members of a group."""
        return self._peer.config.group_size

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds of a monotonic clock."""
        return time.monotonic()

    def statistics(self) -> dict[str, torch.Tensor]:
        """The optimizer's statistics in the shape of their parameter, such as momentum, by name; without `step`."""
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

    def check_tensors(self) -> None:
        """Checks that the averaged tensors are still the trained ones.

        Raises:
            TensorError: a tensor was moved in memory, or the inner optimizer has other parameters now.
        """
        for name, tensor in self.tensors.items():
            # `share_memory_()` moves both, which is harmless.
            if tensor.data_ptr() != self._averaged[name].data_ptr():
                raise TensorError(
                    f"{name!r} has been moved in memory, as `model.to()` and `.data = ...` do; move the model first, "
                    "then make the averager, and write later values in place, with `copy_`"
                )
        if self._parameter_ids() != self._initial_ids:
            raise TensorError(
                "the inner optimizer has other parameters than when the averager was made; the averaged ones cannot "
                "change: add parameters before, or close this averager and make a new one"
            )

    def _parameter_ids(self) -> list[list[int]]:
        """Identities of the inner optimizer's parameters; `parameters` keeps the initial ones alive."""
        return [[id(parameter) for parameter in group["params"]] for group in self.optimizer.param_groups]

    def evaluate(self, closure: Callable[[], float] | None) -> float | None:
        """Calls a closure, if there is one, with gradients enabled."""
        if closure is None:
            return None
        with self._own_work(), torch.enable_grad():
            return closure()

    def inner_step(self, closure: Callable[[], float] | None = None, max_norm: float | None = None) -> float | None:
        """One step of the inner optimizer under the tensors' lock.

        The lock is free while a closure is evaluated, so that a forward and backward pass inside it does not delay
        rounds and newcomers. An optimizer that has changed parameters before it evaluates the closure, as LBFGS does,
        must find them unchanged: then the lock is held.

        Args:
            closure: reevaluates the model and returns the loss.
            max_norm: gradients are clipped to this norm before they are used; None does not clip.
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
        """Wraps a closure so that it is evaluated without the lock while no parameter has changed."""
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
        """Counts of writes to each parameter."""
        return [parameter._version for parameter in self.parameters.values()]

    def count_local_step(self, samples: int | None = None) -> None:
        """Counts a local step in which the inner optimizer did not step.

        Args:
            samples: behind the step; the step rate counts samples then.
        """
        self.local_step += 1
        self._rate.count(1 if samples is None else samples)

    @property
    def step_rate(self) -> float | None:
        """Local steps or samples per second of this peer's own work, without the time of rounds; None if unknown."""
        return self._rate.per_second

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Wraps a call that may wait for other peers; the time between two such calls is this peer's own work."""
        self._rate.begin(self.monotonic())
        try:
            yield
        finally:
            self._rate.end(self.monotonic())

    @contextmanager
    def _own_work(self) -> Iterator[None]:
        """Wraps what counts as this peer's own work inside of `measuring`."""
        began = self.monotonic()
        try:
            yield
        finally:
            self._rate.worked(self.monotonic() - began)

    def locked(self) -> AbstractContextManager[list[torch.Tensor]]:
        """The tensors' lock, see `Peer.tensors`."""
        return self._peer.tensors()

    def replacing(self) -> AbstractContextManager[list[torch.Tensor]]:
        """The tensors' lock; the values at the end are the new state, see `Peer.replacing`.

        Raises:
            ClosedError: the averager was closed, perhaps by `on_round` or a signal handler, or its thread has failed.
        """
        self._thread.check()
        return self._peer.replacing()

    # Rounds

    def topic(self, name: str, tensors: Mapping[str, torch.Tensor], **options: Unpack[TopicOptions]) -> Topic:
        """Creates a topic, see `Peer.topic`. Tensors with the name of a buffer are never compressed.

        A codec has one scale for large and small values, which running variances and constants do not survive.
        """
        made = self._peer.topic(name, tensors, **options)
        exact = tensors.keys() & self.buffers.keys()
        return made.sending_exactly(exact) if exact else made

    def average(self, topic: Topic | None = None, **options: Unpack[RoundOptions]) -> Receipt:
        """Averages a topic with a group and waits for the end of the round.

        Args:
            topic: from `topic`; the peer's own tensors if None.
            options: see `RoundOptions`.

        Returns:
            The receipt, also when no group was found or the round failed. A peer that is alone gets it at once.

        Raises:
            ConfigError: a weight or a `gather` is invalid.
            TensorError: a tensor to be averaged holds NaN or infinity, or has been moved.
            ClosedError: the averager was closed, or its thread has failed.
        """
        return self._report(self._thread.run(self._round(topic, options)))

    def begin(self, topic: Topic | None = None, **options: Unpack[RoundOptions]) -> SignalSafeFuture[Receipt]:
        """Begins what `average` does without waiting; `receipt_of` waits for the returned future."""
        return self._thread.start(self._round(topic, options))

    def receipt_of(self, started: SignalSafeFuture[Receipt]) -> Receipt:
        """Waits for a round from `begin` and returns its receipt."""
        return self._report(self._thread.wait(started))

    def _round(self, topic: Topic | None, options: RoundOptions) -> Coroutine[Any, Any, Receipt]:
        self.check_tensors()
        self._synchronize()
        config, weight = self._peer.config, self.weight
        # One declaration, and another one for each group bit that may have to be dropped.
        search_timeout = min(config.group_wait * (1 + len(config.group_bits)), config.round_timeout)
        expected_peers = options.get("expected_peers", frozenset)

        async def average() -> Receipt:
            alone = len(self._peer.peers) == 1
            announcements = self._peer.progress.announcements
            chosen: RoundOptions = {
                "weight": weight,
                "start_size": all_of(expected_peers, announcements),
                "expected_peers": expected_peers,
                "search_timeout": 0.0 if alone else search_timeout,
            }
            if expected_peers(announcements) and ("expected_peers" in options or "search_timeout" not in options):
                chosen["stop_search"] = lambda seen: not expected_peers(seen)  # all of them have left
            chosen.update(options)
            return await self._peer.average(topic or self._model_topic, **chosen)

        return average()

    def digest(self) -> str:
        """Digest of the model's weights, 16 hexadecimal digits; equal at all peers that hold the same bytes."""
        with self._peer.tensors() as tensors:
            return digest_of_tensors(tensors)

    def _synchronize(self) -> None:
        """Waits until the device has computed the tensors, since the peer's thread copies them."""
        for device in {tensor.device for tensor in self.tensors.values()}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def _report(self, receipt: Receipt) -> Receipt:
        """Passes a receipt on, and warns of a failed round once per reason."""
        reason = "" if receipt.averaged else receipt.reason
        if reason and reason != self._warned:
            logger.warning("%s; training goes on, and further rounds that fail like this are not logged", receipt)
        self._warned = reason
        self._on_receipt(receipt)
        return receipt

    def log_alone(self, alone: bool) -> None:
        """Warns when this peer begins to make global steps alone."""
        if alone and not self._alone:
            logger.warning("%r is alone and trains on; it averages again as soon as other peers come", self._peer)
        self._alone = alone

    def warn(self, what: str, error: Exception) -> None:
        """Warns once of a failure after which training goes on."""
        warning = f"{what}: {error}"
        if warning != self._warned:
            logger.warning("%s; training goes on", warning)
        self._warned = warning

    # Other peers

    def announce(self, progress: bytes, *, soon: bool = True) -> None:
        """Announces this peer's progress, see `RunProgress.announce`; does not wait for the peer's thread."""
        self._thread.start(on_loop(lambda: self._peer.progress.announce(progress, soon=soon)))

    def announcements(self, *, wait: bool = True) -> dict[str, bytes]:
        """The packed progress of the other peers, by endpoint.

        Args:
            wait: whether to wait for the peer's thread; if not, the result may be one step old.
        """
        return self._queries.recent(self._thread, "announcements", lambda: self._peer.progress.announcements, wait=wait)

    def wait_for_announcements(self, condition: Callable[[dict[str, bytes]], bool], seconds: float) -> dict[str, bytes]:
        """Waits until the announcements fulfil `condition`, or for `seconds`; returns them."""
        return self._thread.run(self._peer.progress.until(condition, seconds))

    @property
    def group_wait(self) -> float:
        """Seconds for which one declaration of this peer lasts."""
        return self._peer.config.group_wait

    def declared_until(self, topic: Topic, phase: str = "") -> float | None:
        """When the last declaration of other training peers for this topic expires; None if there is none.

        In seconds since the epoch. It does not wait for the peer's thread, so the result may be one step old.
        """
        key = (topic.schema.topic, phase)
        return self._queries.recent(self._thread, key, lambda: self._peer.declared_until(topic, phase), wait=False)

    def fetch(self, donors: Sequence[str], check: Callable[[Mapping[str, Any]], None]) -> Fetch:
        """Starts to download the state of the first of `donors` that delivers one; training can go on meanwhile.

        Args:
            donors: endpoints.
            check: called with the strategy's part of the state as soon as a donor starts to send; raises StateError if
                the state is not wanted, and then the next donor is asked.
        """
        fetch = Fetch(donors, self.monotonic())

        def started(user: Mapping[str, Any]) -> None:
            self._check(user)
            check(user["strategy"])
            fetch.delivering = True
            fetch.started.set()

        async def download() -> FetchedState:
            fetch.task = asyncio.current_task()
            offering = {name for _, name in self._peer.donors}
            return await self._peer.fetch_state([name for name in fetch.donors if name in offering], started)

        fetch.result = self._thread.start(download())
        return fetch

    def wait_for_fetches(self, fetches: Sequence[Fetch], seconds: float | None) -> None:
        """Waits until one of them ends, or starts to deliver if it did not yet; at most for `seconds`."""

        async def wait() -> None:
            started = [asyncio.create_task(fetch.started.wait()) for fetch in fetches if not fetch.delivering]
            ends = [fetch.task for fetch in fetches if fetch.task is not None]
            try:
                await asyncio.wait([*ends, *started], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in started:
                    one.cancel()

        self._thread.run(wait())

    def cancel_fetch(self, fetch: Fetch) -> None:
        """Cancels a download."""
        self._thread.start(on_loop(lambda: fetch.task is not None and fetch.task.cancel()))

    def receive(self, fetch: Fetch) -> Mapping[str, Any]:
        """Waits for a download and returns the strategy's part of the state.

        Raises:
            StateError: no donor delivered a valid state.
            ClosedError: the averager was closed, or its thread has failed.
        """
        user: Mapping[str, Any] = self._thread.wait(fetch.result).state.user["strategy"]
        return user

    def take_over(self, fetch: Fetch) -> None:
        """Takes over a downloaded state completely.

        Raises:
            StateError: it does not fit; nothing was changed.
            RoundError: the application held the tensors' lock for more than `round_timeout`; nothing was changed.
        """
        self._thread.run(self._peer.take_over(self._thread.wait(fetch.result), self._take_over))
        self.refresh()

    def refresh(self) -> None:
        """Forgets cached announcements and declarations."""
        self._queries.clear()

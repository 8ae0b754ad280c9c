"""What a strategy works with: the inner optimizer, its parameters, and the peer that averages them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Unpack

import torch

from averaging.common import EventLoopThread
from averaging.errors import TensorError
from averaging.peer import ExpectedAtFirst, Peer, RoundOptions, Topic, TopicOptions
from averaging.receipts import DriftCheck, Outcome, Receipt
from averaging.training.announcements import Announcements
from averaging.training.counts import Pace, RoundWeight
from averaging.training.fingerprints import DriftMonitor, fingerprint_of, tolerance_of
from averaging.training.history import HistoryStanding, still_training
from averaging.training.layout import as_divided, clip, local
from averaging.training.named_tensors import (
    Counters,
    ModelBuffers,
    ModelParts,
    TensorGuard,
    TrainedModel,
    without_counters,
)
from averaging.training.optimizer_state import GroupProgress
from averaging.training.parameter_copies import ITERATE, NamedMasters, ParameterCopies, WeightModes
from averaging.training.site import Site
from averaging.training.takeover import (
    BackgroundDownload,
    PendingRound,
    SharedState,
    StateTakeover,
    end_of,
    wrapped,
)

logger = logging.getLogger("averaging.training")

LOOK_SECONDS = 0.1
"""Seconds between two looks for peers that have come to a moment before this one."""


class StrategyContext:
    """What a strategy works with: an averager's optimizer and peer, seen from the training thread.

    A custom strategy uses its `optimizer`, `site` and `local_step`, the tensors by name (`trained` are those of the
    optimizer, `parameters` and `buffers` what this rank holds of them), and the methods `topic`, `inner_step`,
    `average`, `begin` and `receipt_of`. What other peers announce is in `announcements`, this peer's part in its run in
    `standing`. The clocks are `now`, since the epoch, and `monotonic`. `peer` runs in another thread.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: dict[str, torch.Tensor],
        buffers: ModelBuffers,
        peer: Peer,
        *,
        model: TrainedModel | None = None,
        site: Site,
        donates: bool,
        masters: NamedMasters | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.progress = GroupProgress(optimizer)
        self.modes = WeightModes(optimizer, peer.tensors)
        self.copies = ParameterCopies(optimizer, parameters, masters)
        self.trained = parameters
        self.parameters = {name: local(parameter) for name, parameter in parameters.items()}
        self.buffers, self.shared_buffers = buffers.averaged, buffers.shared
        self.parts = ModelParts(site, model, parameters, self.buffers | self.shared_buffers, peer.tensors)
        self.peer, self.site, self.donates = peer, site, donates
        self.local_step = 0  # including those of a downloaded or loaded state
        self.standing = HistoryStanding()
        self.weights = RoundWeight(site)
        self.drift = DriftMonitor(site, optimizer, self.progress)
        self.now, self.monotonic = time.time, time.monotonic
        self.pace = Pace(lambda: self.monotonic())
        self.guard = TensorGuard(optimizer, model, parameters, buffers)
        self._begun = 0  # rounds, the same at all ranks of the site

    def run_in(self, thread: EventLoopThread, state: SharedState, on_receipt: Callable[[Receipt], None]) -> None:
        """Sets the thread in which the peer runs, the state besides the averaged tensors, and who gets each receipt."""
        self.thread = thread
        self.reports = RoundReports(self.site, self.peer, Counters(self.shared_buffers), on_receipt)
        self.announcements = Announcements(self.site, self.peer, thread)
        self.states = StateTakeover(self.site, self.peer, thread, state, lambda: self.monotonic())

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The peer's own tensors: parameters and averaged buffers."""
        return self.parameters | self.buffers

    def statistics(self) -> dict[str, torch.Tensor]:
        """The optimizer's statistics in the shape of their parameter, such as momentum, by name; without `step`."""
        return {
            f"{key}/{name}": local(value)
            for name, parameter in self.trained.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.shape == parameter.shape
            and key != "step"
        }

    def iterates(self) -> dict[str, torch.Tensor]:
        """The third sequence of a schedule-free optimizer, by name, which is averaged like the weights; else empty."""
        if not self.modes.exist:
            return {}
        iterates = {name: tensor for name, tensor in self.statistics().items() if name.startswith(f"{ITERATE}/")}
        if not iterates and self.local_step and self.site.leads:
            self.modes.warn_once()
        return iterates

    @contextmanager
    def changing_parameters(self) -> Iterator[None]:
        """Wraps a write to the parameters that neither a round nor the inner optimizer makes.

        The inner optimizer's copies get the new values, and the third sequence of a schedule-free one moves with them.
        """
        iterates = {name.removeprefix(f"{ITERATE}/"): iterate for name, iterate in self.iterates().items()}
        before = {name: self.parameters[name].detach().clone() for name in iterates}
        with self.copies.following():
            yield
        with torch.no_grad():
            for name, iterate in iterates.items():
                iterate.add_(self.parameters[name] - before[name])

    def gradient(self, name: str) -> torch.Tensor | None:
        """What this rank holds of the gradient of a parameter."""
        gradient = self.trained[name].grad
        return None if gradient is None else local(gradient)

    def set_gradient(self, name: str, gradient: torch.Tensor | None) -> None:
        """Sets what this rank holds of the gradient of a parameter, in the dtype of its gradients."""
        parameter = self.trained[name]
        if gradient is not None:
            # Newer torch lets the dtype of gradients differ from that of the parameter.
            dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
            gradient = as_divided(gradient.to(parameter.dtype if dtype is None else dtype, copy=True), parameter)
        parameter.grad = gradient

    def clip(self, tensors: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Scales tensors in place so that their joint norm, over all shards, is at most `max_norm`. See `clip`."""

        def joint(norm: torch.Tensor) -> torch.Tensor:
            norms = dict(self.site.all_gather(lambda: (self.site.shard, float(norm))))
            return torch.tensor(math.sqrt(sum(norms[shard] ** 2 for shard in sorted(norms))))

        return clip(tensors, max_norm, joint if self.site.shards > 1 else None)

    # Steps

    def evaluate(self, closure: Callable[[], float] | None) -> float | None:
        """Calls a closure, if there is one, with gradients enabled."""
        if closure is None:
            return None
        with self.pace.working(), torch.enable_grad():
            return closure()

    def inner_step(self, closure: Callable[[], float] | None = None, max_norm: float | None = None) -> float | None:
        """One step of the inner optimizer under the tensors' lock. `max_norm` clips the gradients before they are used.

        The lock is free while a closure is evaluated, so that a forward and backward pass inside it does not delay
        rounds and newcomers. An optimizer that has changed parameters before it evaluates the closure, as LBFGS does,
        must find them unchanged: then the lock is held.
        """
        with self.pace.working():
            if closure is None:
                with self.peer.tensors():
                    self._clip(max_norm)
                    loss = self.optimizer_step()
                    self.local_step += 1
            else:
                with ExitStack() as lock:
                    lock.enter_context(self.peer.tensors())
                    loss = self.optimizer_step(self._freeing(lock, closure, max_norm))
                    self.local_step += 1
        self.pace.count()
        return loss

    def only_makes_state(self) -> bool:
        """Whether a step is to make the inner optimizer's state only, and belongs to no training.

        `torch.distributed.checkpoint.state_dict` makes one with learning rate and gradients of 0 if there is no state.
        """
        groups = self.optimizer.param_groups
        if self.optimizer.state or any(group.get("lr") is None or float(group["lr"]) for group in groups):
            return False
        # Another rank's shards may have gradients.
        gradients = [gradient for name in self.trained if (gradient := self.gradient(name)) is not None]
        return all(self.site.all_gather(lambda: not any(bool(gradient.any()) for gradient in gradients)))

    def optimizer_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Calls the inner optimizer's `step`. The caller holds the tensors' lock."""
        with self.progress.observed():
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def _freeing(self, lock: ExitStack, closure: Callable[[], float], max_norm: float | None) -> Callable[[], float]:
        """Wraps a closure so that it is evaluated without the lock while no parameter has changed."""
        untouched = [parameter._version for parameter in self.parameters.values()]

        def evaluated() -> float:
            if [parameter._version for parameter in self.parameters.values()] != untouched:
                loss = closure()
            else:
                lock.close()
                try:
                    loss = closure()
                finally:
                    lock.enter_context(self.peer.tensors())
            self._clip(max_norm)
            return loss

        return evaluated

    def _clip(self, max_norm: float | None) -> None:
        if max_norm is not None:
            gradients = (self.gradient(name) for name in self.trained)
            self.clip((gradient for gradient in gradients if gradient is not None), max_norm)

    def count_local_step(self, samples: int | None = None) -> None:
        """Counts a local step in which the inner optimizer did not step; with `samples` its rate counts these."""
        self.local_step += 1
        self.pace.count(samples)

    def locked(self) -> AbstractContextManager[list[torch.Tensor]]:
        """The tensors' lock, see `Peer.tensors`."""
        return self.peer.tensors()

    def replacing(self) -> AbstractContextManager[list[torch.Tensor]]:
        """The tensors' lock; the values at the end are the new state, see `Peer.replacing`.

        Raises:
            ClosedError: the averager was closed, perhaps by `on_round` or a signal handler, or its thread has failed.
        """
        self.thread.check()
        return self.peer.replacing() if self.site.owns else self.peer.tensors()

    # Rounds

    def topic(self, name: str, tensors: Mapping[str, torch.Tensor], **options: Unpack[TopicOptions]) -> Topic:
        """Creates a topic, see `Peer.topic`. By default it commits if parameters are among its tensors.

        Tensors with the name of a buffer are never compressed: a codec has one scale for large and small values, which
        running variances and constants do not survive.
        """
        if not isinstance(tensors, Mapping):
            raise TensorError(f"topic {name!r} needs a dict of its tensors by name, not a {type(tensors).__name__}")
        options.setdefault("commits", self._has_parameters(tensors.values()))
        made = self.peer.topic(name, tensors, **options)
        exact = tensors.keys() & self.buffers.keys()
        return made.sending_exactly(exact) if exact else made

    def run_now(self) -> float:
        """The clock of the run, since the epoch; at a rank that does not lead its site the rank's own clock."""
        return self.now() + (self.announcements.clock_correction() if self.site.leads else 0.0)

    def average(self, topic: Topic | None = None, *, after: float = 0.0, **options: Unpack[RoundOptions]) -> Receipt:
        """Averages a topic with a group and waits for the end of the round; without one, the peer's own tensors.

        Args:
            topic: a topic made by `topic`.
            after: seconds until the round begins, the same at all ranks of a site; it begins earlier if another peer
                looks for a group.
            options: see `RoundOptions`.

        Returns:
            The receipt, also when no group was found or the round failed. A peer that is alone gets it at once.

        Raises:
            ConfigError: a weight or a `gather` is invalid.
            TensorError: a tensor to be averaged holds NaN or infinity, or has been moved.
            ClosedError: the averager was closed, or its thread has failed.
        """
        topic = topic or self.topic("", self.tensors)
        with self.copies.following() if self._has_parameters(topic.tensors.tensors) else nullcontext():
            if self.site.size > 1:
                return self.receipt_of(self.begin(topic, after=after, **options))
            self.guard.check()
            self.weights.add_to(options, topic)
            made = self.weights.made
            receipt = self.thread.run(self._round(topic, options, after))
            if receipt.averaged:
                self.weights.averaged[topic.schema.topic] = made
        return self._report(receipt)

    def _has_parameters(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether parameters themselves, or parts of them, are among these, and not only gradients or copies."""
        spans = sorted((parameter.data_ptr(), parameter.nbytes) for parameter in self.parameters.values())
        starts = [start for start, _ in spans]

        def is_part(place: int) -> bool:
            before = bisect_right(starts, place) - 1
            return before >= 0 and place < sum(spans[before])

        return any(is_part(tensor.data_ptr()) for tensor in tensors)

    def begin(self, topic: Topic | None = None, *, after: float = 0.0, **options: Unpack[RoundOptions]) -> PendingRound:
        """Begins what `average` does without waiting; `receipt_of` waits for the result."""
        topic = topic or self.topic("", self.tensors)
        pending = PendingRound(self.site, topic.tensors.tensors, self._begun)
        self._begun += 1
        pending.samples = topic.schema.topic, self.weights.made
        self.weights.add_to(options, topic)
        self.guard.check()
        if self.site.owns:
            with pending.starting():
                pending.receipt = self.thread.start(pending.run(lambda: self._round(topic, options, after, pending)))
        return pending

    def end_search(self, pending: PendingRound) -> None:
        """Ends the search of a round from `begin`, unless a leader has accepted this peer already."""
        if self.site.owns and not pending.done():
            self.thread.run(self.peer.end_search())

    def is_over(self, pending: PendingRound) -> bool:
        """Whether `receipt_of` need not wait."""
        if self.site.shards > 1:
            return all(self.site.all_gather(lambda: pending.is_settled))
        return self.site.broadcast_from_leader(lambda: pending.is_settled)

    def receipt_of(self, pending: PendingRound, *, may_fail: bool = False) -> Receipt:
        """Waits for a round from `begin`; the receipt is the same at all ranks of the site.

        With `may_fail` no warning says that it has found no group.
        """
        receipt = end_of(pending, self.thread)
        if receipt.averaged:
            topic, made = pending.samples
            self.weights.averaged[topic] = made
        return self._report(receipt, may_fail=may_fail)

    def _round(
        self, topic: Topic, options: RoundOptions, after: float, pending: PendingRound | None = None
    ) -> Coroutine[Any, Any, Receipt]:
        """A round in the peer's thread, with the options that the strategy has left to the averager."""
        topic.tensors.note_computed()  # the peer's thread copies the tensors
        config, shard = self.peer.config, self.peer.shard
        expected_peers = options.get("expected_peers", frozenset)
        expected = ExpectedAtFirst(expected_peers if shard is None else shard.translated(expected_peers))
        # One declaration, and another one for each group bit that may have to be dropped.
        seconds = min(config.group_wait * (1 + len(config.group_bits)), config.round_timeout)
        chosen: RoundOptions = {
            "weight": self.weights.number,
            "start_size": expected.start_size,
            "search_timeout": lambda seen: seconds if _may_come(self.peer, expected, seen) else 0.0,
        }
        if "expected_peers" in options or "search_timeout" not in options:
            chosen["stop_search"] = expected.have_left
        chosen.update(options)
        chosen["expected_peers"] = expected.peers
        chosen["gather"] = self.reports.counters.added_to(options.get("gather"))  # in the training thread, which counts
        chosen["drift"] = self.drift.comparison(options.get("drift"), self.local_step)
        if shard is not None and pending is not None:
            chosen["confirm"] = pending.confirm
            chosen["gather"] = wrapped(shard.site, pending.number, chosen["gather"])
        return _average_at(self.peer, after, topic, chosen) if after > 0 else self.peer.average(topic, **chosen)

    def fingerprint(
        self, tensors: Mapping[str, torch.Tensor], moment: str, number: int, *, step: int | None = None
    ) -> DriftCheck:
        """Fingerprint of tensors that all members of a group should hold alike, to be compared in its round.

        Args:
            tensors: tensors by name, in the same order at all peers.
            moment: which moment they are of, at most 64 characters; only fingerprints of the same one are compared.
            number: which part of large tensors is digested, the same at all peers.
            step: step of the run for which the hyperparameters count; the local step if None.
        """
        values = list(tensors.values())
        return DriftCheck(fingerprint_of(values, moment, number), list(tensors), tolerance_of(values), step)

    def _report(self, receipt: Receipt, *, may_fail: bool = False) -> Receipt:
        self.standing = self.standing.after_round(receipt.members, averaged=receipt.averaged)
        self.parts.warn_of_others(self.announcements)
        self.drift.log(receipt)
        return self.reports.pass_on(receipt, may_fail=may_fail)

    def take_over(self, fetch: BackgroundDownload) -> None:
        """Takes over a downloaded state completely, at all ranks of the site, or changes nothing and raises."""
        with self.copies.following():
            self.states.take_over(fetch)
        self.modes.settle()
        self.announcements.refresh()


async def _average_at(peer: Peer, after: float, topic: Topic, options: RoundOptions) -> Receipt:
    """Averages after so many seconds, or as soon as another peer looks for a group."""
    loop = asyncio.get_running_loop()
    end, phase = loop.time() + after, options.get("phase", "")
    while peer.declared_until(topic, phase) is None:
        if (left := end - loop.time()) <= 0:
            break
        await asyncio.sleep(min(left, LOOK_SECONDS))
    return await peer.average(topic, **options)


def _may_come(peer: Peer, expected: ExpectedAtFirst, announcements: Mapping[str, bytes]) -> bool:
    may_come = peer.peers - {peer.endpoint}
    # Those whose training has ended, or that refuse connections, make no group any more.
    if not expected.peers(announcements) and not still_training(announcements):
        may_come -= peer.progress.announcers
    return bool(may_come)


class RoundReports:
    """Passes receipts on, takes the largest counters, and warns of a failed round once per reason."""

    def __init__(self, site: Site, peer: Peer, counters: Counters, on_receipt: Callable[[Receipt], None]) -> None:
        self.counters = counters
        self._site, self._peer, self._on_receipt = site, peer, on_receipt
        self._warned = ""

    def pass_on(self, receipt: Receipt, *, may_fail: bool) -> Receipt:
        if self.counters and receipt.averaged:
            dropped = {member.endpoint for member in receipt.dropped}
            with self._peer.tensors():
                self.counters.take_largest(sent for name, sent in receipt.gathered.items() if name not in dropped)
        if self.counters:
            gathered = {name: without_counters(sent) for name, sent in receipt.gathered.items()}
            receipt = replace(receipt, gathered=gathered)
        reason = "" if receipt.averaged else receipt.reason
        if may_fail and receipt.outcome is Outcome.NO_GROUP:
            reason = self._warned
        if reason and reason != self._warned and self._site.leads:
            logger.warning("%s; training goes on, and further rounds that fail like this are not logged", receipt)
        self._warned = reason
        self._on_receipt(receipt)
        return receipt

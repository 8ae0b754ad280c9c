"""What a strategy works with: the inner optimizer, its parameters, and the peer that averages them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, TypeVar, Unpack

import torch

from averaging.common import EventLoopThread, check_weight, listed, on_loop
from averaging.config import NonFinite
from averaging.errors import ClosedError, TensorError
from averaging.peer import ExpectedAtFirst, FetchedState, Peer, RoundOptions, Topic, TopicOptions
from averaging.protocol import Fingerprint, shorten
from averaging.receipts import Drift, DriftCheck, DriftKind, HyperparameterLog, Receipt, StepRate
from averaging.state import ExtraState, State
from averaging.tensors import digest_of_tensors
from averaging.training.counters import Counters, without_counters
from averaging.training.fetch import BackgroundDownload, CachedQueries
from averaging.training.fingerprints import (
    HyperparameterReader,
    fingerprint_of,
    tolerance_of,
)
from averaging.training.group_progress import GroupProgress
from averaging.training.history import read_progress, still_training
from averaging.training.layout import as_divided, clip, local
from averaging.training.named_tensors import BUFFER, ModelBuffers
from averaging.training.optimizer_wrapper import ITERATE, WeightModes
from averaging.training.parameter_copies import ParameterCopies
from averaging.training.pending_round import PendingRound, end_of, wrapped
from averaging.training.site import Site
from averaging.training.site_state import SiteState
from averaging.training.standing import HistoryStanding
from averaging.training.trained_model import TrainedModel, digest_of

logger = logging.getLogger("averaging.training")


T = TypeVar("T")

DRIFT_ADVICE = (
    "give all peers the same hyperparameters and scheduler, and write no parameters at one peer alone; "
    "on_drift='adopt' takes over what most peers have"
)

MAX_DRIFT = 1024
"""Differences that are remembered, so that each is logged once."""

FROZEN = "frozen parameters"
"""Name of the part of a model that the optimizer does not train."""

ASK_AGAIN_SECONDS = 60.0
"""Seconds after which the ranks of a site meet while they wait for the announcements of other peers."""


class Training:
    """What a strategy works with: an averager's optimizer and peer, seen from the training thread.

    Args:
        optimizer: the inner optimizer.
        parameters: the parameters by name, in the optimizer's order.
        buffers: the buffers of the model that the peers have in common.
        model: the model of these tensors; None if the user did not give it.
        peer: the peer of these tensors, not entered yet; at a rank that owns none it is never entered.
        site: the processes that train this copy of the model.
        donates: whether other peers can download this peer's state.
        on_receipt: called with the receipt of every round.
        check: called in the peer's thread with what a state holds besides its tensors, while that is downloaded; raises
            StateError if the state cannot be taken over.
        take_over: called in the peer's thread with a downloaded state, before the tensors are overwritten.

    Attributes:
        local_step: number of local steps, including those of a downloaded or loaded state.
        progress: what the inner optimizer changes in its parameter groups.
        copies: the inner optimizer's copies of the parameters.
        modes: whether the model holds the weights to train or to evaluate.
        since: 0 if this peer began with its own parameters; else 1 + its local step when it last took over a state.
        hyperparameters: reads those that the peers should have in common; a strategy adds its own optimizers.
        parameters: what this rank holds of the parameters, by name.
        buffers: the averaged buffers, by name.
        shared_buffers: the buffers that newcomers get, but that are not averaged, by name.
        parts: digests of the parts of the model: from the start of what is not trained, at the end of all.
        site: the processes that train this copy of the model.
        donates: whether other peers can download this peer's state.
        standing: this peer's part in its run.
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
        on_receipt: Callable[[Receipt], None],
        check: Callable[[Mapping[str, Any]], None],
        take_over: Callable[[State], None],
    ) -> None:
        self.optimizer = optimizer
        self.progress = GroupProgress(optimizer)
        self.modes = WeightModes(optimizer, peer.tensors)
        self.copies = ParameterCopies(optimizer, parameters)
        self._trained = parameters
        self._model = model
        self.parts: dict[str, str] = {}
        self._other_bases: set[str] = set()
        self._counters = Counters(buffers.shared)
        self.parameters = {name: local(one) for name, one in parameters.items()}
        self.buffers, self.shared_buffers = buffers.averaged, buffers.shared
        self.site, self.donates = site, donates
        self.local_step, self.since = 0, 0
        self.standing = HistoryStanding()
        self.hyperparameters = HyperparameterReader(optimizer, lambda: self.progress.keys)
        self._log = HyperparameterLog()
        self._comparison = DriftCheck(Fingerprint())  # of the last round
        self._drift: set[Drift] = set()  # that was logged
        self._peer = peer
        self._on_receipt, self._check, self._take_over = on_receipt, check, take_over
        self._weight = 1.0
        self._warned = ""
        self._alone = self._warned_of_modes = False
        self._averaged = {name: tensor.detach() for name, tensor in self.tensors.items()}  # sharing their memory
        self._initial_ids = self._parameter_ids()
        self._queries = CachedQueries()
        self._rate = StepRate()
        self._running: EventLoopThread | None = None
        self._model_topic = self.topic("", self.tensors, commits=True)

    def run_in(self, thread: EventLoopThread, share: Callable[[], ExtraState]) -> None:
        """Sets the thread in which the peer runs, and what is shared besides the averaged tensors."""
        self._running = thread
        self._site_state = SiteState(self.site, self._peer, thread, share, self._check, self._take_over)

    def agreed(self, question: Callable[[], T]) -> T:
        """The answer to a question to which the ranks of a site could have different ones; that of its leader.

        Whether a round is due, and all else that depends on clocks, chance or other peers, is such a question. Only the
        leader calls `question`, and all ranks get its result, which must be picklable, or its exception.
        """
        return self.site.agreed(question)

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
        return self.agreed(lambda: len(self._thread.run(on_loop(lambda: self._peer.peers))) == 1)

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
            f"{key}/{name}": local(value)
            for name, parameter in self._trained.items()
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
        found = {name: one for name, one in self.statistics().items() if name.startswith(f"{ITERATE}/")}
        if not found and self.local_step and not self._warned_of_modes and self.site.leads:
            self._warned_of_modes = True
            logger.warning(
                "%s has training and evaluation weights, but none of its statistics is %r: only the training weights "
                "are averaged, and the evaluation weights of the peers will differ",
                type(self.optimizer).__name__,
                ITERATE,
            )
        return found

    @contextmanager
    def changing_parameters(self) -> Iterator[None]:
        """Wraps a write to the parameters that neither a round nor the inner optimizer makes.

        The inner optimizer's copies get the new values, and the third sequence of a schedule-free one moves with them.
        """
        iterates = {name.removeprefix(f"{ITERATE}/"): one for name, one in self.iterates().items()}
        before = {name: self.parameters[name].detach().clone() for name in iterates}
        with self.copies.following():
            yield
        with torch.no_grad():
            for name, iterate in iterates.items():
                iterate.add_(self.parameters[name] - before[name])

    def sizes(self) -> dict[str, int]:
        """Number of elements of each parameter, at all ranks together."""
        return {name: parameter.numel() for name, parameter in self._trained.items()}

    def gradient(self, name: str) -> torch.Tensor | None:
        """What this rank holds of the gradient of a parameter."""
        gradient = self._trained[name].grad
        return None if gradient is None else local(gradient)

    def set_gradient(self, name: str, gradient: torch.Tensor | None) -> None:
        """Sets what this rank holds of the gradient of a parameter, in the dtype of its gradients."""
        parameter = self._trained[name]
        if gradient is not None:
            # Newer torch lets the dtype of gradients differ from that of the parameter.
            dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
            gradient = as_divided(gradient.to(parameter.dtype if dtype is None else dtype, copy=True), parameter)
        parameter.grad = gradient

    @property
    def has_counters(self) -> bool:
        """Whether the peers take the largest values of some integer buffers, see `Counters`."""
        return bool(self._counters)

    def divided(self, part: torch.Tensor, name: str) -> torch.Tensor:
        """The tensor, divided like the parameter of that name, of which this rank holds `part`."""
        return as_divided(part, self._trained[name])

    def samples_of_all(self, samples: int) -> int:
        """The samples of all ranks of the site together."""
        return sum(self.site.together(lambda: samples))

    def check_everywhere(self, check: Callable[[], None]) -> None:
        """Does a check of what this rank holds, which raises at every rank of the site if it fails at one."""
        if self.site.shards > 1:
            self.site.together(check)
        else:
            check()

    def clip(self, tensors: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Scales tensors in place so that their joint norm, over all shards, is at most `max_norm`. See `clip`."""
        return clip(tensors, max_norm, self._joint_norm if self.site.shards > 1 else None)

    def _joint_norm(self, norm: torch.Tensor) -> torch.Tensor:
        found = dict(self.site.together(lambda: (self.site.shard, float(norm))))
        return torch.tensor(math.sqrt(sum(found[shard] ** 2 for shard in sorted(found))))

    # Steps

    def check_tensors(self) -> None:
        """Checks that the averaged tensors are still the trained ones.

        Raises:
            TensorError: a tensor was moved in memory, or the inner optimizer or the model has other ones now.
        """
        if self._model is not None:
            self._model.check({name.removeprefix(BUFFER) for name in self.buffers | self.shared_buffers})
        for name, tensor in (self._trained | self.buffers).items():
            # `share_memory_()` moves both, which is harmless.
            if local(tensor).data_ptr() != self._averaged[name].data_ptr():
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
            self.note_hyperparameters(self.local_step)
            if closure is None:
                self._clip(max_norm)
                loss = self.optimizer_step()
            else:
                loss = self.optimizer_step(self._freeing(lock, closure, max_norm))
            self.local_step += 1
        self._rate.count(1)
        return loss

    def optimizer_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Calls the inner optimizer's `step`. The caller holds the tensors' lock."""
        with self.progress.observed():
            loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self.copies.stepped()
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
            gradients = (self.gradient(name) for name in self._trained)
            self.clip((one for one in gradients if one is not None), max_norm)

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
        return self._peer.replacing() if self.site.owns else self._peer.tensors()

    # Rounds

    def topic(self, name: str, tensors: Mapping[str, torch.Tensor], **options: Unpack[TopicOptions]) -> Topic:
        """Creates a topic, see `Peer.topic`. Tensors with the name of a buffer are never compressed.

        A codec has one scale for large and small values, which running variances and constants do not survive.
        """
        if self.site.size > 1:
            options["in_place"] = False  # a result is adopted by all ranks, or by none
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
        with self.copies.following() if self._has_parameters(topic) else nullcontext():
            if self.site.size > 1:
                return self.receipt_of(self.begin(topic, **options))
            self.check_tensors()
            receipt = self._thread.run(self._round(topic, options))
        return self._report(receipt)

    def _has_parameters(self, topic: Topic | None) -> bool:
        """Whether a topic averages the parameters themselves, and not gradients or copies."""
        places = {parameter.data_ptr() for parameter in self.parameters.values()}
        return topic is None or any(tensor.data_ptr() in places for tensor in topic.tensors.tensors)

    def begin(self, topic: Topic | None = None, **options: Unpack[RoundOptions]) -> PendingRound:
        """Begins what `average` does without waiting; `receipt_of` waits for the result."""
        pending = PendingRound(self.site, (topic or self._model_topic).tensors.tensors)
        self.check_tensors()
        if self.site.owns:
            round_ = self._round(topic, options, pending)
            with pending.starting():
                pending.receipt = self._thread.start(round_ if self.site.shards == 1 else pending.proposing(round_))
        return pending

    def is_over(self, pending: PendingRound) -> bool:
        """Whether `receipt_of` need not wait."""
        if self.site.shards > 1:
            return all(self.site.together(lambda: pending.is_settled))
        return self.agreed(lambda: pending.is_settled)

    def receipt_of(self, pending: PendingRound) -> Receipt:
        """Waits for a round from `begin` and returns its receipt, the same at all ranks of the site."""
        return self._report(end_of(pending, self._thread))

    def _round(
        self, topic: Topic | None, options: RoundOptions, pending: PendingRound | None = None
    ) -> Coroutine[Any, Any, Receipt]:
        """A round in the peer's thread, with the options that the strategy has left to the averager."""
        self._synchronize()
        config, shard = self._peer.config, self._peer.shard
        expected_peers = options.get("expected_peers", frozenset)
        expected = ExpectedAtFirst(expected_peers if shard is None else shard.translated(expected_peers))
        # One declaration, and another one for each group bit that may have to be dropped.
        seconds = min(config.group_wait * (1 + len(config.group_bits)), config.round_timeout)
        chosen: RoundOptions = {
            "weight": self.weight,
            "start_size": expected.start_size,
            "search_timeout": lambda seen: seconds if self._may_come(expected, seen) else 0.0,
        }
        if "expected_peers" in options or "search_timeout" not in options:
            chosen["stop_search"] = expected.have_left
        chosen.update(options)
        chosen["expected_peers"] = expected.peers
        chosen["gather"] = self._counters.added_to(options.get("gather"))  # in the training thread, which counts
        chosen["drift"] = self._compared(options)
        if shard is not None and pending is not None:
            chosen["confirm"] = pending.confirm
            chosen["gather"] = wrapped(shard.site, chosen["gather"])
        return self._peer.average(topic or self._model_topic, **chosen)

    def _may_come(self, expected: ExpectedAtFirst, announcements: Mapping[str, bytes]) -> bool:
        """Whether a group may be found; called in the peer's thread."""
        may_come = self._peer.peers - {self._peer.endpoint}
        # Those whose training has ended, or that refuse connections, make no group any more.
        if not expected.peers(announcements) and not still_training(announcements):
            may_come -= self._peer.progress.announcers
        return bool(may_come)

    # Drift

    def note_hyperparameters(self, step: int) -> None:
        """Notes the hyperparameters that are used at a step, for the comparison with other peers.

        Args:
            step: local step; a strategy whose peers make all steps together passes the global step.
        """
        self._log.record(step, self.hyperparameters.read())

    def fingerprint(self, tensors: Mapping[str, torch.Tensor], moment: str, number: int) -> DriftCheck:
        """Fingerprint of tensors that all members of a group should hold alike, to be compared in its round.

        Args:
            tensors: by name, in the same order at all peers.
            moment: which moment they are of, at most 64 characters; only fingerprints of the same one are compared.
            number: the same at all peers; other parts of large tensors are digested with the next number.
        """
        values = list(tensors.values())
        own = fingerprint_of(values, moment, number)
        return DriftCheck(own, list(tensors), tolerance=tolerance_of(values))

    def _compared(self, options: RoundOptions) -> DriftCheck:
        """What is compared in a round: what the strategy compares, and the hyperparameters of the last step."""
        check = options.get("drift") or DriftCheck(Fingerprint())
        step, values = self._log.latest()
        own = replace(check.own, since=self.since, step=step, hyperparameters=shorten(values))
        self._comparison = replace(check, own=own, log=self._log)
        return self._comparison

    def _log_drift(self, receipt: Receipt) -> None:
        """Warns once of each difference between members of a group that should be equal."""
        if receipt.averaged and not receipt.drift:
            self._drift.clear()
        for drift in receipt.drift:
            same = {replace(drift, value="", expected="", size=None)}  # values may change with each step
            if self.site.leads and not same <= self._drift:
                rounding = drift.kind is DriftKind.ROUNDING
                whose = " (this peer)" if drift.endpoint == receipt.endpoint else ""
                advice = "" if rounding else f"; {DRIFT_ADVICE}"
                logger.log(logging.INFO if rounding else logging.WARNING, "drift: %s%s%s", drift, whose, advice)
            if len(self._drift) < MAX_DRIFT:
                self._drift |= same

    def adopt_hyperparameters(self) -> tuple[list[str], tuple[str, ...]]:
        """Takes over the hyperparameters of the members from which this peer differed in its last round.

        Returns:
            The names of those that were changed, and the members that hold the right tensors; none if this peer does.
        """
        right, donors = self.agreed(lambda: (self._comparison.right, self._comparison.donors))
        return self.hyperparameters.adopt(right), donors

    def digest(self) -> str:
        """Digest of what is averaged, 16 hexadecimal digits; equal at all peers that hold the same bytes."""
        with self._peer.tensors() as tensors:
            return self._joint_digest(lambda: digest_of_tensors(tensors))

    @property
    def knows_model(self) -> bool:
        """Whether the user gave the model."""
        return self._model is not None

    def measure_frozen(self) -> None:
        """Sets the digest of the parameters that the optimizer does not train, if the model has some.

        Warns if it is another one than before.
        """
        frozen = {} if self._model is None else self._model.frozen(self._trained.values())
        if not frozen:
            return
        before = self.parts.get(FROZEN)
        self.parts[FROZEN] = self._joint_digest(lambda: digest_of(frozen))
        if before not in (None, self.parts[FROZEN]) and self.site.leads:
            logger.warning(
                "parameters that the optimizer does not train have changed since the start (of %s); they are not "
                "averaged, so give them to the optimizer, or leave them as they are",
                listed(list(frozen)),
            )

    def measure_parts(self) -> None:
        """Sets the digests of all that the model computes with: parameters, buffers, and what is not trained."""
        self.measure_frozen()
        with self._peer.tensors():
            buffers = self.buffers | self.shared_buffers if self._model is None else self._model.present_buffers
            plain = {name.removeprefix(BUFFER): buffer for name, buffer in sorted(buffers.items())}
            # By number, since a peer that was made without the model has no names for them.
            numbered = {str(number): parameter for number, parameter in enumerate(self.parameters.values())}
            self.parts["parameters"] = self._joint_digest(lambda: digest_of(numbered))
            if plain:
                self.parts["buffers"] = self._joint_digest(lambda: digest_of(plain))

    def _joint_digest(self, digest: Callable[[], str]) -> str:
        """The digest of what all ranks of the site hold; of the ranks with the same shard its owner counts."""
        of_ranks = self.site.together(lambda: (self.site.shard, digest()) if self.site.owns else None)
        found = dict(one for one in of_ranks if one is not None)
        if self.site.shards == 1:
            return found[0]
        return hashlib.sha256("".join(found[shard] for shard in sorted(found)).encode()).hexdigest()[:16]

    def name_other_bases(self) -> None:
        """Warns of peers whose parameters that are not trained are others, once of each."""
        if FROZEN not in self.parts or not self.site.leads:
            return
        with suppress(ClosedError):
            self._warn_of_other_bases(self.parts[FROZEN])

    def _warn_of_other_bases(self, own: str) -> None:
        seen = self._queries.recent(
            self._thread, "announcements", lambda: self._peer.progress.announcements, wait=False
        )
        progress = read_progress(seen)
        others = {name for name, one in progress.items() if one.parts.get(FROZEN, own) != own} - self._other_bases
        self._other_bases |= others
        if others:
            logger.warning(
                "%s: other values in parameters that the optimizer does not train, so these peers compute something "
                "else, even if all trained parameters are equal; load the same base model at all peers",
                listed(sorted(others)),
            )

    def _synchronize(self) -> None:
        """Waits until the device has computed the tensors, since the peer's thread copies them."""
        for device in {tensor.device for tensor in self.tensors.values()}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def _report(self, receipt: Receipt) -> Receipt:
        """Passes a receipt on, and warns of a failed round once per reason."""
        if self._counters and receipt.averaged:
            dropped = {one.endpoint for one in receipt.dropped}
            present = [sent for name, sent in receipt.gathered.items() if name not in dropped]
            with self._peer.tensors():
                self._counters.take_largest(present)
        if self._counters:
            receipt = replace(receipt, gathered={name: without_counters(one) for name, one in receipt.gathered.items()})
        self.name_other_bases()
        reason = "" if receipt.averaged else receipt.reason
        if reason and reason != self._warned and self.site.leads:
            logger.warning("%s; training goes on, and further rounds that fail like this are not logged", receipt)
        self._warned = reason
        self.standing = self.standing.after_round(receipt.members, averaged=receipt.averaged)
        self._log_drift(receipt)
        self._on_receipt(receipt)
        return receipt

    def log_alone(self, alone: bool) -> None:
        """Warns when this peer begins to make global steps alone."""
        if alone and not self._alone and self.site.leads:
            logger.warning("%r is alone and trains on; it averages again as soon as other peers come", self._peer)
        self._alone = alone

    def warn(self, what: str, error: Exception) -> None:
        """Warns once of a failure after which training goes on."""
        warning = f"{what}: {error}"
        if warning != self._warned and self.site.leads:
            logger.warning("%s; training goes on", warning)
        self._warned = warning

    # Other peers

    def announce(self, progress: bytes, *, soon: bool = True) -> None:
        """Announces this peer's progress, see `RunProgress.announce`; does not wait for the peer's thread."""
        if not self.site.owns:
            return
        # In a site the next question tells all ranks alike that it was closed.
        with suppress(ClosedError) if self.site.size > 1 else nullcontext():
            self._thread.start(on_loop(lambda: self._peer.progress.announce(progress, soon=soon)))

    def announcements(self, *, wait: bool = True) -> dict[str, bytes]:
        """The packed progress of the other peers, by endpoint; in a site what its leader knows.

        Args:
            wait: whether to wait for the peer's thread; if not, the result may be one step old.
        """
        return self.agreed(
            lambda: self._queries.recent(
                self._thread, "announcements", lambda: self._peer.progress.announcements, wait=wait
            )
        )

    @property
    def members(self) -> Mapping[str, str]:
        """What each announcer counts as, see `member_of`, as of the last announcements; at the leader of a site."""
        return self._peer.progress.members

    @property
    def member(self) -> str:
        """What this peer counts as; at the leader of a site."""
        return self.members[self._peer.endpoint]

    def wait_for_announcements(self, condition: Callable[[dict[str, bytes]], bool], seconds: float) -> dict[str, bytes]:
        """Waits until the announcements fulfil `condition`, or for `seconds`; returns them."""
        end = self.monotonic() + seconds

        def wait() -> tuple[dict[str, bytes], bool]:
            left = min(end - self.monotonic(), ASK_AGAIN_SECONDS) if self.site.size > 1 else end - self.monotonic()
            seen = self._thread.run(self._peer.progress.until(condition, left))
            return seen, condition(seen) or self.monotonic() >= end

        is_over = False
        while not is_over:
            seen, is_over = self.agreed(wait)
        return seen

    @property
    def group_wait(self) -> float:
        """Seconds for which one declaration of this peer lasts."""
        return self._peer.config.group_wait

    def declared_until(self, topic: Topic, phase: str = "") -> float | None:
        """When the last declaration of other training peers for this topic expires; None if there is none.

        In seconds since the epoch. It does not wait for the peer's thread, so the result may be one step old.
        """
        key = (topic.schema.topic, phase)
        return self.agreed(
            lambda: self._queries.recent(self._thread, key, lambda: self._peer.declared_until(topic, phase), wait=False)
        )

    def fetch(self, donors: Sequence[str], check: Callable[[Mapping[str, Any]], None]) -> BackgroundDownload:
        """Starts to download the state of the first of `donors` that delivers one; training can go on meanwhile.

        Args:
            donors: endpoints.
            check: called with the strategy's part of the state as soon as a donor starts to send; raises StateError if
                the state is not wanted, and then the next donor is asked.
        """
        fetch = BackgroundDownload(donors, self.monotonic())

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

    def wait_for_fetches(self, fetches: Sequence[BackgroundDownload], seconds: float | None) -> None:
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

    def cancel_fetch(self, fetch: BackgroundDownload) -> None:
        """Cancels a download."""
        self._thread.start(on_loop(lambda: fetch.task is not None and fetch.task.cancel()))

    def receive(self, fetch: BackgroundDownload) -> Mapping[str, Any]:
        """Waits for a download and returns the strategy's part of the state.

        Raises:
            StateError: no donor delivered a valid state.
            ClosedError: the averager was closed, or its thread has failed.
        """
        user: Mapping[str, Any] = self._thread.wait(fetch.result).state.user["strategy"]
        return user

    def found(self, search: Callable[[], BackgroundDownload | None]) -> BackgroundDownload | None:
        """The download that `search` finds at the leader, with those of the other shards of the site."""
        return self._site_state.found(search)

    def download(self, donors: Sequence[str]) -> None:
        """Downloads the state of the first of these peers or sites that delivers it, and takes it over at all ranks.

        Raises:
            StateError: none could deliver a state that fits; nothing was changed.
        """
        self.take_over(self._site_state.fetch(donors))

    def take_over(self, fetch: BackgroundDownload) -> None:
        """Takes over a downloaded state completely, at all ranks of the site.

        Raises:
            StateError: it does not fit; nothing was changed.
            RoundError: the application held the tensors' lock for more than `round_timeout`; nothing was changed.
        """
        with self.copies.following():
            self._site_state.take_over(fetch)
        self.modes.settle()
        self.refresh()

    def refresh(self) -> None:
        """Forgets cached announcements and declarations."""
        self._queries.clear()

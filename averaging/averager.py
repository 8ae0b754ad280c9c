"""`DecentralizedAverager`: an optimizer whose model is averaged with the other peers of a run while it trains."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, Unpack, overload

import torch
from torch.optim.lr_scheduler import LRScheduler

from averaging.common.validation import is_count, is_finite, one_of
from averaging.config import PeerOptions
from averaging.errors import AveragingError, ClosedError, ConfigError, RoundError
from averaging.observe.receipts import Receipt
from averaging.observe.training_status import Finish, TrainingStatus
from averaging.peer.lifecycle import DiscoveryFactory
from averaging.peer.peer import Peer
from averaging.peer.round_options import RoundOptions
from averaging.protocol.group import Mode
from averaging.strategies.base import Strategy
from averaging.strategies.run_end import RunEnd
from averaging.strategies.run_start import RunStart
from averaging.training import sigterm
from averaging.training.event_loop_thread import EventLoopThread, on_loop
from averaging.training.history import Stage, of_one_run
from averaging.training.named_tensors import named_buffers, named_parameters
from averaging.training.optimizer_wrapper import OptimizerWrapper
from averaging.training.scheduler import drive, make_scheduler
from averaging.training.training import Training
from averaging.training.training_state import TrainingState
from averaging.transport.base import Transport

logger = logging.getLogger(__name__)

MAX_STEPS = 10_000_000
"""Steps that a state may claim unless the user says otherwise; a scheduler takes up to two minutes for so many."""


class DecentralizedAverager(OptimizerWrapper):
    """Wraps an optimizer so that what it trains is averaged with the other peers of a run.

    ```python
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    with DecentralizedAverager(optimizer, run_id="gpt", join=["a.example:4222"], strategy=LocalSGD(every=50)) as opt:
        for batch in data:
            opt.zero_grad()
            loss(model, batch).backward()
            opt.step()
    ```

    The constructor starts a peer in a thread of its own. A peer without anybody to `join` starts the run, and the
    others begin with its parameters. A newcomer downloads the parameters, the optimizer's state, the strategy's and the
    step counters of the peer that has averaged most, before the constructor returns; the hyperparameters, such as the
    learning rate, stay its own. A checkpoint that is loaded before yields to the run's state; one that is loaded
    afterwards replaces it at this peer. Models are moved to their device before.

    A learning rate may be driven from outside, as usual, once per `opt.step()`: a newcomer finds `initial_lr` in its
    groups, so that `LambdaLR(opt, schedule, last_epoch=opt.local_step - 1)` goes on where the run is. Most others, such
    as `StepLR`, go on from the present rate, which is a newcomer's own, and so would begin anew. Given as `scheduler`
    any is driven by the averager: once per global step with GradientAveraging, else once per local step.

    To the rest of torch it is the inner optimizer: `param_groups`, `state` and `defaults` are the inner one's. Step
    hooks registered here enclose the averaging, those of the inner optimizer do not.

    Args:
        optimizer: the inner optimizer. It may have been made from `model.named_parameters()` (torch 2.6 or newer), then
            errors name them.
        run_id: peers with the same run average together.
        strategy: what is averaged, and when.
        weight: of this peer in the averages, where the strategy sets none; the attribute may be changed at any time.
        buffers: of the model, by name (`dict(model.named_buffers())`): floating-point ones, such as BatchNorm's running
            statistics, are averaged along, and newcomers get all of them. The model must write to them in place.
        scheduler: makes a learning rate scheduler of the inner optimizer.
        max_steps: a state that claims more steps is refused, so that no donor can have the scheduler stepped without
            end. Set it above the steps of a longer run.
        on_round: called in the training thread with the receipt of every round, also of those that failed. The
            strategy may have to take up the round's result yet, so `average_now` is called after the step instead.
        leave_on_sigterm: whether this peer leaves its run in order when the process gets SIGTERM, so that the others do
            not wait for it; only where it is made in the main thread. Whatever handled the signal before does so
            afterwards, which ends the process if that was the default. If the process goes on, `step` makes the inner
            optimizer's steps alone.
        transport: see `Peer`.
        discovery: see `Peer`.
        options: see `PeerConfig`.

    Attributes:
        strategy: as given.
        scheduler: as made, or None.
        last_receipt: of the last round, None before the first.

    Raises:
        ConfigError: an option that cannot work.
        TensorError: the optimizer has a parameter that cannot be averaged, or there is such a buffer.
        ListenError: the address cannot be had.
        NoSeedAnsweredError: none of `join` answered in time; a `JoinRefusedError` if all refuse for good.
        StateError: there are peers with a state, and none could deliver it; nothing was changed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        run_id: str,
        strategy: Strategy,
        weight: float = 1.0,
        buffers: Mapping[str, torch.Tensor] | None = None,
        scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        max_steps: int = MAX_STEPS,
        on_round: Callable[[Receipt], object] | None = None,
        leave_on_sigterm: bool = True,
        transport: Transport | None = None,
        discovery: DiscoveryFactory | None = None,
        **options: Unpack[PeerOptions],
    ) -> None:
        if one_of(Mode, options.get("mode", Mode.NODE), "mode") is Mode.AUXILIARY:
            raise ConfigError("an auxiliary peer has nothing to train; start it as a Peer or with `averaging peer`")
        _check(strategy, optimizer)
        if not is_count(max_steps) or max_steps < 1:
            raise ConfigError(f"max_steps must be a whole number of steps, at least 1, not {max_steps!r}")
        super().__init__(optimizer)
        self.strategy = strategy
        self.last_receipt: Receipt | None = None
        self._on_round = on_round
        self._telling = False  # `on_round` of a round whose result the strategy may have to take up yet
        parameters = named_parameters(optimizer)
        buffers = named_buffers({} if buffers is None else buffers)
        averaged = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        self._peer = Peer(
            parameters | averaged,
            run_id=run_id,
            extra_state=lambda: self._training_state.shared(),
            transport=transport,
            discovery=discovery,
            **options,
        )
        self._training = Training(
            optimizer,
            parameters,
            averaged,
            self._peer,
            note=self._note,
            check=lambda user: self._training_state.check(user),
            take_over=lambda state: self._training_state.take_over(state),
        )
        self.weight = weight  # checked by the property
        self.scheduler = None if scheduler is None else make_scheduler(scheduler, optimizer)
        kept = {name: buffer for name, buffer in buffers.items() if name not in averaged}
        self._training_state = TrainingState(self._training, strategy, self.scheduler, kept, max_steps)
        strategy.start(self._training)
        self._left = False
        self._thread = EventLoopThread(self._peer, f"the averager of run {run_id!r}")
        try:
            if leave_on_sigterm:
                sigterm.leave_on_sigterm(self)
            self._training.run_in(self._thread)
            beginning = RunStart(
                self._peer,
                strategy,
                self._training,
                check=self._training_state.check,
                take_over=self._training_state.take_over,
                now=self._training.now(),
                rng=random.SystemRandom(),
            )
            self._thread.run(beginning.begin())
            strategy.joined(self._training)
            self._drive_scheduler()
        except BaseException:
            self.close()
            raise
        strategy.taken = True

    # As an optimizer

    def __repr__(self) -> str:
        return f"DecentralizedAverager ({self._peer!r}, {self.strategy!r}, step {self.local_step}) of {self._inner!r}"

    @overload
    def step(self, closure: None = None, *, batch_size: int | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, batch_size: int | None = None) -> float: ...

    def step(self, closure: Callable[[], float] | None = None, *, batch_size: int | None = None) -> float | None:
        """One step of training; the strategy averages, if it is time, before this returns.

        A round that fails changes nothing: a warning tells why, and training goes on.

        Args:
            closure: reevaluates the model and returns the loss.
            batch_size: samples behind the gradients, their loss being the mean; for GradientAveraging.

        Raises:
            ConfigError: the strategy counts samples and was told none.
            TensorError: there is NaN or infinity in what is to be averaged, or it has been moved, or the inner
                optimizer has another parameter now.
            StateError: the inner optimizer keeps something that newcomers cannot be given.
            RoundError: `finish` was called.
            ClosedError: the averager was closed, or its thread has failed.
        """
        if self._has_left():
            loss = self.strategy.step_alone(self._training, closure)
            self._drive_scheduler()
            return loss
        self._thread.check()
        if self.strategy.stage is not Stage.TRAINING:
            raise RoundError("finish() was called, so the others count on no further step; make a new averager")
        self._training.check_places()
        try:
            with self._training.measuring():
                loss = self.strategy.step(self._training, closure, batch_size)
        except ClosedError:
            if not self._has_left():  # on SIGTERM, in the midst of this step
                raise
            loss = None if closure is None else math.nan
        self._drive_scheduler()
        return loss

    def _drive_scheduler(self) -> None:
        if self.scheduler is not None:
            drive(self.scheduler, self.strategy.schedule(self._training))

    def _own_state(self) -> dict[str, Any]:
        return self._training_state.saved()

    def _load(self, inner: dict[str, Any], own: object) -> None:
        own = own if isinstance(own, dict) else {"local_step": own}
        if not is_count(own.get("local_step")):
            raise ConfigError(f"the state dict has {own!r:.200} under {self.state_key!r}, not a step counter")
        self._thread.check()
        with self._peer.tensors():
            self._training_state.load(inner, own)
        self._thread.run(self._peer.commit(self._peer.version))
        self.strategy.joined(self._training)
        self._drive_scheduler()

    # As a peer

    @property
    def endpoint(self) -> str:
        """Where others reach this peer: what they `join`."""
        self._thread.check()
        return self._peer.endpoint

    @property
    def peers(self) -> frozenset[str]:
        """The endpoints of the peers of the run that are known, this one included."""
        return self._thread.run(on_loop(lambda: self._peer.peers))

    def wait_for_peers(self, count: int, timeout: float) -> bool:
        """Waits until so many peers train in the run, this one included; whether they are there within the time.

        They count once they are of one run: if several peers began one at the same moment, all but one of them take
        over its parameters here or at their first step.

        Args:
            count: peers, for example all that are to begin together.
            timeout: seconds.

        Raises:
            ConfigError: one of them is no number.
            ClosedError: the averager was closed, or its thread has failed.
        """
        if type(count) is not int:
            raise ConfigError(f"count must be a whole number of peers, not {count!r}")
        if not is_finite(timeout) and timeout != math.inf:
            raise ConfigError(f"timeout must be a number of seconds, not {timeout!r}")
        self._thread.check()
        training, strategy = self._training, self.strategy
        end = training.monotonic() + timeout

        def are_there(told: Mapping[str, bytes]) -> bool:
            return 1 + len(of_one_run(strategy.announced(training), told)) >= count

        while True:
            told = training.told_until(
                lambda told: are_there(told) or bool(strategy.others(training, told).ahead),
                max(0.0, end - training.monotonic()),
            )
            others, left = strategy.others(training, told), end - training.monotonic()
            if not others.ahead or left <= 0:
                return are_there(told)
            strategy.keep_up(training, others, left)

    def finish(self, timeout: float = 60.0) -> Finish:
        """Ends the training of this peer together with the others, and leaves the weights to export in the model.

        It ends what is in progress and waits, at most `timeout` seconds, until the other peers call `finish`, too. Then
        a last round brings them together: with LocalSGD the parameters are averaged, with DiLoCo the local steps since
        the last round go into an outer step, and with GradientAveraging, whose peers are equal, a peer that has missed
        a step catches up. At last all compare what they hold.

        Call it after the last step, before the averager is closed. The other peers do not wait for this one any more.

        Args:
            timeout: seconds.

        Returns:
            Whether all peers hold the same weights (`alike`), and if not, why (`str`).

        Raises:
            ConfigError: `timeout` is not a number of seconds.
            ClosedError: the averager was closed, or its thread has failed.
        """
        if not is_finite(timeout) or timeout < 0:
            raise ConfigError(f"timeout must be a finite number of seconds, not {timeout!r}")
        if self._has_left():
            return Finish(self._training.digest(), {}, left=True)
        self._thread.check()
        return RunEnd(self._training, self.strategy, timeout).finish()

    @property
    def status(self) -> TrainingStatus:
        """How far this peer and its run are."""
        peers = self.peers
        return TrainingStatus(
            local_step=self.local_step,
            global_step=self.strategy.global_step,
            samples=self.strategy.samples,
            peers=peers,
            alone=len(peers) == 1,
            last_receipt=self.last_receipt,
            peer=self._thread.run(on_loop(lambda: self._peer.status)),
        )

    @property
    def local_step(self) -> int:
        """Calls of `step`, those of the state that was downloaded or loaded included."""
        return self._training.local_step

    @property
    def global_step(self) -> int | None:
        """Steps that the run has made together; None with a strategy that has none, such as LocalSGD."""
        return self.strategy.global_step

    @property
    def model_version(self) -> int:
        """Version of the state that newcomers get from this peer: it grows with every round."""
        return self._peer.version

    @property
    def weight(self) -> float:
        """Weight of this peer in the averages; finite and at least 0."""
        return self._training.weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._training.weight = weight

    def check_tensors(self) -> None:
        """Checks that what is averaged is what is trained, as every `step` does; for who wants to know before.

        Raises:
            TensorError: the model was moved or converted after the averager was made, or the inner optimizer has
                other parameters now.
            ClosedError: the averager was closed, or its thread has failed.
        """
        self._thread.check()
        self._training.check_places()

    def average_now(self, *, weight: float | None = None, gather: Any = None) -> Receipt:
        """Averages the parameters with a group now, whatever the strategy, and waits for the end of the round.

        A round of the strategy's that is in progress, with `overlap` or `delay`, is waited for first. With
        GradientAveraging, whose peers are equal already, it changes something only where the averager's `compression`
        is lossy; then who takes no part stays a little apart from the others for good. Give that to the strategy.

        Args:
            weight: of this peer in this round; the attribute `weight` if None.
            gather: handed to all members of the group, see `Peer.average`.

        Returns:
            The receipt, also when no group was found within `timeout` or the round failed; training can go on in any
            case.

        Raises:
            ConfigError: a weight or a gather that cannot work.
            TensorError: there is NaN or infinity in what is to be averaged, or it has been moved.
            RoundError: it was called in `on_round`.
            ClosedError: the averager was closed, or its thread has failed.
        """
        self._thread.check()
        if self._telling:
            raise RoundError("on_round cannot average: the round it is told of is not over; call average_now() later")
        config = self._peer.config
        options: RoundOptions = {"gather": gather, "enough": config.group_size, "patience": config.timeout}
        if weight is not None:
            options["weight"] = weight
        with self._training.measuring():
            self.strategy.finish(self._training)
            return self._training.average(**options)

    def close(self) -> None:
        """Ends a round in progress, leaves the run and ends the thread. The inner optimizer can be used on."""
        sigterm.stay_on_sigterm(self)
        self._thread.close()

    def begin_to_leave(self) -> None:
        """Called on SIGTERM, see `leave_on_sigterm`."""
        self._left = True
        self._thread.begin_to_close()

    def leave(self) -> None:
        """Called on SIGTERM after `begin_to_leave`."""
        self._thread.close()
        logger.warning("the averager of run %r has left on SIGTERM", self._peer.run_id)

    def _has_left(self) -> bool:
        return self._left

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._has_left():
                self.strategy.finish(self._training)
        except AveragingError as failure:
            logger.warning("%r could not end in order: %s", self.strategy, failure)
        finally:
            self.close()

    def _note(self, receipt: Receipt) -> None:
        self.last_receipt = receipt
        if self._on_round is not None:
            self._telling = True
            try:
                self._on_round(receipt)
            finally:
                self._telling = False


def _check(strategy: object, optimizer: object) -> None:
    if not isinstance(strategy, Strategy):
        raise ConfigError(f"strategy must be one that was made, such as LocalSGD(every=50), not {strategy!r}")
    if strategy.taken:
        raise ConfigError(f"{strategy!r} serves another averager, or one that was closed; make one for each averager")
    if not hasattr(optimizer, "param_groups"):
        raise ConfigError(f"the first argument must be an optimizer, not {type(optimizer).__name__}")

"""`DecentralizedAverager`: an optimizer whose model is averaged with the other peers of a run while it trains."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, Self, overload, runtime_checkable

import torch
from torch.optim.lr_scheduler import LRScheduler

from averaging.common import EventLoopThread, on_loop
from averaging.config import PeerConfig, configure
from averaging.discovery import ShardOfRun
from averaging.errors import AveragingError, ClosedError, ConfigError, RoundError, WaitTimeoutError
from averaging.peer import DiscoveryFactory, Peer, PeerContext, RoundOptions
from averaging.protocol import Mode
from averaging.receipts import Finish, Receipt, TrainingProgress, TrainingStatus
from averaging.strategies import RunEnd, RunStart, Strategy, check_unused, wait_for_peers
from averaging.training import (
    NO_GROUP,
    WITHOUT_MODEL,
    DataRecords,
    LeaderStatus,
    LeaderStatusRelay,
    NamedMasters,
    OptimizerWrapper,
    Site,
    Stage,
    StrategyContext,
    TrainedModel,
    TrainingState,
    check_alike,
    check_only_one,
    described,
    ending_process,
    leave_on_signals,
    local,
    named_buffers,
    named_parameters,
    note_closed,
    note_open,
    of_rank,
    site_of,
)
from averaging.transport import RpcService, Transport

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.05


@runtime_checkable
class StateService(RpcService, Protocol):
    """A service of a `DecentralizedAverager` that is told when the strategy has averaged, or tried to."""

    def averaged(self, averager: DecentralizedAverager) -> None:
        """Called in the training thread: at the start, after each round, and when `model_version` has grown otherwise.

        It should return soon. If the service has a method `close`, that is called when the averager has left the run.
        """


class DecentralizedAverager(OptimizerWrapper):
    """Wraps an optimizer so that what it trains is averaged with the other peers of a run.

    ```python
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    strategy = LocalSGD(sync_every=50)
    with DecentralizedAverager(
        optimizer, model=model, strategy=strategy, run_id="gpt", join=["a.example:4222"]
    ) as opt:
        for batch in data:
            opt.zero_grad()
            loss(model, batch).backward()
            opt.step()
    ```

    The constructor starts a peer in a thread of its own. Move the model to its device before. Peers that start at the
    same moment agree on the parameters of one of them. A newcomer downloads the parameters, the state of the optimizer
    and the strategy, and the step counters of the most advanced peer before the constructor returns. Hyperparameters,
    such as the learning rate, stay its own. The run's state replaces a checkpoint that was loaded before; a checkpoint
    that is loaded afterwards replaces the run's state at this peer.

    A scheduler that is given as `scheduler` is stepped by the averager: once per global step with `GradientAveraging`,
    else once per local step. You may also step one yourself after each `opt.step()`. A newcomer continues at the run's
    step with `LambdaLR(opt, schedule, last_epoch=opt.local_step - 1)`, since its groups have `initial_lr`. Most other
    schedulers, such as `StepLR`, start from the newcomer's own learning rate.

    `param_groups`, `state` and `defaults` are those of the inner optimizer. Step hooks that are registered on the
    averager run around the averaging; those of the inner optimizer do not.

    Args:
        optimizer: The inner optimizer.
        model: The module whose parameters the optimizer trains, with or without wrappers such as
            DistributedDataParallel and `torch.compile`. Its names pair the tensors of the peers, its buffers are
            averaged, and `step` notices parameters that were replaced or added. Without it the averager sees what the
            optimizer holds only, and a warning says what it cannot check. See docs/how-to/optimizers.md.
        strategy: What is averaged, and when.
        run_id: Peers with the same run id average together.
        config: The options as one object, for example from `PeerConfig.from_toml`; single options win over it.
        weight: This peer's weight in the averages, unless the strategy sets one; `"samples"` for the samples since the
            last average of the same tensors, as given by `step(batch_size=)`. The attribute can change at any time.
        buffers: Exceptions from what `model` says of buffers: the ones to take, by name. By default these are all in
            the model's state dict. Floating-point ones, such as the running statistics of BatchNorm, are averaged;
            newcomers get all of them. The model must write to them in place.
        scheduler: Makes a learning rate scheduler from the inner optimizer.
        on_round: Called in the training thread with the receipt of every round, also of a failed one. It must not call
            `average_now`.
        process_group: The ranks that train this copy of the model together, such as `torch.distributed.group.WORLD`.
            They are a *site*, which is one peer of the run. All ranks make an averager with the same arguments and
            call its methods alike. See docs/how-to/sites.md.
        services: Further gRPC methods that this peer serves, see `Peer`. A service with a method `averaged` is
            called after each round, see `StateService`.
        masters: Returns the optimizer's own copies of the parameters, such as float32 ones of bfloat16 parameters, one
            for each in the optimizer's order: they get what a round writes. Those that it keeps as
            `state[parameter]["master_param"]` need not be named.
        transport: See `Peer`.
        discovery: See `Peer`.
        options: See `PeerConfig`.

    On the signals in `leave_on`, such as SIGTERM, the peer leaves its run, so that the other peers do not wait for it.
    This works in the main thread only. The handler that was there before runs afterwards; the default one ends the
    process. If the process goes on, `step` makes the steps of the inner optimizer alone. If its owner asks it to leave
    (`averaging leave`), its round ends first; then the process gets SIGTERM, or the agent of torchrun that started it.

    Attributes:
        strategy: The strategy.
        scheduler: The scheduler, or None.
        last_receipt: The receipt of the last round, or None.

    Raises:
        SiteError: Another rank of the site is lost.
        ConfigError: An option is invalid, or differs between the ranks of a site; it is raised at all of them. In an
            interactive session also: this process has an open averager of the same run already; the message names it.
        TensorError: A parameter or buffer cannot be averaged.
        ListenError: The peer cannot listen on its address.
        JoinError: None of the peers in `join` answered in time, or all of them refuse.
        StateError: Other peers have a state, and none of them could deliver it. Nothing was changed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        model: torch.nn.Module | None = None,
        strategy: Strategy,
        run_id: str | None = None,
        config: PeerConfig | None = None,
        weight: float | str = 1.0,
        buffers: Mapping[str, torch.Tensor] | None = None,
        scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        on_round: Callable[[Receipt], object] | None = None,
        process_group: object = NO_GROUP,
        services: Sequence[RpcService] = (),
        masters: NamedMasters | None = None,
        transport: Transport | None = None,
        discovery: DiscoveryFactory | str | None = None,
        **options: Any,
    ) -> None:
        trained = None if model is None else TrainedModel(model)
        parameters = named_parameters(optimizer, trained)
        self._leader = LeaderStatusRelay(self._leader_status)
        self._site = site = site_of(process_group, parameters, self._leader)

        def check() -> dict[str, str]:
            named = {"discovery": discovery} if isinstance(discovery, str) else {}
            self._config = checked = configure(config, run_id, {**options, **named})
            if checked.mode is Mode.AUXILIARY:
                raise ConfigError("an auxiliary peer has nothing to train; start it as a Peer or with `averaging peer`")
            check_unused(strategy)
            if transport is None:  # peers on a network in memory are meant to be in one process
                check_only_one(checked.run_id, checked.join)
            shapes = [(name, tuple(parameter.shape)) for name, parameter in parameters.items()]
            names = sorted(buffers or ()) if trained is None else list(trained.buffers)
            alike = {"optimizer": type(optimizer).__name__, "parameters": shapes, "buffers": names, "weight": weight}
            return described(checked, strategy=strategy, **alike)

        check_alike(site.all_gather(check))
        super().__init__(optimizer)
        self.strategy = strategy
        self.last_receipt: Receipt | None = None
        self._on_round = on_round
        self._in_on_round = False  # the strategy may not have applied the result of that round yet
        self._left = False
        self._state_services = [service for service in services if isinstance(service, StateService)]
        self._reported: tuple[int, int | None, Receipt | None] | None = None

        def start(leader: str) -> str:
            """Starts this rank's peer, if it owns one. Returns its endpoint."""
            run_id = self._config.run_id
            shard = None if site.shards == 1 else ShardOfRun(run_id, site.layout, site.shard, leader)
            in_common = named_buffers(buffers, trained)
            self._peer = Peer(
                {name: local(parameter) for name, parameter in parameters.items()} | in_common.averaged,
                config=of_rank(self._config, site, leader),
                extra_state=lambda: self._training_state.shared(),
                services=[
                    service
                    for service in services
                    if (site.leads or getattr(service, "of_each_shard", False))
                    and not (self._config.mode is Mode.CLIENT and getattr(service, "needs_no_port", False))
                ],
                context=PeerContext(
                    transport,
                    None if isinstance(discovery, str) else discovery,
                    on_leave=self._leave_as_asked if site.leads and transport is None else None,
                    shard=shard,
                    training=self._progress,
                ),
            )
            self._training = StrategyContext(
                optimizer,
                parameters,
                in_common,
                self._peer,
                model=trained,
                site=site,
                donates=self._config.share_state and self._config.mode is not Mode.CLIENT,
                masters=masters,
            )
            self._peer.catching_up = "it takes over the state of its run"
            self.weight = weight  # checked by the property
            self._training_state = TrainingState(self._training, strategy, scheduler)
            self.scheduler = self._training_state.scheduler
            strategy.start(self._training)
            context = ending_process(self._peer) if site.owns else nullcontext()
            self._thread = EventLoopThread(context, f"the averager of run {run_id!r}")
            leave_on_signals(self, self._config.leave_on)
            self._training.run_in(self._thread, self._training_state, self._note)
            if not site.owns:
                return leader
            self._thread.run(self._peer.check_division())
            return self._peer.endpoint

        try:
            # The leader first, since the others join through it.
            self._endpoint = site.broadcast_from_leader(lambda: start(""))
            if site.size > 1:
                site.all_gather(lambda: None if site.leads else start(self._endpoint))
            self._training.parts.measure_untrained()
            with self._training.copies.following():
                RunStart(strategy, self._training, random.SystemRandom()).begin()
            self._training.parts.warn_of_others(self._training.announcements)
            self._training.modes.settle(wanted=False)  # a newcomer begins in the mode of the state
            strategy.joined(self._training)
            self._training_state.drive_scheduler()
            self._leader.tell_now(self._site)
            if model is None and site.leads:
                logger.warning("%s", WITHOUT_MODEL)
            strategy.attached = True
            self._peer.catching_up = ""
            note_open(self)
            self._tell_services()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"DecentralizedAverager ({self._peer!r}, {self.strategy!r}, step {self.local_step}) of {self._inner!r}"

    @overload
    def step(self, closure: None = None, *, batch_size: int | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, batch_size: int | None = None) -> float: ...

    def step(self, closure: Callable[[], float] | None = None, *, batch_size: int | None = None) -> float | None:
        """Makes one training step. If the strategy averages after it, that is done before this returns.

        A round that fails changes nothing: a warning is logged with the reason, and training goes on.

        Args:
            closure: Reevaluates the model and returns the loss.
            batch_size: Number by which the loss was divided: of samples, or of tokens with a language model. All peers
                count the same. `GradientAveraging` and `weight="samples"` need it.

        Raises:
            ConfigError: The strategy needs `batch_size`.
            TensorError: A tensor to average contains NaN or infinity or was moved, or the inner optimizer has other
                parameters now.
            StateError: The state of the inner optimizer contains something that newcomers cannot get.
            RoundError: `finish` was called.
            ClosedError: The averager was closed, or its thread has failed.
        """
        if self._has_left():
            loss = self.strategy.step_alone(self._training, closure)
            self._training_state.drive_scheduler()
            return loss
        if not self._left:  # the other ranks of a site hear of it below
            self._thread.check()
        if not self._training.modes.training:
            raise ConfigError(f"{type(self._inner).__name__} is in evaluation mode; call opt.train() before the step")
        if self.strategy.stage is not Stage.TRAINING:
            raise RoundError("finish() was called, so the other peers expect no further step; make a new averager")
        if self._training.only_makes_state():
            return self._inner.step(closure)
        self._training.guard.check()
        if closure is None:
            self._training.guard.warn_without_gradients()
        self._training.weights.count(batch_size)
        try:
            with self._training.pace.measured():
                loss = self.strategy.step(self._training, closure, batch_size)
            self._training.pace.note_step(batch_size)
        except ClosedError:
            if not self._has_just_left():  # on a signal, in the midst of this step
                self._thread.stop_at_exit()
                raise
            loss = None if closure is None else math.nan
        self._training_state.drive_scheduler()
        self._tell_services()
        return loss

    def _tell_services(self) -> None:
        # In a site the ranks know the version of rank 0's peer a step later.
        now = self.model_version, self.global_step, self.last_receipt
        if self._state_services and now != self._reported:
            self._reported = now
            for service in self._state_services:
                service.averaged(self)

    @property
    def run_id(self) -> str:
        """The id of its run."""
        return self._peer.run_id

    @property
    def endpoint(self) -> str:
        """The address at which other peers `join` this one; in a site that of its rank 0."""
        self._thread.check()
        return self._endpoint

    @property
    def own_endpoint(self) -> str:
        """The address of this rank's own peer; empty if it has none. `endpoint` is that of rank 0."""
        return self._peer.endpoint if self._site.owns else ""

    @property
    def metrics_endpoint(self) -> str:
        """The address of this rank's /metrics, /healthz and /readyz; empty without `metrics_listen`."""
        return self._peer.metrics_endpoint if self._site.owns else ""

    @property
    def peers(self) -> frozenset[str]:
        """The endpoints of the known peers of the run, including this one. Each site has one here."""
        if self._site.size > 1:
            return self._leader.last.peers
        return self._thread.run(on_loop(lambda: self._peer.peers))

    def wait_for_peers(self, count: int, timeout: float, *, required: bool = False) -> bool:
        """Waits until `count` peers train in the run, this one included, or `timeout` seconds are over.

        Peers count once they have the same origin. If several peers started the run at the same moment, all but one of
        them take over its parameters here, or at their first step. Returns whether they are there.

        Raises:
            WaitTimeoutError: They are not there in time, and `required` is set.
            ClosedError: The averager was closed, or its thread has failed.
        """
        self._thread.check()
        is_there = wait_for_peers(self.strategy, self._training, count, timeout)
        self._training_state.drive_scheduler()  # a state may have been taken over
        self._leader.tell_now(self._site)
        if required and not is_there:
            known = f"known are {', '.join(sorted(self.peers))}"
            advice = "Start the others, check their run id and addresses, or wait longer."
            text = f"fewer than {count} peers train in the run after {timeout:g} s; {known}. {advice}"
            raise WaitTimeoutError(text, self.peers)
        return is_there

    def finish(self, timeout: float = 60.0) -> Finish:
        """Ends the training together with the other peers, and leaves the weights to export in the model.

        It ends what is in progress and waits at most `timeout` seconds until the other peers call `finish`, too. Then
        a last round makes the peers equal. `LocalSGD` averages the parameters. `DiLoCo` makes an outer step from the
        local steps since the last round. With `GradientAveraging` the peers are equal already; a peer that has missed a
        step catches up. In the end all peers compare their weights. With a schedule-free optimizer these are the
        evaluation weights.

        Call it after the last step, before the averager is closed. The other peers no longer wait for this one.

        Returns:
            Whether all peers have the same weights (`alike`), and if not, why (`str`).

        Raises:
            ClosedError: The averager was closed, or its thread has failed.
        """
        end = RunEnd(self._training, self.strategy, timeout)
        if self._has_left():
            return Finish(self._training.parts.averaged(), {}, left=True)
        self._thread.check()
        finish = end.finish()
        self._leader.tell_now(self._site)
        self._tell_services()
        return finish

    @property
    def status(self) -> TrainingStatus:
        """The progress of this peer and its run; at all ranks of a site what its rank 0 knew in the last step."""
        peers = self.peers
        return TrainingStatus(
            local_step=self.local_step,
            global_step=self.strategy.global_step,
            samples=self.strategy.samples,
            peers=peers,
            alone=len(peers) == 1,
            last_receipt=self.last_receipt,
            peer=self._leader.last.status or self._thread.run(on_loop(lambda: self._peer.status)),
        )

    def _progress(self) -> TrainingProgress:
        """Called in the peer's thread, so it reads only what the training thread replaces as a whole."""
        training, strategy = self._training, self.strategy
        steps_per_second, samples_per_second = training.pace.steps.per_second(training.monotonic())
        return TrainingProgress(
            strategy=type(strategy).__name__,
            stage=strategy.stage.name.lower(),
            local_step=training.local_step,
            global_step=strategy.global_step,
            gathered=strategy.samples,
            ranks=self._site.size,
            steps=training.pace.steps.steps,
            samples=training.pace.steps.samples,
            steps_per_second=steps_per_second,
            samples_per_second=samples_per_second,
            sync_every=strategy.sync_text,
            quorum=str(strategy.quorum.quorum) if strategy.quorum else "",
            grace=strategy.quorum.grace if strategy.quorum else None,
            max_grace=strategy.quorum.bound if strategy.quorum else None,
            weight_unit=training.weights.unit,
            missed=strategy.missed,
        )

    @property
    def global_step(self) -> int | None:
        """Number of global steps of the run; None with a strategy that has none, such as `LocalSGD`."""
        return self.strategy.global_step

    @property
    def model_version(self) -> int:
        """Version of the state that newcomers get from this peer. It grows with every round."""
        return self._leader.last.version if self._site.size > 1 else self._peer.version

    @cached_property
    def data_records(self) -> DataRecords | None:
        """What the peers announce of the samples that they train, for `averaging.data`; at rank 0 of a site only."""
        return DataRecords(self._peer, self._thread) if self._site.leads else None

    @property
    def site(self) -> Site:
        """The processes that train this copy of the model together."""
        return self._site

    def average_now(self, *, weight: float | None = None, gather: Any = None) -> Receipt:
        """Averages the parameters with a group now, with any strategy, and waits for the end of the round.

        A round of the strategy that is in progress ends first. Do not use it with `GradientAveraging` and a lossy
        `compression` of the averager: a peer that does not take part would differ from the others from then on.

        Args:
            weight: This peer's weight in this round; the attribute `weight` if None.
            gather: Sent to all members of the group, see `Peer.average`.

        Returns:
            The receipt, also if no group was found within `round_timeout` or the round failed; training can go on.

        Raises:
            ConfigError: `weight` or `gather` is invalid, or the strategy does not allow it, as `LoRAAveraging`.
            TensorError: A tensor contains NaN or infinity, or was moved.
            RoundError: It was called in `on_round`.
        """
        self._thread.check()
        if self._in_on_round:
            raise RoundError("average_now() was called in on_round, before that round was over; call it after the step")
        if self.strategy.against_average_now:
            raise ConfigError(self.strategy.against_average_now)
        size, seconds = self._config.group_size, self._config.round_timeout
        options: RoundOptions = {"gather": gather, "start_size": size, "search_timeout": seconds}
        if weight is not None:
            options["weight"] = weight
        with self._training.pace.measured(), self._training.modes.weights(training=True):
            self.strategy.finish(self._training)
            receipt = self._training.average(**options)
        self._tell_services()
        return receipt

    def close(self) -> None:
        """Ends a round in progress, leaves the run and ends the thread. The inner optimizer stays usable."""
        note_closed(self)
        if hasattr(self, "_thread"):  # else the constructor has failed earlier
            self._thread.close()
            for close in filter(None, (getattr(service, "close", None) for service in self._state_services)):
                try:
                    close()
                except AveragingError as error:
                    logger.error("%s", error)
        self._site.close()

    def begin_to_leave(self) -> None:
        """Called on a signal of `leave_on`, and if the peer's owner has asked for it."""
        self._left = True
        self._thread.begin_to_close()

    def leave(self) -> None:
        """Called on a signal of `leave_on` after `begin_to_leave`."""
        self._thread.close()
        logger.warning("the averager of run %r has left", self._peer.run_id)

    def _leave_as_asked(self) -> None:
        """Called in the event loop, when the peer's owner has asked it to leave and its last round is over."""
        if hasattr(self, "_thread"):
            self.begin_to_leave()
        else:  # it has just started
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._leave_as_asked)

    def _has_left(self) -> bool:
        return self._leader.last.left if self._site.size > 1 else self._left

    def _has_just_left(self) -> bool:
        """Whether the peer has left in a step that has failed with a ClosedError, as it did at all ranks of a site."""
        if self._site.size > 1:
            self._leader.tell_now(self._site)
        return self._has_left()

    def _leader_status(self) -> LeaderStatus:
        thread, peer = self._thread, self._peer
        try:
            peers, status, version = thread.run(on_loop(lambda: (peer.peers, peer.status, peer.version)))
        except ClosedError:
            return replace(self._leader.last, left=self._left)
        return LeaderStatus(peers, status, version, self._left)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self._has_left():
                with self._training.modes.weights(training=True):
                    self.strategy.finish(self._training)
        except AveragingError as failure:
            logger.warning("the last round of %r failed: %s", self.strategy, failure)
        finally:
            self.close()

    def _note(self, receipt: Receipt) -> None:
        self.last_receipt = receipt
        if self._on_round is not None:
            self._in_on_round = True
            try:
                self._on_round(receipt)
            finally:
                self._in_on_round = False

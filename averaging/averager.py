"""`DecentralizedAverager`: an optimizer whose model is averaged with the other peers of a run while it trains."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeGuard, TypeVar, Unpack, overload

import torch

from averaging.background import EventLoopThread
from averaging.config import PeerOptions, check_weight
from averaging.errors import ConfigError, StateError, TensorError
from averaging.group import Mode
from averaging.observe.receipts import Receipt
from averaging.observe.status import PeerStatus
from averaging.optimizer_state import load_optimizer, pack_optimizer, set_initial_lr
from averaging.optimizer_wrapper import OptimizerWrapper
from averaging.peer import DiscoveryFactory, Peer
from averaging.snapshots import Extras
from averaging.state import State
from averaging.strategies.base import Strategy
from averaging.transport.base import Transport

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONOR_PATIENCE = 1.0
"""Seconds a newcomer waits for somebody to offer a state: a peer that starts a run offers its own a moment later."""


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
    others begin with its parameters. A newcomer downloads the parameters, the optimizer's state and the step counter of
    the peer that has averaged most, before the constructor returns; the hyperparameters, such as the learning rate,
    stay its own. It finds `initial_lr` in its groups then, so that a scheduler goes on where the run is:
    `LambdaLR(opt, schedule, last_epoch=opt.local_step - 1)`. A checkpoint that is loaded before yields to the run's
    state; one that is loaded afterwards replaces it at this peer. Models are moved to their device before.

    To the rest of torch it is the inner optimizer: `param_groups`, `state` and `defaults` are the inner one's. Step
    hooks registered here enclose the averaging, those of the inner optimizer do not.

    Args:
        optimizer: the inner optimizer. It may have been made from `model.named_parameters()`, then errors name them.
        run_id: peers with the same run average together.
        strategy: what is averaged, and when.
        weight: of this peer in the averages, for example its batch size; the attribute may be changed at any time.
        on_round: called in the training thread with the receipt of every round, also of those that failed.
        transport: see `Peer`.
        discovery: see `Peer`.
        options: see `PeerConfig`.

    Attributes:
        strategy: as given.
        last_receipt: of the last round, None before the first.

    Raises:
        ConfigError: an option that cannot work.
        TensorError: the optimizer has a parameter that cannot be averaged.
        ListenError: the address cannot be had.
        NoSeedAnsweredError: none of `join` answered in time.
        StateError: there are peers with a state, and none could deliver it; nothing was changed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        run_id: str,
        strategy: Strategy,
        weight: float = 1.0,
        on_round: Callable[[Receipt], object] | None = None,
        transport: Transport | None = None,
        discovery: DiscoveryFactory | None = None,
        **options: Unpack[PeerOptions],
    ) -> None:
        if options.get("mode") is Mode.AUXILIARY:
            raise ConfigError("an auxiliary peer has nothing to train; start it as a Peer or with `averaging peer`")
        super().__init__(optimizer)
        self.strategy = strategy
        self.weight = weight  # checked by the property
        self.last_receipt: Receipt | None = None
        self._on_round = on_round
        self._warned = ""
        self._local_step = 0
        self._tensors = strategy.tensors(optimizer)
        self._places = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}
        self._peer = Peer(
            self._tensors,
            run_id=run_id,
            extra_state=self._extra_state,
            transport=transport,
            discovery=discovery,
            **options,
        )
        self._thread = EventLoopThread(self._peer, f"the averager of run {run_id!r}")
        try:
            self._thread.run(_begin(self._peer, self._take_over))
        except BaseException:
            self.close()
            raise

    # As an optimizer

    def __repr__(self) -> str:
        return f"DecentralizedAverager ({self._peer!r}, {self.strategy!r}, step {self.local_step}) of {self._inner!r}"

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of the inner optimizer; then the strategy averages, if it is time, before this returns.

        A round that fails changes nothing: a warning tells why, and training goes on.

        Args:
            closure: reevaluates the model and returns the loss.

        Raises:
            TensorError: there is NaN or infinity in what is to be averaged, or it has been moved.
            ClosedError: the averager was closed, or its thread has failed.
        """
        self._thread.check()
        with self._peer.tensors():
            loss = self._inner.step() if closure is None else self._inner.step(closure)
            self._local_step += 1
        self.strategy.after_step(self)
        return loss

    def _own_state(self) -> dict[str, Any]:
        return {"local_step": self._local_step}

    def _load(self, inner: dict[str, Any], own: object) -> None:
        local_step = own.get("local_step") if isinstance(own, dict) else None
        if not _is_count(local_step):
            raise ConfigError(f"the state dict has {own!r} under {self.state_key!r}, not a step counter")
        self._thread.check()
        with self._peer.tensors():
            self._inner.load_state_dict(inner)
            self._local_step = local_step
        self._thread.run(self._peer.commit(self._peer.version))

    # As a peer

    @property
    def endpoint(self) -> str:
        """Where others reach this peer: what they `join`."""
        self._thread.check()
        return self._peer.endpoint

    @property
    def peers(self) -> frozenset[str]:
        """The endpoints of the peers of the run that are known, this one included."""
        return self._thread.run(_on_loop(lambda: self._peer.peers))

    @property
    def status(self) -> PeerStatus:
        """Who this peer is and what it is doing."""
        return self._thread.run(_on_loop(lambda: self._peer.status))

    @property
    def local_step(self) -> int:
        """Steps made, those of the state that was downloaded or loaded included."""
        return self._local_step

    @property
    def model_version(self) -> int:
        """Version of the state that newcomers get from this peer: it grows with every round."""
        return self._peer.version

    @property
    def weight(self) -> float:
        """Of this peer in the averages; finite and at least 0."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._weight = check_weight(weight)

    def average_now(self, *, weight: float | None = None, gather: Any = None) -> Receipt:
        """Averages with a group now, and waits for the end of the round.

        Args:
            weight: of this peer in this round; the attribute `weight` if None.
            gather: handed to all members of the group, see `Peer.average`.

        Returns:
            The receipt, also when no group was found or the round failed; training can go on in any case.

        Raises:
            ConfigError: a weight or a gather that cannot work.
            TensorError: there is NaN or infinity in what is to be averaged, or it has been moved.
            ClosedError: the averager was closed, or its thread has failed.
        """
        self._settle()
        weight = self.weight if weight is None else weight
        receipt = self._thread.run(self._peer.average(weight=weight, gather=gather))
        self.last_receipt = receipt
        self._warn_about(receipt)
        if self._on_round is not None:
            self._on_round(receipt)
        return receipt

    def close(self) -> None:
        """Ends a round in progress, leaves the run and ends the thread. The inner optimizer can be used on."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _settle(self) -> None:
        """Makes sure that the peer's thread sees what the training thread has computed."""
        devices = set()
        for name, tensor in self._tensors.items():
            if tensor.data_ptr() != self._places[name]:
                raise TensorError(f"{name!r} has been moved in memory; move the model first, then make the averager")
            devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def _warn_about(self, receipt: Receipt) -> None:
        """Warns of a failed round, but not again and again for the same reason."""
        reason = "" if receipt.averaged else receipt.reason
        if reason and reason != self._warned:
            logger.warning("%s; training goes on, and rounds that fail like this are not reported again", receipt)
        self._warned = reason

    # In the peer's thread

    def _extra_state(self) -> Extras:
        tensors, packed = pack_optimizer(self._inner)
        return Extras(tensors, {"local_step": self._local_step, "optimizer": packed})

    def _take_over(self, state: State) -> None:
        if state.version < 1:
            raise StateError("its state has never been averaged and belongs to no run")
        if "optimizer" not in state.user:
            logger.warning("the state has no optimizer's in it; only the parameters are taken over")
            return
        local_step = state.user.get("local_step")
        if not _is_count(local_step):
            raise StateError(f"its step counter is {local_step!r}")
        load_optimizer(self._inner, state.tensors, state.user["optimizer"])
        self._local_step = local_step
        if local_step:
            set_initial_lr(self._inner)


async def _begin(peer: Peer, take_over: Callable[[State], None]) -> None:
    """Starts the run, or downloads the state of somebody who is further."""
    if not set(peer.config.join) - {peer.endpoint}:
        await peer.commit(1)
    elif await peer.donor_appears(DONOR_PATIENCE):
        try:
            await peer.download_state(take_over)
        except StateError as error:
            raise StateError(
                f"{error}. A newcomer does not train without the run's state: check that it reaches those peers "
                "and has the same model and optimizer, then start it again"
            ) from error
    else:
        logger.warning(
            "no peer of run %r offers a state yet, so this one begins with its own parameters; if others begin at the "
            "same moment, start one of them without `join`, or call average_now() before the first step",
            peer.run_id,
        )


async def _on_loop(read: Callable[[], T]) -> T:
    return read()


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

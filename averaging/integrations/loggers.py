"""What all trainers do with an averager, and the loggers for TensorBoard and Weights & Biases.

A new number of a round goes into `round_scalars`, one of the averager's progress into `status_scalars`.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from averaging.averager import DecentralizedAverager
from averaging.errors import AveragingError, ConfigError, TensorError
from averaging.receipts import Receipt
from averaging.strategies import GradientAveraging

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger("averaging.integrations")


def missing(library: str, extra: str) -> ImportError:
    """The error to raise if `library` cannot be imported, which an `extra` of this package installs."""
    return ImportError(
        f"averaging.integrations needs {library}, which cannot be imported; "
        f"run in the checkout: python -m pip install '.[{extra}]'"
    )


def round_scalars(receipt: Receipt) -> dict[str, float]:
    """The numbers of one round: seconds, bytes, members, elements."""
    straggler = receipt.straggler
    return {
        "round/averaged": float(receipt.averaged),
        "round/seconds": receipt.seconds,
        **{f"round/seconds/{phase}": seconds for phase, seconds in receipt.phases.items()},
        "round/bytes_sent": receipt.bytes_sent,
        "round/bytes_received": receipt.bytes_received,
        "round/members": len(receipt.members),
        "round/dropped": len(receipt.dropped),
        "round/kept_local": receipt.kept_local,
        "round/straggler_seconds": 0.0 if straggler is None else straggler.seconds,
    }


def status_scalars(averager: DecentralizedAverager) -> dict[str, float]:
    """The progress of the averager and its run, unless it was closed (ClosedError)."""
    status = averager.status
    global_step = {} if status.global_step is None else {"averaging/global_step": status.global_step}
    return {
        "averaging/local_step": status.local_step,
        **global_step,
        "averaging/samples": status.samples,
        "averaging/peers": len(status.peers),
        "averaging/rounds": status.peer.rounds,
    }


class RoundLogger(ABC):
    """A callable for `on_round`, which gets each receipt. Subclasses write the numbers.

    If they cannot be written, for example to a full disk, there is one warning and the training continues.

    Args:
        on_round: called with each receipt afterwards, for example another logger.
    """

    def __init__(self, on_round: Callable[[Receipt], object] | None = None) -> None:
        self._on_round = on_round
        self._averager: DecentralizedAverager | None = None
        self._has_failed = False

    def follow(self, averager: DecentralizedAverager) -> None:
        self._averager = averager

    def __call__(self, receipt: Receipt) -> None:
        scalars = round_scalars(receipt)
        if self._averager is not None:
            try:
                scalars |= status_scalars(self._averager)
            except AveragingError:  # it left on SIGTERM during the round
                self._averager = None
        try:
            self.write(receipt, scalars)
        except Exception as error:  # of any library: a failed log must not end the training
            if not self._has_failed:
                self._has_failed = True
                logger.warning("%s cannot write round %d: %s. Training continues", self, receipt.round, error)
        if self._on_round is not None:
            self._on_round(receipt)

    @abstractmethod
    def write(self, receipt: Receipt, scalars: dict[str, float]) -> None: ...


class TensorBoardRounds(RoundLogger):
    """Writes each round to TensorBoard, under `round/…`, with the number of the round at this peer as the step.

    ```python
    rounds = TensorBoardRounds("runs/a")
    opt = DecentralizedAverager(
        optimizer, model=model, run_id="example", strategy=LocalSGD(sync_every=50), on_round=rounds
    )
    rounds.follow(opt)  # steps, samples and peers too, under `averaging/…`
    ```

    Args:
        writer: a SummaryWriter, or a folder for a new one. Each peer needs its own folder.
        on_round: called with each receipt afterwards.

    Raises:
        ImportError: `writer` is a folder, and TensorBoard is not installed.
        OSError: the folder cannot be written.
    """

    def __init__(
        self, writer: SummaryWriter | str | Path, *, on_round: Callable[[Receipt], object] | None = None
    ) -> None:
        super().__init__(on_round)
        self._writer = _open_writer(writer) if isinstance(writer, str | Path) else writer

    @property
    def writer(self) -> SummaryWriter:
        """The SummaryWriter, for your own scalars."""
        return self._writer

    def __repr__(self) -> str:
        return f"TensorBoardRounds({self._writer.log_dir!r})"

    def write(self, receipt: Receipt, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, receipt.round)
        text = f"{receipt}" if receipt.straggler is None else f"{receipt}; waited for {receipt.straggler.endpoint}"
        self._writer.add_text("round/receipt", text, receipt.round)
        self._writer.flush()


def _open_writer(folder: str | Path) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise missing("tensorboard", "tensorboard") from error
    Path(folder).mkdir(parents=True, exist_ok=True)  # with TensorFlow installed, the writer raises no OSError
    return SummaryWriter(str(folder))


class WandbRounds(RoundLogger):
    """Writes each round to a W&B run, under `round/…`, with the number of the round at this peer as the step.

    It is used as `TensorBoardRounds`: `WandbRounds(wandb.init(project="example"))`.

    A round shares a step of W&B's own counter with your calls of `run.log`. It increments the counter only if another
    round is logged before your next call. So calls with `step=` lose no data if they count calls of `opt.step`.

    Args:
        run: the value of `wandb.init()`. If None, the current run at each round is used, such as a trainer's.
        on_round: called with each receipt afterwards.

    Raises:
        ImportError: `run` is None, and W&B is not installed.
    """

    def __init__(self, run: Any = None, *, on_round: Callable[[Receipt], object] | None = None) -> None:
        super().__init__(on_round)
        self._given = run
        self._defined: Any = None  # the run whose metrics are defined
        self._open: int | None = None  # step of the last round, which may not be committed yet
        if run is None:
            _current_run()

    def __repr__(self) -> str:
        return f"WandbRounds({self._given!r})"

    def write(self, receipt: Receipt, scalars: dict[str, float]) -> None:
        run = _current_run() if self._given is None else self._given
        if run is None:
            raise ConfigError("there is no current run; call wandb.init() before the first round")
        if run is not self._defined:
            run.define_metric("round/number")
            run.define_metric("round/*", step_metric="round/number")
            run.define_metric("averaging/*", step_metric="round/number")
            self._defined, self._open = run, None
        texts = {
            "round/outcome": receipt.outcome.value,
            "round/straggler": "" if receipt.straggler is None else receipt.straggler.endpoint,
        }
        if run.step == self._open:
            run.log({}, commit=True)  # else this round would overwrite the last one
        run.log({"round/number": receipt.round, **scalars, **texts}, commit=False)
        self._open = run.step


def _current_run() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise missing("wandb", "wandb") from error
    return wandb.run


def weighs_steps(averager: DecentralizedAverager) -> bool:
    return isinstance(averager.strategy, GradientAveraging) or averager.weight == "samples"


class TrainerHooks:
    """The tasks of one trainer for one averager; the arguments are those of its callback."""

    def __init__(
        self, averager: DecentralizedAverager, *, wait_for: int, timeout: float, global_steps: int | None
    ) -> None:
        if not isinstance(averager, DecentralizedAverager):
            raise ConfigError(f"the averager must be a DecentralizedAverager, not {type(averager).__name__}")
        if type(wait_for) is not int or wait_for < 1:
            raise ConfigError(f"wait_for must be a whole number of peers, at least 1, not {wait_for!r}")
        if type(timeout) not in (int, float) or not 0 <= timeout < math.inf:
            raise ConfigError(f"timeout must be a finite number of seconds, not {timeout!r}")
        if global_steps is not None:
            if type(global_steps) is not int or global_steps < 1:
                raise ConfigError(f"global_steps must be a whole number, at least 1, not {global_steps!r}")
            if averager.global_step is None:
                raise ConfigError(
                    f"{averager.strategy!r} has no global steps; omit global_steps, so that the training ends "
                    "after the trainer's max_steps"
                )
        self._averager = averager
        self._wait_for, self._timeout, self._global_steps = wait_for, timeout, global_steps
        self._is_newcomer = averager.local_step > 0
        self.finished = False
        self.divisor: int | None = None  # what the loss of the next step is divided by: samples, or tokens
        averager.register_step_pre_hook(self._add_batch_size)

    def check(self, model: torch.nn.Module, remedy: str) -> None:
        """Checks that the averager has the parameters that the trainer's `model` trains.

        Raises:
            ConfigError: the model was moved or converted after the averager was created, the averager has parameters of
                another model, or its training has ended. The message has the `remedy`.
        """
        if self.finished:
            raise ConfigError(
                "this averager has finished its training; create a new strategy, averager and callback to train again"
            )
        trained = {id(parameter) for parameter in model.parameters()}
        if not all(id(parameter) in trained for group in self._averager.param_groups for parameter in group["params"]):
            raise ConfigError(f"the averager has parameters that are not in the trainer's model: {remedy}")
        try:
            self._averager.check_tensors()
        except TensorError as error:
            raise ConfigError(f"{error}. Here: {remedy}") from error

    def check_resumed(self) -> None:
        if self._is_newcomer:
            raise ConfigError(
                "the trainer resumes from a checkpoint, but this peer has joined a run in progress and has its state; "
                "train without the checkpoint. Resume only if the averager's local_step is 0, that is if all peers "
                "restart"
            )

    def begin(self) -> None:
        """Waits for the other peers, unless this one has joined a run in progress."""
        if self._is_newcomer or self._wait_for == 1:
            return
        if not self._averager.wait_for_peers(self._wait_for, self._timeout):
            logger.warning(
                "fewer than %d peers after %g s; the training begins without the others", self._wait_for, self._timeout
            )

    def is_over(self, max_steps: float) -> bool:
        """Whether the run has made `global_steps`, or else `max_steps` local steps; 0 or less means no limit."""
        if self._global_steps is not None:
            return (self._averager.global_step or 0) >= self._global_steps
        return 0 < max_steps <= self._averager.local_step

    def finish(self) -> None:
        """Ends the training of this peer together with the others. Further calls do nothing."""
        if self.finished:
            return
        self.finished = True
        finish = self._averager.finish(self._timeout)
        logger.log(logging.INFO if finish.alike else logging.WARNING, "the training has ended: %s", finish)

    def _add_batch_size(self, _: object, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        return (arguments, {"batch_size": self.divisor, **options}) if self.divisor else None

    def scalars(self) -> dict[str, float]:
        """The averager's status for the trainer's logs; empty after the averager was closed."""
        try:
            return status_scalars(self._averager)
        except AveragingError:
            return {}

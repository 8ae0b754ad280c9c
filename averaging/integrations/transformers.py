"""The averager in Hugging Face's Trainer."""

from __future__ import annotations

import logging
import math
from collections.abc import Sized
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from averaging import ConfigError, DecentralizedAverager
from averaging.integrations.duties import Duties
from averaging.integrations.extras import missing

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise missing("transformers", "transformers") from error

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger("averaging.integrations")

REMEDY = (
    "make the Trainer first, since it moves the model, then the averager from trainer.model.parameters(), "
    "then call attach(trainer)"
)


class AveragingCallback(TrainerCallback):
    """Trains a Trainer's model with an averager, together with the other peers of the run.

    ```python
    trainer = Trainer(model, arguments, train_dataset=data)
    optimizer = torch.optim.AdamW(trainer.model.parameters())
    with DecentralizedAverager(optimizer, run_id="example", strategy=LocalSGD(every=50)) as opt:
        AveragingCallback(opt, wait_for=2).attach(trainer)
        trainer.train()
    ```

    The training begins when the other peers are there. It ends for all peers with the same step, also for one that
    joined later. Then `opt.finish()` leaves the weights to export in the model, before the Trainer's last evaluation
    and checkpoint. GradientAveraging is told the samples behind each step. The Trainer's logs have the averager's
    status, as `averaging/local_step` and so on.

    The learning rate is that of the averager's optimizer, driven by the averager's `scheduler`. What TrainingArguments
    say about optimizer and learning rate has no effect.

    Args:
        averager: made of the parameters of the Trainer's model, after the Trainer.
        wait_for: peers, this one included, for which the training waits at its start.
        timeout: seconds to wait for them, and at the end for the other peers to finish.
        global_steps: of the run, after which the training ends, with strategies that count them; `max_steps` of the
            TrainingArguments must be large enough then. None: it ends after `max_steps` local steps of the run.
        batch_size: samples behind each step; None: as the TrainingArguments say, the last batches of an epoch, which
            may be smaller, counted as they are where the dataset has a length.

    Raises:
        ConfigError: an argument that cannot work.
    """

    def __init__(
        self,
        averager: DecentralizedAverager,
        *,
        wait_for: int = 1,
        timeout: float = 60.0,
        global_steps: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        self._duties = Duties(averager, wait_for=wait_for, timeout=timeout, global_steps=global_steps)
        self._averager = averager
        self._batch_size = batch_size
        self._trainer: Trainer | None = None

    def attach(self, trainer: Trainer) -> None:
        """Gives the averager to the Trainer as its optimizer, with a scheduler that leaves the learning rate alone.

        Args:
            trainer: one that has no optimizer, and has not trained yet.

        Raises:
            ConfigError: the Trainer cannot train with this averager.
        """
        if self._trainer is not None:
            raise ConfigError("this callback is attached to a Trainer already; make another one")
        _check(trainer)
        self._duties.check(trainer.model, REMEDY)
        trainer.optimizer = self._averager
        trainer.lr_scheduler = _Untouched(self._averager)
        # Before the callbacks that report, so that they are given the averager's status too.
        trainer.callback_handler.callbacks.insert(0, self)
        self._averager.register_step_pre_hook(self._tell_samples)
        self._trainer = trainer

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Refuses to be given to the Trainer's constructor, which would make an optimizer and a scheduler itself."""
        raise ConfigError("leave the AveragingCallback out of Trainer(callbacks=...); call attach(trainer) afterwards")

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Waits for the other peers."""
        if self._trainer is None:
            raise ConfigError("this AveragingCallback was added to a Trainer; call attach(trainer) instead")
        self._duties.check(self._trainer.model, REMEDY)
        if state.global_step > 0:
            self._duties.check_resumed()
        self._duties.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Ends the training with that of the run."""
        if self._duties.is_over(state.max_steps):
            control.should_training_stop = True
            # As the Trainer does at its own last step.
            control.should_evaluate |= args.eval_strategy == "steps"
            control.should_save |= args.save_strategy == "steps"
        if control.should_training_stop or state.global_step >= state.max_steps:
            self._duties.finish()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Finishes if another callback has stopped the training."""
        if control.should_training_stop:
            self._duties.finish()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Finishes at the latest."""
        self._duties.finish()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Adds the averager's status to what the Trainer logs of the training."""
        if logs is not None and "loss" in logs:
            status = self._duties.scalars()
            logs.update(status)
            state.log_history[-1].update(status)

    def _tell_samples(self, _: object, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        samples = self._samples() if self._batch_size is None else self._batch_size
        return arguments, {"batch_size": samples, **options}

    def _samples(self) -> int:
        """The samples behind the step that is about to be made."""
        if self._trainer is None:
            raise RuntimeError("called before attach")
        arguments, state = self._trainer.args, self._trainer.state
        data = self._trainer.callback_handler.train_dataloader
        batch_size = state.train_batch_size if arguments.auto_find_batch_size else arguments.train_batch_size
        return samples_of_step(
            state.global_step,
            batch_size,
            arguments.gradient_accumulation_steps,
            batches=_length(data),
            samples=_length(getattr(data, "dataset", None)),
        )


def samples_of_step(step: int, batch_size: int, accumulated: int, *, batches: int | None, samples: int | None) -> int:
    """The samples behind a step of the Trainer's.

    Args:
        step: its number since the beginning of the training, from 0.
        batch_size: samples of a full batch.
        accumulated: batches between two steps, fewer before the last step of an epoch.
        batches: of an epoch; None if that is not known.
        samples: of the dataset; None likewise.
    """
    if not batches:
        return batch_size * accumulated
    steps = math.ceil(batches / accumulated)
    if (step + 1) % steps:
        return batch_size * accumulated
    lacking = batches * batch_size - samples if samples is not None else 0
    if not 0 <= lacking < batch_size:  # a last batch that is left out, or a sampler that draws more or fewer
        lacking = 0
    return (batches - (steps - 1) * accumulated) * batch_size - lacking


class _Untouched(LRScheduler):
    """A scheduler for the Trainer, which makes its own otherwise: it leaves the learning rate as it is."""

    def get_lr(self) -> list[Any]:
        """The learning rate that is there."""
        return [group["lr"] for group in self.optimizer.param_groups]


def _check(trainer: Trainer) -> None:
    """Whether the Trainer can train with an averager.

    Raises:
        ConfigError: it cannot.
    """
    arguments = trainer.args
    if arguments.world_size > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ConfigError(
            f"the Trainer trains with {arguments.world_size} processes, FSDP or DeepSpeed, so each process would be a "
            "peer, or hold a part of the model; start it as one process. docs/coming-from.md has DDP inside a machine"
        )
    if trainer.model_init is not None:
        raise ConfigError("the Trainer makes its model anew with model_init when it trains; give it the model instead")
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        raise ConfigError(
            "the Trainer has an optimizer or a scheduler already; leave optimizers= out, give the scheduler to the "
            "averager (scheduler=), and attach before the Trainer has trained"
        )
    if arguments.load_best_model_at_end:
        logger.warning(
            "load_best_model_at_end replaces the weights that all peers hold at the end by a checkpoint of this peer's"
        )
    if arguments.lr_scheduler_type != "linear" or arguments.warmup_steps:
        logger.warning(
            "lr_scheduler_type and warmup_steps have no effect; give the averager a scheduler, such as "
            "scheduler=functools.partial(LinearLR, total_iters=100)"
        )


def _length(sized: object) -> int | None:
    try:
        return len(sized) if isinstance(sized, Sized) else None
    except TypeError:  # a data loader whose dataset has no length
        return None

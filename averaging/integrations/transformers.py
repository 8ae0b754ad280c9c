"""Use of the averager in Hugging Face's Trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from averaging.averager import DecentralizedAverager
from averaging.errors import ConfigError
from averaging.integrations.loggers import TrainerHooks, missing, weighs_steps

try:
    from accelerate.utils import find_batch_size
    from transformers import TrainerCallback
except ImportError as error:
    raise missing("transformers", "transformers") from error

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger("averaging.integrations")

IGNORED = -100  # the label of a position that has no part in the loss

REMEDY = (
    "create the Trainer first, because it moves the model, then the averager from trainer.model.parameters(), "
    "then call attach(trainer)"
)


class AveragingCallback(TrainerCallback):
    """Trains a Trainer's model with an averager, with the other peers of the run.

    ```python
    trainer = Trainer(model, arguments, train_dataset=data)
    optimizer = torch.optim.AdamW(trainer.model.parameters())
    strategy = LocalSGD(sync_every=50)
    with DecentralizedAverager(optimizer, model=trainer.model, run_id="example", strategy=strategy) as opt:
        AveragingCallback(opt, wait_for=2).attach(trainer)
        trainer.train()
    ```

    The training waits for the other peers. It ends at the same step for all peers, including those that joined later.
    `opt.finish()` then puts the final weights into the model, before the Trainer's last evaluation and checkpoint.
    GradientAveraging and `weight="samples"` get what the Trainer divides the loss of each step by: with a language
    model the tokens, so `target_batch_size` counts tokens. The Trainer's logs have the averager's status, as
    `averaging/local_step` and so on.

    The learning rate is that of the averager's optimizer, driven by the averager's `scheduler`. The optimizer and
    learning rate in TrainingArguments have no effect.

    Args:
        averager: created after the Trainer, from the parameters of its model.
        wait_for: number of peers, including this one, for which the training waits at its start.
        timeout: seconds to wait for them, and at the end for the other peers to finish.
        global_steps: global steps after which the training ends, if the strategy has them; `max_steps` of the
            TrainingArguments must be large enough. None: the training ends after `max_steps` local steps of the run.
        batch_size: samples per step, or a function of a batch that returns the number by which its loss is divided.
            None takes the Trainer's own count (`num_items_in_batch`); without it the number of integer labels other
            than -100, if a sample has several labels; else the samples.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self,
        averager: DecentralizedAverager,
        *,
        wait_for: int = 1,
        timeout: float = 60.0,
        global_steps: int | None = None,
        batch_size: int | Callable[[Any], int] | None = None,
    ) -> None:
        self._hooks = TrainerHooks(averager, wait_for=wait_for, timeout=timeout, global_steps=global_steps)
        self._averager = averager
        self._batch_size = batch_size
        self._trainer: Trainer | None = None

    def attach(self, trainer: Trainer) -> None:
        """Makes the averager the Trainer's optimizer, with a scheduler that does not change the learning rate.

        Args:
            trainer: a Trainer without an optimizer that has not trained yet.

        Raises:
            ConfigError: the Trainer cannot train with this averager.
        """
        if self._trainer is not None:
            raise ConfigError("this callback is attached to a Trainer already; create another one")
        _check(trainer)
        self._hooks.check(trainer.model, REMEDY)
        trainer.optimizer = self._averager
        trainer.lr_scheduler = _UnchangedLR(self._averager)
        # First, so that reporting callbacks get the averager's status.
        trainer.callback_handler.callbacks.insert(0, self)
        trainer.get_batch_samples = partial(self._get_batch_samples, trainer.get_batch_samples, trainer.args)
        self._trainer = trainer

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Refuses to be passed to the Trainer's constructor, because it needs the finished Trainer."""
        raise ConfigError("remove the AveragingCallback from Trainer(callbacks=...); call attach(trainer) afterwards")

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._trainer is None:
            raise ConfigError("this AveragingCallback was added to a Trainer; call attach(trainer) instead")
        self._hooks.check(self._trainer.model, REMEDY)
        if state.global_step > 0:
            self._hooks.check_resumed()
        self._hooks.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._hooks.is_over(state.max_steps):
            control.should_training_stop = True
            # As the Trainer does at its own last step.
            control.should_evaluate |= args.eval_strategy == "steps"
            control.should_save |= args.save_strategy == "steps"
        if control.should_training_stop or state.global_step >= state.max_steps:
            self._hooks.finish()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Finishes the training if another callback has stopped it."""
        if control.should_training_stop:
            self._hooks.finish()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._hooks.finish()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if logs is not None and "loss" in logs:
            status = self._hooks.scalars()
            logs.update(status)
            state.log_history[-1].update(status)

    def _get_batch_samples(
        self, get: Callable[..., tuple[list[Any], Any]], args: TrainingArguments, *arguments: Any, **options: Any
    ) -> tuple[list[Any], Any]:
        batches, items = get(*arguments, **options)
        if isinstance(self._batch_size, int):
            self._hooks.divisor = self._batch_size
        elif self._batch_size is not None:
            self._hooks.divisor = sum(map(self._batch_size, batches))
        else:
            # DataParallel takes the mean of its GPUs, and only this option's count is that of all of them.
            parts = 1 if args.average_tokens_across_devices else max(1, args.n_gpu)
            counted = divisor_of(batches, items, parts) if weighs_steps(self._averager) else None
            if counted is None:
                counted = sum(find_batch_size(batch) or 0 for batch in batches)
            self._hooks.divisor = counted
        return batches, items


def divisor_of(batches: Sequence[Any], items: torch.Tensor | int | None, parts: int = 1) -> int | None:
    """What the loss of a step of the Trainer is divided by; None if that is the number of samples.

    `items` is the Trainer's `num_items_in_batch`, with several GPUs the same for each; of `parts` equal parts of the
    step it counts one.
    """
    if items is not None:
        return int(torch.as_tensor(items).flatten()[0]) * parts
    # The model takes the mean itself: over the labels, if they are classes and a sample has several.
    count = 0
    for batch in batches:
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, torch.Tensor) or labels.ndim < 2 or labels.is_floating_point():
            return None
        count += int(labels.ne(IGNORED).sum())
    return count


class _UnchangedLR(LRScheduler):
    """A scheduler that does not change the learning rate. Without one the Trainer would create its own."""

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


def _check(trainer: Trainer) -> None:
    arguments = trainer.args
    if arguments.world_size > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ConfigError(
            f"the Trainer trains with {arguments.world_size} processes, FSDP or DeepSpeed, so each process would be a "
            "peer, or hold a part of the model; start it as one process. docs/how-to/gpus.md describes DDP inside a "
            "machine"
        )
    if trainer.model_init is not None:
        raise ConfigError("the Trainer creates a new model with model_init when it trains; pass the model instead")
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        raise ConfigError(
            "the Trainer has an optimizer or a scheduler already; remove optimizers=, pass the scheduler to the "
            "averager (scheduler=), and attach before the Trainer has trained"
        )
    if arguments.load_best_model_at_end:
        logger.warning(
            "load_best_model_at_end replaces the weights that all peers hold at the end by a checkpoint of this peer"
        )
    if arguments.lr_scheduler_type != "linear" or arguments.warmup_steps:
        logger.warning(
            "lr_scheduler_type and warmup_steps have no effect; pass a scheduler to the averager, such as "
            "scheduler=functools.partial(LinearLR, total_iters=100)"
        )

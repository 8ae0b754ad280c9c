"""Use of the averager in a training loop with accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from averaging.averager import DecentralizedAverager
from averaging.errors import ConfigError, TensorError
from averaging.integrations.loggers import weighs_steps

if TYPE_CHECKING:
    from accelerate import Accelerator


class AveragingLoop:
    """Prepares an averager for a loop with accelerate, and passes it the number of samples of each step.

    ```python
    model, data = accelerator.prepare(model, data)
    adamw = torch.optim.AdamW(model.parameters())
    opt = DecentralizedAverager(adamw, model=model, run_id="example", strategy=LocalSGD(sync_every=50))
    with opt:
        loop = AveragingLoop(accelerator, opt)
        for x, y in data:
            with loop.accumulate(model, samples=len(x)):
                accelerator.backward(loss(model(x), y))
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    ```

    Args:
        accelerator: an Accelerator with one process.
        averager: created from the parameters of the prepared model.

    Attributes:
        optimizer: the averager as returned by `accelerator.prepare`.

    Raises:
        ConfigError: there are several processes, or the averager was created before the model was prepared.
    """

    def __init__(self, accelerator: Accelerator, averager: DecentralizedAverager) -> None:
        if not isinstance(averager, DecentralizedAverager):
            raise ConfigError(f"the averager must be a DecentralizedAverager, not {type(averager).__name__}")
        if accelerator.num_processes > 1 or accelerator.distributed_type.value in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
            raise ConfigError(
                f"accelerate trains with {accelerator.num_processes} processes ({accelerator.distributed_type.value}), "
                "each of which would be a peer, or hold a part of the model; start it with --num_processes 1 and "
                "without FSDP and DeepSpeed. docs/how-to/gpus.md describes DDP inside a machine"
            )
        remedy = "call accelerator.prepare(model) first, then create the averager, then the AveragingLoop"
        for group in averager.param_groups:
            for parameter in group["params"]:
                if parameter.device.type != accelerator.device.type:
                    raise ConfigError(
                        f"the averager's parameters are on {parameter.device}, and accelerate trains on "
                        f"{accelerator.device}: {remedy}"
                    )
        try:
            averager.check_tensors()
        except TensorError as error:
            raise ConfigError(f"{error}. Here: {remedy}") from error
        self._accelerator = accelerator
        self._averager = averager
        self._samples = 0
        self._is_complete = False  # whether the counted samples belong to a finished step
        averager.register_step_pre_hook(self._add_batch_size)
        self.optimizer: torch.optim.Optimizer = accelerator.prepare(averager)

    @contextmanager
    def accumulate(self, model: torch.nn.Module, samples: int = 0) -> Iterator[None]:
        """Like `accelerator.accumulate(model)`, and counts the samples of the batch.

        Args:
            model: the prepared model.
            samples: number by which the loss of this batch is divided, for GradientAveraging and `weight="samples"`: of
                samples, or of tokens with a language model.
        """
        with self._accelerator.accumulate(model):
            if self._is_complete:
                self._samples = 0
            self._samples += samples
            self._is_complete = self._accelerator.sync_gradients
            yield

    def _add_batch_size(self, _: object, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not weighs_steps(self._averager) or "batch_size" in options:
            return None
        if self._samples < 1:
            raise ConfigError(
                "each step is weighed by its samples, and this step has none: train each batch in "
                "`with loop.accumulate(model, samples=len(batch)):`"
            )
        return arguments, {**options, "batch_size": self._samples}

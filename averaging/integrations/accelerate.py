"""The averager in a training loop with accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from averaging import ConfigError, DecentralizedAverager, GradientAveraging, TensorError

if TYPE_CHECKING:
    from accelerate import Accelerator


class AveragingLoop:
    """Prepares an averager for a loop with accelerate, and tells it the samples behind each step.

    ```python
    model, data = accelerator.prepare(model, data)
    opt = DecentralizedAverager(torch.optim.AdamW(model.parameters()), run_id="example", strategy=LocalSGD(every=50))
    with opt:
        loop = AveragingLoop(accelerator, opt)
        for x, y in data:
            with loop.accumulate(model, samples=len(x)):
                accelerator.backward(loss(model(x), y))
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    ```

    Args:
        accelerator: of one process.
        averager: made of the parameters of the prepared model.

    Attributes:
        optimizer: the averager as `accelerator.prepare` returned it.

    Raises:
        ConfigError: several processes, or the model was not prepared before the averager was made.
    """

    def __init__(self, accelerator: Accelerator, averager: DecentralizedAverager) -> None:
        if not isinstance(averager, DecentralizedAverager):
            raise ConfigError(f"the averager must be a DecentralizedAverager, not {type(averager).__name__}")
        if accelerator.num_processes > 1 or accelerator.distributed_type.value in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
            raise ConfigError(
                f"accelerate trains with {accelerator.num_processes} processes ({accelerator.distributed_type.value}), "
                "each of which would be a peer, or hold a part of the model; start it with --num_processes 1 and "
                "without FSDP and DeepSpeed. docs/coming-from.md has DDP inside a machine"
            )
        remedy = "call accelerator.prepare(model) first, then make the averager, then the AveragingLoop"
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
        self._counts_samples = isinstance(averager.strategy, GradientAveraging)
        self._samples = 0
        self._is_complete = False  # the samples counted so far are those of a step that is over
        averager.register_step_pre_hook(self._tell_samples)
        self.optimizer: torch.optim.Optimizer = accelerator.prepare(averager)

    @contextmanager
    def accumulate(self, model: torch.nn.Module, samples: int = 0) -> Iterator[None]:
        """What `accelerator.accumulate(model)` is; counts the samples of the batch besides.

        Args:
            model: the prepared one.
            samples: in this batch, for GradientAveraging.
        """
        with self._accelerator.accumulate(model):
            if self._is_complete:
                self._samples = 0
            self._samples += samples
            self._is_complete = self._accelerator.sync_gradients
            yield

    def _tell_samples(self, _: object, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not self._counts_samples or "batch_size" in options:
            return None
        if self._samples < 1:
            raise ConfigError(
                "GradientAveraging counts samples, and this step was told none: train each batch in "
                "`with loop.accumulate(model, samples=len(batch)):`"
            )
        return arguments, {**options, "batch_size": self._samples}

"""Gradients of one large batch, gathered by all peers together."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from averaging.common.shared_tensors import all_finite, digest_of_piece
from averaging.errors import ConfigError, TensorError
from averaging.observe.receipts import Receipt
from averaging.peer.topics import Adopt
from averaging.protocol.messages import CompressionType
from averaging.strategies.base import needs_closure
from averaging.strategies.lockstep import LockstepStrategy
from averaging.training.history import Others
from averaging.training.tensor_math import clip, full_precision
from averaging.training.training import Training

WAITED_BATCHES = 2.0
"""How long a peer waits for the batches of others that complete the joined one, in times of its own last batch."""


class GradientAveraging(LockstepStrategy):
    """Peers of different speeds gather gradients until they have a batch together, average them, and step.

    Each `opt.step(batch_size=n)` adds the gradients of n samples (the loss is their mean) to this peer's. As soon as
    all peers together have `target_batch_size` samples, the gradients are averaged, weighted by samples, and every peer
    makes the same step of its optimizer: the step of one process with the joined batch, as long as one group takes all
    peers in (`group_size`). Until then the parameters stay as they are (Diskin et al., 2021, arXiv:2106.10207). A peer
    whose next batch would be one too many, since those that others compute complete the joined one, waits for them.

    A peer that is alone steps when it has the batch itself. If a round fails, the gradients stay and it is tried again
    at the next `opt.step`. A peer that comes too late for a step takes over the state of another one; the gradients it
    has gathered meanwhile belong to old parameters and are dropped.

    Args:
        target_batch_size: samples of one global step, of all peers together.
        compression: see `Strategy`.
        error_feedback: see `Strategy`.
        max_norm: of this peer's mean gradient, before it is averaged.

    Raises:
        ConfigError: an argument that cannot work.
    """

    def __init__(
        self,
        target_batch_size: int,
        *,
        compression: CompressionType | str | None = None,
        error_feedback: bool = False,
        max_norm: float | None = None,
    ) -> None:
        super().__init__(compression=compression, error_feedback=error_feedback, max_norm=max_norm)
        if type(target_batch_size) is not int or target_batch_size < 1:
            raise ConfigError(f"target_batch_size must be a whole number, at least 1, not {target_batch_size!r}")
        self.target_batch_size = target_batch_size
        self._gathered = 0
        self._returned = math.inf  # when the last step was over, and the present batch was begun

    def __repr__(self) -> str:
        return f"GradientAveraging(target_batch_size={self.target_batch_size}{self._options()})"

    @property
    def samples(self) -> float:
        """Samples this peer has gathered for the next global step."""
        return self._gathered

    def schedule(self, training: Training) -> int:
        """The learning rate follows the global steps."""
        return self.history.step

    def start(self, training: Training) -> None:
        """Makes the mean gradients, which are averaged, and, if there are buffers, averages those along.

        Raises:
            ConfigError: the optimizer steps only with a closure, so the gradients are not there before its step.
        """
        if needs_closure(training.optimizer):
            raise ConfigError(
                f"{type(training.optimizer).__name__} evaluates the model during its step, so its gradients cannot be "
                "gathered before; train with LocalSGD or DiLoCo"
            )
        # The running mean over all samples so far, so that nothing is rescaled before or after a round.
        self._means = {
            name: torch.zeros_like(parameter, dtype=full_precision(parameter), requires_grad=False)
            for name, parameter in training.parameters.items()
        }
        self._present = dict.fromkeys(self._means, False)
        self._topic = training.topic(
            "gradients",
            self._means | training.buffers,
            adopt=Adopt.WHOLE,
            compression=self.compression,
            error_feedback=self.error_feedback,
        )

    def step(
        self, training: Training, closure: Callable[[], float] | None = None, batch_size: int | None = None
    ) -> float | None:
        """Adds the gradients, and makes a global step if there are samples enough."""
        if type(batch_size) is not int or batch_size < 1:
            raise ConfigError(
                f"GradientAveraging counts samples: call opt.step(batch_size=n), not {batch_size!r}; in a trainer that "
                "calls it, use the class of averaging.integrations for it"
            )
        loss = training.evaluate(closure)
        self._gather(training, batch_size)
        training.count_local_step(batch_size)
        others = self.others(training, training.told())
        if self._is_worth_waiting(others):
            others = self._wait_for_the_rest(training)
        if not self.keep_up(training, others) and self._is_complete(others):
            self.announce(training)
            self._global_step(training, others.together)
        self.announce(training, coming=batch_size)
        self._returned = training.now()
        return loss

    def _is_complete(self, others: Others) -> bool:
        return self._gathered + others.samples >= self.target_batch_size

    def _is_worth_waiting(self, others: Others) -> bool:
        """Whether the batches that others compute now complete the joined one, so that one more would be too many."""
        coming = self._gathered + others.samples + others.coming
        return not self._is_complete(others) and coming >= self.target_batch_size

    def _wait_for_the_rest(self, training: Training) -> Others:
        """Waits while that is so, but not much longer than a batch of this peer's takes."""
        self.announce(training)
        patience = max(0.0, min(WAITED_BATCHES * (training.now() - self._returned), training.matchmaking_time))
        told = training.told_until(lambda told: not self._is_worth_waiting(self.others(training, told)), patience)
        return self.others(training, told)

    def _gather(self, training: Training, samples: int) -> None:
        for name, parameter in training.parameters.items():
            if parameter.grad is not None:
                _check_gradient(name, parameter.grad, training.allows_non_finite)
        total = self._gathered + samples
        with torch.no_grad():
            for name, parameter in training.parameters.items():
                mean = self._means[name]
                if parameter.grad is None:
                    mean.mul_(self._gathered / total)
                else:
                    self._present[name] = True
                    mean.lerp_(parameter.grad.to(mean.dtype), samples / total)
        self._gathered = total

    def _forget_gradients(self) -> None:
        self._gathered = 0
        for name, mean in self._means.items():
            mean.zero_()
            self._present[name] = False

    def _global_step(self, training: Training, together: tuple[str, ...]) -> None:
        scale = None if self.max_norm is None else clip(self._means.values(), self.max_norm)
        lacking = {number for number, here in enumerate(self._present.values()) if not here}
        receipt: Receipt | None = None
        if together:
            try:
                receipt = training.average(
                    self._topic,
                    phase=self.history.phase,
                    weight=self._gathered,
                    gather={"samples": self._gathered, "lacking": _bitmap(lacking, len(self._present))},
                    awaited=self._level(training, together),
                    state=digest_of_piece(list(training.parameters.values()), self.history.step),
                )
            finally:  # also after a KeyboardInterrupt
                if receipt is None or not receipt.averaged:
                    self._unclip(scale)
            if not receipt.averaged:
                return
            for member in receipt.members:
                lacking &= _numbers(receipt.gathered[member], "lacking")
        for number, (name, parameter) in enumerate(training.parameters.items()):
            # As in one process, the optimizer passes over a parameter for which nobody has a gradient.
            parameter.grad = None if number in lacking else self._means[name].to(_gradient_dtype(parameter), copy=True)
        with training.replacing():
            training.optimizer.step()
            self._advance(training, receipt, self._gathered)
            self._forget_gradients()

    def _unclip(self, scale: torch.Tensor | None) -> None:
        """The batch goes on, and it is the mean of all of it that is clipped."""
        if scale is not None and scale > 0:
            for mean in self._means.values():
                mean.div_(scale.to(mean.device, mean.dtype))

    def step_alone(self, training: Training, closure: Callable[[], float] | None) -> float | None:
        """Changes nothing: a batch of this peer alone is not what its optimizer is tuned for."""
        training.count_local_step()
        return training.evaluate(closure)

    def conclude(self, training: Training, partners: Collection[str], patience: float) -> Receipt | None:
        """The parameters of all are equal; averages the buffers, which batches since the last step have changed."""
        if not training.buffers:
            return None
        topic = training.topic("buffers", training.buffers, adopt=Adopt.WHOLE)
        return self._average_at_the_end(training, topic, patience)

    def load(self, tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> None:
        """Drops what has been gathered, which is of other parameters."""
        super().load(tensors, user)
        self._forget_gradients()


def _check_gradient(name: str, gradient: torch.Tensor, allows_non_finite: bool) -> None:
    if gradient.layout is not torch.strided:
        raise TensorError(
            f"the gradient of {name!r} is {gradient.layout}; make it dense, for example with "
            "Embedding(..., sparse=False), or train with LocalSGD"
        )
    if not allows_non_finite and not all_finite(gradient):
        raise TensorError(
            f"the gradient of {name!r} holds NaN or infinity, so this batch is not counted; leave it out, use a "
            "GradScaler if it comes from float16, or allow it with non_finite='allow'"
        )


def _gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of its gradients. Newer torch lets a parameter have another one for them, and takes only that then."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if dtype is None else dtype


def _bitmap(numbers: Collection[int], count: int) -> bytes:
    """Which of so many numbers are there, one bit each: of a large model a list would be too long for a gather."""
    bits = bytearray(-(-count // 8))
    for number in numbers:
        bits[number // 8] |= 1 << number % 8
    return bytes(bits)


def _numbers(user: Any, key: str) -> set[int]:
    """The numbers that a member has told its group as a bitmap under `key`; none if it told something else."""
    told = user.get(key) if isinstance(user, dict) else None
    if not isinstance(told, bytes):
        return set()
    return {8 * place + bit for place, byte in enumerate(told) for bit in range(8) if byte >> bit & 1}

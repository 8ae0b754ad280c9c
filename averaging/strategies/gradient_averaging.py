"""Gradient averaging: all peers gather the gradients of one large batch together."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from averaging.config import NonFinite
from averaging.errors import ConfigError, TensorError
from averaging.peer import Adopt, RoundOptions
from averaging.protocol import CompressionType, Statement
from averaging.receipts import Receipt
from averaging.strategies.base import average_at_the_end, common_options
from averaging.strategies.lockstep import LockstepStrategy
from averaging.tensors import first_not_finite
from averaging.training import (
    Others,
    StrategyContext,
    full_precision,
    needs_closure,
    read_progress,
)

WAITED_BATCHES = 2.0
"""How long a peer waits until other peers complete the joint batch, in multiples of its own last batch time."""


class GradientAveraging(LockstepStrategy):
    """Peers of different speeds gather the gradients of one large batch, average them, and make the same step.

    Each `opt.step(batch_size=n)` adds the gradients of n samples (the loss is their mean) to this peer's own. Once all
    peers together have `target_batch_size` samples, the gradients are averaged, weighted by samples, and every peer
    steps its optimizer with the average. If one group has room for all peers (`group_size`), that equals the step of
    one process with the joint batch. Until then the parameters do not change (Diskin et al., 2021, arXiv:2106.10207).
    A peer waits instead of computing another batch if the batches in progress elsewhere complete the joint one.

    A peer that is alone steps when it has the whole batch itself; while others wait for it in `finish`, it goes on
    gathering, see `LockstepStrategy`. If a round fails, the gradients stay and the next `opt.step` tries again. A peer
    that misses a global step takes over the state of another peer; it drops the gradients gathered meanwhile, because
    they belong to old parameters. If it is behind again after the download, the others put off their next step and
    gather on until it is level, for 300 s and the time of eight copies of the model at 10 Mbit/s at most.

    Args:
        target_batch_size: samples of one global step, of all peers together; tokens if the steps count tokens.
        compression: see `Strategy`.
        error_feedback: see `Strategy`.
        max_norm: limit for this peer's mean gradient, before it is averaged.

    Raises:
        ConfigError: an argument is invalid.
    """

    scheduled_globally = True

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
        self._batch_began = math.inf  # when the last step returned

    def __repr__(self) -> str:
        return f"GradientAveraging(target_batch_size={self.target_batch_size}{common_options(self)})"

    @property
    def samples(self) -> float:
        return self._gathered

    def terms(self, training: StrategyContext) -> Mapping[str, str]:
        return {"target_batch_size": str(self.target_batch_size)}

    def start(self, training: StrategyContext) -> None:
        if needs_closure(training.optimizer):
            raise ConfigError(
                f"{type(training.optimizer).__name__} evaluates the model during its step, so its gradients cannot be "
                "gathered before it; use LocalSGD or DiLoCo"
            )
        # A running mean, so that nothing has to be rescaled before or after a round.
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
        self, training: StrategyContext, closure: Callable[[], float] | None = None, batch_size: int | None = None
    ) -> float | None:
        if type(batch_size) is not int or batch_size < 1:
            raise ConfigError(
                f"GradientAveraging counts samples: call opt.step(batch_size=n), not {batch_size!r}; in a trainer that "
                "calls step() itself, use its class from averaging.integrations"
            )
        loss = training.evaluate(closure)
        gradients = {name: training.gradient(name) for name in self._means}

        def checked() -> int:
            here = {name: gradient for name, gradient in gradients.items() if gradient is not None}
            _check_gradients(here, training.peer.config.non_finite is NonFinite.ALLOW)
            return batch_size

        # In a site the step has the samples of all ranks, and fails at all of them if a gradient is unfit at one.
        samples = sum(training.site.all_gather(checked))
        self._gather(gradients, samples)
        training.count_local_step(samples)
        training.site.broadcast_from_leader(
            lambda: self.check_terms(training, training.announcements.at_leader(wait=False))
        )
        others = self.present_others(training)
        if self._is_worth_waiting(others):
            others = self._wait_for_the_rest(training)
        is_level = not self.catch_up(training, others)
        if is_level and self._is_complete(others) and not self._ends_with_others(training, others.together):
            self.announce(training)
            if not training.site.broadcast_from_leader(lambda: self._holds(training, self._topic)):
                self._global_step(training, others.together)
            self._tell_standstill(training, self.history.step)
        self.announce(training, computing=samples)
        self._batch_began = training.now()
        return loss

    def _cycle(self, training: StrategyContext) -> tuple[int, float]:
        progress = read_progress(training.announcements.at_leader(wait=False)).values()
        samples = sum(rate for rate in (training.pace.per_second, *(peer.rate for peer in progress)) if rate)
        return 1, self.target_batch_size / samples if samples else math.inf

    def _is_complete(self, others: Others) -> bool:
        return self._gathered + others.samples >= self.target_batch_size

    def _is_worth_waiting(self, others: Others) -> bool:
        """Whether the batches that other peers compute now complete the joint batch."""
        expected = self._gathered + others.samples + others.computing
        return not self._is_complete(others) and expected >= self.target_batch_size

    def _wait_for_the_rest(self, training: StrategyContext) -> Others:
        """Waits until other peers have completed the joint batch, or can no longer; bounded by this peer's speed."""
        self.announce(training)
        timeout = max(0.0, min(WAITED_BATCHES * (training.now() - self._batch_began), training.peer.config.group_wait))
        seen = training.announcements.wait_for(
            lambda seen: not self._is_worth_waiting(self.others(training, seen)), timeout
        )
        return training.site.broadcast_from_leader(lambda: self.others(training, seen))

    def _gather(self, gradients: Mapping[str, torch.Tensor | None], samples: int) -> None:
        total = self._gathered + samples
        with torch.no_grad():
            for name, gradient in gradients.items():
                mean = self._means[name]
                if gradient is None:
                    mean.mul_(self._gathered / total)
                else:
                    self._present[name] = True
                    mean.lerp_(gradient.to(mean.dtype), samples / total)
        self._gathered = total

    def _drop_gradients(self) -> None:
        self._gathered = 0
        for name, mean in self._means.items():
            mean.zero_()
            self._present[name] = False

    def _global_step(
        self, training: StrategyContext, together: tuple[str, ...], search_timeout: float | None = None
    ) -> None:
        scale = None if self.max_norm is None else training.clip(self._means.values(), self.max_norm)
        lacking = {number for number, here in enumerate(self._present.values()) if not here}
        receipt: Receipt | None = None
        if together:
            step, bits = self.history.step, _bitmap(lacking, len(self._present))
            try:
                options: RoundOptions = {
                    "phase": self.history.phase,
                    "weight": self._gathered,
                    "gather": Statement(samples=self._gathered, lacking=bits).pack(),
                    "expected_peers": self._expected_peers(training, together),
                    "drift": training.fingerprint(training.parameters, self.history.phase, step, step=step),
                }
                if search_timeout is not None:
                    options["search_timeout"] = search_timeout
                receipt = training.average(self._topic, **options)
            finally:  # also after a KeyboardInterrupt
                if receipt is None or not receipt.averaged:
                    self._unclip(scale)
            if not receipt.averaged:
                self._standstill.reason = f"its last round failed: {receipt.reason}"
                return
            for member in receipt.members:
                lacking &= _numbers(Statement.read(receipt.gathered[member]).lacking)
        for number, (name, mean) in enumerate(self._means.items()):
            # Like in one process, the optimizer skips a parameter for which no peer has a gradient.
            training.set_gradient(name, None if number in lacking else mean)
        with training.replacing():
            training.optimizer_step()
            self._advance(training, receipt, self._gathered)
            self._drop_gradients()

    def _unclip(self, scale: torch.Tensor | None) -> None:
        """Undoes `clip` after a failed round, because the mean of the whole batch is clipped later."""
        if scale is not None and scale > 0:
            for mean in self._means.values():
                mean.div_(scale.to(mean.device, mean.dtype))

    def step_alone(self, training: StrategyContext, closure: Callable[[], float] | None) -> float | None:
        """Makes no step: the optimizer is not tuned for a batch of this peer alone."""
        training.count_local_step()
        return training.evaluate(closure)

    def conclude(self, training: StrategyContext, partners: Collection[str], timeout: float) -> Receipt | None:
        """Makes the step that was left to the end, if there is one, and averages the buffers, which may differ."""
        others, end = self.present_others(training), training.monotonic() + timeout
        if others.together and self._is_complete(others):
            self._global_step(training, others.together, timeout)
        self.dropped = self._gathered
        if not training.buffers and not training.reports.counters:
            return None
        topic = training.topic("buffers", training.buffers or {"nothing": torch.zeros(1)}, adopt=Adopt.WHOLE)
        return average_at_the_end(training, topic, end - training.monotonic())

    def load(self, tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> None:
        super().load(tensors, user)
        self._drop_gradients()


def _check_gradients(gradients: Mapping[str, torch.Tensor], allows_non_finite: bool) -> None:
    for name, gradient in gradients.items():
        if gradient.layout is not torch.strided:
            raise TensorError(
                f"the gradient of {name!r} is {gradient.layout}; make it dense, for example with "
                "Embedding(..., sparse=False), or use LocalSGD"
            )
    number = None if allows_non_finite else first_not_finite(list(gradients.values()))
    if number is not None:
        raise TensorError(
            f"the gradient of {list(gradients)[number]!r} holds NaN or infinity, so this batch is not counted; skip "
            "the batch, use a GradScaler for float16, or allow such values with non_finite='allow'"
        )


def _bitmap(numbers: Collection[int], count: int) -> bytes:
    """Packs a set of numbers below `count` with one bit each, since `gather` is too small for a list of them."""
    bits = bytearray(-(-count // 8))
    for number in numbers:
        bits[number // 8] |= 1 << number % 8
    return bytes(bits)


def _numbers(bitmap: bytes) -> set[int]:
    return {8 * place + bit for place, byte in enumerate(bitmap) for bit in range(8) if byte >> bit & 1}

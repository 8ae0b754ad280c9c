"""Checks that nothing is lost with `top_k`: what was trained is what was sent, the residual, and the steps since."""

from __future__ import annotations

from typing import Any

import torch

from averaging import DecentralizedAverager, DiLoCo
from averaging.peer import SparseFeedback


class TrainingLedger:
    """Follows one averager whose `DiLoCo` has `decay=1` and no `max_norm`, from its first step on.

    Args:
        averager: it has no local steps since its last global one.
        former: the ledger of the averager of which this one has loaded a checkpoint.

    Attributes:
        trained: what the inner optimizer has changed so far, by name, as former minus present parameters; float64.
            A residual at the beginning is counted as well.
        sent: what was sent of that in rounds whose result this peer or, perhaps, the others have applied.
    """

    def __init__(self, averager: DecentralizedAverager, former: TrainingLedger | None = None) -> None:
        self.parameters = averager._training.parameters
        assert isinstance(averager.strategy, DiLoCo)
        self.strategy = averager.strategy
        zeros = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in self.parameters.items()}
        begun = zeros | {name: tensor.double() for name, tensor in self.strategy.own_state().items()}
        self.trained: dict[str, torch.Tensor] = dict(begun if former is None else former.trained)
        self.sent: dict[str, torch.Tensor] = dict(zeros if former is None else former.sent)
        self._watch_training(averager._training)
        for fragment in self.strategy._fragments:
            assert fragment.feedback is not None
            self._watch_sending(fragment, fragment.feedback)

    def _watch_training(self, training: Any) -> None:
        inner_step = training.inner_step

        def counted(*args: Any) -> Any:
            before = {name: tensor.detach().double().clone() for name, tensor in self.parameters.items()}
            loss = inner_step(*args)
            for name, tensor in self.parameters.items():
                self.trained[name] = self.trained[name] + before[name] - tensor.detach().double()
            return loss

        training.inner_step = counted

    def _watch_sending(self, fragment: Any, feedback: SparseFeedback) -> None:
        applied, applied_alone = feedback.applied, feedback.applied_alone
        names = feedback._names

        def sent() -> None:
            last = feedback._last
            if last is not None and last.base is feedback.residuals:
                for number, sparse in last.sparse.items():
                    decoded = feedback.layouts[number].from_blocks(sparse.dense()).double()
                    self.sent[names[number]] = self.sent[names[number]] + decoded
            applied()

        def sent_alone() -> None:
            for name, change in fragment.changes.items():
                self.sent[name] = self.sent[name] + change.double()
            applied_alone()

        feedback.applied, feedback.applied_alone = sent, sent_alone  # type: ignore[method-assign]

    def error(self) -> float:
        """How far what was trained is from what was sent, the residual and the steps since, as a share of the first."""
        residual = self.strategy.own_state()
        off = size = 0.0
        late = {name: steps for one in self.strategy._fragments for name, steps in one._included.items()}
        for name, tensor in self.parameters.items():
            start = self.strategy._anchors[name].detach().to(tensor.dtype).double()
            since = start - tensor.detach().double() + late.get(name, torch.zeros(())).double()
            kept = residual[name].double() if name in residual else torch.zeros(tensor.shape, dtype=torch.float64)
            off += float((self.sent[name] + kept + since - self.trained[name]).square().sum())
            size += float(self.trained[name].square().sum())
        return float((off / size) ** 0.5) if size else 0.0

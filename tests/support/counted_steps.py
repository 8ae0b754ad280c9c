"""Which local steps the rounds of a run on virtual time have averaged, from what their members sent."""

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from averaging import Peer, Receipt

PARTS = 3


class Counts:
    """Tensors of which each peer changes one element only, by 1 in each of its steps: so they count its steps."""

    batch_size = 4

    def __init__(self, number: int, peers: int) -> None:
        self._number = number
        self.parameters = [torch.nn.Parameter(torch.zeros(peers, dtype=torch.float64)) for _ in range(PARTS)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0)

    def backward(self) -> None:
        """See `Learner.backward`."""
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[self._number] = -1.0


class Averages:
    """What the rounds of a run have averaged, computed from what their members sent.

    Attributes:
        rounds: of each peer, the receipt of each of its rounds, and what it sent.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Notes the rounds of all peers from now on."""
        self.rounds: dict[str, list[tuple[Receipt, list[torch.Tensor]]]] = defaultdict(list)
        average, averages = Peer.average, self

        async def noted(self: Peer, topic: Any = None, **options: Any) -> Receipt:
            assert topic is not None
            sent = [tensor.detach().clone() for tensor in topic.tensors.tensors]
            receipt = await average(self, topic, **options)
            averages.rounds[self.endpoint].append((receipt, sent))
            return receipt

        monkeypatch.setattr(Peer, "average", noted)

    def of_rounds(self) -> list[tuple[Receipt, list[torch.Tensor]]]:
        """A receipt of each round that has averaged, in their order, and its averages."""
        sent: dict[bytes, list[list[torch.Tensor]]] = defaultdict(list)
        receipts: dict[bytes, Receipt] = {}
        for receipt, tensors in itertools.chain(*self.rounds.values()):
            if receipt.averaged:
                sent[receipt.group_id].append(tensors)
                receipts[receipt.group_id] = receipt
        ordered = sorted(receipts.values(), key=lambda receipt: receipt.started)
        return [(receipt, _mean(sent[receipt.group_id])) for receipt in ordered]

    def steps(self, name: str, number: int) -> list[float]:
        """How many local steps of a peer are in averages, by tensor: its own element of the changes that it sent.

        Of weights that is the change since its average before, as nobody else has changed that element meanwhile.
        """
        averages = {receipt.group_id: tensors for receipt, tensors in self.of_rounds()}
        counts, before = [0.0] * PARTS, [0.0] * PARTS
        for receipt, sent in self.rounds[name]:
            if receipt.averaged:
                first = first_of_changes(receipt)
                for place, tensor in enumerate(sent, first or 0):
                    counts[place] += float(tensor[number]) * (1 if first is None else -1) - before[place]
                    if first is None:
                        before[place] = float(averages[receipt.group_id][place][number])
        return [round(count, 6) for count in counts]


def first_of_changes(receipt: Receipt) -> int | None:
    """The place of the first tensor whose changes a round of `DiLoCo` averages; None if it averages weights."""
    if not receipt.topic.startswith("pseudogradient-"):
        return None
    number, pieces = map(int, receipt.topic.removeprefix("pseudogradient-").split("/")[0].split("of"))
    return number * PARTS // pieces


def _mean(sent: Iterable[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(tensors).mean(dim=0) for tensors in zip(*sent, strict=True)]

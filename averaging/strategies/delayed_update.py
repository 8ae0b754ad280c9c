"""What a round changes while training goes on: copies are averaged, and the change is added when it is there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from averaging.common.shared_tensors import sharing_memory


class DelayedUpdate:
    """Tensors that are trained, and copies of them of which a round makes the change.

    Args:
        tensors: by name.
        kinds: names of those that may be second moments, by the kind of statistic or buffer that they are.

    Attributes:
        copies: on the CPU, by name; after a round the average minus what was sent.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], kinds: Mapping[str, Sequence[str]]) -> None:
        self._tensors, self._kinds = dict(tensors), kinds
        self.copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        tied = sharing_memory(list(tensors.values()))
        self._tied = [name for place, name in enumerate(tensors) if place in tied]
        self._sent_moments: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self) -> None:
        """Copies what the tensors hold now: it is about to be sent."""
        for name, tensor in self._tensors.items():
            self.copies[name].copy_(tensor)
        self._sent_moments = {name: self.copies[name].clone() for name in _moments(self._kinds.values(), self.copies)}

    @torch.no_grad()
    def add(self) -> None:
        """Adds the change to what the tensors hold now. The caller holds their lock."""
        was = {name: self._tensors[name].clone() for name in self._tied}  # before the first of them is written
        for name, tensor in self._tensors.items():
            change, result = self.copies[name].to(tensor.device), was.get(name, tensor)
            if name in self._sent_moments and bool((result >= 0).all()):
                _add_to_moment(result, change, self._sent_moments[name].to(tensor.device))
            else:
                result.add_(change)
            if name in was:
                tensor.copy_(result)


def _moments(kinds: Iterable[Sequence[str]], sent: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of second moments: of the kinds of statistics of which nothing is below 0 in any parameter's.

    A single parameter's momentum may well be above 0, all of it. The running variances of a model are a kind, too.
    """
    found = [names for names in kinds if all(bool((sent[name] >= 0).all()) for name in names)]
    return [name for names in found for name in names]


def _add_to_moment(moment: torch.Tensor, change: torch.Tensor, sent: torch.Tensor) -> None:
    """Adds a late change to a second moment so that it stays at least 0.

    A moment that was `sent` has decayed since, and the change would have decayed with it: no more than `moment / sent`
    of it is left, since squares of gradients only add to it.
    """
    left = torch.where(sent > moment, moment / sent, 1.0)
    moment.add_(change * left).clamp_(min=0)

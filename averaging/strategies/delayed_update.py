"""Averaging while training goes on: copies are averaged, and their change is added when the round ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from averaging.common.shared_tensors import sharing_memory


class DelayedUpdate:
    """Trained tensors with the copies of them that a round averages.

    Args:
        tensors: the tensors by name.
        kinds: names of the statistics and buffers, grouped by kind; any kind may consist of second moments.

    Attributes:
        copies: copies on the CPU, by name; after a round they hold the average minus what was sent.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], kinds: Mapping[str, Sequence[str]]) -> None:
        self._tensors, self._kinds = dict(tensors), kinds
        self.copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        tied = sharing_memory(list(tensors.values()))
        self._tied = [name for place, name in enumerate(tensors) if place in tied]
        self._sent_moments: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copy(self) -> None:
        """Copies the present tensors, right before they are sent."""
        for name, tensor in self._tensors.items():
            self.copies[name].copy_(tensor)
        self._sent_moments = {name: self.copies[name].clone() for name in _moments(self._kinds.values(), self.copies)}

    @torch.no_grad()
    def add(self) -> None:
        """Adds the change to the present tensors. The caller holds their lock."""
        was = {name: self._tensors[name].clone() for name in self._tied}  # tied tensors before any of them is written
        for name, tensor in self._tensors.items():
            change, result = self.copies[name].to(tensor.device), was.get(name, tensor)
            if name in self._sent_moments and bool((result >= 0).all()):
                _add_to_moment(result, change, self._sent_moments[name].to(tensor.device))
            else:
                result.add_(change)
            if name in was:
                tensor.copy_(result)


def _moments(kinds: Iterable[Sequence[str]], sent: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the second moments: a kind whose values are at least 0 for every parameter counts as one.

    The kind matters, since the momentum of a single parameter may be positive by chance.
    """
    found = [names for names in kinds if all(bool((sent[name] >= 0).all()) for name in names)]
    return [name for names in found for name in names]


def _add_to_moment(moment: torch.Tensor, change: torch.Tensor, sent: torch.Tensor) -> None:
    """Adds a late change to a second moment so that it stays at least 0.

    The moment has decayed since it was `sent`, and the change would have decayed with it. Since squares of gradients
    only add to the moment, at most the fraction `moment / sent` of the change is left.
    """
    left = torch.where(sent > moment, moment / sent, 1.0)
    moment.add_(change * left).clamp_(min=0)

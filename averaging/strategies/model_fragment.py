"""A fragment of the model as `DiLoCo` averages it, and the division of a model into fragments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from averaging.errors import ConfigError
from averaging.peer import Topic
from averaging.tensors import sharing_memory
from averaging.training import GroupProgress


class Fragment:
    """A piece of the model with its outer state.

    Attributes:
        parameters: parameters of the model, trained by the inner optimizer.
        anchors: the parameters after the last global step, on the CPU.
        changes: the pseudo-gradient, anchors minus parameters; after a round its average.
        progress: what the outer optimizer changes in its parameter groups.
        buffers: pairs of a model's buffer and its copy; after a round the copy holds the average.
    """

    def __init__(
        self,
        number: int,
        parameters: dict[str, torch.Tensor],
        anchors: dict[str, torch.nn.Parameter],
        changes: dict[str, torch.Tensor],
        topic: Topic,
        outer: torch.optim.Optimizer,
        buffers: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        self.number = number
        self.parameters, self.anchors, self.changes, self.buffers = parameters, anchors, changes, buffers
        self.topic, self.outer, self.progress = topic, outer, GroupProgress(outer)
        tied = sharing_memory(list(parameters.values()))
        self._tied = [name for place, name in enumerate(parameters) if place in tied]

    @torch.no_grad()
    def anchor(self) -> None:
        """Sets the anchors to the present parameters."""
        for name, parameter in self.parameters.items():
            self.anchors[name].copy_(parameter)

    @torch.no_grad()
    def measure(self) -> None:
        """Computes the pseudo-gradient and copies the buffers."""
        for name, parameter in self.parameters.items():
            torch.sub(self.anchors[name], parameter.to("cpu", self.anchors[name].dtype), out=self.changes[name])
        for buffer, copied in self.buffers:
            copied.copy_(buffer)

    def step(self, alpha: float) -> None:
        """Makes the outer step and writes its result and the averaged buffers to the model."""
        for name, anchor in self.anchors.items():
            anchor.grad = self.changes[name]
        with self.progress.observed():
            self.outer.step()
        with torch.no_grad():
            # Copies of parameters that share memory, made before any of them is written.
            was = {name: self.parameters[name].clone() for name in self._tied} if alpha else {}
            for name, parameter in self.parameters.items():
                self.anchors[name].grad = None
                result = self.anchors[name].to(parameter.device, parameter.dtype)
                if alpha:
                    # lerp_ of equal values is exact, so parameters that nobody trains keep a pseudo-gradient of 0.
                    parameter.copy_(was.get(name, parameter).lerp_(result, 1 - alpha))
                else:
                    parameter.copy_(result)  # also replaces infinity and NaN, which lerp_ would keep
            for buffer, average in self.buffers:
                buffer.copy_(average)

    @torch.no_grad()
    def local_steps(self) -> dict[str, torch.Tensor]:
        """The change by the local steps since the last global step: parameters minus anchors."""
        return {
            name: parameter.to("cpu", self.anchors[name].dtype) - self.anchors[name]
            for name, parameter in self.parameters.items()
        }

    @torch.no_grad()
    def export(self) -> None:
        """Sets the parameters to the anchors, which drops the local steps since the last global step."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.anchors[name])

    @torch.no_grad()
    def rebase(self, steps: Mapping[str, torch.Tensor]) -> None:
        """Sets the parameters to the anchors plus `steps`."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.anchors[name] + steps[name])


def cut(sizes: Mapping[str, int], pieces: int) -> list[list[str]]:
    """Divides tensors, in order, into pieces of about equal size, each with at least one tensor.

    Args:
        sizes: number of elements of each tensor, by name.
        pieces: number of pieces.

    Raises:
        ConfigError: there are fewer tensors than pieces.
    """
    if len(sizes) < pieces:
        raise ConfigError(f"{len(sizes)} tensors cannot be cut into {pieces} fragments; use at most {len(sizes)}")
    names, total = list(sizes), sum(sizes.values())
    result: list[list[str]] = []
    seen = 0
    for place, name in enumerate(names):
        left = len(names) - place
        open_pieces = pieces - len(result)
        # A piece begins at its share of all elements, or if only one tensor is left for each remaining piece.
        if not result or (open_pieces and (seen * pieces >= len(result) * total or left <= open_pieces)):
            result.append([])
        result[-1].append(name)
        seen += sizes[name]
    return result

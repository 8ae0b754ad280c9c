"""The pieces into which DiLoCo divides a model, each with its anchors, pseudo-gradient and outer optimizer."""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from averaging.errors import ConfigError, StateError, TensorError
from averaging.peer import SparseFeedback, Topic
from averaging.tensors import HostCopies, copy_to_host, is_on_device, sent, sharing_memory
from averaging.training import (
    GroupProgress,
    load_optimizer,
    pack_optimizer,
    restored_on_error,
    take_tensor,
    under_own_names,
)

logger = logging.getLogger("averaging.training")


class Fragment:
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
        self.open_steps, self._bases = 0, 0.0  # the latter is the sum of the global steps that they were made on
        self._sent_steps = 0  # of the open ones, those that the round in progress sends
        self._host = HostCopies(
            [*parameters.values(), *(buffer for buffer, _ in buffers)],
            [*(changes[name] for name in parameters), *(copied for _, copied in buffers)],
        )
        self.waits = any(map(is_on_device, parameters.values()))
        self._completing = threading.Lock()
        self._is_complete = True  # whether `changes` holds what was measured last
        self._measured: dict[str, torch.Tensor] = {}
        self._included: dict[str, torch.Tensor] = {}  # the local steps in a result that this peer has not got yet
        tied = sharing_memory(list(parameters.values()))
        self._tied = [name for place, name in enumerate(parameters) if place in tied]

    @property
    def feedback(self) -> SparseFeedback | None:
        return self.topic.feedback if isinstance(self.topic.feedback, SparseFeedback) else None

    @torch.no_grad()
    def anchor(self) -> None:
        self.complete()
        copy_to_host(list(self.parameters.values()), list(self.anchors.values()))

    @torch.no_grad()
    def measure(self, *, keep: bool = False, background: bool = False) -> None:
        """Computes the pseudo-gradient and copies the buffers."""
        self._sent_steps = self.open_steps
        self._measured = {name: parameter.clone() for name, parameter in self.parameters.items()} if keep else {}
        with self._completing:
            self._host.begin(keep=background)
            self._is_complete = False
        if not (background and self.waits):
            self.complete()

    @torch.no_grad()
    def complete(self) -> None:
        """Waits until what was measured is in `changes`; called by the peer's thread before it is sent."""
        with self._completing:
            if self._is_complete:
                return
            self._host.wait()
            for name, parameter in self.parameters.items():
                anchor, change = self.anchors[name], self.changes[name]
                # What rounding has changed is measured again and again if it is not sent, so it must not be in a
                # residual.
                start = anchor if self.feedback is None else anchor.to(parameter.dtype).to(anchor.dtype)
                torch.sub(start, change, out=change)
                if name in self._included:
                    change.add_(self._included[name])
            self._is_complete = True

    def count(self, step: int) -> None:
        """Counts a local step, made on the state after global step `step`."""
        self.open_steps += 1
        self._bases += step

    @property
    def base(self) -> float | None:
        return self._bases / self.open_steps if self.open_steps else None

    def start_at(self, step: int, open_steps: int = 0) -> None:
        self.open_steps, self._bases = open_steps, float(open_steps * step)

    @property
    def keeps(self) -> bool:
        return bool(self._measured)

    @torch.no_grad()
    def include(self, step: int) -> tuple[int, dict[str, torch.Tensor]]:
        """Notes that a result which this peer, at global step `step`, lacks includes the local steps up to `measure`.

        Returns how many local steps these are that none included before, and their change.
        """
        new: dict[str, torch.Tensor] = {}
        for name, measured in self._measured.items():
            change = measured.to("cpu", self.anchors[name].dtype) - self.anchors[name]
            new[name] = change - self._included.get(name, 0)
            self._included[name] = change
        self._measured = {}
        sent, self._sent_steps = self._sent_steps, 0
        self.start_at(step, self.open_steps - sent)
        return sent, new

    def exclude(self) -> None:
        self._included = {}

    def applied(self, step: int) -> None:
        """Notes that the result of the round is the state after global step `step`."""
        self.start_at(step, self.open_steps - self._sent_steps)
        self._sent_steps = 0

    def step(self, alpha: float) -> None:
        """Makes the outer step and writes its result and the averaged buffers to the model."""
        self.complete()
        for name, anchor in self.anchors.items():
            anchor.grad = self.changes[name]
        with self.progress.observed():
            self.outer.step()
        with torch.no_grad():
            # Copies of parameters that share memory, made before any of them is written.
            was = {name: self.parameters[name].clone() for name in self._tied} if alpha else {}
            anchors = sent([anchor.detach() for anchor in self.anchors.values()], list(self.parameters.values()))
            for (name, parameter), sent_anchor in zip(self.parameters.items(), anchors, strict=True):
                self.anchors[name].grad = None
                result = sent_anchor.to(parameter.dtype)
                if name in self._measured:
                    # Not lerp_: the local parameters also hold what was not sent, which is sent later.
                    since = was.get(name, parameter) - self._measured[name]
                    parameter.copy_(result + alpha * since)
                elif alpha:
                    # lerp_ of equal values is exact, so parameters that nobody trains keep a pseudo-gradient of 0.
                    parameter.copy_(was.get(name, parameter).lerp_(result, 1 - alpha))
                else:
                    parameter.copy_(result)  # also replaces infinity and NaN, which lerp_ would keep
            self._measured = {}
            for buffer, average in self.buffers:
                buffer.copy_(average)

    @torch.no_grad()
    def local_steps(self) -> dict[str, torch.Tensor]:
        """The change by the local steps that no result includes: parameters minus anchors, if none was sent late."""
        steps = {
            name: parameter.to("cpu", self.anchors[name].dtype) - self.anchors[name]
            for name, parameter in self.parameters.items()
        }
        for name, included in self._included.items():
            steps[name] -= included
        return steps

    def steps_to_keep(self, *, discarded: bool) -> dict[str, torch.Tensor]:
        """The local steps that no result includes, by name; `discarded`: nor may include, up to the last round."""
        if not discarded:
            return self.local_steps()
        if self.feedback is None:
            return {}
        change = self.feedback.open_change()  # what was not sent of it stays in the residual
        return {name: steps + change[name] if name in change else steps for name, steps in self.local_steps().items()}

    @torch.no_grad()
    def rebase(self, steps: Mapping[str, torch.Tensor]) -> None:
        """Sets the parameters to the anchors, plus `steps` where there are some; drops all other local steps."""
        for name, parameter in self.parameters.items():
            anchor = self.anchors[name]
            parameter.copy_(anchor + steps[name] if name in steps else anchor)


class Fragments(list[Fragment]):
    """The fragments of a model, in the order of their rounds."""

    def at(self, step: int) -> Fragment:
        """The fragment that is averaged after global step `step`."""
        return self[step % len(self)]

    @property
    def anchors(self) -> dict[str, torch.Tensor]:
        return {name: anchor for fragment in self for name, anchor in fragment.anchors.items()}

    @property
    def feedbacks(self) -> list[SparseFeedback]:
        return [fragment.feedback for fragment in self if fragment.feedback is not None]

    def anchor(self) -> None:
        for fragment in self:
            fragment.anchor()

    def rebase(self, steps: Mapping[str, torch.Tensor]) -> None:
        for fragment in self:
            fragment.rebase(steps)

    def state(self) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
        """The anchors and the tensors of the outer optimizers (not copied), and the rest of each of these."""
        tensors: dict[str, torch.Tensor] = {f"anchor/{name}": anchor.detach() for name, anchor in self.anchors.items()}
        outer = []
        for fragment in self:
            of_outer, packed = pack_optimizer(fragment.outer, fragment.progress, f"outer{fragment.number}")
            tensors |= of_outer
            outer.append(packed)
        return tensors, outer

    def outer_state_to_come(self) -> dict[str, torch.Tensor]:
        """Zeros for the tensors that the outer optimizers make in their first steps."""
        tensors: dict[str, torch.Tensor] = {}
        for fragment in self:
            if not fragment.outer.state:
                probe = copy.deepcopy(fragment.outer)
                for parameter in (parameter for group in probe.param_groups for parameter in group["params"]):
                    parameter.grad = torch.zeros_like(parameter)
                probe.step()
                made, _ = pack_optimizer(probe, fragment.progress, f"outer{fragment.number}")
                tensors |= {name: torch.zeros_like(tensor) for name, tensor in made.items()}
        return tensors

    def parameter_of(self, name: str) -> str | None:
        """The parameter of an anchor, or of a tensor in the state of an outer optimizer."""
        kind, _, rest = name.partition("/")
        if kind == "anchor":
            return rest
        number, _, key = rest.partition("/")
        names = list(self[int(kind.removeprefix("outer"))].anchors)
        return names[int(number)] if number.isdigit() and key != "step" else None

    def load(self, tensors: Mapping[str, torch.Tensor], outer: object) -> None:
        """Loads what `state` returned, or raises StateError and changes nothing."""
        if not isinstance(outer, list) or len(outer) != len(self):
            raise StateError(f"its model is not divided into {len(self)} fragments, as this peer's is")
        named = under_own_names(tensors, "anchor/", list(self.anchors))
        anchors = {name: take_tensor(named, name, anchor) for name, anchor in self.anchors.items()}
        with ExitStack() as all_or_none:
            for fragment, packed in zip(self, outer, strict=True):
                all_or_none.enter_context(restored_on_error(fragment.outer))
                load_optimizer(fragment.outer, tensors, packed, fragment.progress, f"outer{fragment.number}")
        with torch.no_grad():
            for fragment in self:
                fragment.complete()  # what a round sends is measured from the old anchors
                for name, anchor in fragment.anchors.items():
                    anchor.copy_(anchors[name])
                fragment.exclude()

    def tell_unsent(self) -> None:
        norms = [feedback.unsent() for feedback in self.feedbacks]
        residual, change = (math.hypot(*of_fragments) for of_fragments in zip(*norms, strict=True))
        logger.info(
            "this peer ends with changes that it never sent; they are dropped. Their norm is %.3g, that of its "
            "last change %.3g%s",
            *(residual, change, f" ({residual / change:.1f} times as much)" if change else ""),
        )


def cut(sizes: Mapping[str, int], pieces: int) -> list[list[str]]:
    """Divides tensors, in order and given by their elements, into pieces of about equal size with at least one each."""
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


def check_tied(fragments: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
    """Checks that parameters that share memory are cut into the same blocks, so that the same is sent of them."""
    names = [(number, name) for number, parameters in fragments.items() for name in parameters]
    tensors = [fragments[number][name] for number, name in names]
    tied = {names[place]: tensors[place] for place in sharing_memory(tensors)}
    kinds = {key: (key[0], tensor.data_ptr(), tensor.shape, tensor.stride()) for key, tensor in tied.items()}
    count = Counter(kinds.values())
    for (_, name), kind in kinds.items():
        if count[kind] < 2:
            raise TensorError(
                f"parameter {name!r} shares its memory with another one of another shape or fragment, of which "
                "other elements would be sent; use another compression, or give the optimizer one of them"
            )

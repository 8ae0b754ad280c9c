"""Optimizers that hold further weights: copies of the parameters, or a second set of weights to evaluate.

An optimizer that steps a copy, such as a float32 master of a bfloat16 parameter, and then overwrites the parameter
undoes whatever a round has written to it.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from averaging.tensors import on_cpu
from averaging.training.layout import local

logger = logging.getLogger("averaging.training")

TELLING = re.compile("master|main_param|fp32|fp16")
"""In a name that says that tensors are copies, even if they have the dtype of the parameters."""

MAX_DEPTH = 6
"""How deep containers in an optimizer are searched."""

MAX_ITEMS = 1 << 17
"""How many entries of one container in an optimizer are searched."""

SAMPLED = 64
"""Elements of each parameter in which a step is watched."""

MAX_PROBES = 3
"""Probes without a finding after which an optimizer is trusted."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor of the optimizer and the parameter that it equals, rounded to the narrower of both dtypes."""

    tensor: torch.Tensor
    parameter: torch.Tensor

    def equal(self) -> bool:
        dtype = self._narrower
        heads = (tensor.reshape(-1)[:1].to(self.parameter.device, dtype) for tensor in (self.tensor, self.parameter))
        return torch.equal(*heads) and torch.equal(*self._narrow())

    def refresh(self) -> None:
        """Writes the parameter's elements that have changed; the others keep the precision of the copy."""
        tensor, parameter = self._narrow()
        flat = self.tensor.reshape(-1)
        fresh = self.parameter.reshape(-1).to(flat.device, flat.dtype)
        self.tensor.copy_(torch.where((tensor == parameter).to(flat.device), flat, fresh).view(self.tensor.shape))

    @property
    def _narrower(self) -> torch.dtype:
        return min(self.tensor.dtype, self.parameter.dtype, key=lambda dtype: dtype.itemsize)

    def _narrow(self) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, device = self._narrower, self.parameter.device
        return self.tensor.reshape(-1).to(device, dtype), self.parameter.reshape(-1).to(dtype)


class ParameterCopies:
    """Finds the copies of parameters in an optimizer and writes to them what is written to the parameters.

    A group of tensors, such as all `state[…]["master"]`, are copies if each of them equals its parameter. Statistics
    that equal it by chance, as zeros do, are told apart: some parameter has several values, and the tensors have
    another dtype or a telling name, or have followed the parameters from one round to the next.

    Copies that cannot be found, for example in one flat tensor, are noticed in the step after a round: it brings back
    the parameters of before. Then a probe decides, a step with learning rate 0 and without gradients from slightly
    other parameters, which changes nothing unless there are copies.

    Args:
        optimizer: the inner optimizer.
        parameters: its parameters by name.
    """

    def __init__(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._stale: list[_Copy] = []  # that the write in progress makes differ
        self._logged: set[str] = set()  # groups of copies that were logged
        self._seen: dict[str, list[torch.Tensor]] = {}  # beginnings of the parameters that a group equalled first
        self._jump: tuple[torch.Tensor, torch.Tensor] | None = None  # samples before and after the last write
        self._probes_left = 0 if needs_closure(optimizer) else MAX_PROBES

    @contextmanager
    def following(self) -> Iterator[None]:
        """Wraps a write to the parameters that is not the optimizer's own."""
        self._stale = [pair for copies in self._find().values() for pair in copies]
        before = self._sample()
        try:
            yield
        finally:
            self.refresh()
        after = self._sample()
        if self._jump is not None:  # another write before, and no step between
            before = self._jump[0]
        self._jump = (before, after) if self._probes_left and not torch.equal(before, after) else None

    def refresh(self) -> None:
        """Writes the parameters to their copies if a write is in progress; also called before a state is committed."""
        with torch.no_grad():
            for pair in self._stale:
                pair.refresh()
        self._stale = []

    def stepped(self) -> None:
        """Called after each step of the optimizer, under the tensors' lock; warns if it has undone a write."""
        if self._jump is None:
            return
        (before, after), self._jump = self._jump, None
        now = self._sample()
        if not _is_nearer(now, before, after):
            return
        copies = self._find(quiet=True)
        self._probes_left -= 1
        if self._undoes(now, after, [pair for name in copies.keys() & self._logged for pair in copies[name]]):
            self._probes_left = 0
            self._warn(sorted(copies.keys() - self._logged))

    def _warn(self, groups: list[str]) -> None:
        kind = type(self._optimizer).__name__
        if groups:
            self._logged.update(groups)
            names = ", ".join(groups)
            rest = f"These are in {names}, and from now on what a round writes is written to them too"
        else:
            rest = (
                "They cannot be found, so averaging has no effect on what is trained: let the optimizer train the "
                "parameters themselves, in float32, and compute in lower precision with torch.autocast, or keep the "
                "copies in its state, one for each parameter"
            )
        logger.warning(
            "%s has undone what the last round wrote to the parameters, because it keeps copies of them (masters). %s",
            kind,
            rest,
        )

    def _find(self, *, quiet: bool = False) -> dict[str, list[_Copy]]:
        """The copies, by what they are called."""
        groups: dict[str, list[tuple[torch.Tensor | None, torch.Tensor]]] = {}
        own = {id(parameter): parameter for parameter in self._parameters.values()}
        for name, owner, tensor in _tensors_in(self._optimizer, own):
            if tensor.is_floating_point():
                groups.setdefault(name, []).append((owner, tensor))
        by_name = {name: copies for name, group in groups.items() if (copies := self._copies(name, group))}
        if (news := by_name.keys() - self._logged) and not quiet:
            self._logged |= news
            logger.info(
                "%s keeps copies of the parameters (%s); what rounds write to the parameters is written to them too",
                type(self._optimizer).__name__,
                ", ".join(sorted(news)),
            )
        return by_name

    def _copies(self, name: str, tensors: Sequence[tuple[torch.Tensor | None, torch.Tensor]]) -> list[_Copy]:
        """The copies in a group of tensors: all of them, or none."""
        pairs = _paired(tensors, list(self._parameters.values()))
        if not pairs or not all(pair.equal() for pair in pairs):
            self._seen.pop(name, None)
            return []
        values = [pair.parameter.reshape(-1)[:SAMPLED] for pair in pairs]
        if all(bool((value == value[0]).all()) for value in values if value.numel()):
            return []
        if TELLING.search(name) or any(pair.tensor.dtype != pair.parameter.dtype for pair in pairs):
            return pairs
        before = self._seen.setdefault(name, [value.clone() for value in values])
        same = len(before) == len(values) and all(map(torch.equal, before, values))
        return [] if same else pairs

    def _sample(self) -> torch.Tensor:
        """Some elements of each parameter, in one tensor on the CPU."""
        samples = [_elements(parameter).to(torch.float32) for parameter in self._local()]
        if len({sample.device for sample in samples}) == 1:
            return on_cpu(torch.cat(samples))  # a device is waited for once
        return torch.cat(list(map(on_cpu, samples)))

    def _local(self) -> list[torch.Tensor]:
        return [local(parameter).detach() for parameter in self._parameters.values()]

    def _undoes(self, now: torch.Tensor, other: torch.Tensor, known: list[_Copy]) -> bool:
        """Whether a step without learning rate and gradients brings back parameters that were changed before it.

        Args:
            now: sample of the present parameters.
            other: what is written to the sampled elements for the probe.
            known: the copies that get what is written to the parameters.
        """
        with torch.no_grad(), _restored(self._optimizer, self._local()):
            start = 0
            for parameter in self._local():
                elements = _elements(parameter)
                elements.copy_(other[start : start + len(elements)])
                start += len(elements)
            for pair in known:
                pair.refresh()
            changed = self._sample()
            with suppress(Exception):  # an optimizer may be unable to make such a step; that is no finding
                self._optimizer.step()
                return 10 * float((self._sample() - now).norm()) < float((self._sample() - changed).norm())
        return False


def _is_nearer(sample: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> bool:
    return float((sample - before).norm()) < float((sample - after).norm())


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """A view of up to `SAMPLED` elements of a tensor."""
    if tensor.is_contiguous():
        return tensor.view(-1)[:: max(1, tensor.numel() // SAMPLED)][:SAMPLED]
    while tensor.dim() > 1:
        tensor = tensor[len(tensor) // 2]
    return tensor[:SAMPLED]


def _paired(tensors: Sequence[tuple[torch.Tensor | None, torch.Tensor]], parameters: list[torch.Tensor]) -> list[_Copy]:
    """Pairs tensors with parameters: their owner, or else the next of the same shape; empty if one has none."""
    pairs = []
    rest = iter(parameters)
    for owner, tensor in tensors:
        parameter = (
            next((candidate for candidate in rest if candidate.shape == tensor.shape), None) if owner is None else owner
        )
        if parameter is None or parameter.shape != tensor.shape or not tensor.numel():
            return []
        pairs.append(_Copy(local(tensor).detach(), local(parameter).detach()))
    return pairs


def _tensors_in(
    optimizer: Any, own: Mapping[int, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor | None, torch.Tensor]]:
    """The dense tensors in an optimizer besides its parameters, each once.

    Yields:
        What it is called, with `*` for numbers and parameters; the parameter under which it is kept, or None; and the
        tensor.
    """
    seen = set(own)

    def walk(value: Any, name: str, owner: torch.Tensor | None, depth: int) -> Iterator[Any]:
        if depth > MAX_DEPTH or isinstance(value, str | int | float | torch.nn.Module | type) or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                yield name, owner, value
            return
        items: list[tuple[Any, Any]] = []
        if isinstance(value, dict):
            items = list(value.items())
        elif isinstance(value, list | tuple):
            items = list(enumerate(value))
        elif isinstance(value, torch.optim.Optimizer) or (depth == 1 and not callable(value)):
            items = list(getattr(value, "__dict__", {}).items())
        for key, item in items[:MAX_ITEMS]:
            key_owner = own.get(id(key), owner)
            part = key if isinstance(key, str) else "*"
            yield from walk(item, f"{name}.{part}" if name else part, key_owner, depth + 1)

    return walk(dict(vars(optimizer)), "", None, 0)


@contextmanager
def _restored(optimizer: Any, parameters: list[torch.Tensor]) -> Iterator[None]:
    """Wraps a step without learning rate and gradients, and restores everything that can be found afterwards."""
    tensors = [*parameters, *(tensor for _, _, tensor in _tensors_in(optimizer, {}))]
    saved = [(tensor, tensor.detach().clone()) for tensor in tensors]
    state = [values for values in optimizer.state.values() if isinstance(values, dict)]
    undo: list[Callable[[], object]] = [_reset(values) for values in [vars(optimizer), *state]]
    for group in optimizer.param_groups:
        undo.append(_reset(group))
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in group["params"]:
            undo.append(partial(setattr, parameter, "grad", parameter.grad))
            if parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad)
    devices = {tensor.device for tensor in parameters if tensor.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for restore in undo:
            restore()
        for tensor, was in saved:
            tensor.copy_(was)


def _reset(values: dict[str, Any]) -> Callable[[], None]:
    """Restores the entries of a dict; tensors in it are restored apart, and containers one level deep."""
    before = {key: copy.copy(value) if isinstance(value, list | dict) else value for key, value in values.items()}

    def reset() -> None:
        for key in values.keys() - before.keys():
            del values[key]
        for key, value in before.items():
            now = values.get(key)
            if isinstance(now, dict) and isinstance(value, dict):
                now.clear()
                now.update(value)
            elif isinstance(now, list) and isinstance(value, list):
                now[:] = value
            else:
                values[key] = value

    return reset


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step` requires a closure, as that of LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


# The two sets of weights of a schedule-free optimizer: the model holds those to train, or those to evaluate.


MODE = "train_mode"
"""Where schedule-free optimizers keep their mode: a key of their parameter groups, or an attribute."""

ITERATE = "z"
"""The third sequence of a schedule-free optimizer in its state: both sets of weights are averages that involve it."""


class WeightModes:
    """Switches a schedule-free optimizer between its modes (Defazio et al., 2024, arXiv:2405.15682).

    Its steps and all rounds use the training weights. While the evaluation weights are in the model, a copy of the
    training weights is kept: the optimizer would compute them back with rounding errors, and a peer that evaluates
    would differ from one that does not.

    Args:
        optimizer: any optimizer; if it has no modes, nothing here has an effect.
        lock: the tensors' lock, see `Peer.tensors`.
    """

    def __init__(self, optimizer: Any, lock: Callable[[], AbstractContextManager[object]]) -> None:
        self._optimizer, self._lock = optimizer, lock
        self._kept: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # parameter, training weights, version
        self._wanted: bool | None = None

    @property
    def exist(self) -> bool:
        """Whether the optimizer has modes."""
        switches = all(callable(getattr(self._optimizer, name, None)) for name in ("train", "eval"))
        return switches and (hasattr(self._optimizer, MODE) or any(MODE in group for group in self._groups))

    @property
    def training(self) -> bool:
        """Whether the model holds the training weights; True without modes."""
        if not self.exist:
            return True
        mode = getattr(self._optimizer, MODE, None)
        return bool(self._groups[0].get(MODE) if mode is None else mode)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    def eval(self) -> None:
        """Puts the evaluation weights into the model."""
        if not (self.exist and self.training):
            return
        with self._lock(), torch.no_grad():
            parameters = [parameter for group in self._groups for parameter in group["params"]]
            kept = [parameter.detach().clone() for parameter in parameters]
            self._optimizer.eval()
            self._kept = [(parameter, was, parameter._version) for parameter, was in zip(parameters, kept, strict=True)]

    def train(self) -> None:
        """Puts the training weights into the model."""
        if self.training:
            return
        with self._lock(), torch.no_grad():
            untouched = [(parameter, was) for parameter, was, version in self._kept if parameter._version == version]
            self._optimizer.train()
            for parameter, was in untouched:
                if _differ_by_rounding(parameter, was):
                    parameter.copy_(was)
            self._kept = []

    @contextmanager
    def weights(self, *, training: bool) -> Iterator[None]:
        """Within the block the model holds the weights of that mode; afterwards those that it held before."""
        before = self.training
        self._switch(training)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, training: bool) -> None:
        self.train() if training else self.eval()

    def received(self, *, training: bool) -> None:
        """Called with the mode of a state that is taken over; the caller holds the lock. See `settle`."""
        self._kept = []
        if not self.exist:
            return
        if self._wanted is None:
            self._wanted = self.training
        if hasattr(self._optimizer, MODE):
            self._optimizer.train_mode = training
        for group in self._groups:
            if MODE in group:
                group[MODE] = training

    def settle(self, *, wanted: bool = True) -> None:
        """Called when a state has been taken over: switches to the mode from before, if that is `wanted`."""
        if self._wanted is not None and wanted:
            self._switch(self._wanted)
        self._wanted = None


def _differ_by_rounding(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal but for rounding errors; if not, the weights were replaced meanwhile."""
    limit = 64 * torch.finfo(tensor.dtype).eps * other.abs().amax() if tensor.numel() else 0.0
    return bool(((tensor - other).abs() <= limit).all())

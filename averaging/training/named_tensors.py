"""The tensors of a model by name: parameters, buffers, and the counters among these.

`TrainedModel` has the names and notices tensors that were replaced; `ModelParts` tells models apart by digests.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from averaging.common import listed, without_wrappers
from averaging.errors import ClosedError, ConfigError, TensorError
from averaging.receipts import UNSAVED
from averaging.tensors import AVERAGED_DTYPES, STATE_DTYPES, all_finite, digest_of_tensors
from averaging.training.announcements import Announcements
from averaging.training.history import read_progress
from averaging.training.layout import is_divided, local
from averaging.training.site import Site

logger = logging.getLogger("averaging.training")

BUFFER = "buffer/"
"""Prefix of the names of buffers."""

FROZEN = "frozen parameters"
"""Name of the part of a model that the optimizer does not train."""

NOT_AVERAGED = {
    FROZEN: "parameters that the optimizer does not train, so these peers compute something else, even if all trained "
    "parameters are equal; load the same base model at all peers",
    UNSAVED: f"{UNSAVED}, so these peers may compute something else, even if all weights are equal; unless they are "
    "caches, compute them alike at all peers, also after to_empty()",
}
"""What a warning says of the parts of a model that are not averaged, if they differ."""

WITHOUT_MODEL = (
    "the averager was made without model=, so it cannot check what the optimizer does not hold: peers may have other "
    "buffers (BatchNorm) and frozen parameters, and replaced parameters go unnoticed; pass model=model"
)


class TrainedModel:
    """The parameters and persistent buffers of a model by name, each once, in the model's order.

    The names lack the prefixes of wrappers (DistributedDataParallel, torch.compile, FSDP), see `without_wrappers`.

    Raises:
        ConfigError: it is no module.
    """

    def __init__(self, model: object) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"model must be the torch.nn.Module that the optimizer trains, not {type(model).__name__}; for several "
                "modules torch.nn.ModuleList([first, second])"
            )
        self.model = model
        self.parameters, self.buffers, _ = _named_tensors(model)
        # What each module holds: the dicts themselves, and the identities of what is in them now.
        holders = [members for module in model.modules() for members in (module._parameters, module._modules)]
        self._members = [(members, [id(member) for member in members.values()]) for members in holders]
        self._places = [
            (module._buffers, key, buffer)
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and key not in module._non_persistent_buffers_set
        ]

    def names(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    given = group.get("param_names") or [f"number {index}" for index in range(len(group["params"]))]
                    raise ConfigError(
                        f"the optimizer trains a parameter that `model` does not have ({given[place]} of group "
                        f"{number}, of shape {list(parameter.shape)}); give the model whose parameters the optimizer "
                        "got, and make the optimizer after the model was wrapped, divided or converted"
                    )
        return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]

    def frozen(self, trained: Collection[torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = {id(parameter) for parameter in trained}
        return {
            name: parameter for name, parameter in _named_tensors(self.model)[0].items() if id(parameter) not in ids
        }

    @property
    def present_buffers(self) -> dict[str, torch.Tensor]:
        return _named_tensors(self.model)[1]

    @property
    def unsaved(self) -> dict[str, torch.Tensor]:
        return _named_tensors(self.model)[2]

    def check(self, buffers: Collection[str]) -> None:
        """Raises TensorError if a parameter, or one of these buffers, was replaced, added or removed."""
        if all([*map(id, members.values())] == before for members, before in self._members) and all(
            members.get(key) is buffer for members, key, buffer in self._places
        ):
            return  # the usual case takes about a millisecond for a thousand modules
        parameters, now, _ = _named_tensors(self.model)
        for kind, before, after in (
            ("parameter", self.parameters, parameters),
            ("buffer", {name: self.buffers[name] for name in buffers if name in self.buffers}, now),
        ):
            for name, tensor in before.items():
                # The modules of FSDP hold shards and whole parameters by turns.
                if after.get(name) is not tensor and not is_divided(tensor):
                    raise TensorError(_changed(kind, name, "has been replaced" if name in after else "is gone"))
        for name in parameters:
            if name not in self.parameters:
                raise TensorError(_changed("parameter", name, "is new"))


class ModelParts:
    """Digests of the parts of a model, by which peers see in which they differ."""

    def __init__(
        self,
        site: Site,
        model: TrainedModel | None,
        trained: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        locked: Callable[[], AbstractContextManager[list[torch.Tensor]]],
    ) -> None:
        self.model = model  # None if the user gave none
        self._site, self._trained, self._buffers = site, trained, buffers
        self._locked = locked  # gives the averaged tensors, under their lock
        self.digests: dict[str, str] = {}
        self.of_strategy: Callable[[], Mapping[str, torch.Tensor]] | None = None
        self._named: set[tuple[str, str]] = set()  # the parts and peers of which a warning said that they differ

    def averaged(self) -> str:
        """Digest of what is averaged, 16 hexadecimal digits; equal at all peers that hold the same bytes."""
        with self._locked() as tensors:
            return self._joint(lambda: digest_of_tensors(tensors))

    def _joint(self, digest: Callable[[], str]) -> str:
        """The digest of what all ranks of the site hold; of the ranks with the same shard its owner counts."""
        of_ranks = self._site.all_gather(lambda: (self._site.shard, digest()) if self._site.owns else None)
        of_shard = dict(pair for pair in of_ranks if pair is not None)
        if self._site.shards == 1:
            return of_shard[0]
        return hashlib.sha256("".join(of_shard[shard] for shard in sorted(of_shard)).encode()).hexdigest()[:16]

    def measure_untrained(self) -> None:
        """Sets the digests of what is not averaged: parameters that the optimizer does not train, unsaved buffers.

        Warns of parameters that have changed, and at the start of buffers that nothing has written.
        """
        before, is_start = self.digests.get(FROZEN), UNSAVED not in self.digests
        if self.model is None:
            return
        frozen, unsaved = self.model.frozen(self._trained.values()), self.model.unsaved
        for part, tensors in ((FROZEN, frozen), (UNSAVED, unsaved)):
            if tensors:
                self.digests[part] = self._joint(partial(digest_of, tensors))
        unwritten = [name for name, buffer in unsaved.items() if is_start and _is_unwritten(buffer)]
        if unwritten and self._site.leads:
            logger.warning(
                "%s with NaN or subnormal numbers, as in memory that nothing has written: %s. After to_empty() compute "
                "them anew, since no state dict and no other peer has them",
                UNSAVED,
                listed(unwritten),
            )
        if before not in (None, self.digests.get(FROZEN)) and self.of_strategy is None and self._site.leads:
            logger.warning(
                "parameters that the optimizer does not train have changed since the start (of %s); they are not "
                "averaged, so give them to the optimizer, or leave them as they are",
                listed(list(frozen)),
            )

    def measure_all(self) -> None:
        """Sets the digests of all that the model computes with: parameters, buffers, and what is not trained."""
        with self._locked():
            self._measure_all()

    def _measure_all(self) -> None:
        self.measure_untrained()
        buffers = self._buffers if self.model is None else self.model.present_buffers
        plain = {name.removeprefix(BUFFER): buffer for name, buffer in sorted(buffers.items())}
        # By number, since a peer that was made without the model has no names for them.
        numbered = {str(number): local(parameter) for number, parameter in enumerate(self._trained.values())}
        self.digests["parameters"] = self._joint(lambda: digest_of(numbered))
        if self.of_strategy is not None:
            further = dict(self.of_strategy())
            self.digests["tensors of the strategy"] = self._joint(lambda: digest_of(further))
        if plain:
            self.digests["buffers"] = self._joint(lambda: digest_of(plain))

    def warn_of_others(self, announcements: Announcements) -> None:
        """Warns of peers that have other values in what is not averaged, once of each."""
        if not (self.digests and self._site.leads):
            return
        try:
            progress = read_progress(announcements.at_leader(wait=False))
        except ClosedError:
            return
        for part, advice in NOT_AVERAGED.items():
            own = self.digests.get(part)
            if own is None or (part == FROZEN and self.of_strategy is not None):
                continue  # the strategy compares the base itself, and may change it
            training = {name: peer.parts for name, peer in progress.items() if not peer.digest}
            others = {(part, name) for name, parts in training.items() if parts.get(part, own) != own}
            names = sorted(name for _, name in others - self._named)
            self._named |= others
            if names:
                logger.warning("%s: other values in %s", listed(names), advice)


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """A digest, 16 hexadecimal digits, of the names, shapes and values of tensors; of a DTensor those of this rank."""
    digest = xxhash.xxh3_64()
    for name, tensor in tensors.items():
        values = "".join(digest_of_tensors([part]) for part in _plain_parts(tensor.detach()))
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0{values}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()


def _is_unwritten(buffer: torch.Tensor) -> bool:
    # No constant of a model has NaN or subnormal numbers, but memory often (a model built on `meta`, then `to_empty`).
    if not buffer.is_floating_point() or buffer.dtype not in AVERAGED_DTYPES.values():
        return False
    sizes = [part.abs() for part in _plain_parts(buffer.detach()) if part.is_floating_point()]
    return any(bool((size.isnan() | ((size > 0) & (size < torch.finfo(size.dtype).tiny))).any()) for size in sizes)


def _plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Dense tensors that hold the values of a tensor, which may be sparse, quantized or on no device."""
    if is_divided(tensor):
        return _plain_parts(local(tensor))
    if is_traceable_wrapper_subclass(tensor):
        return [part for name in tensor.__tensor_flatten__()[0] for part in _plain_parts(getattr(tensor, name))]
    if tensor.is_quantized:
        return [tensor.int_repr()]
    if tensor.is_meta:
        return []
    return [(tensor if tensor.layout is torch.strided else tensor.to_dense()).resolve_conj().resolve_neg()]


def _changed(kind: str, name: str, how: str) -> str:
    rest = "" if kind == "parameter" else "; if the model does so in every step, leave the buffer out with `buffers`"
    return (
        f"{kind} {name!r} of the model {how} since the averager was made, as load_state_dict(assign=True) and "
        "assignments to modules do; write values in place, or close this averager and make a new one with a new "
        f"optimizer{rest}"
    )


def _named_tensors(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], ...]:
    """The parameters, the persistent buffers and the other buffers of a model by name."""
    keys = {
        f"{at}.{key}" if at else key
        for at, module in model.named_modules()
        for key in module._non_persistent_buffers_set
    }
    buffers = dict(model.named_buffers())
    kinds: list[dict[str, torch.Tensor]] = [
        dict(model.named_parameters()),
        {name: buffer for name, buffer in buffers.items() if name not in keys},
        {name: buffer for name, buffer in buffers.items() if name in keys},
    ]
    names = iter(without_wrappers([name for named in kinds for name in named]))
    return tuple({next(names): tensor for tensor in named.values()} for named in kinds)


# What an optimizer trains, and which buffers the peers have in common.


def named_parameters(optimizer: torch.optim.Optimizer, model: TrainedModel | None = None) -> dict[str, torch.Tensor]:
    """The parameters of an optimizer by name, each once, in the order of its groups.

    The names are those of the model, else those the optimizer was given (`AdamW(model.named_parameters())`), else
    `group0.param0` and so on. Raises ConfigError or TensorError if they cannot be averaged.
    """
    if not hasattr(optimizer, "param_groups"):
        raise ConfigError(f"the first argument must be an optimizer, not {type(optimizer).__name__}")
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for names, group in zip(_names(optimizer, model), optimizer.param_groups, strict=True):
        for name, parameter in zip(names, group["params"], strict=True):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if not parameter.is_floating_point():
                raise TensorError(
                    f"parameter {name!r} is {parameter.dtype}; only floating-point parameters can be averaged"
                )
            if not parameter.requires_grad:
                raise TensorError(
                    f"parameter {name!r} does not require a gradient; give the optimizer only those that do: "
                    "[p for p in model.parameters() if p.requires_grad]"
                )
            _check_writable(f"parameter {name!r}", parameter)
            if name in named:
                raise TensorError(f"two parameters of the optimizer are named {name!r}; give each its own name")
            named[name] = parameter
    return named


def _names(optimizer: torch.optim.Optimizer, model: TrainedModel | None) -> list[list[str]]:
    if model is not None:
        return model.names(optimizer)
    given = [
        group.get("param_names") or [f"group{number}.param{place}" for place in range(len(group["params"]))]
        for number, group in enumerate(optimizer.param_groups)
    ]
    plain = iter(without_wrappers(name for group in given for name in group))
    return [[next(plain) for _ in group] for group in given]


@dataclass(frozen=True, slots=True)
class ModelBuffers:
    """The buffers of a model by name, with the prefix `buffer/`, so that they differ from parameters."""

    averaged: dict[str, torch.Tensor]
    shared: dict[str, torch.Tensor]


def named_buffers(given: Any, model: TrainedModel | None = None) -> ModelBuffers:
    """The buffers that peers have in common."""
    if given is None:
        named = (
            {} if model is None else {name: buffer for name, buffer in model.buffers.items() if _can_be_sent(buffer)}
        )
    else:
        named = _given_buffers(given, model)
    prefixed = {BUFFER + name: buffer for name, buffer in named.items()}
    averaged = {name: buffer for name, buffer in prefixed.items() if buffer.is_floating_point()}
    return ModelBuffers(averaged, {name: buffer for name, buffer in prefixed.items() if name not in averaged})


def _given_buffers(given: Any, model: TrainedModel | None) -> dict[str, torch.Tensor]:
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"buffers must be tensors by name, such as dict(model.named_buffers()), not {type(given).__name__}"
        )
    for name, buffer in given.items():
        if not isinstance(buffer, torch.Tensor):
            raise ConfigError(f"buffer {name!r} must be a tensor, not {type(buffer).__name__}")
        _check_writable(f"buffer {name!r}", buffer)
    known = {} if model is None else {id(buffer): name for name, buffer in model.buffers.items()}
    plain = zip(without_wrappers(given), given.values(), strict=True)
    return {known.get(id(buffer), name): buffer for name, buffer in plain}


def _can_be_sent(buffer: torch.Tensor) -> bool:
    try:
        _check_writable("it", buffer)
    except TensorError:
        return False
    if buffer.layout is not torch.strided:
        return False
    if buffer.is_floating_point():
        return buffer.dtype in AVERAGED_DTYPES.values() and all_finite(buffer)
    return buffer.dtype in STATE_DTYPES.values()


def _check_writable(what: str, tensor: torch.Tensor) -> None:
    """Raises TensorError, at once instead of in the first round, if a result cannot be written to a tensor."""
    if tensor.is_meta:
        raise TensorError(
            f"{what} is on the meta device and has no values; give it values first, for example with model.to_empty()"
        )
    if tensor.is_inference():
        raise TensorError(
            f"{what} was made in inference mode and is writable only there; make it outside of inference mode"
        )
    if tensor.layout is torch.strided and any(
        stride == 0 and extent > 1 for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise TensorError(f"several elements of {what} share memory, as after expand(); clone() it")


class TensorGuard:
    """Notices that the averaged tensors are not the trained ones any more."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: TrainedModel | None,
        trained: Mapping[str, torch.Tensor],
        buffers: ModelBuffers,
    ) -> None:
        self._optimizer, self._model = optimizer, model
        self._tensors = {**trained, **buffers.averaged}
        self._buffers = {name.removeprefix(BUFFER) for name in buffers.averaged | buffers.shared}
        self._places = {name: local(tensor).detach() for name, tensor in self._tensors.items()}  # sharing their memory
        self._ids = self._parameter_ids()
        self._warned = False

    def check(self) -> None:
        """Raises TensorError if a tensor was moved, or the inner optimizer or the model has other ones now."""
        if self._model is not None:
            self._model.check(self._buffers)
        for name, tensor in self._tensors.items():
            # `share_memory_()` moves both, which is harmless.
            if local(tensor).data_ptr() != self._places[name].data_ptr():
                raise TensorError(
                    f"{name!r} has been moved in memory, as `model.to()` and `.data = ...` do; move the model first, "
                    "then make the averager, and write later values in place, with `copy_`"
                )
        if self._parameter_ids() != self._ids:
            raise TensorError(
                "the inner optimizer has other parameters than when the averager was made; the averaged ones cannot "
                "change: add parameters before, or close this averager and make a new one"
            )

    def warn_without_gradients(self) -> None:
        # For example if a cell of a notebook that makes the model ran again, but not that which makes the averager.
        groups = self._optimizer.param_groups
        if not (self._warned or any(tensor.grad is not None for group in groups for tensor in group["params"])):
            self._warned = True
            logger.warning(
                "no parameter of the optimizer has a gradient in this step, so it trains nothing. If the model was "
                "made anew after this averager, close it and make another one with the new model and its optimizer"
            )

    def _parameter_ids(self) -> list[list[int]]:
        return [[id(parameter) for parameter in group["params"]] for group in self._optimizer.param_groups]


# Integer buffers, such as the count of batches in BatchNorm: the members of a round take the largest value of each.


KEY = "counters"
"""Key of the values in a member's `gather`, behind a digest of their names. The rest of the map is the strategy's."""

MAX_EACH, MAX_ALL = 1024, 2048
"""Elements of one counter, and of all: `gather` has room for 64 KiB. Larger buffers are tables rather than counts."""

MAX_VALUE = 2**53
"""Largest value that is taken, so that no counter overflows."""

KINDS = (torch.int64, torch.int32, torch.int16)


class Counters:
    """The counters among the buffers that are not averaged; members with the same names are compared."""

    def __init__(self, buffers: Mapping[str, torch.Tensor]) -> None:
        self._named: dict[str, torch.Tensor] = {}
        left = MAX_ALL
        for name, buffer in sorted(buffers.items()):
            if buffer.dtype in KINDS and buffer.numel() <= min(MAX_EACH, left):
                self._named[name] = buffer
                left -= buffer.numel()
        names = "".join(f"{name}\0{buffer.numel()}\0" for name, buffer in self._named.items())
        self._digest = xxhash.xxh3_64_intdigest(names.encode(errors="surrogatepass")) & (MAX_VALUE - 1)

    def __bool__(self) -> bool:
        return bool(self._named)

    def added_to(self, gather: Any) -> Any:
        """What a member sends to its group: its strategy's `gather`, a map or nothing, and the present values."""
        if not self or not (gather is None or isinstance(gather, dict)):
            return gather  # the application chose another form
        values = [value for counter in self._named.values() for value in counter.reshape(-1).tolist()]
        return {**(gather or {}), KEY: [self._digest, *values]}

    @torch.no_grad()
    def take_largest(self, gathered: Iterable[Any]) -> None:
        """Raises each counter to the largest value that a member has sent; malformed ones are ignored."""
        sizes = [counter.numel() for counter in self._named.values()]
        sent = [
            values
            for user in gathered
            if isinstance(user, dict) and isinstance(numbers := user.get(KEY), list) and len(numbers) == 1 + sum(sizes)
            for digest, *values in [numbers]
            if digest == self._digest and all(type(value) is int and abs(value) <= MAX_VALUE for value in values)
        ]
        if not sent:
            return
        largest = torch.split(torch.tensor(sent, dtype=torch.int64).amax(0), sizes)
        for counter, new in zip(self._named.values(), largest, strict=True):
            fitting = new.clamp(max=torch.iinfo(counter.dtype).max).reshape(counter.shape)
            counter.copy_(torch.maximum(counter, fitting.to(counter.device, counter.dtype)))


def without_counters(gathered: Any) -> Any:
    if not isinstance(gathered, dict) or KEY not in gathered:
        return gathered
    return {key: value for key, value in gathered.items() if key != KEY} or None

"""The model that an optimizer trains: the names of its tensors, and whether they are still the same ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from averaging.common import without_wrappers
from averaging.errors import ConfigError, TensorError
from averaging.tensors import digest_of_tensors
from averaging.training.layout import is_divided, local


class TrainedModel:
    """The parameters and persistent buffers of a model by name, each once, in the model's order.

    The names lack the prefixes of wrappers (DistributedDataParallel, torch.compile, FSDP), see `without_wrappers`.

    Args:
        model: given by the user.

    Attributes:
        parameters: all parameters, trained and frozen.
        buffers: the buffers that are in the model's state dict.

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
        self.parameters, self.buffers = _named_tensors(model)
        # What each module holds: the dicts themselves, and the identities of what is in them now.
        holders = [held for module in model.modules() for held in (module._parameters, module._modules)]
        self._held = [(held, [id(one) for one in held.values()]) for held in holders]
        self._places = [
            (module._buffers, key, buffer)
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and key not in module._non_persistent_buffers_set
        ]

    def names(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """The names of an optimizer's parameters, for each of its groups.

        Raises:
            ConfigError: the model lacks one of them.
        """
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    given = group.get("param_names") or [f"number {one}" for one in range(len(group["params"]))]
                    raise ConfigError(
                        f"the optimizer trains a parameter that `model` does not have ({given[place]} of group "
                        f"{number}, of shape {list(parameter.shape)}); give the model whose parameters the optimizer "
                        "got, and make the optimizer after the model was wrapped, divided or converted"
                    )
        return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]

    def frozen(self, trained: Collection[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The present parameters of the model that are not among the trained ones, by name."""
        ids = {id(parameter) for parameter in trained}
        return {name: one for name, one in _named_tensors(self.model)[0].items() if id(one) not in ids}

    @property
    def present_buffers(self) -> dict[str, torch.Tensor]:
        """The present buffers of its state dict by name."""
        return _named_tensors(self.model)[1]

    def check(self, buffers: Collection[str]) -> None:
        """Checks that the model has the same tensors as when this was made.

        Args:
            buffers: names of the buffers that must be the same; others may be replaced.

        Raises:
            TensorError: a parameter, or one of these buffers, was replaced, added or removed.
        """
        if all([*map(id, held.values())] == before for held, before in self._held) and all(
            held.get(key) is buffer for held, key, buffer in self._places
        ):
            return  # the usual case takes about a millisecond for a thousand modules
        parameters, now = _named_tensors(self.model)
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


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """A digest, 16 hexadecimal digits, of the names, shapes and values of tensors; of a DTensor those of this rank."""
    digest = xxhash.xxh3_64()
    for name, tensor in tensors.items():
        values = "".join(digest_of_tensors([part]) for part in _plain_parts(tensor.detach()))
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0{values}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()


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


def _named_tensors(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The parameters and the persistent buffers of a model by name."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    for prefix, module in model.named_modules():
        for key in module._non_persistent_buffers_set:
            buffers.pop(f"{prefix}.{key}" if prefix else key, None)
    names = without_wrappers([*found, *buffers])
    return dict(zip(names, found.values(), strict=False)), dict(zip(names[len(found) :], buffers.values(), strict=True))

"""A device whose memory the CPU cannot read, without a GPU: what reads its tensors as if they were on the CPU fails.

Its tensors are computed on the CPU, so results are the same to the bit. As on CUDA, an operation that mixes them with
tensors on the CPU is an error, except copies between both and 0-dim tensors.
"""

from functools import cache
from typing import Any, Self

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten

MIXING = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default, aten.set_.source_Tensor}
"""Operations whose tensors may be on both sides."""


@cache
def separate_device() -> torch.device:
    """The device, which exists once for each process."""
    backend_registration._setup_privateuseone_for_python_backend("separate")
    library: Any = _LIBRARY
    library.impl("empty_strided", lambda *shape, **kind: SeparateTensor(torch.empty_strided(*shape, **_on_cpu(kind))))
    library.impl("empty.memory_format", lambda *shape, **kind: SeparateTensor(torch.empty(*shape, **_on_cpu(kind))))
    return torch.device("separate:0")


_LIBRARY = torch.library.Library("aten", "IMPL", "PrivateUse1")  # type: ignore[no-untyped-call]


def _on_cpu(kind: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kind.items() if name != "pin_memory"} | {"device": "cpu"}


class SeparateTensor(torch.Tensor):
    """A tensor on the device."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> Self:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=separate_device(),
            requires_grad=requires_grad,
        )
        made.held = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SeparateTensor({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        """Addresses on the device, as they tell whether tensors share memory."""
        return self.held.data_ptr()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert a tensor on a separate device to numpy; use Tensor.cpu() first")

    def tolist(self) -> Any:
        """Waits for the device and copies, as it does on CUDA."""
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = dict(kwargs or {})
        given, _ = tree_flatten((args, kwargs))
        strangers = [one for one in given if isinstance(one, torch.Tensor) and not isinstance(one, cls) and one.dim()]
        if strangers and func not in MIXING:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found separate:0 and cpu")
        target = kwargs.pop("device", None)
        leaves = target is not None and torch.device(target).type == "cpu"
        kwargs.pop("pin_memory", None)
        if target is not None:
            kwargs["device"] = "cpu"
        out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if leaves:
            # Never the same memory, although the device's is the CPU's.
            return out.clone() if any(_inner(one) is out for one in given) else out
        mutated = args[0] if func._schema.name.endswith("_") and args else None
        if isinstance(mutated, torch.Tensor):
            return mutated
        return tree_map(lambda one: cls(one) if isinstance(one, torch.Tensor) else one, out)


def _inner(value: Any) -> Any:
    return value.held if isinstance(value, SeparateTensor) else value


def to_separate(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on the device."""
    return SeparateTensor(tensor.detach().clone())


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """A model with its parameters and buffers on the device, in place."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(to_separate(parameter), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = to_separate(buffer)
    return model

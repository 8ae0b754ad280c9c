"""The LoRA layers of a peft model: which can be averaged exactly, and what is kept beside their bases."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer

from averaging.common import listed
from averaging.errors import ConfigError, StateError, printable
from averaging.integrations.lora_factors import LayerShape, add_product, cut_product
from averaging.training import digest_of

INSTEAD = "average it with LocalSGD or DiLoCo, which average what is trained as it is, or train plain LoRA"


class AdaptedLayer:
    """One linear layer with a LoRA adapter; its `name` in the model is without wrappers of peft."""

    def __init__(self, name: str, module: Any, adapter: str) -> None:
        self.name, self.module, self.adapter = name, module, adapter
        self.trained_rank = self.rank  # first rows of A and columns of B, which this peer trains; others are padding

    @property
    def a(self) -> torch.Tensor:
        weight: torch.Tensor = self.module.lora_A[self.adapter].weight
        return weight

    @property
    def b(self) -> torch.Tensor:
        weight: torch.Tensor = self.module.lora_B[self.adapter].weight
        return weight

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])

    @property
    def scaling(self) -> float:
        return float(self.module.scaling[self.adapter])

    @property
    def shape(self) -> LayerShape:
        return LayerShape(self.b.shape[0], self.a.shape[1], self.rank)

    @property
    def base(self) -> torch.Tensor:
        """The frozen matrix as [out, into]: a view of the base layer's weight."""
        weight: torch.Tensor = self.module.get_base_layer().weight.detach()
        return weight.T if getattr(self.module, "fan_in_fan_out", False) else weight

    def check_plain(self) -> None:
        if not self.base.is_floating_point() or type(self.module.get_base_layer().weight) is not torch.nn.Parameter:
            raise ConfigError(
                f"the base of layer {self.name!r} is quantised ({self.base.dtype}); load the adapter of save_adapter() "
                "on the base in bfloat16 or float32, and merge it there"
            )

    @torch.no_grad()
    def product(self) -> torch.Tensor:
        return (self.b.float() @ self.a.float()) * self.scaling

    @torch.no_grad()
    def pad(self, rank: int) -> None:
        """Makes the rank this, with the same function: new rows of A are random as peft's, new columns of B are 0.

        The scaling becomes that of a LoRA layer of this rank, and B is divided by as much.
        """
        module, name, before = self.module, self.adapter, self.scaling
        alpha = float(module.lora_alpha[name])
        scaling = alpha / math.sqrt(rank) if module.use_rslora.get(name) else alpha / rank
        more = torch.empty(rank - self.rank, self.a.shape[1])
        torch.nn.init.kaiming_uniform_(more, a=math.sqrt(5))
        a = torch.cat([self.a, more.to(self.a.device, self.a.dtype)])
        b = torch.cat([self.b * (before / scaling), self.b.new_zeros(self.b.shape[0], rank - self.rank)], 1)
        module.lora_A[name].weight = torch.nn.Parameter(a)
        module.lora_B[name].weight = torch.nn.Parameter(b)
        module.lora_A[name].out_features = module.lora_B[name].in_features = rank
        module.r[name], module.scaling[name] = rank, scaling


def adapted_layers(model: PeftModel) -> list[AdaptedLayer]:
    """The layers of a model's active adapter, in the model's order, or a ConfigError with why it cannot be exact."""
    if not isinstance(model, PeftModel):
        raise ConfigError(f"model must be a PeftModel, as get_peft_model returns it, not {type(model).__name__}")
    active = list(model.active_adapters)
    if len(active) != 1:
        raise ConfigError(f"{listed(active)} are active at once; activate the one to average with model.set_adapter")
    config = model.peft_config[active[0]]
    if type(config) is not LoraConfig:
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise ConfigError(f"adapter {active[0]!r} is {kind}, not LoRA, so its model is no base plus B·A; {INSTEAD}")
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and active[0] in _adapters(module):
            _check(name, module, active[0])
            layers.append(AdaptedLayer(plain_name(name), module, active[0]))
    if not layers:
        raise ConfigError(f"adapter {active[0]!r} adapts no linear layer")
    return layers


def _adapters(module: Any) -> set[str]:
    return {name for kind in module.adapter_layer_names for name in getattr(module, kind, {})}


def _check(name: str, module: Any, adapter: str) -> None:
    variant = module.lora_variant.get(adapter) if hasattr(module, "lora_variant") else None
    if variant is not None:
        kind = type(variant).__name__.removesuffix("LinearVariant").removesuffix("Variant")
        raise ConfigError(f"layer {name!r} is {kind}, which is not linear in B·A; {INSTEAD}")
    factors = [getattr(module, kind, {}) for kind in ("lora_A", "lora_B")]
    is_linear = all(adapter in of and type(of[adapter]) is torch.nn.Linear for of in factors)
    kind = type(module).__name__
    if not isinstance(module, LoraLayer) or not is_linear or kind in ("MultiheadAttention", "ParamWrapper"):
        raise ConfigError(
            f"layer {name!r} is a {type(module).__module__.rpartition('.')[2]}.{kind}; only linear layers can be "
            f"averaged through their products. Leave it out of target_modules, or {INSTEAD}"
        )
    if module.merged:
        raise ConfigError(f"layer {name!r} is merged; call model.unmerge_adapter() before the training")
    if not (module.lora_A[adapter].weight.requires_grad and module.lora_B[adapter].weight.requires_grad):
        raise ConfigError(
            f"a factor of layer {name!r} is frozen; then the mean of the other one is exact, so LocalSGD or DiLoCo do"
        )


def plain_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace("base_layer.", "")


def pad_ranks(model: PeftModel, layers: Iterable[AdaptedLayer], rank: int) -> None:
    """Pads the adapter of all layers to this rank, and says so in the adapter's configuration."""
    layers = list(layers)
    if type(rank) is not int or rank < 1:
        raise ConfigError(f"rank must be a whole number, at least 1, not {rank!r}")
    for layer in layers:
        if layer.rank > rank:
            raise ConfigError(f"layer {layer.name!r} has rank {layer.rank}; rank must be at least that, not {rank}")
    for layer in layers:
        if layer.rank < rank:
            layer.pad(rank)
    config = model.peft_config[layers[0].adapter]
    config.r, config.rank_pattern = rank, {}


class Correction:
    """What the mean of a layer's products has more than the product of the mean factors, equal at all peers.

    It is kept beside the frozen matrix, as dense + left @ right in float32, and added to the layer's output. The rank
    grows with every round. Once the two factors are as large as the matrix, they become one.
    """

    def __init__(self, layer: AdaptedLayer) -> None:
        self.layer = layer
        shape, device = layer.shape, layer.b.device
        self.left = torch.zeros(shape.out, 0, device=device)
        self.right = torch.zeros(0, shape.into, device=device)
        self.dense: torch.Tensor | None = None
        self._hook = layer.module.register_forward_hook(self._correct, with_kwargs=True)

    def _correct(
        self, module: Any, given: tuple[Any, ...], named: Mapping[str, Any], output: torch.Tensor
    ) -> torch.Tensor:
        if module.disable_adapters or self.layer.adapter not in module.active_adapters:
            return output
        more = None
        values = (given[0] if given else named["x"]).to(self.left.dtype)
        if self.left.shape[1]:
            more = torch.nn.functional.linear(torch.nn.functional.linear(values, self.right), self.left)
        if self.dense is not None:
            dense = torch.nn.functional.linear(values, self.dense)
            more = dense if more is None else more + dense
        return output if more is None else (output + more).to(output.dtype)

    def remove(self) -> None:
        self._hook.remove()

    def add(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Appends the factors, or adds their product to the dense correction."""
        left, right, shape = left.to(self.left), right.to(self.right), self.layer.shape
        rank = self.left.shape[1] + left.shape[1]
        if self.dense is None and rank * (shape.out + shape.into) < shape.out * shape.into:
            self.left, self.right = torch.cat([self.left, left], 1), torch.cat([self.right, right])
            return
        dense = self.left.new_zeros(shape.out, shape.into) if self.dense is None else self.dense.clone()
        add_product(dense, self.left, self.right)
        add_product(dense, left, right)
        self.dense, self.left, self.right = dense, self.left[:, :0], self.right[:0]

    def matrix(self) -> torch.Tensor:
        whole = self.left @ self.right
        return whole if self.dense is None else whole + self.dense

    def joined(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of an adapter of a higher rank that has the correction too, without a loss."""
        a, b, left, right = self.layer.a, self.layer.b, self.left, self.right
        if self.dense is not None:
            unit = torch.eye(min(self.dense.shape), device=self.dense.device)
            left, right = (self.dense, unit) if b.shape[0] >= a.shape[1] else (unit, self.dense)
        if not left.shape[1]:
            return a, b
        left = left.to(b.device) / self.layer.scaling
        return torch.cat([a.float(), right.to(a.device)]), torch.cat([b.float(), left], 1)

    @torch.no_grad()
    def cut(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, float, float]:
        """A and B of an adapter of this rank and a scaling of 1, that has the correction too, see `cut_product`."""
        a, b = self.layer.a.to(self.right), self.layer.b.to(self.left) * self.layer.scaling
        left, right = torch.cat([b, self.left], 1), torch.cat([a, self.right])
        left, right, lost, whole = cut_product(left, right, self.dense, rank)
        return right, left, lost, whole

    def merged_matrix(self) -> torch.Tensor:
        """What the layer multiplies with, [out, into], in the dtype of its base, rounded once."""
        base, more = self.layer.base, self.layer.product()
        more += self.matrix().to(more)
        return (base.to(torch.promote_types(base.dtype, torch.float32)) + more.to(base.device)).to(base.dtype)

    def merged_bias(self) -> torch.Tensor | None:
        layer = self.layer
        bias = layer.module.lora_B[layer.adapter].bias
        return None if bias is None else layer.module.get_base_layer().bias.detach() + bias * layer.scaling

    def tensors(self) -> dict[str, torch.Tensor]:
        """What of the three is not empty."""
        name = self.layer.name
        parts = {f"dense/{name}": self.dense} if self.dense is not None else {}
        if self.left.shape[1]:
            parts |= {f"left/{name}": self.left, f"right/{name}": self.right}
        return parts

    def read(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What of the three is in a state."""
        name, shape = self.layer.name, self.layer.shape
        given = {kind: tensors[f"{kind}/{name}"] for kind in ("left", "right", "dense") if f"{kind}/{name}" in tensors}
        rank = given["left"].shape[-1] if "left" in given else 0
        wanted = {"left": (shape.out, rank), "right": (rank, shape.into), "dense": (shape.out, shape.into)}
        limit = shape.out * shape.into // (shape.out + shape.into)
        if ("left" in given) != ("right" in given) or rank > limit:
            raise StateError(f"its correction of layer {name!r} has the rank {rank}, and at most {limit} is possible")
        for kind, tensor in given.items():
            if tuple(tensor.shape) != wanted[kind] or tensor.dtype != torch.float32:
                there = f"{tensor.dtype} {list(tensor.shape)}"
                raise StateError(f"its correction of layer {name!r} is {there}, not float32 {list(wanted[kind])}")
        return given

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        empty = {"left": self.left[:, :0], "right": self.right[:0]}
        taken = empty | {kind: tensor.to(self.left, copy=True) for kind, tensor in tensors.items()}
        self.left, self.right, self.dense = taken["left"], taken["right"], taken.get("dense")

    @property
    def state_bytes(self) -> int:
        """The most bytes that `tensors` ever has."""
        return 4 * self.layer.shape.out * self.layer.shape.into


REMEDY = "load the same base model, in the same dtype and with the same quantisation, at all peers"


def describe_base(
    model: torch.nn.Module, trained: Iterable[torch.Tensor], layers: Iterable[AdaptedLayer]
) -> dict[str, Any]:
    """Describes the frozen tensors and the adapter of a peer for the others, see `_Description`; it can be packed."""
    ids = {id(parameter) for parameter in trained}
    tensors = []
    for name, parameter in model.named_parameters():
        if id(parameter) not in ids:
            kind = "" if type(parameter) is torch.nn.Parameter else f" in {type(parameter).__name__}"
            shown = f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}{kind}"
            tensors.append([plain_name(name), shown, digest_of({"": parameter})])
    return {"tensors": tensors, "layers": [[layer.name, layer.rank, layer.scaling] for layer in layers]}


class _Description(msgspec.Struct):
    tensors: list[tuple[str, str, str]]  # the frozen ones: name, dtype and shape, digest
    layers: list[tuple[str, int, float]]  # the adapted ones: name, rank, scaling


def check_base(own: Mapping[str, Any], theirs: object) -> None:
    """Raises StateError with the first difference to the description of another peer, which is untrusted."""
    try:
        here, there = (msgspec.convert(each, _Description) for each in (own, theirs))
    except msgspec.ValidationError:
        raise StateError("it does not say which base its adapter belongs to") from None
    ours_by_name, theirs_by_name = ({name: rest for name, *rest in each.tensors} for each in (here, there))
    if missing := sorted(ours_by_name.keys() ^ theirs_by_name.keys()):
        where = "here" if missing[0] in ours_by_name else "there"
        raise StateError(
            f"it has another base model: {len(missing)} frozen tensors are only at one of the two peers, such as "
            f"{_shown(missing[0])} ({where}); {REMEDY}, and freeze the same parameters"
        )
    _check_layers(here.layers, there.layers)
    differing = [[name for name, ours in ours_by_name.items() if ours[i] != theirs_by_name[name][i]] for i in (0, 1)]
    for names, what in zip(differing, ("is {} there, and {} here", "has other values"), strict=True):
        if names:
            kinds = (printable(each[names[0]][0])[:100] for each in (theirs_by_name, ours_by_name))
            raise StateError(
                f"it has another base: frozen tensor {_shown(names[0])} {what.format(*kinds)} ({len(names)} of "
                f"{len(ours_by_name)} differ); {REMEDY}"
            )


def _check_layers(own: list[tuple[str, int, float]], theirs: list[tuple[str, int, float]]) -> None:
    names = [{layer[0] for layer in layers} for layers in (own, theirs)]
    if other := sorted(names[0] ^ names[1]):
        where = "here" if other[0] in names[0] else "there"
        raise StateError(
            f"its adapter has other layers: {_shown(other[0])} is only {where}; use the same target_modules"
        )
    there = {name: (rank, scaling) for name, rank, scaling in theirs}
    for name, rank, scaling in own:
        if there[name][0] != rank:
            highest = max(rank, there[name][0])
            raise StateError(
                f"its adapter has rank {there[name][0]} in layer {_shown(name)}, this peer's {rank}; pad both with "
                f"LoRAAveraging(rank={highest})"
            )
        if abs(there[name][1] - scaling) > 1e-6 * abs(scaling):
            raise StateError(
                f"its adapter counts {there[name][1]:g} times in layer {_shown(name)}, this peer's {scaling:g} times; "
                "use the same lora_alpha and use_rslora at all peers"
            )


def _shown(name: str) -> str:
    return repr(printable(name)[:100])

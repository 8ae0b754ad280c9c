"""Writes what was trained with `LoRAAveraging`: as an adapter of peft, or merged into the base model."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file

from averaging.errors import ConfigError
from averaging.integrations.lora_layers import AdaptedLayer, Correction, plain_name

logger = logging.getLogger("averaging.training")

ADAPTER_FILE = "adapter_model.safetensors"


def save_adapter(model: PeftModel, corrections: Sequence[Correction], folder: str | os.PathLike[str]) -> None:
    """Writes an adapter that plain peft loads, with the correction among its factors, so that its rank is higher."""
    name = corrections[0].layer.adapter
    config = copy.deepcopy(model.peft_config[name])
    config.inference_mode = True
    tensors = dict(get_peft_model_state_dict(model, adapter_name=name))
    places = {id(module): place for place, module in model.named_modules()}
    ranks, alphas = {}, {}
    for correction in corrections:
        a, b = _with_correction(correction)
        place, plain = places[id(correction.layer.module)], plain_name(correction.layer.name)
        tensors[f"{place}.lora_A.weight"], tensors[f"{place}.lora_B.weight"] = a, b
        ranks[plain], alphas[plain] = a.shape[0], correction.layer.scaling * a.shape[0]
    # alpha / rank is the scaling of each layer, whatever rank it has with the correction.
    config.rank_pattern, config.alpha_pattern, config.use_rslora = ranks, alphas, False
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, Path(folder) / ADAPTER_FILE)
    config.save_pretrained(str(folder))


def warn_before_saving(model: PeftModel, corrections: Sequence[Correction]) -> None:
    """Makes `model.save_pretrained` warn, once, if the adapter that it writes lacks a correction."""
    save = model.save_pretrained
    warned: list[bool] = []

    def save_pretrained(*args: Any, **options: Any) -> Any:
        if not warned and any(correction.tensors() for correction in corrections):
            warned.append(True)
            logger.warning(
                "save_pretrained writes the adapter without its correction, which is not the model that was trained; "
                "use save_adapter() or merge() of LoRAAveraging"
            )
        return save(*args, **options)

    model.save_pretrained = save_pretrained


def _with_correction(correction: Correction) -> tuple[torch.Tensor, torch.Tensor]:
    layer = correction.layer
    left, right = correction.factors()
    if not left.shape[1]:
        return layer.a, layer.b
    a = torch.cat([layer.a.float(), right.to(layer.a.device)])
    return a, torch.cat([layer.b.float(), left.to(layer.b.device) / layer.scaling], 1)


@torch.no_grad()
def merge(model: PeftModel, corrections: Sequence[Correction]) -> Any:
    """Adds adapter and correction to the base weights, each rounded once, and returns the base model without peft.

    Raises:
        ConfigError: a base weight is quantised; nothing was changed.
    """
    for correction in corrections:
        _check_plain(correction.layer)
    for correction in corrections:
        layer = correction.layer
        layer.base.copy_(_merged_matrix(correction))
        correction.remove()
        bias = layer.module.lora_B[layer.adapter].bias
        if bias is not None:
            layer.module.get_base_layer().bias += bias * layer.scaling
    return model.unload()


def _merged_matrix(correction: Correction) -> torch.Tensor:
    """What a layer multiplies with, [out, into], in the dtype of its base."""
    layer, base = correction.layer, correction.layer.base
    more = layer.product()
    more += correction.matrix().to(more)
    return (base.to(torch.promote_types(base.dtype, torch.float32)) + more.to(base.device)).to(base.dtype)


class MergedView(torch.nn.Module):
    """Stands for the merged model where only a state dict is read, as `WeightPublisher` does. Nothing is merged.

    Args:
        model: the peft model.
        corrections: the rest of each layer.

    Raises:
        ConfigError: a base weight is quantised.
    """

    def __init__(self, model: PeftModel, corrections: Sequence[Correction]) -> None:
        super().__init__()
        for correction in corrections:
            _check_plain(correction.layer)
        self._source = (model, tuple(corrections))  # in a tuple, so that it is no module of this one

    @torch.no_grad()
    def state_dict(self, *args: Any, **options: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """The tensors of the merged model under the names of the base model; those of adapted layers are copies."""
        model, corrections = self._source
        name = corrections[0].layer.adapter
        state: dict[str, torch.Tensor] = {}
        for key, tensor in model.state_dict().items():
            key, saved = _without_saved_modules(plain_name(key), name)
            if ".lora_" not in key and (saved or key not in state):
                state[key] = tensor.detach()
        for correction in corrections:
            layer = correction.layer
            whole, plain = _merged_matrix(correction), plain_name(layer.name)
            is_turned = getattr(layer.module, "fan_in_fan_out", False)
            state[f"{plain}.weight"] = whole.T.contiguous() if is_turned else whole
            bias = layer.module.lora_B[layer.adapter].bias
            if bias is not None:
                state[f"{plain}.bias"] = layer.module.get_base_layer().bias.detach() + bias * layer.scaling
        return state


def _without_saved_modules(key: str, adapter: str) -> tuple[str, bool]:
    """A name without what peft adds around `modules_to_save`, and whether it is that of the trained copy."""
    saved = f".modules_to_save.{adapter}."
    return key.replace(saved, ".").replace(".original_module.", "."), saved in key


def _check_plain(layer: AdaptedLayer) -> None:
    if not layer.base.is_floating_point() or type(layer.module.get_base_layer().weight) is not torch.nn.Parameter:
        raise ConfigError(
            f"the base of layer {layer.name!r} is quantised ({layer.base.dtype}); load the adapter of save_adapter() "
            "on the base in bfloat16 or float32, and merge it there"
        )

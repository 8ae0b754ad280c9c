"""Trains a LoRA adapter of peft with other peers, so that the model of each round is the mean of their models.

docs/how-to/adapters.md is the guide.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file

from averaging.common import ADAPTER_CONFIG, ADAPTER_ERROR, ADAPTER_FILE, pack
from averaging.errors import ConfigError, RoundError
from averaging.integrations.lora_factors import FactorSlots, mean_of, packed, rest_of_factors, unpacked
from averaging.integrations.lora_layers import (
    REMEDY,
    AdaptedLayer,
    Correction,
    adapted_layers,
    check_base,
    describe_base,
    pad_ranks,
    plain_name,
)
from averaging.peer import Adopt, RoundOptions, Topic
from averaging.protocol import AggregationKind, CompressionType, Statement, parse_aggregation
from averaging.receipts import Receipt
from averaging.state import ExtraState
from averaging.strategies import AveragingSchedule, LockstepStrategy, common_options
from averaging.training import BackgroundDownload, StrategyContext, count_in, full_precision, take_tensor

logger = logging.getLogger("averaging.training")

CONFIG_ROOM = 256  # bytes by which a published configuration can become longer, so that all versions have one layout


class AdapterRound:
    """What the peers average in one round, with room for `slots` members, and how its result is applied."""

    def __init__(
        self, layers: Sequence[AdaptedLayer], corrections: Sequence[Correction], training: StrategyContext, slots: int
    ) -> None:
        self._layers, self._corrections = layers, corrections
        self._shapes = [layer.shape for layer in layers]
        part_elements = training.peer.config.part_size_bytes // 4
        self._slots = FactorSlots(sum(shape.factors for shape in self._shapes), slots, part_elements)
        exchanged = _factors_of(layers)
        plain = {name: tensor for name, tensor in training.trained.items() if id(tensor) not in exchanged}
        self._plain = {name: (tensor, _copy_of(tensor)) for name, tensor in (plain | training.buffers).items()}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:  # the slots, and copies of all that is averaged as it is
        slots = {f"factors/{number}": piece for number, piece in enumerate(self._slots.pieces)}
        return slots | {name: copied for name, (_, copied) in self._plain.items()}

    @torch.no_grad()
    def measure(self) -> None:
        """Writes the present factors to slot 0, since the group is not known yet, and copies the rest."""
        self._slots.write(packed([(layer.a, layer.b) for layer in self._layers]), 0)
        for tensor, copied in self._plain.values():
            copied.copy_(tensor)

    def take_slot(self, slot: int) -> None:
        self._slots.move(slot)

    @torch.no_grad()
    def apply(self) -> bool:
        """Writes the result to the model: the mean factors, and the rest of the products. The caller holds the lock.

        Returns:
            Whether there was one: not if each member was dropped by some reducer. Then nothing was written.
        """
        read = self._slots.read()
        if not read:
            return False
        shares = [share for share, _ in read]
        of_members = [unpacked(values, self._shapes) for _, values in read]
        for number, (layer, correction) in enumerate(zip(self._layers, self._corrections, strict=True)):
            factors = [of_member[number] for of_member in of_members]
            layer.a.copy_(mean_of(shares, [a for a, _ in factors]))
            layer.b.copy_(mean_of(shares, [b for _, b in factors]))
            correction.add(*rest_of_factors(shares, factors, (layer.a, layer.b), layer.scaling))
        for tensor, copied in self._plain.values():
            tensor.copy_(copied)
        return True


def _factors_of(layers: Sequence[AdaptedLayer]) -> set[int]:
    return {id(factor) for layer in layers for factor in (layer.a, layer.b)}


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", full_precision(tensor), copy=True)


class LoRAAveraging(LockstepStrategy):
    """Averages the models of a LoRA adapter exactly: not the factors A and B apart, but their products.

    After `sync_every` local steps the adapter of every peer holds mean(B)·mean(A), and what mean(B·A) has more is kept
    beside it, so that each peer's model is the mean of the models of all members (FedEx-LoRA, arXiv:2410.09432). Biases
    and `modules_to_save` are averaged as they are. The frozen base does not travel: its digests are compared at the
    start. The optimizer's state, such as Adam's moments of A and B, stays each peer's own; a newcomer gets its donor's.

    Make it right after `get_peft_model`, before the optimizer and before a checkpoint is loaded.

    A peer that is alone trains on. If a round fails, nothing changes, and the next step tries again. A peer that has
    missed a round takes over the state of another peer and adds its own local steps since its last round.

    Args:
        model: the peft model, with one active LoRA adapter of linear layers. DoRA and other kinds that are not linear
            in B·A are refused.
        sync_every: local steps between two rounds.
        rank: the rank to which adapters are padded, if peers have different ones: the highest of all. A peer trains its
            own rows of A and columns of B only, and holds the others as the rounds make them. None does not pad.
        max_norm: limit for the gradients of each local step, see `Strategy`.

    Raises:
        ConfigError: an argument is invalid, or the adapter cannot be averaged exactly; the message names the layer.
    """

    against_average_now = (
        "average_now() averages A and B apart, so the model would not be the mean of the models; LoRAAveraging "
        "averages every sync_every steps, and in finish()"
    )

    def __init__(
        self, model: PeftModel, sync_every: int, *, rank: int | None = None, max_norm: float | None = None
    ) -> None:
        super().__init__(max_norm=max_norm)
        self._schedule: AveragingSchedule = AveragingSchedule(sync_every)
        self.sync_text = str(self._schedule)
        self._model, self._layers = model, adapted_layers(model)
        self._padded = False
        if rank is not None:
            pad_ranks(model, self._layers, rank)
            self._padded = any(layer.trained_rank < rank for layer in self._layers)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._description = describe_base(model, trained, self._layers)
        self._digest = hashlib.sha256(pack(self._description)).hexdigest()[:16]
        self._corrections = [Correction(layer) for layer in self._layers]
        self._warn_before_saving()
        self._round: AdapterRound  # both are made by `start`
        self._topic: Topic
        self._anchors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._loaded = False  # whether the anchors come from a state; local steps may follow them
        self._open_steps = 0
        self._discarded = False  # whether another peer's result may include the local steps since the last global step

    def __repr__(self) -> str:
        return f"LoRAAveraging(sync_every={self.sync_every}{common_options(self)})"

    @property
    def sync_every(self) -> int:
        """Local steps between two rounds."""
        return self._schedule.sync_every

    @property
    def samples(self) -> float:
        """Local steps that no average includes: since the last round, and also after a state was taken over."""
        return self._open_steps

    def save_adapter(self, folder: str | os.PathLike[str]) -> None:
        """Writes the adapter with its correction as a folder that `PeftModel.from_pretrained` loads on the same base.

        The correction is part of its factors, so that its ranks are higher. Call it between two steps, or at the end.
        """
        joined = [correction.joined() for correction in self._corrections]
        config, tensors = _as_saved(self._model, self._layers, joined)
        # alpha / rank is the scaling of each layer, whatever rank it has with the correction.
        ranks = {plain_name(layer.name): a.shape[0] for layer, (a, _) in zip(self._layers, joined, strict=True)}
        scalings = {plain_name(layer.name): layer.scaling for layer in self._layers}
        config.rank_pattern = ranks
        config.alpha_pattern = {name: scalings[name] * rank for name, rank in ranks.items()}
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, path / ADAPTER_FILE)
        config.save_pretrained(str(path))

    def _warn_before_saving(self) -> None:
        """Makes `model.save_pretrained` warn, once, if the adapter that it writes lacks a correction."""
        save, warned = self._model.save_pretrained, list[bool]()

        def save_pretrained(*args: Any, **options: Any) -> Any:
            if not warned and self._kept():
                warned.append(True)
                logger.warning(
                    "save_pretrained writes the adapter without its correction, which is not the model that was "
                    "trained; use save_adapter() or merge() of LoRAAveraging"
                )
            return save(*args, **options)

        self._model.save_pretrained = save_pretrained

    @torch.no_grad()
    def merge(self) -> Any:
        """Adds adapter and correction to the base, and returns the base model without peft, to call `save_pretrained`.

        Call it after the averager was closed, since the model has no adapter to train then.

        Raises:
            ConfigError: a base weight is quantised; nothing was changed.
        """
        for layer in self._layers:
            layer.check_plain()
        for correction in self._corrections:
            layer = correction.layer
            layer.base.copy_(correction.merged_matrix())
            correction.remove()
            if (bias := correction.merged_bias()) is not None:
                layer.module.get_base_layer().bias.copy_(bias)
        return self._model.unload()

    def merged_view(self) -> torch.nn.Module:
        """Stands for the merged model in `WeightPublisher(strategy.merged_view())`; training goes on as before.

        Its state dict has the tensors of the base model under their own names, with adapter and correction added. A
        publisher of the peft model itself would publish neither names of the base nor the correction.

        Raises:
            ConfigError: a base weight is quantised.
        """
        return _MergedView(self._model, self._corrections)

    def adapter_view(self, rank: int) -> torch.nn.Module:
        """Stands for the adapter in `WeightPublisher(strategy.adapter_view(rank=64))`; training goes on as before.

        Its state dict has the tensors of `adapter_model.safetensors` of peft under their names, and as
        `adapter_config.json` the bytes of that file: what `averaging follow --layout peft` writes as a folder, which
        peft and engines load on the same base. The correction is part of the factors, all of one rank and with a
        scaling of 1.

        Args:
            rank: rank of the published factors. The adapter is exact as long as its rank with the correction is not
                higher, and always if `rank` is the shorter side of each matrix. Otherwise it is the nearest of that
                rank, and the configuration names the relative error of its products in the Frobenius norm.

        Raises:
            ConfigError: `rank` is no whole number above 0.
        """
        if type(rank) is not int or rank < 1:
            raise ConfigError(f"rank must be a whole number, at least 1, not {rank!r}")
        return _AdapterView(self._model, self._corrections, rank)

    def start(self, training: StrategyContext) -> None:
        self._check(training)
        config = training.peer.config
        self._round = AdapterRound(self._layers, self._corrections, training, config.group_size)
        self._topic = training.topic(
            f"adapters of {config.group_size}", self._round.tensors, adopt=Adopt.WHOLE, compression=CompressionType.NONE
        )
        self._anchors = {name: (tensor, _copy_of(tensor)) for name, tensor in training.parameters.items()}
        training.parts.of_strategy = self._kept
        training.peer.further_state_bytes = sum(correction.state_bytes for correction in self._corrections)

    def _check(self, training: StrategyContext) -> None:
        given = training.parts.model
        if all(module is not self._model for module in (given.model.modules() if given else ())):
            raise ConfigError("give the averager model=model with the peft model of LoRAAveraging")
        if training.site.size > 1:
            raise ConfigError("LoRAAveraging works with one process for each peer; leave out process_group")
        if training.modes.exist:
            raise ConfigError(
                f"{type(training.optimizer).__name__} has training and evaluation weights, and the mean of one is not "
                "that of the other; use another optimizer with LoRAAveraging"
            )
        config = training.peer.config
        if parse_aggregation(config.aggregation).kind is not AggregationKind.MEAN:
            raise ConfigError(
                f"aggregation={config.aggregation!r} of factors is not that of the models; LoRAAveraging works with "
                "aggregation='mean' only"
            )
        ids = {id(tensor) for tensor in training.trained.values()}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in ids:
                raise ConfigError(
                    f"{name!r} requires a gradient, but the optimizer does not train it; make the optimizer after "
                    "LoRAAveraging, from [p for p in model.parameters() if p.requires_grad]"
                )
        exchanged = _factors_of(self._layers)
        for name, trained in training.trained.items():
            if ".lora_" in name and id(trained) not in exchanged and not name.endswith(".bias"):
                raise ConfigError(f"the optimizer trains {name!r}, which is not of the active adapter; freeze it")
        if not exchanged <= ids:
            raise ConfigError("the model has other adapter parameters than when LoRAAveraging was made; make it anew")

    def joined(self, training: StrategyContext) -> None:
        if self.history.step == 0 and not self._loaded:
            self._anchor()
        super().joined(training)

    def step(
        self, training: StrategyContext, closure: Callable[[], float] | None = None, batch_size: int | None = None
    ) -> float | None:
        if training.local_step == self.history.step == 0:
            with training.locked():
                self._anchor()
        loss = training.inner_step(closure, self.max_norm)
        if self._padded:
            with training.locked(), training.changing_parameters():
                self._restore_padding()
        self._schedule.count(training.now())
        self._open_steps += 1
        others = self.present_others(training, wait=False)
        is_behind = bool(others.ahead) or self._downloads.busy
        if not (is_behind and self.catch_up(training, others)):
            seen = training.announcements.at_leader(wait=False)
            due = self._due(training, self._topic, seen, self.history.phase)
            if due is not None and not self._holds(training, self._topic):
                self._average(training, others.together)
        self._go_on(training, self.history.step, in_round=False)
        return loss

    @torch.no_grad()
    def _anchor(self) -> None:
        self._open_steps = 0
        for tensor, anchor in self._anchors.values():
            anchor.copy_(tensor)

    @torch.no_grad()
    def _restore_padding(self) -> None:
        """Undoes what the optimizer did to rows and columns that this peer does not train, such as weight decay."""
        of = {id(tensor): anchor for tensor, anchor in self._anchors.values()}
        for layer in self._layers:
            rank = layer.trained_rank
            for factor, other in ((layer.a, of[id(layer.a)]), (layer.b.T, of[id(layer.b)].T)):
                factor[rank:] = other[rank:]

    def _average(
        self, training: StrategyContext, together: tuple[str, ...], search_timeout: float | None = None
    ) -> Receipt | None:
        """A round with these peers; without any, this peer makes the step alone."""
        if search_timeout is None and self._ends_with_others(training, together):
            return None
        self._schedule.restart()
        if not together:
            with training.replacing():
                self._advance(training, None, training.weights.number)
                self._anchor()
            self.announce(training)
            return None
        self._round.measure()
        kept = {name: anchor for name, (_, anchor) in self._anchors.items()} | self._kept()
        options: RoundOptions = {
            "phase": self.history.phase,
            "gather": Statement(samples=training.weights.number, base=self._digest).pack(),
            "expected_peers": self._expected_peers(training, together),
            "drift": training.fingerprint(kept, self.history.phase, self.history.step),
            "prepare": lambda gathered: self._take_slot(training, gathered),
        }
        if search_timeout is not None:
            options["search_timeout"] = search_timeout
        self._discarded = True  # until it is known what became of the steps
        receipt = training.average(self._topic, **options)
        if not receipt.averaged:
            self._discarded = bool(receipt.group_id)
            self._standstill.reason = f"its last round failed: {receipt.reason}"
        else:
            self._apply(training, receipt)
        return receipt

    def _take_slot(self, training: StrategyContext, gathered: Mapping[str, Any]) -> None:
        for name, sent in gathered.items():
            if Statement.read(sent).base != self._digest:  # it never downloaded a state
                raise RoundError(f"{name} has another base or adapter than this peer; {REMEDY}")
        slot, slots = list(gathered).index(training.peer.endpoint), training.peer.config.group_size
        if slot >= slots:
            raise RoundError(f"the group has {len(gathered)} members, more than group_size={slots} of this peer")
        self._round.take_slot(slot)

    def _apply(self, training: StrategyContext, receipt: Receipt) -> None:
        with training.replacing(), training.changing_parameters():
            if not self._round.apply():
                logger.warning("round %d: no member's factors arrived at all members; it is made again", receipt.round)
                self._discarded = False  # nobody could apply it
                return
            self._anchor()
            self._advance(training, receipt, training.weights.number)
        self._discarded = False
        self.announce(training)

    def conclude(self, training: StrategyContext, partners: Collection[str], timeout: float) -> Receipt | None:
        """Averages a last time; if that fails, drops the local steps since the last round."""
        end = training.monotonic() + timeout
        receipt: Receipt | None = None
        self.dropped, step = self.samples, self.history.step
        if self.dropped + self.present_others(training).samples > 0:
            announcements = training.announcements.of_others()
            together = self.others(training, announcements).together
            # A step of this peer alone would make its weights differ from those of partners that are left.
            if together or announcements.keys().isdisjoint(partners):
                receipt = self._average(training, together, max(0.0, end - training.monotonic()))
        if self.history.step > step:
            self.dropped = 0.0
        with training.replacing(), training.changing_parameters(), torch.no_grad():
            for tensor, anchor in self._anchors.values():
                tensor.copy_(anchor)
        return receipt

    def _take_over(self, training: StrategyContext, fetch: BackgroundDownload) -> None:
        """Adds the local steps that no result includes to the state, if it follows this peer's own."""
        before, open_steps = self.history, 0 if self._discarded else self._open_steps
        own = {} if self._discarded else {name: _copy_of(tensor) - was for name, (tensor, was) in self._anchors.items()}
        super()._take_over(training, fetch)
        self._open_steps = 0
        if self.history.includes(before):
            self._open_steps = open_steps
            with training.locked(), training.changing_parameters(), torch.no_grad():
                for name, change in own.items():
                    tensor, anchor = self._anchors[name]
                    tensor.copy_(anchor + change)
        self._discarded = False

    # The state

    def _kept(self) -> dict[str, torch.Tensor]:
        return {name: tensor for correction in self._corrections for name, tensor in correction.tensors().items()}

    def state(self) -> ExtraState:
        anchors = {f"anchor/{name}": anchor for name, (_, anchor) in self._anchors.items()}
        return ExtraState(anchors | self._kept(), {"since": self._schedule.steps, "adapter": self._description})

    def check(self, user: Mapping[str, Any]) -> None:
        check_base(self._description, user.get("adapter"))

    def load(self, tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> None:
        super().load(tensors, user)
        self.check(user)
        since = count_in(user, "since")
        anchors = {name: take_tensor(tensors, f"anchor/{name}", own) for name, (_, own) in self._anchors.items()}
        kept = [correction.read(tensors) for correction in self._corrections]
        with torch.no_grad():
            for name, anchor in anchors.items():
                self._anchors[name][1].copy_(anchor)
            for correction, of_layer in zip(self._corrections, kept, strict=True):
                correction.load(of_layer)
        self._schedule.steps = self._open_steps = since  # those of a checkpoint are in its parameters
        self._loaded, self._discarded = True, False


def _as_saved(
    model: PeftModel,
    layers: Sequence[AdaptedLayer],
    factors: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    scaled: bool = False,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The configuration and the tensors as peft saves them, with these A and B, which are `scaled` or are not yet."""
    name = layers[0].adapter
    config = copy.deepcopy(model.peft_config[name])
    config.inference_mode, config.use_rslora = True, False
    # peft may look for the base at the Hub to see whether its embeddings were resized; not in each round.
    embeddings: Any = False if scaled else "auto"
    tensors = dict(get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=embeddings))
    places = {id(module): place for place, module in model.named_modules()}
    for layer, (a, b) in zip(layers, factors, strict=True):
        place = places[id(layer.module)]
        tensors[f"{place}.lora_A.weight"], tensors[f"{place}.lora_B.weight"] = a, b
        if scaled and (bias := f"{place}.lora_B.bias") in tensors:
            tensors[bias] = tensors[bias] * layer.scaling
    return config, tensors


class _AdapterView(torch.nn.Module):
    def __init__(self, model: PeftModel, corrections: Sequence[Correction], rank: int) -> None:
        super().__init__()
        self._source = (model, tuple(corrections))  # in a tuple, so that it is no module of this one
        self._rank, self._config_bytes = rank, 0

    @torch.no_grad()
    def state_dict(self, *args: Any, **options: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """The tensors of peft's file, and the bytes of its configuration, which always are equally many."""
        model, corrections = self._source
        cuts = [correction.cut(self._rank) for correction in corrections]
        layers = [correction.layer for correction in corrections]
        config, tensors = _as_saved(model, layers, [cut[:2] for cut in cuts], scaled=True)
        config.r = config.lora_alpha = self._rank
        config.rank_pattern, config.alpha_pattern = {}, {}
        lost, whole = (sum(cut[number] for cut in cuts) for number in (2, 3))
        error = math.sqrt(lost / whole) if lost else 0.0
        if error:
            logger.info("the adapter is published with rank %d, cut with a relative error of %.1e", self._rank, error)
        text = json.dumps(config.to_dict() | {ADAPTER_ERROR: float(f"{error:.2e}")}, default=sorted).encode()
        self._config_bytes = self._config_bytes or len(text) + CONFIG_ROOM
        tensors[ADAPTER_CONFIG] = torch.frombuffer(bytearray(text.ljust(self._config_bytes)), dtype=torch.uint8)
        return tensors


class _MergedView(torch.nn.Module):
    def __init__(self, model: PeftModel, corrections: Sequence[Correction]) -> None:
        super().__init__()
        for correction in corrections:
            correction.layer.check_plain()
        self._source = (model, tuple(corrections))  # in a tuple, so that it is no module of this one

    @torch.no_grad()
    def state_dict(self, *args: Any, **options: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """The tensors of the merged model under the names of the base model; those of adapted layers are copies."""
        model, corrections = self._source
        saved = f".modules_to_save.{corrections[0].layer.adapter}."
        state: dict[str, torch.Tensor] = {}
        for name, tensor in model.state_dict().items():
            key = plain_name(name).replace(saved, ".").replace(".original_module.", ".")
            if ".lora_" not in key and (saved in name or key not in state):  # the trained copy, or the only one
                state[key] = tensor.detach()
        for correction in corrections:
            layer, whole = correction.layer, correction.merged_matrix()
            plain, is_turned = plain_name(layer.name), getattr(layer.module, "fan_in_fan_out", False)
            state[f"{plain}.weight"] = whole.T.contiguous() if is_turned else whole
            if (bias := correction.merged_bias()) is not None:
                state[f"{plain}.bias"] = bias
        return state

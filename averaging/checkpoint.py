"""`DistributedCheckpoint`: a model and its averager, as torch.distributed.checkpoint saves and loads them."""

from __future__ import annotations

import io
import logging
from typing import Any

import torch

from averaging.averager import DecentralizedAverager
from averaging.errors import ConfigError

PARTS = ("tensors", "own")
"""Where `saved` of a training state has a strategy's tensors."""

logger = logging.getLogger("averaging.training")


class DistributedCheckpoint:
    """What `torch.distributed.checkpoint` saves and loads of a site: model, optimizer, strategy and sampler.

    ```python
    state = {"training": DistributedCheckpoint(model, optimizer)}
    dcp.save(state, checkpoint_id="checkpoints/1000")
    dcp.load(state, checkpoint_id="checkpoints/1000")
    ```

    Every rank of the site calls both. A site of another number of ranks may load it, also of one: what a strategy has
    for each parameter is divided like the parameter. Other tensors of a strategy of your own need as many shards as at
    the time of `save`. What does not fit, such as another strategy, is a missing key, for which `dcp.load` raises
    before it changes anything.

    Args:
        model: The module whose parameters the optimizer has, divided by `fully_shard` or not.
        averager: Around its optimizer.
        sampler: The `RunSampler` of the training, if it has one; with the same `block_size`, which must be a multiple
            of each number of ranks.

    Raises:
        ConfigError: At `load`, the averager cannot take over the state; the model and the inner optimizer may have it.
    """

    def __init__(self, model: torch.nn.Module, averager: DecentralizedAverager, sampler: Any = None) -> None:
        self._model, self._averager, self._sampler = model, averager, sampler

    @property
    def _keys(self) -> tuple[str, str, str]:
        """Keys of the state of the site, of the shard, and of the sampler; they say what the loader must have alike."""
        kind, site = type(self._averager.strategy).__name__, self._averager.site
        division = self._sampler.state_dict()["division"] if self._sampler is not None else ""
        shard = f"{kind}, shard {site.shard} of {site.shards}"
        return kind, shard, f"samples, with the dataset's length, block_size and seed of {division}"

    def state_dict(self) -> dict[str, Any]:
        """See `torch.distributed.checkpoint.stateful.Stateful`."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._model, self._averager.optimizer)
        site, strategy, trained = self._averager.site, self._averager.strategy, self._averager._training.trained
        own = self._averager.state_dict()[self._averager.state_key]
        made = [own["strategy"].pop(part) for part in PARTS]
        own["strategy"]["names"] = [list(tensors) for tensors in made]
        divided: dict[str, torch.Tensor] = {}
        alike: dict[str, torch.Tensor] = {}
        of_shard: dict[str, torch.Tensor] = {}
        # What the loader does not ask for is not loaded, and a new strategy has not made all of its tensors yet.
        for part, to_come, tensors in zip(PARTS, self._averager._training_state.tensors_to_come(), made, strict=True):
            for name, tensor in (to_come | tensors).items():
                parameter = trained.get((name if part == "own" else strategy.parameter_of(name)) or "")
                if parameter is not None and tensor.shape == parameter.shape:
                    divided[f"{part}/{name}"] = tensor
                elif name in tensors:
                    (alike if site.shards == 1 or not tensor.dim() else of_shard)[f"{part}/{name}"] = tensor.cpu()
        # Not by the site, which is closed with the averager. Any rank may write a value, so all have the leader's.
        rest = own, alike, self._sampler and self._sampler.state_dict()
        ranks: list[Any] = [rest] * site.size
        if site.size > 1:
            torch.distributed.all_gather_object(ranks, rest, group=site.group)
        own, alike, of_sampler = ranks[0]
        own["samples"] = _total([each["samples"] for each, _, _ in ranks])
        key_of_site, key_of_shard, key_of_sampler = self._keys
        averaging = {key_of_site: _packed([own, alike])}
        if of_shard:
            averaging[key_of_shard] = _packed(of_shard)
        if self._sampler is not None:
            averaging[key_of_sampler] = _packed(of_sampler)
        return {"model": model, "optimizer": optimizer, "strategy": divided, "averaging": averaging}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.distributed.checkpoint.stateful.Stateful`."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        averaging, inner = state_dict.get("averaging", {}), self._averager.optimizer
        key_of_site, key_of_shard, key_of_sampler = self._keys
        if not isinstance(averaging.get(key_of_site), bytes):
            raise ConfigError(f"the checkpoint has no state of an averager with {key_of_site}; use the same strategy")
        own, tensors = _unpacked(averaging[key_of_site])
        tensors |= state_dict.get("strategy", {})
        tensors |= _unpacked(averaging[key_of_shard]) if key_of_shard in averaging else {}
        for part, names in zip(PARTS, own["strategy"].pop("names"), strict=True):
            own["strategy"][part] = {name: tensors[key] for name in names if (key := f"{part}/{name}") in tensors}
            left = next((name for name in names if name not in own["strategy"][part]), None)
            if left is not None and part == "tensors":
                raise ConfigError(f"the checkpoint has {left!r}, which {self._averager.strategy!r} lacks; use the same")
            if left is not None and self._averager.site.leads:
                logger.warning("the checkpoint holds changes that were not sent yet; without top_k they are dropped")
        if not self._averager.site.leads:
            own["samples"] = [0, {}]  # they count together, and the leader has those of all
        set_state_dict(
            self._model, inner, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optimizer"]
        )
        self._averager.load_state_dict({**inner.state_dict(), self._averager.state_key: own})
        if self._sampler is not None:
            self._sampler.load_state_dict(_unpacked(averaging[key_of_sampler]))


def _total(samples: list[Any]) -> list[Any]:
    """The samples of all ranks that no average has yet, of each topic."""
    topics = {topic for _, averaged in samples for topic in averaged}
    return [
        sum(made for made, _ in samples),
        {topic: sum(averaged.get(topic, 0) for _, averaged in samples) for topic in topics},
    ]


# As one value, since what a strategy keeps grows with its steps: a new averager would not ask for all of it.
def _packed(value: object) -> bytes:
    packed = io.BytesIO()
    torch.save(value, packed)
    return packed.getvalue()


def _unpacked(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=True)

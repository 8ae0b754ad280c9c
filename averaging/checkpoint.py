"""`DistributedCheckpoint`: a model and its averager, as torch.distributed.checkpoint saves and loads them."""

from __future__ import annotations

import io
from typing import Any

import torch

from averaging.averager import DecentralizedAverager
from averaging.errors import ConfigError
from averaging.training import local


class DistributedCheckpoint:
    """What `torch.distributed.checkpoint` saves and loads of one rank: model, optimizer and strategy.

    ```python
    state = {"training": DistributedCheckpoint(model, optimizer)}
    dcp.save(state, checkpoint_id="checkpoints/1000")
    dcp.load(state, checkpoint_id="checkpoints/1000")
    ```

    Every rank of the site calls both. The state of model and optimizer may be loaded with another number of ranks. The
    outer state of the strategy is that of each rank, so the averager needs as many ranks as at the time of `save`.

    Args:
        model: The module whose parameters the optimizer has, divided by `fully_shard` or not.
        averager: Around its optimizer.

    Raises:
        ConfigError: At `load`, the checkpoint has no state of this rank's averager.
    """

    def __init__(self, model: torch.nn.Module, averager: DecentralizedAverager) -> None:
        self._model, self._averager = model, averager

    @property
    def _rank(self) -> str:
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        return f"rank {torch.distributed.get_rank() if ready else 0}"

    def state_dict(self) -> dict[str, Any]:
        """See `torch.distributed.checkpoint.stateful.Stateful`."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._model, self._averager.optimizer)
        own = self._averager.state_dict()[self._averager.state_key]
        # As one value, since what a strategy keeps grows with its steps: a new averager would not ask for all of it.
        packed = io.BytesIO()
        torch.save(_of_this_rank(own), packed)
        return {"model": model, "optimizer": optimizer, "averaging": {self._rank: packed.getvalue()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.distributed.checkpoint.stateful.Stateful`."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        packed = state_dict.get("averaging", {}).get(self._rank)
        if not isinstance(packed, bytes):
            raise ConfigError(f"the checkpoint has no state of the averager at {self._rank}; use as many ranks as then")
        inner = self._averager.optimizer
        set_state_dict(
            self._model, inner, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optimizer"]
        )
        own = torch.load(io.BytesIO(packed), weights_only=True)
        self._averager.load_state_dict({**inner.state_dict(), self._averager.state_key: own})


def _of_this_rank(value: Any) -> Any:
    """A nested state in which tensors that are divided are replaced by the part that this rank holds."""
    if isinstance(value, dict):
        return {name: _of_this_rank(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_of_this_rank(item) for item in value)
    return local(value).detach().cpu() if isinstance(value, torch.Tensor) else value

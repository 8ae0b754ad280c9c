"""The options of a synchronizer. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from averaging.common import one_of
from averaging.config import FilePath
from averaging.errors import ConfigError

MAX_NAMESPACE = 128
"""Maximum length of a namespace in characters."""

GROUP_SECONDS = 300.0
"""Default time limit for the set-up of a weight sync group and for one transfer of a tensor in it."""


class SyncMethod(StrEnum):
    """How weights come from a trainer to explorers."""

    NCCL = "nccl"
    """With a collective of torch.distributed; see `WeightSender` and `WeightReceiver`."""
    CHECKPOINT = "checkpoint"
    """By a path to files that both sides reach."""
    MEMORY = "memory"
    """From the memory of the synchronizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronizerConfig:
    """The options of a `Synchronizer`.

    Attributes:
        namespace: Name of the synchronizer, if there are several in a process or on a peer.
        sync_method: Transport of the weights. With `checkpoint`, the synchronizer looks each second for a new
            checkpoint in `checkpoint_dir`.
        sync_timeout: Seconds after which every wait ends.
        checkpoint_dir: Folder of the trainer's checkpoints, `global_step_N/actor`. The version is kept there too, so
            that it does not go back when the synchronizer restarts.
        group_name: Name of the weight sync group.
        max_state_bytes: Maximum size of a state that another process sends.
        silence_timeout: Seconds after which a silent session of another process ends.

    Raises:
        ConfigError: An option is invalid.
    """

    namespace: str = ""
    sync_method: SyncMethod | str = SyncMethod.MEMORY
    sync_timeout: float = 3600.0
    checkpoint_dir: FilePath | None = None
    group_name: str = "rollout_weight_sync"
    max_state_bytes: int = 64 << 30
    silence_timeout: float = 30.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "sync_method", one_of(SyncMethod, self.sync_method, "sync_method"))
        for name in ("sync_timeout", "silence_timeout", "max_state_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a number above 0, not {value!r}")
        if self.sync_method is SyncMethod.CHECKPOINT and self.checkpoint_dir is None:
            raise ConfigError("sync_method 'checkpoint' needs checkpoint_dir, the folder with global_step_N")
        check_namespace(self.namespace)
        if not self.group_name:
            raise ConfigError("group_name must not be empty")


def check_namespace(namespace: str) -> str:
    """Returns `namespace`.

    Raises:
        ConfigError: It is too long.
    """
    if len(namespace) > MAX_NAMESPACE:
        raise ConfigError(f"a namespace of {len(namespace)} characters; at most {MAX_NAMESPACE} are allowed")
    return namespace

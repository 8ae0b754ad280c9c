"""How the ranks of a divided model agree on the version that they publish."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from averaging.errors import ConfigError, SiteError
from averaging.synchronizer.weights_layout import Shard


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know of a version.

    Attributes:
        version: its number, at rank 0.
        last: the newest version that any rank has published; -1 if none has.
        changed: whether any part has changed since.
        shards: all parts, that of rank 0 first. Parts of ranks that only repeat another one's are left out.
    """

    version: int
    last: int
    changed: bool
    shards: tuple[Shard, ...]


class Ranks:
    """The ranks that publish one model.

    Args:
        group: their process group, of any backend.
        endpoint: where this rank's publisher is served.

    Raises:
        ConfigError: torch.distributed is not initialized.
    """

    def __init__(self, group: Any, endpoint: str) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError("process_group needs torch.distributed; call init_process_group before")
        self.endpoint = endpoint
        self.leads = dist.get_rank(group) == 0
        ranks = dist.get_process_group_ranks(group)
        self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._size = len(ranks)

    def agree(self, digest: bytes, version: int, last: int, *, changed: bool) -> Agreed:
        """Called by all ranks with what they are about to publish.

        Raises:
            SiteError: a rank has died, or has no address.
        """
        told: list[Any] = [None] * self._size
        try:
            dist.all_gather_object(told, (digest, version, last, changed, self.endpoint), group=self._group)
        except (RuntimeError, ValueError) as error:
            raise SiteError(
                f"another rank does not publish this version with this one ({error}); end all ranks"
            ) from None
        shards: dict[bytes, Shard] = {}
        for number, (part, _, _, _, endpoint) in enumerate(told):
            if number == 0 or (part not in shards and endpoint):
                shards[part] = Shard("" if number == 0 else endpoint, part)
        if missing := [number for number, one in enumerate(told) if one[0] not in shards]:
            raise SiteError(f"rank {missing[0]} has no server; give its publisher an endpoint, or to an averager")
        return Agreed(
            told[0][1],
            max(one[2] for one in told),
            any(one[3] for one in told),
            tuple(shards.values()),
        )

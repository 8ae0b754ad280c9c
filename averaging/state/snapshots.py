"""The state a peer shares: committed under a growing version, copied only when that becomes necessary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack
import torch

from averaging.common.shared_tensors import SharedTensors
from averaging.common.threads import in_thread
from averaging.protocol.schema import Schema
from averaging.state.manifest import Described, Manifest
from averaging.state.packing import Snapshot, State, check_state, seal
from averaging.state.self_check import SelfCheck

NO_DIGEST = bytes(32)
"""In the place of a digest that was not computed yet."""

INLINE_BYTES = 1 << 20
"""The digests of a state up to this size are taken on the event loop, those of a larger one in a thread."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What the application adds to the averaged tensors: further tensors by name, and a small dict.

    The dict holds what msgpack can pack: numbers, strings, bytes, lists and dicts. The keys of these are text, bytes or
    integers.
    """

    tensors: Mapping[str, torch.Tensor]
    user: Mapping[str, Any]


NO_EXTRAS = Extras({}, {})


class Snapshots:
    """The last committed state of one peer.

    A commit copies nothing. The copy is made by the first download, or before the application writes the tensors again,
    so a peer that only averages holds no second set of its tensors.

    Args:
        tensors: the averaged ones.
        extras: asked under the tensors' lock what belongs to the state besides them.
        schema: of the tensors, as newcomers have it.
        shared: whether anybody may download the state; if not, nothing is ever copied.
    """

    def __init__(
        self, tensors: SharedTensors, extras: Callable[[], Extras] | None, schema: Schema, *, shared: bool
    ) -> None:
        self._tensors = tensors
        self._extras = extras or (lambda: NO_EXTRAS)
        self.shared = shared
        self.version = 0
        self._committed_extras = NO_EXTRAS
        self._committed_user = b""  # packed, since the application may go on writing to what is in its dict
        self._copy: State | None = None
        self._sealed: Snapshot | None = None  # the last one, perhaps of an earlier copy
        self._acceptance = SelfCheck(schema)
        if shared:
            tensors.before_application_writes = self._copy_once

    @property
    def at_stake(self) -> bool:
        """Whether the tensors themselves are what others may download, so that nobody may write to them yet."""
        return self.shared and self._copy is None

    def commit(self, version: int) -> None:
        """What the tensors hold now is the state, under `version` or the present one if that is greater.

        The caller holds the tensors' lock.

        Raises:
            StateError: the extras cannot be shared.
        """
        if self.shared:
            extras = self._extras()
            self._committed_user = check_state(self._tensors.names, extras.tensors, extras.user)
            self._committed_extras = extras
            if not self._acceptance.tried:  # later ones when somebody asks for them
                described = tuple(Described(n, t.dtype, tuple(t.shape), NO_DIGEST) for n, t in self._named().items())
                self._acceptance.check(Manifest(version, described, extras.user))
        self._copy = self._sealed = None
        self.version = max(version, self.version)

    async def latest(self, timeout: float) -> Snapshot:
        """The committed state with its digests; waits at most `timeout` seconds for the tensors' lock.

        To be called by one at a time, so that those who download leave the loop's threads to others. What it has begun
        is done also if it is cancelled: who lost patience with a large state will ask for it again.
        """
        state, sealed = self._copy, self._sealed
        if sealed is not None and sealed.state is state:
            return sealed
        nbytes = sum(tensor.nbytes for tensor in self._named().values())
        if state is None:
            state = await self._tensors.while_locked(self._copy_once, timeout, nbytes)
        finish = partial(self._seal, state)
        return await in_thread(finish) if nbytes > INLINE_BYTES else finish()

    def _copy_once(self) -> State:
        if self._copy is None:
            copies = {name: _copied(tensor) for name, tensor in self._named().items()}
            user = msgpack.unpackb(self._committed_user, strict_map_key=False)
            self._copy = State(self.version, copies, user)
        return self._copy

    def _named(self) -> dict[str, torch.Tensor]:
        own = zip(self._tensors.names, self._tensors.tensors, strict=True)
        return dict(own) | dict(self._committed_extras.tensors)

    def _seal(self, state: State) -> Snapshot:
        sealed = seal(state)
        self._acceptance.check(Manifest(state.version, sealed.tensors, state.user))
        if self._copy is state:  # else another was committed meanwhile; this one is whole all the same
            self._sealed = sealed
        return sealed


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

"""The state that a peer shares: committed under a growing version, and copied only when necessary."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from msgspec import msgpack

from averaging.state.manifest import Snapshot, State, check_state, seal
from averaging.tensors import (
    HostCopies,
    SharedTensors,
    copy_to_cpu,
    finish,
    host_memory,
    in_thread,
    is_on_device,
)

INLINE_BYTES = 1 << 20
"""Digests of a state up to this size are computed on the event loop, those of a larger state in a thread."""


@dataclass(frozen=True, slots=True)
class ExtraState:
    """The application's additions to a state: further tensors by name, and a small dict that msgpack can pack.

    The dict has numbers, strings, bytes, lists and dicts; keys are text, bytes or integers.
    """

    tensors: Mapping[str, torch.Tensor]
    user: Mapping[str, Any]


NO_EXTRA_STATE = ExtraState({}, {})


class _Copies:
    """Makes the copies of states, whose memory is used again once nobody holds the state before."""

    def __init__(self) -> None:
        self._memory: list[torch.Tensor] = []
        self._holder: Callable[[], State | None] = lambda: None

    def of(self, version: int, named: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> _Copied:
        """A copy; of what is on a device it is complete later, and the tensors may be written at once."""
        tensors = list(named.values())
        if not any(map(is_on_device, tensors)):
            return _Copied(State(version, {name: copy_to_cpu(tensor) for name, tensor in named.items()}, user), None)
        kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if self._holder() is not None or kinds != [(memory.shape, memory.dtype) for memory in self._memory]:
            self._memory = []  # before as much is taken again
            self._memory = host_memory(tensors, [tensor.dtype for tensor in tensors])
        arriving = HostCopies(tensors, self._memory)
        arriving.begin(keep=True)
        state = State(version, dict(zip(named, self._memory, strict=True)), user)
        self._holder = weakref.ref(state)
        return _Copied(state, arriving)


@dataclass(frozen=True, slots=True)
class _Copied:
    state: State
    arriving: HostCopies | None


class Snapshots:
    """The last committed state of one peer.

    A commit copies nothing. The first download makes the copy, or the next write of the application to the tensors. So
    a peer that only averages holds no second set of its tensors, and one whose state is not `shared` never copies.
    `extras` is called under the tensors' lock for the application's additions to the state.
    """

    def __init__(self, tensors: SharedTensors, extras: Callable[[], ExtraState] | None, *, shared: bool) -> None:
        self._tensors = tensors
        self._extras = extras or (lambda: NO_EXTRA_STATE)
        self.shared = shared
        self.version = 0
        self._committed_extras = NO_EXTRA_STATE
        self._committed_user = b""  # packed, because the application may change its dict later
        self._copies = _Copies()
        self._copy: _Copied | None = None
        self._sealed: Snapshot | None = None  # possibly of an earlier copy
        if shared:
            tensors.before_application_writes = self._copy_once

    def commit(self, version: int) -> None:
        """Commits the present values of the tensors under `version`, or the last version if that is greater.

        The caller holds the tensors' lock. Raises a StateError if the extras cannot be shared.
        """
        if self.shared:
            extras = self._extras()
            self._committed_user = check_state(self._tensors.names, extras.tensors, extras.user)
            self._committed_extras = extras
        self._copy = self._sealed = None
        self.version = max(version, self.version)

    async def latest(self, timeout: float) -> Snapshot:
        """Returns the committed state with its digests. It waits at most `timeout` seconds for the tensors' lock.

        Call it once at a time, so that downloads do not use up the loop's threads. If it is cancelled, the copy and the
        digests are still completed, because the reader of a large state will ask again.
        """
        copy, sealed = self._copy, self._sealed
        if copy is not None and sealed is not None and sealed.state is copy.state:
            return sealed
        nbytes = sum(tensor.nbytes for tensor in self._named().values())
        if copy is None:
            copy = await self._tensors.while_locked(self._copy_for_reader, timeout, nbytes)
        seal_it = partial(self._seal, copy)
        return await in_thread(seal_it) if nbytes > INLINE_BYTES or copy.arriving is not None else seal_it()

    def _copy_for_reader(self) -> _Copied:
        """Copies in another thread than that of training, on whose stream the next write may come at once."""
        self._tensors.wait_for_computed()
        copy = self._copy_once()
        finish(self._tensors.tensors)
        return copy

    def _copy_once(self) -> _Copied:
        if self._copy is None:
            self._copy = self._copies.of(self.version, self._named(), msgpack.decode(self._committed_user))
        return self._copy

    def _named(self) -> dict[str, torch.Tensor]:
        own = zip(self._tensors.names, self._tensors.tensors, strict=True)
        return dict(own) | dict(self._committed_extras.tensors)

    def _seal(self, copy: _Copied) -> Snapshot:
        state = copy.state
        if copy.arriving is not None:
            copy.arriving.wait()
        sealed = seal(state)
        if self._copy is copy:  # else another state was committed meanwhile; this snapshot is still valid
            self._sealed = sealed
        return sealed

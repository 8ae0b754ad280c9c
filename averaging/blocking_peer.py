"""`BlockingPeer`: a `Peer` with blocking methods, for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch

from averaging.common import EventLoopThread, InProcess, on_loop
from averaging.config import PeerConfig
from averaging.peer import Peer
from averaging.receipts import PeerStatus, Receipt
from averaging.state import State


class BlockingPeer(InProcess):
    """A `Peer` in a thread of its own, with methods that block until their result is there.

    ```python
    with BlockingPeer({"w": torch.randn(10)}, run_id="demo", join=["a.example:4222"]) as peer:
        print(peer.average())
        with peer.tensors() as tensors:
            print(tensors[0])
    ```

    Ctrl+C during a call cancels the call and raises `KeyboardInterrupt`. The methods may be called from any thread, but
    not from `extra_state` or `apply`.

    Args:
        tensors: The tensors to average: the same dtypes and shapes in the same order at all peers. They are updated in
            place. A mapping gives them names.
        run_id: Peers with the same run id average together.
        config: The options as one object. A keyword argument overrides it.
        options: See `PeerConfig`.

    Raises:
        ConfigError: An option is invalid.
        TensorError: A tensor cannot be averaged.
        ListenError: The peer cannot listen on its address.
        JoinError: None of the peers in `join` answered in time, or all of them refuse.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
        *,
        run_id: str | None = None,
        config: PeerConfig | None = None,
        **options: Any,
    ) -> None:
        self._peer = Peer(tensors, run_id=run_id, config=config, **options)
        self._thread = EventLoopThread(self._peer, f"the peer of run {self._peer.run_id!r}")

    def __repr__(self) -> str:
        return f"Blocking{self._peer!r}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends a round in progress, leaves the run and ends the thread. A second call does nothing."""
        self._thread.close()

    @property
    def endpoint(self) -> str:
        """The address at which other peers `join` this one."""
        self._thread.check()
        return self._peer.endpoint

    @property
    def metrics_endpoint(self) -> str:
        """The address of /metrics, /healthz and /readyz; empty without `metrics_listen`."""
        self._thread.check()
        return self._peer.metrics_endpoint

    @property
    def peers(self) -> frozenset[str]:
        """The endpoints of the known peers of the run, including this one."""
        return self._thread.run(on_loop(lambda: self._peer.peers))

    @property
    def status(self) -> PeerStatus:
        """The name, the configuration and the present activity of this peer."""
        return self._thread.run(on_loop(lambda: self._peer.status))

    @property
    def version(self) -> int:
        """The version of the committed state."""
        return self._peer.version

    def tensors(self) -> AbstractContextManager[list[torch.Tensor]]:
        """Locks the tensors, so that no round writes to them inside the `with` block. Call no other method inside."""
        return self._peer.tensors()

    def average(self, *, weight: float = 1.0, gather: Any = None) -> Receipt:
        """Finds a group, averages the tensors with it, and waits for the end of the round. See `Peer.average`."""
        return self._thread.run(self._peer.average(weight=weight, gather=gather))

    def commit(self, version: int | None = None) -> None:
        """Makes the present tensors the state that newcomers download. See `Peer.commit`."""
        self._thread.run(self._peer.commit(version))

    def download_state(self, apply: Callable[[State], None] | None = None) -> State:
        """Downloads the newest state of the run into the tensors. See `Peer.download_state`."""
        return self._thread.run(self._peer.download_state(apply))

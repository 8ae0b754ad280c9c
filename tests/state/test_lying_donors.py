"""A donor that gives other bytes than it announces: newcomers end with the state of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

import pytest
import torch

from averaging import Peer
from averaging.errors import StateError
from averaging.protocol.messages import DownloadData, Resume
from averaging.state.manifest import State, pack, seal
from tests.support.swarm import Swarm

SIZE = 1 << 18
LIAR, HONEST = "peer-1:1", ["peer-2:1", "peer-3:1"]
"""Donors of the same version are asked in the order of their names."""


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("averaging.state.snapshots.INLINE_BYTES", 1 << 30)


class Liar:
    """Lets a peer send the true description of its state and other bytes."""

    def __init__(self, peer: Peer) -> None:
        self.asked = 0
        transport: Any = peer._transport
        serve = transport.serve

        async def serve_lies(service: Any, gossip: Any) -> None:
            self._honest = service.download_state
            service.download_state = self._lie
            await serve(service, gossip)

        transport.serve = serve_lies

    async def _lie(self, resume: Resume | None, caller: str) -> AsyncGenerator[DownloadData, None]:
        self.asked += 1
        async with aclosing(self._honest(None, caller)) as messages:
            first: DownloadData = await anext(messages)
        lies = list(pack(seal(State(0, {"w": torch.full((SIZE,), 100.0 + self.asked)}))))
        lies[0] = replace(lies[0], metadata=first.metadata)
        for message in lies:
            yield message


def downloaded() -> tuple[list[State | StateError], Liar]:
    """What three newcomers get, who come one after the other."""
    swarm = Swarm(1)
    donors = [swarm.peer(name, {"w": torch.ones(SIZE)}) for name in (LIAR, *HONEST)]
    newcomers = [
        swarm.peer(f"peer-{number}:1", {"w": torch.zeros(SIZE)}, share_state=False) for number in range(10, 13)
    ]
    liar = Liar(donors[0])

    async def main() -> list[State | StateError]:
        async with AsyncExitStack() as stack:
            for peer in (*donors, *newcomers):
                await stack.enter_async_context(peer)
            await asyncio.sleep(1.0)
            found: list[State | StateError] = []
            for newcomer in newcomers:
                try:
                    async with asyncio.timeout(60.0):
                        found.append(await newcomer.download_state())
                except StateError as error:
                    found.append(error)
            return found

    return swarm.simulate(main()), liar


def test_bytes_that_were_not_announced_are_never_taken() -> None:
    found, liar = downloaded()
    assert liar.asked >= len(found)
    for state in found:
        assert isinstance(state, State)
        assert bool((state.tensors["w"] == 1.0).all())

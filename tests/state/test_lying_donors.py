"""A donor that gives each newcomer other bytes: newcomers that compare donors all end with the honest ones' state."""

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
    """Lets a peer send each caller another state; or, as a mimic, the true description of its state and other bytes."""

    def __init__(self, peer: Peer, *, mimics: bool) -> None:
        self.asked = 0
        self._mimics = mimics
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
        if self._mimics:
            lies[0] = replace(lies[0], metadata=first.metadata)
        for message in lies:
            yield message


def downloaded(*, mimics: bool, verify_donors: int, honest: int = 2) -> tuple[list[State | StateError], Liar]:
    """What three newcomers get, who come one after the other."""
    swarm = Swarm(1)
    donors = [swarm.peer(name, {"w": torch.ones(SIZE)}) for name in (LIAR, *HONEST[:honest])]
    newcomers = [
        swarm.peer(f"peer-{number}:1", {"w": torch.zeros(SIZE)}, verify_donors=verify_donors, share_state=False)
        for number in range(10, 13)
    ]
    liar = Liar(donors[0], mimics=mimics)

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


@pytest.mark.parametrize("mimics", [False, True])
def test_newcomers_that_compare_donors_all_have_the_honest_state(mimics: bool) -> None:
    found, liar = downloaded(mimics=mimics, verify_donors=2)
    assert liar.asked >= len(found)
    for state in found:
        assert isinstance(state, State)
        assert bool((state.tensors["w"] == 1.0).all())


def test_a_mimic_is_found_out_by_newcomers_that_do_not_compare_too() -> None:
    found, liar = downloaded(mimics=True, verify_donors=1)
    assert liar.asked >= len(found)
    for state in found:
        assert isinstance(state, State)
        assert bool((state.tensors["w"] == 1.0).all())


def test_where_too_few_agree_nothing_is_taken() -> None:
    found, _ = downloaded(mimics=False, verify_donors=2, honest=1)
    for error in found:
        assert isinstance(error, StateError)
        assert "fewer than 2 donors of different certificates or hosts have the same state" in str(error)

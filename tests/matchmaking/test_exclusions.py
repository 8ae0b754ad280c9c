"""A member that breaks the protocol or sends NaN is dropped; after two violations in a row it is also excluded."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from averaging import Outcome, Peer
from averaging.config import NonFinite
from averaging.matchmaking.memory import (
    DESERTION_SECONDS,
    EXCLUSION_SECONDS,
    MAX_EXCLUSION_SECONDS,
    MAX_REMEMBERED,
    Conduct,
)
from averaging.matchmaking.rules import LeaderStanding
from averaging.protocol.messages import AveragingData
from averaging.receipts import DropCode
from averaging.testing import virtual_time
from tests.support.swarm import Swarm, change_messages, entered, together

OPTIONS: dict[str, Any] = {
    "group_size": 3,
    "group_wait": 2.0,
    "round_timeout": 8.0,
    "part_size_bytes": 1024,
}  # a part for each


class Spoiler:
    """A peer whose parts, or averages, have a wrong shape for as long as it is `on`."""

    def __init__(self, peer: Peer, where: str) -> None:
        self.on = True
        change_messages(peer, self._spoil, where)

    async def _spoil(self, messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        async for message in messages:
            wire = message.tensor_part
            if self.on and wire is not None:
                wire = replace(wire, size=(1,), buffer=bytes(wire.buffer)[:4])
            yield replace(message, tensor_part=wire, encoded=[])


@pytest.mark.parametrize(("spoiler", "where"), [(0, "replies"), (1, "parts"), (2, "replies")])  # it leads, or follows
def test_a_peer_that_broke_the_protocol_twice_is_excluded_for_a_while(spoiler: int, where: str) -> None:
    swarm = Swarm(3)
    peers = [swarm.peer(f"peer:{n + 1}", [torch.full((768,), float(n))], **OPTIONS) for n in range(3)]
    spoiling = Spoiler(peers[spoiler], where)
    honest = [peer for number, peer in enumerate(peers) if number != spoiler]
    name = f"peer:{spoiler + 1}"

    async def main() -> None:
        async with entered(peers):
            for _ in range(2):
                assert not any(peer.excluded for peer in honest)
                receipts = await together(peers)
                for receipt in receipts[:spoiler] + receipts[spoiler + 1 :]:
                    assert receipt.outcome is Outcome.AVERAGED
                    [lost] = receipt.dropped
                    assert (lost.endpoint, lost.code) == (name, DropCode.PROTOCOL_VIOLATION)
            spoiling.on = False
            for peer in honest:
                assert list(peer.excluded) == [name]
            for receipt in await together(honest):
                assert receipt.outcome is Outcome.AVERAGED
                assert name not in receipt.members
            await asyncio.sleep(EXCLUSION_SECONDS)
            assert honest[0].excluded == {}
            for receipt in await together(peers):
                assert len(receipt.members) == 3
                assert receipt.dropped == ()

    swarm.simulate(main())


def test_a_member_that_sends_nan_is_dropped_and_not_excluded() -> None:
    swarm = Swarm(4)
    tensors = [torch.full((768,), value) for value in (1.0, 3.0, float("nan"))]
    policies = [NonFinite.REFUSE, NonFinite.REFUSE, NonFinite.ALLOW]
    peers = [swarm.peer(f"peer:{n + 1}", [tensors[n]], non_finite=policies[n], **OPTIONS) for n in range(3)]

    async def main() -> None:
        async with entered(peers):
            receipts = await together(peers)
            for peer, receipt in zip(peers[:2], receipts, strict=False):
                assert [(lost.endpoint, lost.code) for lost in receipt.dropped] == [("peer:3", DropCode.NON_FINITE)]
                assert peer.excluded == {}
            for tensor in tensors[:2]:
                assert torch.isfinite(tensor).all()
            tensors[2].fill_(5.0)
            for receipt in await together(peers):
                assert len(receipt.members) == 3
                assert receipt.dropped == ()

    swarm.simulate(main())


def test_a_peer_that_cannot_be_called_costs_few_rounds() -> None:
    swarm = Swarm(3)
    peers = [swarm.peer(f"peer:{n + 1}", [torch.full((768,), float(n))], **OPTIONS) for n in range(3)]

    async def main() -> None:
        async with entered(peers):
            for caller in ("peer:1", "peer:2"):
                swarm.network.refuse(caller, "peer:3")
            lost, end = [], virtual_time.clock() + 400.0
            while virtual_time.clock() < end:
                [first, second, _] = await together(peers)
                assert first.outcome is second.outcome is Outcome.AVERAGED
                assert first.dropped == () or [member.endpoint for member in first.dropped] == ["peer:3"]
                lost.append(bool(first.dropped))
            assert sum(lost[:8]) <= 5
            assert sum(lost[-15:]) <= 2
            swarm.network.heal()
            receipts = await together(peers)
            while len(receipts[0].members) < 3:
                receipts = await together(peers)
            assert virtual_time.clock() < end + MAX_EXCLUSION_SECONDS + 20.0
            assert all(receipt.dropped == () for receipt in receipts)
            assert all(len(receipt.members) == 3 for receipt in await together(peers))

    swarm.simulate(main())


PEER = "192.0.2.1:1"


def test_a_peer_is_excluded_after_two_faults_in_a_row_and_longer_each_further_time() -> None:
    conduct, now = Conduct(), 1e6
    conduct.note_fault(PEER, now)
    assert conduct.excluded(now) == {}
    for seconds in (EXCLUSION_SECONDS, 2 * EXCLUSION_SECONDS, 4 * EXCLUSION_SECONDS):
        conduct.note_fault(PEER, now)
        assert conduct.excluded(now) == {PEER: now + seconds}
        assert conduct.excluded(now + seconds) == {}
    for _ in range(2000):
        conduct.note_fault(PEER, now)
    assert conduct.excluded(now) == {PEER: now + MAX_EXCLUSION_SECONDS}
    conduct.note_well(PEER)
    conduct.note_fault(PEER, now)
    assert conduct.excluded(now) == {}


def test_a_deserter_is_remembered_until_it_begins_a_group() -> None:
    conduct = Conduct()
    conduct.note_desertion(PEER, 5.0)
    assert conduct.standing(PEER, 5.0 + DESERTION_SECONDS - 1) is LeaderStanding.DESERTER
    assert conduct.standing(PEER, 5.0 + DESERTION_SECONDS) is LeaderStanding.GOOD
    conduct.note_group(PEER)
    assert conduct.standing(PEER, 5.0) is LeaderStanding.GOOD


def test_of_many_names_the_latest_are_remembered() -> None:
    conduct = Conduct()
    for number in range(2 * MAX_REMEMBERED):
        for _ in range(2):
            conduct.note_fault(f"client::{number}", 0.0)
        conduct.note_silence(f"client::{number}")
    assert set(conduct.excluded(0.0)) == {f"client::{number}" for number in range(MAX_REMEMBERED, 2 * MAX_REMEMBERED)}
    assert conduct.unanswered("client::0") == 0

"""A member that breaks the protocol or sends NaN is dropped; after a protocol violation it is also excluded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from averaging import Mode, Outcome, Peer, Receipt
from averaging.config import NonFinite
from averaging.matchmaking.conduct import EXCLUSION_SECONDS, MAX_ONE_WAY_SECONDS
from averaging.matchmaking.rules import pack_looking
from averaging.protocol.group import group_key
from averaging.protocol.messages import AveragingData, MessageCode
from averaging.receipts import DropCode
from averaging.testing import virtual_time
from averaging.testing.discovery import MemoryDiscovery
from tests.support.swarm import Swarm

OPTIONS: dict[str, Any] = {
    "group_size": 3,
    "group_wait": 2.0,
    "round_timeout": 8.0,
    "part_size_bytes": 1024,
}  # a part for each


class Spoiler:
    """A peer whose parts, or averages, have a wrong shape for as long as it is `on`."""

    def __init__(self, peer: Peer, *, averages: bool) -> None:
        self.on = True
        transport: Any = peer._transport
        serve, send = transport.serve, transport.aggregate_part

        async def serve_spoiled(service: Any, gossip: Any) -> None:
            answer = service.aggregate_part
            service.aggregate_part = lambda messages: self._spoil(answer(messages))
            await serve(service, gossip)

        if averages:
            transport.serve = serve_spoiled
        else:
            transport.aggregate_part = lambda endpoint, messages: send(endpoint, self._spoil(messages))

    async def _spoil(self, messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        async for message in messages:
            wire = message.tensor_part
            if self.on and wire is not None:
                wire = replace(wire, size=(1,), buffer=bytes(wire.buffer)[:4])
            yield replace(message, tensor_part=wire, encoded=[])


def test_malformed_parts_without_proof_of_the_sender_do_not_exclude() -> None:
    swarm = Swarm(3)
    peers = [swarm.peer(f"peer:{n + 1}", [torch.full((768,), float(n))], **OPTIONS) for n in range(3)]
    spoiling = Spoiler(peers[2], averages=False)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            for peer in peers:
                await stack.enter_async_context(peer)
            for receipt in (await asyncio.gather(*(peer.average() for peer in peers)))[:2]:
                assert receipt.outcome is Outcome.AVERAGED
                (lost,) = receipt.dropped
                assert (lost.endpoint, lost.code) == ("peer:3", DropCode.PROTOCOL_VIOLATION)
            for peer in peers[:2]:
                assert peer.excluded == {}
                assert peer.offences == {}
            spoiling.on = False
            for receipt in await asyncio.gather(*(peer.average() for peer in peers)):
                assert len(receipt.members) == 3
                assert receipt.dropped == ()

    swarm.simulate(main())


@pytest.mark.parametrize("spoiler", range(3))  # whether it would lead or follow
def test_a_peer_that_broke_the_protocol_is_excluded_for_some_minutes(spoiler: int) -> None:
    swarm = Swarm(3)
    peers = [swarm.peer(f"peer:{n + 1}", [torch.full((768,), float(n))], **OPTIONS) for n in range(3)]
    spoiling = Spoiler(peers[spoiler], averages=True)
    honest = [peer for number, peer in enumerate(peers) if number != spoiler]
    name = f"peer:{spoiler + 1}"

    async def rounds(*averaging: Peer) -> list[Receipt]:
        return await asyncio.gather(*(peer.average() for peer in averaging))

    async def main() -> None:
        async with AsyncExitStack() as stack:
            for peer in peers:
                await stack.enter_async_context(peer)
            receipts = await rounds(*peers)
            for receipt in receipts[:spoiler] + receipts[spoiler + 1 :]:
                assert receipt.outcome is Outcome.AVERAGED
                assert [(lost.endpoint, lost.code) for lost in receipt.dropped] == [(name, DropCode.PROTOCOL_VIOLATION)]
            spoiling.on = False
            for peer in honest:
                assert list(peer.excluded) == [name]
                assert peer.offences == {name: {DropCode.PROTOCOL_VIOLATION: 1}}
            receipts = await rounds(*peers)
            alone = receipts.pop(spoiler)
            assert alone.outcome is Outcome.NO_GROUP
            for receipt in receipts:
                assert receipt.outcome is Outcome.AVERAGED
                assert name not in receipt.members
                assert receipt.dropped == ()
            # Alone with it, a peer says why it forms no group.
            [receipt, _] = await rounds(honest[0], peers[spoiler])
            assert receipt.outcome is Outcome.NO_GROUP
            assert (
                f"left out because they broke the protocol or gave an address that is not dialled: {name} for another"
                in receipt.reason
            )
            await asyncio.sleep(EXCLUSION_SECONDS)
            assert honest[0].excluded == {}
            for receipt in await rounds(*peers):
                assert len(receipt.members) == 3
                assert receipt.dropped == ()

    swarm.simulate(main())


def test_a_member_that_sends_nan_is_dropped_and_counted() -> None:
    swarm = Swarm(4)
    tensors = [torch.full((768,), value) for value in (1.0, 3.0, float("nan"))]
    policies = [NonFinite.REFUSE, NonFinite.REFUSE, NonFinite.ALLOW]
    peers = [swarm.peer(f"peer:{n + 1}", [tensors[n]], non_finite=policies[n], **OPTIONS) for n in range(3)]

    async def main() -> None:
        async with AsyncExitStack() as stack:
            for peer in peers:
                await stack.enter_async_context(peer)
            receipts = await asyncio.gather(*(peer.average() for peer in peers))
            for peer, receipt in zip(peers[:2], receipts, strict=False):
                assert [(lost.endpoint, lost.code) for lost in receipt.dropped] == [("peer:3", DropCode.NON_FINITE)]
                assert peer.offences["peer:3"] == {DropCode.NON_FINITE: 1}
                assert peer.excluded == {}
            for tensor in tensors[:2]:
                assert torch.isfinite(tensor).all()
            tensors[2].fill_(5.0)
            for receipt in await asyncio.gather(*(peer.average() for peer in peers)):
                assert len(receipt.members) == 3
                assert receipt.dropped == ()

    swarm.simulate(main())


@pytest.mark.parametrize("code", [MessageCode.PROTOCOL_VIOLATION, MessageCode.BAD_GROUP_ID])
def test_refusing_this_peer_is_no_offence(code: MessageCode) -> None:
    swarm = Swarm(3)
    peers = [swarm.peer(f"peer:{n + 1}", [torch.zeros(9)], group_size=2, group_wait=2.0) for n in range(2)]

    async def refuse(endpoint: str, messages: Any) -> Any:
        yield AveragingData(code=code)

    peers[0]._transport.aggregate_part = refuse  # type: ignore[method-assign]

    async def main() -> None:
        async with AsyncExitStack() as stack:
            for peer in peers:
                await stack.enter_async_context(peer)
            receipts = await asyncio.gather(*(peer.average() for peer in peers))
            assert receipts[0].dropped[0].code is DropCode.REFUSED
            assert peers[0].excluded == {}

    swarm.simulate(main())


def test_a_client_is_not_excluded_if_another_peer_declares_it_as_a_leader() -> None:
    """Without certificates, any peer can store a declaration with its endpoint."""
    swarm = Swarm(1)
    node = swarm.peer("peer:1", [torch.zeros(2)], **OPTIONS)
    client = swarm.peer("", [torch.ones(2)], mode=Mode.CLIENT, **OPTIONS)

    async def main() -> list[Receipt]:
        async with node, client, MemoryDiscovery(swarm.registry) as liar:
            await liar.store(group_key("run", ""), client.endpoint, pack_looking(True), virtual_time.clock() + 1.0)
            averaging = asyncio.create_task(node.average())
            await asyncio.sleep(0.5)
            receipts = [await client.average(), await averaging]
            assert node.excluded == {}
            return receipts

    assert [receipt.outcome for receipt in swarm.simulate(main())] == [Outcome.AVERAGED] * 2


def test_a_peer_that_cannot_be_called_costs_few_rounds() -> None:
    swarm = Swarm(3)
    peers = [swarm.peer(f"peer:{n + 1}", [torch.full((768,), float(n))], **OPTIONS) for n in range(3)]

    async def rounds() -> list[Receipt]:
        return await asyncio.gather(*(peer.average() for peer in peers))

    async def main() -> None:
        async with AsyncExitStack() as stack:
            for peer in peers:
                await stack.enter_async_context(peer)
            for caller in ("peer:1", "peer:2"):
                swarm.network.refuse(caller, "peer:3")
            lost, end = [], virtual_time.clock() + 240.0
            while virtual_time.clock() < end:
                [first, second, _] = await rounds()
                assert first.outcome is second.outcome is Outcome.AVERAGED
                assert first.dropped == () or [member.endpoint for member in first.dropped] == ["peer:3"]
                lost.append(bool(first.dropped))
            assert sum(lost[:8]) <= 5
            assert sum(lost[-15:]) <= 2
            swarm.network.heal()
            receipts = await rounds()
            while len(receipts[0].members) < 3:
                receipts = await rounds()
            assert virtual_time.clock() < end + MAX_ONE_WAY_SECONDS + 20.0
            assert all(receipt.dropped == () for receipt in receipts)
            assert all(len(receipt.members) == 3 for receipt in await rounds())

    swarm.simulate(main())

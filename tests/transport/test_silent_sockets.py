"""Sockets that accept connections and stay silent, declared as the earliest leaders: real peers go on averaging."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
import torch

from averaging import Outcome, Peer
from averaging.matchmaking.rules import pack_looking
from tests.support.peers import average, swarm, told

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

SILENT, ROUNDS = 20, 12


async def declare(peer: Peer, endpoints: Sequence[str]) -> None:
    for number, endpoint in enumerate(endpoints):
        await peer.discovery.store("run.0b", endpoint, pack_looking(True), time.time() + 18.0 + number / 1000)


@pytest.mark.asyncio
async def test_twenty_of_them_cost_a_few_seconds_once() -> None:
    async with AsyncExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64)) for _ in range(SILENT)]
        endpoints = [f"127.0.0.1:{silent.getsockname()[1]}" for silent in sockets]
        peers = await swarm(stack, [{"w": torch.full((4,), float(number))} for number in range(3)])
        await declare(peers[0], endpoints)
        for peer in peers:
            for endpoint in endpoints:
                await told(peer, "run.0b", endpoint)
        receipts = [await average(*peers)]
        await declare(peers[0], endpoints)  # for another 18 s
        while len(receipts) < ROUNDS:
            receipts.append(await average(*peers))
    assert all(receipt.outcome is Outcome.AVERAGED and len(receipt.members) == 3 for r in receipts for receipt in r)
    first, *later = [max(receipt.seconds for receipt in r) for r in receipts]
    assert first < 12.0, receipts  # and not 3 s for each of them
    assert statistics.median(later) < 3.0, later  # the seconds that each of them would cost if it was asked again

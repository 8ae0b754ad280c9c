"""A leader of an open run names somebody who is no member: who is named gets no data, and the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from averaging import Mode, Outcome, Peer
from averaging.matchmaking import rules
from averaging.matchmaking.rules import LeaderCandidate
from averaging.protocol.group import make_group_id, pack_gather
from averaging.protocol.messages import MessageFromLeader
from tests.support.listening import listening
from tests.support.peers import average, enter
from tests.support.selection import rest_is_long

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

ROUNDS, SIZE = 3, 200_000
GREETING_BYTES = 256
"""With so few a caller says that it speaks HTTP/2, and nothing else."""


class WebServer:
    """Answers everything with an error, as one that speaks HTTP/1.1 does; counts what it gets."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard.append(await reader.read(1 << 20))
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()


@asynccontextmanager
async def a_web_server(stack: AsyncExitStack) -> AsyncIterator[tuple[str, WebServer]]:
    server = WebServer()
    async with listening(server.handle) as endpoint:
        yield endpoint, server


def let_name(monkeypatch: pytest.MonkeyPatch, leader: Peer, victim: str) -> None:
    """Lets each group that `leader` begins have one more member."""
    assemble = rules.assemble

    def name(searching: LeaderCandidate, gathered: Mapping[str, bytes], rng: Any) -> MessageFromLeader:
        message = assemble(searching, gathered, rng)
        if searching.member.endpoint != leader.endpoint:
            return message
        names = (*message.ordered_group_endpoints, victim)
        gathers = (*message.gathered, pack_gather(1.0, None, Mode.NODE))
        group_id = make_group_id(message.group_id[:6], names, gathers)
        return replace(message, group_id=group_id, ordered_group_endpoints=names, gathered=gathers)

    monkeypatch.setattr(rules, "assemble", name)


@pytest.mark.asyncio
@pytest.mark.parametrize("victim", rest_is_long(["a web server", "a peer of another run", "a metadata service"], 2))
async def test_a_peer_that_is_named_gets_no_data_and_the_others_average(
    victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All reduce, the victim too. It is not waited for until it is silent for too long: that would be without end.
    options = {"min_group_size": 3, "group_size": 4, "part_size_bytes": 1 << 16, "stall_timeout": 3600.0}
    async with AsyncExitStack() as stack:
        tensors = [torch.full((SIZE,), float(number)) for number in range(3)]
        liar = await enter(stack, {"w": tensors[0]}, **options | {"group_size": 3})
        honest = [await enter(stack, {"w": one}, join=[liar.endpoint], **options) for one in tensors[1:]]
        server: WebServer | None = None
        if victim == "a web server":
            endpoint, server = await stack.enter_async_context(a_web_server(stack))
        elif victim == "a peer of another run":
            endpoint = (await enter(stack, {"w": torch.zeros(SIZE)}, run_id="other")).endpoint
        else:
            endpoint = "169.254.169.254:80"
        let_name(monkeypatch, liar, endpoint)
        for _ in range(ROUNDS):
            leading = asyncio.create_task(liar.average())
            async with asyncio.timeout(60):
                while not liar.status.declared_expiration:  # noqa: ASYNC110 - it declares first, so it leads
                    await asyncio.sleep(0.01)
            for receipt in await average(*honest):
                assert receipt.outcome is Outcome.AVERAGED
                assert endpoint in receipt.members
                assert {lost.endpoint for lost in receipt.dropped} == {endpoint}
            await leading
        for peer in honest:
            assert set(peer.excluded) <= {endpoint}  # as an address that is not dialled
        if server is not None:
            assert server.heard
            assert max(map(len, server.heard)) < GREETING_BYTES
            assert len(server.heard) <= ROUNDS * 3 * 3  # three members, which may connect again to ask whether it lives

"""Comparing what two peers hold, with answers that are made up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from averaging.discovery.gossip.anti_entropy import AntiEntropy
from averaging.discovery.gossip.clock_offsets import Clocks
from averaging.discovery.gossip.record import Limits
from averaging.discovery.gossip.record_store import RecordStore
from averaging.discovery.gossip.rumours import Rumours
from averaging.discovery.gossip.settings import GossipSettings
from averaging.errors import ProtocolViolationError
from averaging.protocol.messages import Digest, ExchangeReply, Record
from averaging.transport.base import Transport

SETTINGS = GossipSettings(limits=Limits(records=4))
MOST = 2 * SETTINGS.limits.records
RECORD = Record("run.x", "a:1", b"", 1, 1e9, owner=bytes(32), claimed=1)


class Answers:
    """A transport behind which somebody gives these answers, to one digest after the other."""

    def __init__(self, *answers: Sequence[ExchangeReply]) -> None:
        self.answers = iter(answers)
        self.complete: list[bool] = []

    async def exchange(self, endpoint: str, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        self.complete.append(digest.complete)
        for reply in next(self.answers):
            yield reply


async def compare(transport: Answers) -> int:
    """Returns how many records were taken."""
    taken: list[Record] = []
    table = SimpleNamespace(state_hash=7, versions=dict, select=lambda wanted: [])
    board = cast("RecordStore", SimpleNamespace(table=lambda: table))
    exchange = AntiEntropy(
        "run",
        "me:1",
        cast("Transport", transport),
        board,
        lambda record, sender: taken.append(record),
        cast("Rumours", None),
        SETTINGS,
        Clocks(3.0, 10.0),
        lambda: 1e9,
    )
    await exchange.compare("a:1")
    return len(taken)


@pytest.mark.asyncio
async def test_nothing_but_the_hash_is_sent_to_one_that_holds_the_same() -> None:
    same = Answers([ExchangeReply(differs=False)])
    assert await compare(same) == 0
    assert same.complete == [False]
    other = Answers([ExchangeReply(differs=True)], [ExchangeReply((RECORD,) * MOST)])
    assert await compare(other) == MOST
    assert other.complete == [False, True]


@pytest.mark.asyncio
@pytest.mark.parametrize("reply", [ExchangeReply((RECORD,)), ExchangeReply(wanted=(1,))])
async def test_an_answer_of_more_than_any_peer_may_hold_is_refused(reply: ExchangeReply) -> None:
    await compare(Answers([reply] * MOST))
    with pytest.raises(ProtocolViolationError, match="a:1 answers with more records than a peer may hold"):
        await compare(Answers([reply] * (MOST + 1)))

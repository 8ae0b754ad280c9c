"""Exchanges with a peer whose answers are made up."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from averaging.discovery.gossip.access import GossipAccess, GossipSettings
from averaging.discovery.gossip.anti_entropy import AntiEntropy
from averaging.discovery.gossip.clock_offsets import ClockOffsets
from averaging.discovery.gossip.record import RecordLimits
from averaging.discovery.gossip.record_table import Merged, RecordStore
from averaging.discovery.gossip.rumours import Rumours
from averaging.errors import ProtocolViolationError
from averaging.protocol.messages import Digest, ExchangeReply, Record
from averaging.transport.base import Transport

SETTINGS = GossipSettings(limits=RecordLimits(records=4))
LIMIT = 2 * SETTINGS.limits.records
RECORD = Record("run.x", "a:1", b"", 1, 1e9, owner=bytes(32), claimed=1)


class Answers:
    """A transport to a peer that gives these answers, to one digest after the other."""

    def __init__(self, *answers: Sequence[ExchangeReply]) -> None:
        self.answers = iter(answers)
        self.complete: list[bool] = []

    async def exchange(self, endpoint: str, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        self.complete.append(digest.complete)
        for reply in next(self.answers):
            yield reply


async def compare(transport: Answers) -> int:
    """Returns how many records were merged."""
    merged: list[Record] = []

    def merge(record: Record, sender: str) -> Merged:
        merged.append(record)
        return Merged(is_new=True)

    table = SimpleNamespace(state_hash=7, versions=dict, select=lambda wanted: [])
    store = cast("RecordStore", SimpleNamespace(table=lambda: table))
    access = GossipAccess("run", "me:1", cast("Transport", transport), SETTINGS, lambda: 1e9, random.Random(0))
    await AntiEntropy(access, store, merge, cast("Rumours", None), ClockOffsets(3.0)).compare("a:1")
    return len(merged)


@pytest.mark.asyncio
async def test_only_the_hash_is_sent_if_the_tables_are_equal() -> None:
    same = Answers([ExchangeReply(differs=False)])
    assert await compare(same) == 0
    assert same.complete == [False]
    other = Answers([ExchangeReply(differs=True)], [ExchangeReply((RECORD,) * LIMIT)])
    assert await compare(other) == LIMIT
    assert other.complete == [False, True]


@pytest.mark.asyncio
@pytest.mark.parametrize("reply", [ExchangeReply((RECORD,)), ExchangeReply(wanted=(1,))])
async def test_an_answer_with_more_records_than_a_peer_may_hold_is_refused(reply: ExchangeReply) -> None:
    await compare(Answers([reply] * LIMIT))
    with pytest.raises(ProtocolViolationError, match="a:1 answered with more records than a peer may hold"):
        await compare(Answers([reply] * (LIMIT + 1)))

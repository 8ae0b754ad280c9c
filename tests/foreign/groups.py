"""A group of our peer with one foreign member that follows the protocol and one that does not."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from averaging import Receipt
from averaging.allreduce.shard_reducer import ShardReducer
from tests.foreign.driver import (
    DEADLINE,
    Foreign,
    ForeignPeer,
    Message,
    Ours,
    as_bytes,
    gather,
    our_peer,
    whole_numbers,
)

PART, ELEMENTS = 1024, 256
PARTS = 4
SHAPE = (ELEMENTS * PARTS,)
"""The one tensor of these groups: four parts of 1 KiB."""

BROKEN_PARTS: dict[str, Any] = {
    "another shape": {"buffer": bytes(8), "size": [2], "dtype": "float32"},
    "a huge shape": {"buffer": bytes(8), "size": [2**32 - 1, 2**32 - 1], "dtype": "float32"},
    "a short buffer": {"buffer": bytes(4 * ELEMENTS - 1), "size": [ELEMENTS], "dtype": "float32"},
    "no dtype": {"buffer": bytes(4 * ELEMENTS), "size": [ELEMENTS]},
    "garbage for a code": {"buffer": b"x", "size": [ELEMENTS], "dtype": "compressed_float32", "compression": 4},
    "a code of nobody": {"buffer": b"x", "size": [ELEMENTS], "dtype": "float32", "compression": 99},
    "not a number": {"buffer": b"\xff" * 4 * ELEMENTS, "size": [ELEMENTS], "dtype": "float32"},
}
"""Messages that are no valid part of 256 float32."""


def values(seed: int) -> torch.Tensor:
    return whole_numbers(seed, SHAPE)[0]


class Group:
    """A group of our peer, `good`, which only sends and follows the protocol, and `bad`.

    If `bad` is a client our peer reduces everything, else it and `bad` reduce one half each.
    """

    def __init__(self, us: Ours, receipt: asyncio.Task[Receipt], good: ForeignPeer, bad: ForeignPeer) -> None:
        self.us, self.receipt, self.good, self.bad = us, receipt, good, bad
        self.ours, self.theirs, self.others = values(1), values(2), values(3)
        self.announced: Message = {}
        self._taken: Counter[str] = Counter()
        self._takes = asyncio.Event()

    @property
    def of_all(self) -> torch.Tensor:
        return (self.ours + self.theirs + self.others) / 3

    @property
    def without_bad(self) -> torch.Tensor:
        return (self.ours + self.theirs) / 2

    def up_to(self, parts: int) -> torch.Tensor:
        """The average if this number of parts of `bad` arrive."""
        return torch.cat([self.of_all[: parts * ELEMENTS], self.without_bad[parts * ELEMENTS :]])

    @property
    def own_parts(self) -> slice:
        """The half that our peer reduces."""
        order = [name for name in self.announced["ordered_group_endpoints"] if name != self.good.endpoint]
        return slice(0, SHAPE[0] // 2) if order[0] == self.us.endpoint else slice(SHAPE[0] // 2, SHAPE[0])

    async def messages(self, member: ForeignPeer) -> list[Message]:
        """The parts that `member` must send to our peer."""
        tensor = self.theirs if member is self.good else self.others
        result: list[Message] = await member.messages(
            reducer=self.us.endpoint, group=self.announced, schema=self.us.schema, tensors=as_bytes([tensor])
        )
        return result

    def bad_sends(self, messages: list[Message], *, ends: bool = True) -> asyncio.Future[list[Message]]:
        return asyncio.ensure_future(self.bad.send(reducer=self.us.endpoint, messages=messages, ends=ends))

    async def has_taken(self, count: int, sender: ForeignPeer | None = None) -> None:
        """Waits until our peer has received this number of parts of `bad`, or of `sender`."""
        async with asyncio.timeout(DEADLINE):
            while self._taken[(sender or self.bad).endpoint] < count:
                self._takes.clear()
                await self._takes.wait()

    def take(self, sender: str) -> None:
        """Waits until our peer has received a part of `sender`."""
        self._taken[sender] += 1
        self._takes.set()

    def leave_notice(self, code: str) -> list[Message]:
        return [{"code": code, "group_id": self.announced["group_id"], "endpoint": self.bad.endpoint}]

    async def good_sends(self) -> torch.Tensor:
        """`good` sends all of its parts to our peer; returns the averages."""
        replies = await self.good.send(reducer=self.us.endpoint, messages=await self.messages(self.good))
        assert {reply["code"] for reply in replies} == {"AVERAGED_PART"}
        return torch.cat([averages(reply) for reply in replies])

    async def ends(self, *, without: bool, kept_local: int = 0) -> torch.Tensor:
        """Our tensor after the round, which must have continued `without` the bad member, or with it."""
        result = await self.receipt
        assert result.averaged, result.reason
        assert [dropped.endpoint for dropped in result.dropped] == ([self.bad.endpoint] if without else [])
        assert result.kept_local == kept_local
        with self.us.peer.tensors() as (tensor,):
            return tensor.clone()


def averages(reply: Message) -> torch.Tensor:
    return torch.frombuffer(bytearray(reply["tensor_part"]["buffer"]), dtype=torch.float32)


@asynccontextmanager
async def group_with(
    foreign: Foreign, *, client: bool, replies: list[Message] | None = None, hangs: bool = False, **options: Any
) -> AsyncGenerator[Group, None]:
    """Begins the round of the group; if `bad` is no client it answers all streams of parts with `replies`."""
    good, bad = await foreign.client(), await (foreign.client() if client else foreign.peer())
    await bad.answer_parts(replies=replies, hangs=hangs)
    chosen: dict[str, Any] = {"group_size": 3, "part_size_bytes": PART, **options}
    async with our_peer([values(1)], **chosen) as us, us.averaging() as receipt:
        assert await us.asks_to_join(good, gather(mode=1)) == "ACCEPTED"
        assert await us.asks_to_join(bad, gather(mode=1 if client else 0)) == "ACCEPTED"
        group = Group(us, receipt, good, bad)
        group.announced = await us.begins(good, bad)
        add = ShardReducer.add

        def watched(self: ShardReducer, sender: str, values: torch.Tensor, *, spare: bool = False) -> None:
            add(self, sender, values, spare=spare)
            group.take(sender)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShardReducer, "add", watched)
            yield group

"""A leader announces different groups to its followers: no peer adopts a result or excludes an honest member."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pytest
import torch

from averaging import Mode, Outcome, Peer, Receipt
from averaging.matchmaking import rules
from averaging.protocol.group import pack_gather
from averaging.protocol.messages import JoinRequest, MessageCode, MessageFromLeader
from averaging.receipts import DropCode
from tests.support.swarm import Swarm

Lie: TypeAlias = Callable[[MessageFromLeader, str], MessageFromLeader]

SIZE = 2048
OPTIONS: dict[str, Any] = {"group_size": 4, "group_wait": 2.0, "round_timeout": 8.0, "part_size_bytes": 1024}


def change_gathers(announced: MessageFromLeader, **gathers: bytes) -> MessageFromLeader:
    """The announcement with changed gathers of the members at these ports."""
    by_name = dict(zip(announced.ordered_group_endpoints, announced.gathered, strict=True))
    by_name |= {f"peer:{port.removeprefix('p')}": gather for port, gather in gathers.items()}
    return replace(announced, gathered=tuple(by_name[name] for name in announced.ordered_group_endpoints))


def other_order(announced: MessageFromLeader, follower: str) -> MessageFromLeader:
    names, gathered = announced.ordered_group_endpoints, announced.gathered
    return replace(announced, ordered_group_endpoints=names[1:] + names[:1], gathered=gathered[1:] + gathered[:1])


def other_weight(announced: MessageFromLeader, follower: str) -> MessageFromLeader:
    return change_gathers(announced, p1=pack_gather(100.0, None, Mode.NODE))


def fewer_members(announced: MessageFromLeader, follower: str) -> MessageFromLeader:
    left_out = next(name for name in announced.ordered_group_endpoints if name not in (follower, "peer:1"))
    kept = [
        (name, gather)
        for name, gather in zip(announced.ordered_group_endpoints, announced.gathered, strict=True)
        if name != left_out
    ]
    return replace(
        announced,
        ordered_group_endpoints=tuple(name for name, _ in kept),
        gathered=tuple(gather for _, gather in kept),
    )


def other_mode(announced: MessageFromLeader, follower: str) -> MessageFromLeader:
    return change_gathers(announced, p1=pack_gather(1.0, None, Mode.AUXILIARY))


LIES = [other_order, other_weight, fewer_members, other_mode]


def let_lie(peer: Peer, deceived: set[str], lie: Lie) -> None:
    """Makes a leader announce the group as changed by `lie` to some followers."""
    transport: Any = peer._transport
    serve = transport.serve

    async def serve_lies(service: Any, gossip: Any) -> None:
        join_group = service.join_group

        async def lying(request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
            async for message in join_group(request):
                lies = message.code is MessageCode.BEGIN_ALLREDUCE and request.endpoint in deceived
                yield lie(message, request.endpoint) if lies else message

        service.join_group = lying
        await serve(service, gossip)

    transport.serve = serve_lies


@dataclass(frozen=True)
class Follower:
    """The outcome at a follower: its receipt, whether its tensor is unchanged, and the peers it excludes."""

    receipt: Receipt
    unchanged: bool
    excluded: frozenset[str]


def averaged_under(deceived: set[str], lie: Lie, seed: int, options: Mapping[str, Any]) -> dict[str, Follower]:
    """A round of four peers of which the first leads and lies to some."""
    swarm = Swarm(seed)
    names = [f"peer:{n + 1}" for n in range(4)]
    tensors = [torch.full((SIZE,), float(n)) for n in range(4)]
    peers = [swarm.peer(name, [tensor], **OPTIONS, **options) for name, tensor in zip(names, tensors, strict=True)]
    let_lie(peers[0], deceived, lie)

    async def main() -> dict[str, Follower]:
        async with AsyncExitStack() as stack:
            for peer in peers:
                await stack.enter_async_context(peer)
            leading = asyncio.create_task(peers[0].average())
            await asyncio.sleep(0.3)  # it declares first, so it leads
            receipts = await asyncio.gather(*(peer.average() for peer in peers[1:]))
            await leading
            return {
                names[n]: Follower(receipt, bool((tensors[n] == n).all()), frozenset(peers[n].excluded))
                for n, receipt in enumerate(receipts, 1)
            }

    found: dict[str, Follower] = swarm.simulate(main())
    return found


DECEIVED = pytest.mark.parametrize("deceived", [{"peer:2"}, {"peer:3", "peer:4"}], ids=["one", "two"])
OF_ALL_KINDS = pytest.mark.parametrize("options", [{}, {"in_place": True}, {"reply_form": "delta"}], ids=str)
SEEDS = pytest.mark.parametrize("seed", range(3))
ANNOUNCED = "announced other members, another order or other weights"


@DECEIVED
@OF_ALL_KINDS
@SEEDS
@pytest.mark.parametrize("lie", LIES)
def test_nothing_is_adopted_and_no_honest_member_is_excluded(
    lie: Lie, deceived: set[str], options: Mapping[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As leaders of other software do.
    monkeypatch.setattr(rules, "make_group_id", lambda nonce, *_, **__: nonce + bytes(14))
    followers = averaged_under(deceived, lie, seed, options)
    for follower in followers.values():
        assert follower.receipt.outcome is Outcome.FAILED
        assert follower.unchanged
        assert follower.excluded <= {"peer:1"}
    assert any(f"peer:1 {ANNOUNCED}" in follower.receipt.reason for follower in followers.values())
    assert any(follower.excluded for follower in followers.values())


@DECEIVED
@OF_ALL_KINDS
@SEEDS
@pytest.mark.parametrize("lie", LIES)
def test_members_whose_group_matches_the_id_average_without_the_others(
    lie: Lie, deceived: set[str], options: Mapping[str, Any], seed: int
) -> None:
    followers = averaged_under(deceived, lie, seed, options)
    for name, follower in followers.items():
        if name in deceived:
            assert follower.receipt.outcome is Outcome.FAILED
            assert follower.unchanged
            assert follower.excluded <= {"peer:1"}
        else:
            # Each of the others notices it too and leaves; either may be observed first.
            lost = {lost.endpoint: lost.code for lost in follower.receipt.dropped}
            assert lost.keys() == deceived
            assert set(lost.values()) <= {DropCode.OTHER_GROUP, DropCode.CANCELLED, DropCode.REFUSED}
            assert follower.excluded == frozenset()
    assert any(f"peer:1 {ANNOUNCED}" in followers[name].receipt.reason for name in deceived)
    results = {follower.receipt.digest for name, follower in followers.items() if name not in deceived}
    assert len(results) == 1  # an empty one where the replies are deltas

"""Foreign followers of our peer: every verdict, what becomes of those that were accepted, what members tell."""

from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec import msgpack

from averaging.protocol.group import MAX_GATHER_BYTES
from tests.foreign.driver import Foreign, ends_together, gather, is_led, leads, our_peer

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("nothing_is_left_behind"),
]

NAN = float("nan")


# Verdicts


async def test_a_peer_that_does_not_look_for_a_group(foreign: Foreign) -> None:
    follower = await foreign.peer()
    async with our_peer() as us:
        assert await us.asks_to_join(follower, schema_hash=b"", endpoint="") == "NOT_LOOKING_FOR_GROUP"


VIOLATIONS: dict[str, dict[str, Any]] = {
    "no hash": {"schema_hash": b""},
    "expiration nan": {"expiration": NAN},
    "gather no msgpack": {"gather": b"\xc1"},
    "weight nan": {"gather": gather(NAN)},
    "a node in client mode": {"gather": gather(mode=1)},
    "a client that accepts calls": {"endpoint": "client::1"},
}


@pytest.mark.parametrize("fields", VIOLATIONS.values(), ids=VIOLATIONS)
async def test_a_request_that_is_none(foreign: Foreign, fields: dict[str, Any]) -> None:
    follower = await foreign.peer()
    async with our_peer() as us, us.averaging():
        also_wrong: dict[str, Any] = {"schema_hash": b"another", "expiration": time.time() - 60}
        assert await us.asks_to_join(follower, **(also_wrong | fields)) == "PROTOCOL_VIOLATION"


async def test_other_tensors_and_an_expiration_before_ours(foreign: Foreign) -> None:
    follower = await foreign.peer()
    async with our_peer() as us, us.averaging():
        too_soon = us.peer.status.declared_expiration - 0.001
        assert await us.asks_to_join(follower, schema_hash=b"x", expiration=too_soon) == "BAD_SCHEMA_HASH"
        assert (
            await us.asks_to_join(follower, expiration=too_soon, endpoint=us.endpoint, client_mode=False)
            == "BAD_EXPIRATION_TIME"
        )
        assert await us.asks_to_join(follower, expiration=us.peer.status.declared_expiration) == "ACCEPTED"


async def test_an_endpoint_that_is_there_already(foreign: Foreign) -> None:
    first, second = await foreign.peer(), await foreign.peer()
    async with our_peer(group_size=3) as us, us.averaging():
        assert await us.asks_to_join(first, endpoint=us.endpoint) == "DUPLICATE_ENDPOINT"
        assert await us.asks_to_join(first) == "ACCEPTED"
        assert await us.asks_to_join(second, endpoint=first.endpoint) == "DUPLICATE_ENDPOINT"


async def test_a_follower_that_leaves_makes_room(foreign: Foreign) -> None:
    first, second = await foreign.peer(), await foreign.peer()
    async with our_peer(group_size=3) as us, us.averaging() as receipt:
        assert await us.asks_to_join(first) == "ACCEPTED"
        await first.leave(leader=us.endpoint)
        await us.accepts_at_last(first, refusal="DUPLICATE_ENDPOINT")
        assert await us.asks_to_join(second) == "ACCEPTED"
        await is_led(us, receipt, first, second)


async def test_a_full_group_and_an_assembled_one(foreign: Foreign) -> None:
    """Our group is full and cannot begin as long as a leader that our peer asked may still take it in."""
    leader, first, second, third = [await foreign.peer() for _ in range(4)]
    async with our_peer(group_size=3) as us:
        await us.declare(leader.endpoint)
        async with us.averaging() as receipt:
            await leader.next_request()
            assert await us.asks_to_join(first) == "ACCEPTED"
            assert await us.asks_to_join(second) == "ACCEPTED"
            assert await us.asks_to_join(third) == "GROUP_IS_FULL"
            await leader.answer(follower=us.endpoint, code="NOT_LOOKING_FOR_GROUP")
            group = await us.begins(first, second)
            assert await us.asks_to_join(third) == "NOT_LOOKING_FOR_GROUP"
            await ends_together(us, receipt, group, first, second)


# What becomes of those that were accepted


async def test_enough_at_the_leaders_time(foreign: Foreign) -> None:
    follower = await foreign.peer()
    async with our_peer(group_size=3, group_wait=0.3) as us, us.averaging() as receipt:
        declared = us.peer.status.declared_expiration
        assert await us.asks_to_join(follower) == "ACCEPTED"
        group = await us.begins(follower)
        assert time.time() >= declared
        assert await follower.next_message(leader=us.endpoint) == {}
        await ends_together(us, receipt, group, follower)


async def test_a_leader_that_is_accepted_elsewhere(foreign: Foreign) -> None:
    leader, follower = await foreign.peer(), await foreign.peer()
    async with our_peer(group_size=3) as us:
        await us.declare(leader.endpoint)
        async with us.averaging() as receipt:
            await leader.next_request()
            assert await us.asks_to_join(follower) == "ACCEPTED"
            await leader.answer(follower=us.endpoint, code="ACCEPTED")
            disbanded = {"code": "GROUP_DISBANDED", "suggested_leader": leader.endpoint}
            assert await us.fates(follower) == [disbanded]
            # Whoever asks now is sent to the leader, unless something else is wrong with the request.
            request = {"schema_hash": us.peer.schema.hash, "expiration": time.time() + 60}
            verdict = await follower.ask(leader=us.endpoint, **request)
            assert verdict == {"code": "NOT_A_LEADER", "suggested_leader": leader.endpoint}
            assert await us.asks_to_join(follower, expiration=time.time()) == "BAD_EXPIRATION_TIME"
            await leads(us, receipt, leader, accepts=False)


# Declarations


async def test_a_declaration_is_renewed_when_its_time_is_over() -> None:
    async with our_peer(group_wait=0.2) as us, us.averaging():
        declared = us.peer.status.declared_expiration
        entry = await us.declares(us.key, after=declared)
        assert time.time() >= declared
        assert msgpack.decode(entry.value) is True


async def test_bits_are_kept_where_somebody_was(foreign: Foreign) -> None:
    """A client declares nothing, and is somebody all the same."""
    client = await foreign.client()
    async with our_peer(group_wait=3.0, group_bits="01", group_size=3, min_group_size=3) as us, us.averaging():
        declared, key = us.peer.status.declared_expiration, us.key
        assert await us.asks_to_join(client, gather(mode=1)) == "ACCEPTED"
        assert await us.fates(client) == [{"code": "GROUP_DISBANDED"}]
        await us.declares(key, after=declared)


# What members tell


async def test_the_largest_gather_and_none_at_all(foreign: Foreign) -> None:
    first, second = await foreign.peer(), await foreign.peer()
    empty = len(gather(user=b"x" * 60_000)) - 60_000
    largest = gather(user=b"x" * (MAX_GATHER_BYTES - empty))
    assert len(largest) == MAX_GATHER_BYTES
    async with our_peer(group_size=3) as us, us.averaging() as receipt:
        assert await us.asks_to_join(first, largest) == "ACCEPTED"
        assert await us.asks_to_join(second, b"") == "ACCEPTED"
        await is_led(us, receipt, first, second)
        assert (await receipt).gathered == {
            us.endpoint: None,
            first.endpoint: b"x" * (MAX_GATHER_BYTES - empty),
            second.endpoint: None,
        }

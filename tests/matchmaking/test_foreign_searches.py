"""Foreign followers and leaders: every verdict, what becomes of those that were accepted, and whom our peer asks."""

import itertools
import time
from typing import Any

import pytest
from msgspec import msgpack

from averaging.protocol.group import MAX_GATHER_BYTES
from tests.foreign.driver import (
    EARLIER,
    OUR_TIME,
    Foreign,
    ForeignPeer,
    Ours,
    begun,
    ends_together,
    gather,
    is_led,
    leads,
    our_peer,
)

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


# Foreign leaders: whom our peer asks, where it goes when it is sent on, what it does not believe


async def test_what_our_peer_says_to_a_leader(foreign: Foreign) -> None:
    leader = await foreign.peer()
    async with our_peer(bandwidth=2e6) as us:
        await us.declare(leader.endpoint)
        async with us.averaging(weight=3, gather={"loss": 0.5}):
            request = await leader.next_request()
            declared = us.peer.status.declared_expiration
    user = msgpack.encode({"loss": 0.5})
    assert msgpack.decode(request.pop("gather")) == [3.0, 2e6, 0, user]
    assert request == {"endpoint": us.endpoint, "schema_hash": us.peer.schema.hash, "expiration": declared}


async def test_whom_our_peer_asks_and_in_which_order(foreign: Foreign) -> None:
    """The earliest first; not those that do not look or wait longer, and nobody else once it is in a group."""
    first, second, third, later, quiet, garbled = [await foreign.peer() for _ in range(6)]
    async with our_peer() as us:
        await us.declare(quiet.endpoint, EARLIER - 3.0, looking=False)
        await us.declare(garbled.endpoint, EARLIER - 3.0, looking={"perhaps": 1})
        times = {later: OUR_TIME + 30.0, third: EARLIER, second: EARLIER - 1.0, first: EARLIER - 2.0}
        for leader, seconds in times.items():
            await us.declare(leader.endpoint, seconds)
        async with us.averaging() as receipt:
            await first.next_request()
            await first.answer(follower=us.endpoint, code="GROUP_IS_FULL")
            await second.next_request()
            await leads(us, receipt, second)
        entry = us.discovery.get(us.key)[us.endpoint]
        assert msgpack.decode(entry.value) is False  # it does not look any more
        for other in (third, later, quiet, garbled):
            assert await other.pending_requests() == 0


async def test_equal_expirations_are_decided_by_the_endpoint(foreign: Foreign) -> None:
    """The lesser endpoint leads: 127.0.0.1 before localhost."""
    other = await foreign.peer()
    async with our_peer(advertise="localhost:0") as us, us.averaging() as receipt:
        declared = us.peer.status.declared_expiration
        await us.declare_until(other.endpoint, declared)
        assert (await other.next_request())["expiration"] == declared
        await leads(us, receipt, other)
    other = await foreign.peer(host="localhost")
    async with our_peer() as us, us.averaging() as receipt:
        declared = us.peer.status.declared_expiration
        await us.declare_until(other.endpoint, declared)
        assert await us.asks_to_join(other, expiration=declared) == "ACCEPTED"
        await is_led(us, receipt, other)
        assert await other.pending_requests() == 0


@pytest.mark.parametrize("code", ["NOT_A_LEADER", "GROUP_DISBANDED"])
async def test_three_redirects_in_a_row_and_no_more(foreign: Foreign, code: str) -> None:
    chain = [await foreign.peer() for _ in range(5)]
    async with our_peer() as us:
        await us.declare(chain[0].endpoint)
        for named in chain[1:]:
            await us.name(named.endpoint)
        async with us.averaging() as receipt:
            for asked, suggested in itertools.pairwise(chain):
                await redirect(us, asked, code, suggested.endpoint)
            # Not the fifth: the first is asked again, after a pause.
            await chain[0].next_request()
            assert await chain[4].pending_requests() == 0
            await leads(us, receipt, chain[0])


async def redirect(us: Ours, asked: ForeignPeer, code: str, suggested: str) -> float:
    """`asked` is asked and sends our peer to `suggested`; returns when it was about to do so."""
    await asked.next_request()
    now = time.time()
    if code == "GROUP_DISBANDED":
        await asked.answer(follower=us.endpoint, code="ACCEPTED")
    await asked.answer(follower=us.endpoint, code=code, suggested_leader=suggested)
    return now


@pytest.mark.parametrize("code", ["NOT_A_LEADER", "GROUP_DISBANDED"])
@pytest.mark.parametrize("suggested", ["a stranger", "our peer", "client::1", "nonsense"])
async def test_a_redirect_to_nobody_of_this_run(foreign: Foreign, suggested: str, code: str) -> None:
    leader, stranger = await foreign.peer(), await foreign.peer()
    async with our_peer() as us:
        await us.declare(leader.endpoint)
        suggested = {"a stranger": stranger.endpoint, "our peer": us.endpoint}.get(suggested, suggested)
        async with us.averaging() as receipt:
            await redirect(us, leader, code, suggested)
            await leader.next_request()
            assert await stranger.pending_requests() == 0
            await leads(us, receipt, leader)


BROKEN_GROUPS: dict[str, dict[str, Any]] = {
    "without our peer": {"ordered_group_endpoints": ["127.0.0.1:1", "127.0.0.1:2"]},
    "a gather too few": {"gathered": [gather()]},
    "a negative weight": {"gathered": [gather(), gather(-1.0)]},
}


async def is_taken_in(us: Ours, leader: ForeignPeer, follower: ForeignPeer) -> None:
    """`leader` accepts our peer, which follows it as soon as it has sent its own follower there."""
    await leader.next_request()
    assert await us.asks_to_join(follower) == "ACCEPTED"
    await leader.answer(follower=us.endpoint, code="ACCEPTED")
    assert await us.fates(follower) == [{"code": "GROUP_DISBANDED", "suggested_leader": leader.endpoint}]


@pytest.mark.parametrize("fields", BROKEN_GROUPS.values(), ids=BROKEN_GROUPS)
async def test_a_beginning_that_makes_no_sense(foreign: Foreign, fields: dict[str, Any]) -> None:
    """Our peer leaves such a leader and finds another group."""
    leader, follower = await foreign.peer(), await foreign.peer()
    async with our_peer() as us:
        await us.declare(leader.endpoint)
        async with us.averaging() as receipt:
            await is_taken_in(us, leader, follower)
            await leader.answer(follower=us.endpoint, code="BEGIN_ALLREDUCE", **(begun(us, leader) | fields))
            await us.accepts_at_last(follower, refusal="NOT_A_LEADER")
            await is_led(us, receipt, follower)


@pytest.mark.parametrize("code", ["INTERNAL_ERROR", "NOT_DECLARED", "ACCEPTED", "AVERAGED_PART"])
async def test_a_leader_that_fails_after_accepting(foreign: Foreign, code: str) -> None:
    leader, follower = await foreign.peer(), await foreign.peer()
    async with our_peer() as us:
        await us.declare(leader.endpoint)
        async with us.averaging() as receipt:
            await is_taken_in(us, leader, follower)
            await leader.answer(follower=us.endpoint, code=code)
            await us.accepts_at_last(follower, refusal="NOT_A_LEADER")
            await is_led(us, receipt, follower)

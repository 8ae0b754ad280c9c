"""Leaders that do not lead: they do not answer, accept and send nothing, or say something else. The others go on."""

import asyncio
import random
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from averaging import Mode, Outcome, Receipt
from averaging.errors import CallRefusedError
from averaging.matchmaking import Conduct, Matchmaking, NoGroupError, SearchConfig
from averaging.matchmaking.rules import CLOCK_TOLERANCE, MIN_HEAD_START, pack_looking
from averaging.protocol.group import Group, group_key, pack_gather
from averaging.protocol.messages import CompressionType, JoinRequest, MessageCode, MessageFromLeader
from averaging.tensors.schema import Schema, TensorSpec
from averaging.testing import virtual_time
from averaging.testing.discovery import MemoryDiscovery, MemoryRegistry
from averaging.timing.deadlines import MIN_WAITS, VERDICT_SECONDS, Deadlines, Phase
from averaging.transport.base import Transport
from tests.support.fake_transport import OneLane
from tests.support.rounds import SilentLeader
from tests.support.simulated import in_virtual_time
from tests.support.swarm import Swarm, scalars

ME, FIRST, SECOND, FOLLOWER = "192.0.2.1:1", "192.0.2.2:1", "192.0.2.3:1", "192.0.2.4:1"
SCHEMA = Schema((TensorSpec("w", "float32", (3,), CompressionType.NONE),), 1024)
GATHER = pack_gather(1.0, None, Mode.NODE)


class Leaders(OneLane):
    """The network: each of two leaders accepts after a time of its own, and then begins or disbands.

    Attributes:
        answers_after: seconds until a leader accepts.
        decides_after: seconds from then on until it decides.
        disbands: the leader that does not begin.
        left: when the follower of each leader left.
    """

    def __init__(
        self, first: float, second: float, decide: tuple[float, float] = (1.0, 1.0), disbands: str = ""
    ) -> None:
        self.answers_after = {FIRST: first, SECOND: second}
        self.decides_after = dict(zip((FIRST, SECOND), decide, strict=True))
        self.disbands = disbands
        self.asked: list[str] = []
        self.left: dict[str, float] = {}

    async def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        self.asked.append(endpoint)
        try:
            await asyncio.sleep(self.answers_after.get(endpoint, 100.0))
            yield MessageFromLeader(MessageCode.ACCEPTED)
            await asyncio.sleep(self.decides_after[endpoint])
            if endpoint == self.disbands:
                yield MessageFromLeader(MessageCode.GROUP_DISBANDED)
                return
            members, gathers = (endpoint, request.endpoint), (GATHER, request.gather)
            yield MessageFromLeader(MessageCode.BEGIN_ALLREDUCE, bytes(20), "", members, gathers)
        except (GeneratorExit, asyncio.CancelledError):
            self.left[endpoint] = asyncio.get_running_loop().time()
            raise


def known_network() -> Conduct:
    """One in which others have answered, so that a peer that was never asked has a head start of a second."""
    conduct = Conduct()
    for _ in range(MIN_WAITS):
        conduct.deadlines.record("192.0.2.9:1", Phase.VERDICT, 0, 0.01, 0.0)
    return conduct


def searcher(leaders: Leaders, discovery: MemoryDiscovery, conduct: Conduct, group_size: int = 4) -> Matchmaking:
    config = SearchConfig("run", ME, group_size, 2, 20.0, virtual_time.clock, random.Random(1))
    return Matchmaking(config, SCHEMA, cast("Transport", leaders), discovery, conduct=conduct)


async def find(
    leaders: Leaders, conduct: Conduct, *names: str, mode: Mode = Mode.NODE, apart: float = 1.0, quiet: str = ""
) -> Group:
    """The group that is found among leaders that have declared to wait for 10 s, each so many seconds longer.

    Args:
        quiet: a peer that does not look for a group.
    """
    async with MemoryDiscovery(MemoryRegistry(clock=virtual_time.clock)) as discovery:
        now = virtual_time.clock()
        for number, name in enumerate(names):
            await discovery.store(group_key("run", ""), name, pack_looking(True), now + 10 + apart * number)
        if quiet:
            await discovery.store(group_key("run", ""), quiet, pack_looking(False), now + 15)
        return await searcher(leaders, discovery, conduct).find_group(pack_gather(1.0, None, mode), now + 30)


def search(leaders: Leaders, conduct: Conduct | None = None, silent: int = 0) -> Group:
    """The group that is found among the two leaders and the `silent` ones before them, which do not answer."""
    names = [*(f"192.0.2.8:{number + 1}" for number in range(silent)), FIRST, SECOND]
    return virtual_time.run(find(leaders, conduct or Conduct(), *names))


async def seconds(leaders: Leaders, deadlines: Deadlines, *names: str, **options: Any) -> float:
    """How long a search takes."""
    began = virtual_time.clock()
    await find(leaders, Conduct(deadlines), *names, **options)
    return virtual_time.clock() - began


@in_virtual_time
async def test_a_dead_candidate_costs_less_as_soon_as_round_trips_are_known() -> None:
    lower, leaders = 0.5, Leaders(first=100.0, second=0.02, decide=(0.0, 0.0))
    deadlines = Deadlines(lower, 10.0)
    assert await seconds(leaders, deadlines, FIRST, SECOND) == pytest.approx(VERDICT_SECONDS, abs=0.2)
    usual = [await seconds(leaders, deadlines, SECOND) for _ in range(MIN_WAITS)]
    # It missed one before, so it gets twice what one gets who is new.
    assert await seconds(leaders, deadlines, FIRST, SECOND) <= max(usual) + 4 * lower + 0.1

    fresh = Deadlines(lower, 10.0)
    for _ in range(MIN_WAITS):
        await seconds(leaders, fresh, SECOND)
    assert await seconds(leaders, fresh, FIRST, SECOND) <= max(usual) + 2 * lower + 0.1


@in_virtual_time
async def test_a_leader_that_has_accepted_may_decide_until_its_declaration_expires() -> None:
    deadlines = Deadlines(0.5, 10.0)
    for decides_after, took in [*[(0.0, 0.02)] * MIN_WAITS, (9.0, 9.02)]:
        leaders = Leaders(first=0.02, second=0.02, decide=(decides_after, 0.0))
        assert await seconds(leaders, deadlines, FIRST) == pytest.approx(took, abs=0.1)


@in_virtual_time
async def test_a_client_waits_for_a_silent_leader_until_its_declaration_expires() -> None:
    leaders = Leaders(first=0.02, second=0.02, decide=(100.0, 0.0))  # the first accepts and sends nothing more
    waited = await seconds(leaders, Deadlines(0.5, 10.0), FIRST, SECOND, mode=Mode.CLIENT, apart=9.0)
    assert waited == pytest.approx(10 + CLOCK_TOLERANCE, abs=0.2)  # and not its own 30 s


@in_virtual_time
async def test_a_full_group_waits_for_the_answer_to_its_leader_s_own_request() -> None:
    """Otherwise it could be in two groups at once."""
    async with MemoryDiscovery(MemoryRegistry(clock=virtual_time.clock)) as discovery:
        now = virtual_time.clock()
        await discovery.store(group_key("run", ""), FIRST, pack_looking(True), now + 10)
        found = searcher(Leaders(first=1.0, second=9.0), discovery, Conduct(), group_size=2)
        searching = asyncio.create_task(found.find_group(GATHER, now + 30))
        await asyncio.sleep(0.1)
        replies = found.join_group(JoinRequest(FOLLOWER, SCHEMA.hash, now + 60, GATHER))
        assert (await anext(replies)).code is MessageCode.ACCEPTED
        decided = await anext(replies)
        assert (decided.code, decided.suggested_leader) == (MessageCode.GROUP_DISBANDED, FIRST)
        assert set((await searching).endpoints) == {FIRST, ME}
        await replies.aclose()


@in_virtual_time
async def test_a_peer_that_stood_still_counts_no_other_as_silent() -> None:
    conduct, leaders = Conduct(), Leaders(first=0.05, second=0.01)
    for _ in range(MIN_WAITS):
        conduct.deadlines.record(FIRST, Phase.VERDICT, 0, 0.01, 0.0)
    asyncio.get_running_loop().call_later(0.045, virtual_time.stand_still, 5.0)
    assert (await find(leaders, conduct, FIRST, SECOND)).leader == FIRST
    assert leaders.asked == [FIRST]


def test_the_first_leads_if_it_answers_within_its_head_start() -> None:
    leaders = Leaders(first=2.9, second=0.01)
    group = search(leaders)
    assert (group.leader, leaders.asked) == (FIRST, [FIRST])


def test_the_second_leads_if_the_first_does_not_answer_in_time_and_the_request_is_withdrawn() -> None:
    leaders = Leaders(first=1.8, second=0.02)
    group = search(leaders, known_network())
    assert (group.leader, leaders.asked) == (SECOND, [FIRST, SECOND])
    assert leaders.left[FIRST] == pytest.approx(1.02, abs=0.01)  # as soon as the second accepts


def test_the_first_leads_if_it_answers_before_the_second_that_was_asked_meanwhile() -> None:
    conduct, leaders = known_network(), Leaders(first=1.1, second=1.5)
    group = search(leaders, conduct)
    assert (group.leader, leaders.asked) == (FIRST, [FIRST, SECOND])
    assert leaders.left[SECOND] == pytest.approx(2.0, abs=0.01)  # when the head start of the second is over
    assert not conduct.unanswered(FIRST), "it has answered, if late"


@pytest.mark.parametrize(
    ("leaders", "leads", "leaves"),
    [
        (Leaders(first=1.05, second=0.1), FIRST, {SECOND: 1.2}),
        (Leaders(first=1.05, second=0.1, decide=(1.0, 0.05)), SECOND, {FIRST: 1.15}),
        (Leaders(first=1.05, second=0.1, decide=(0.1, 1.0), disbands=FIRST), SECOND, {FIRST: 1.15}),
    ],
    ids=["the first leads", "the second begins at that moment", "the first disbands at that moment"],
)
def test_of_two_that_accept_only_one_leads(leaders: Leaders, leads: str, leaves: dict[str, float]) -> None:
    """The first after 1.05 s, the second after 1.1 s."""
    group = search(leaders, known_network())
    assert group.leader == leads
    left = {name: when for name, when in leaders.left.items() if name != leads}
    assert left == pytest.approx(leaves, abs=0.01)


def test_the_first_leads_even_if_the_second_that_was_asked_with_it_accepts_sooner() -> None:
    leaders = Leaders(first=0.1, second=0.05)
    group = search(leaders, known_network(), silent=2)
    assert (group.leader, leaders.asked[2:]) == (FIRST, [FIRST, SECOND])
    assert leaders.left[SECOND] == pytest.approx(2.0 + 0.1 + MIN_HEAD_START, abs=0.01)


class Silent(Leaders):
    """Leaders that answer no request."""

    def __init__(self) -> None:
        super().__init__(first=100.0, second=100.0)


@pytest.mark.parametrize("cancelled", [False, True])
@in_virtual_time
async def test_a_complete_group_waits_no_longer_than_a_head_start(cancelled: bool) -> None:
    """And its leader does not begin if its search is cancelled."""
    async with MemoryDiscovery(MemoryRegistry(clock=virtual_time.clock)) as discovery:
        now = virtual_time.clock()
        await discovery.store(group_key("run", ""), FIRST, pack_looking(True), now + 10)
        leaders = Silent()
        found = searcher(leaders, discovery, known_network(), group_size=2)
        searching = asyncio.create_task(found.find_group(GATHER, now + 30))
        await asyncio.sleep(0.1)
        replies = found.join_group(JoinRequest(FOLLOWER, SCHEMA.hash, now + 60, GATHER))
        assert (await anext(replies)).code is MessageCode.ACCEPTED
        decision = asyncio.create_task(anext(replies))
        await asyncio.sleep(0.8)
        assert not decision.done()
        if cancelled:
            searching.cancel()
            assert (await decision).code is MessageCode.GROUP_DISBANDED
        else:
            assert (await decision).code is MessageCode.BEGIN_ALLREDUCE
            assert asyncio.get_running_loop().time() == pytest.approx(1.0, abs=0.01)
            assert set((await searching).endpoints) == {ME, FOLLOWER}
            assert list(leaders.left) == [FIRST]
        await asyncio.wait([searching])
        await replies.aclose()


@pytest.mark.parametrize(
    ("accepts", "then", "reason"),
    [
        (False, None, "ended its answer early"),
        (False, CallRefusedError(FIRST, "TypeError: x is not a function"), "TypeError: x is not a function"),
        (True, None, "ended its answer early"),
        (True, 60.0, "accepted this peer, but neither began a group nor disbanded it"),
        (True, MessageFromLeader(MessageCode.INTERNAL_ERROR), "INTERNAL_ERROR"),
        (True, MessageFromLeader(MessageCode.BEGIN_ALLREDUCE, bytes(20)), "began a group of 0 with 0 gathers"),
    ],
)
@in_virtual_time
async def test_the_error_says_what_a_leader_did_instead(accepts: bool, then: object, reason: str) -> None:
    class Odd(Silent):
        async def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
            if accepts:
                yield MessageFromLeader(MessageCode.ACCEPTED)
            if isinstance(then, Exception):
                raise then
            if isinstance(then, float):
                await asyncio.sleep(then)
            if isinstance(then, MessageFromLeader):
                yield then

    with pytest.raises(NoGroupError, match=rf"\({FIRST}: {reason}\)"):
        await find(Odd(), Conduct(), FIRST)


class Redirects(Silent):
    """Every peer that is asked suggests the second one."""

    async def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        self.asked.append(endpoint)
        yield MessageFromLeader(MessageCode.NOT_A_LEADER, suggested_leader=SECOND)


@pytest.mark.parametrize("broke", [False, True])
@in_virtual_time
async def test_an_excluded_peer_is_not_followed_as_a_suggestion(broke: bool) -> None:
    conduct, network = Conduct(), Redirects()
    for _ in range(4 * broke):
        conduct.note_fault(SECOND, 0.0)
    with pytest.raises(NoGroupError):
        await find(network, conduct, FIRST, quiet=SECOND)
    assert (SECOND in network.asked) is not broke


@pytest.mark.parametrize("accepts", [False, True])
def test_a_stuck_peer_that_renews_its_declaration_does_not_keep_the_others_apart(accepts: bool) -> None:
    swarm = Swarm(1)
    peers = [
        swarm.peer(f"peer:{number}", [tensor], group_size=4, group_wait=5.0, round_timeout=15.0)
        for number, tensor in enumerate(scalars(4, 1), 1)
    ]

    async def declare() -> None:
        async with MemoryDiscovery(swarm.registry) as discovery:
            while True:  # so that its declaration is always the smallest
                until = virtual_time.clock() + 2.5
                await discovery.store(group_key("run", ""), FIRST, pack_looking(True), until)
                await asyncio.sleep(2.4)

    async def main() -> list[list[Receipt]]:
        await swarm.network.transport(FIRST).serve(SilentLeader(accepts), None)
        declaring = asyncio.create_task(declare())
        await asyncio.sleep(0.1)
        try:
            return await swarm.average_together(peers, rounds=3)
        finally:
            declaring.cancel()

    for receipt in (receipt for receipts in swarm.simulate(main()) for receipt in receipts):
        assert receipt.outcome is Outcome.AVERAGED, receipt
        assert len(receipt.members) == 4
        assert receipt.seconds < (5 + 3 + 1 if accepts else 5)

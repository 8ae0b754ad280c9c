"""The decisions of matchmaking: answers to join requests, which peers to ask, and when to ask again."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from averaging.discovery.base import Entry
from averaging.errors import ProtocolViolationError
from averaging.matchmaking import rules
from averaging.matchmaking.rules import Declaration, JoinRefusal, LeaderCandidate, LeaderStanding
from averaging.protocol.group import Member, Mode, pack_gather
from averaging.protocol.messages import JoinRequest, MessageCode, MessageFromLeader

HASH = b"h" * 32
NOW = 1000.0


def searching(**changes: object) -> LeaderCandidate:
    state = LeaderCandidate(Member("me:1"), HASH, target_group_size=3, declared=NOW + 5)
    for name, value in changes.items():
        setattr(state, name, value)
    return state


REQUEST = JoinRequest("you:2", HASH, NOW + 6, pack_gather(1.0, None, Mode.NODE))


def wanting(sizes: dict[str, int]) -> dict[str, JoinRequest]:
    """Requests of followers that take part only in groups of these sizes."""
    return {name: replace(REQUEST, endpoint=name, min_group_size=size) for name, size in sizes.items()}


FULL = {"a:1": Member("a:1"), "b:1": Member("b:1")}

# In the order of the checks. Each case breaks one rule and all later ones, so the first must determine the answer.
CASES = [
    (MessageCode.NOT_LOOKING_FOR_GROUP, {"assembled": True}, {"schema_hash": b""}),
    (MessageCode.PROTOCOL_VIOLATION, {}, {"schema_hash": b"", "expiration": NOW}),
    (MessageCode.PROTOCOL_VIOLATION, {}, {"endpoint": "", "schema_hash": b"x"}),
    (MessageCode.PROTOCOL_VIOLATION, {}, {"endpoint": "no address", "schema_hash": b"x"}),
    (MessageCode.PROTOCOL_VIOLATION, {}, {"expiration": float("nan"), "schema_hash": b"x"}),
    (MessageCode.PROTOCOL_VIOLATION, {}, {"expiration": float("inf"), "schema_hash": b"x"}),
    (MessageCode.PROTOCOL_VIOLATION, {}, {"gather": b"\xc1", "schema_hash": b"x"}),
    (MessageCode.PROTOCOL_VIOLATION, {}, {"client_mode": True, "schema_hash": b"x"}),
    (MessageCode.PROTOCOL_VIOLATION, {"member": Member("client::1", mode=Mode.CLIENT)}, {"schema_hash": b"x"}),
    (MessageCode.BAD_SCHEMA_HASH, {"declared": None}, {"schema_hash": b"x"}),
    (MessageCode.NOT_DECLARED, {"declared": None, "leader": "l:1"}, {"expiration": NOW}),
    (MessageCode.BAD_EXPIRATION_TIME, {"leader": "l:1", "followers": FULL}, {"expiration": NOW + 4.99}),
    (MessageCode.NOT_A_LEADER, {"leader": "l:1", "followers": FULL}, {"endpoint": "me:1"}),
    (MessageCode.DUPLICATE_ENDPOINT, {"followers": FULL}, {"endpoint": "me:1"}),
    (MessageCode.DUPLICATE_ENDPOINT, {"followers": FULL}, {"endpoint": "a:1"}),
    (MessageCode.GROUP_IS_FULL, {"followers": FULL}, {}),
    (MessageCode.ACCEPTED, {"followers": {"a:1": Member("a:1")}}, {}),
    (MessageCode.ACCEPTED, {}, {"expiration": NOW + 5, "gather": b""}),
    (MessageCode.ACCEPTED, {}, {"endpoint": "client::7", "client_mode": True, "gather": b""}),
]


@pytest.mark.parametrize(("code", "state", "request_"), CASES)
def test_the_first_broken_rule_determines_the_answer(
    code: MessageCode, state: dict[str, object], request_: dict[str, object]
) -> None:
    answer, suggested = rules.verdict(replace(REQUEST, **request_), searching(**state))  # type: ignore[arg-type]
    assert answer is code
    assert suggested == ("l:1" if code is MessageCode.NOT_A_LEADER else "")


def looking(*declarations: tuple[float, str]) -> dict[str, Entry]:
    return {name: Entry(rules.pack_looking(True), expiration) for expiration, name in declarations}


def test_candidates_come_before_the_own_declaration_in_order() -> None:
    own = Declaration(NOW + 5, "m:1")
    entries = looking((NOW + 6, "a:1"), (NOW + 5, "z:1"), (NOW + 5, "b:1"), (NOW + 4, "y:1"), (NOW + 5, "m:1"))
    assert rules.candidates(own, entries, {}, NOW)[0][:1] == [Declaration(NOW + 4, "y:1")]
    refused = {"y:1": JoinRefusal(NOW + 4, 1, None)}
    assert rules.candidates(own, entries, refused, NOW)[0] == [Declaration(NOW + 5, "b:1")]
    refused["b:1"] = JoinRefusal(NOW + 5, 1, NOW + 0.5)
    assert rules.candidates(own, entries, refused, NOW) == ([], NOW + 0.5)
    assert rules.candidates(own, entries, refused, NOW + 0.5)[0] == [Declaration(NOW + 5, "b:1")]
    for earlier, later in ((0.5, 0.7), (0.7, 0.5)):  # looks again when the first of them may be asked
        refused = {"y:1": JoinRefusal(NOW + 4, 1, NOW + earlier), "b:1": JoinRefusal(NOW + 5, 1, NOW + later)}
        assert rules.candidates(own, entries, refused, NOW) == ([], NOW + 0.5)


def test_ended_and_expired_declarations_are_no_candidates() -> None:
    own = Declaration(NOW + 5, "m:1")
    entries = looking((NOW - 3.1, "old:1"))
    entries["busy:1"] = Entry(rules.pack_looking(False), NOW + 1)
    entries["odd:1"] = Entry(b"\xc1", NOW + 1)
    assert rules.candidates(own, entries, {}, NOW) == ([], None)
    entries["late:1"] = Entry(rules.pack_looking(True), NOW - 2.9)  # its clock may be behind
    assert rules.candidates(own, entries, {}, NOW)[0] == [Declaration(NOW - 2.9, "late:1")]


def test_excluded_peers_and_clients_are_no_candidates() -> None:
    own = Declaration(NOW + 5, "m:1")
    entries = looking((NOW + 1, "bad:1"), (NOW + 2, "client::7"), (NOW + 3, "nonsense"), (NOW + 4, "good:1"))
    assert rules.candidates(own, entries, {}, NOW, excluded={"bad:1"})[0] == [Declaration(NOW + 4, "good:1")]


def test_a_new_declaration_is_asked_again_at_once_unless_its_tensors_differ() -> None:
    own = Declaration(NOW + 5, "m:1")
    entries = looking((NOW + 2, "a:1"))
    assert rules.candidates(own, entries, {"a:1": JoinRefusal(NOW + 1, 3, NOW + 9)}, NOW)[0] != []
    assert rules.candidates(own, entries, {"a:1": JoinRefusal(NOW + 1, 3, None)}, NOW) == ([], None)


@given(declarations=st.lists(st.tuples(st.sampled_from([1.0, 2.0, 3.0]), st.integers(1, 30)), unique_by=lambda d: d[1]))
def test_of_any_two_peers_exactly_one_asks_the_other(declarations: list[tuple[float, int]]) -> None:
    everybody = [Declaration(NOW + seconds, f"h:{port}") for seconds, port in declarations]
    entries = looking(*((d.expiration, d.endpoint) for d in everybody))
    for one in everybody:
        for other in everybody:
            if one is other:
                continue
            only = {name: entries[name] for name in (one.endpoint, other.endpoint)}
            asks = rules.candidates(one, only, {}, NOW)[0] == [other]
            is_asked = rules.candidates(other, only, {}, NOW)[0] == [one]
            assert asks != is_asked


def test_pauses_grow_and_are_bounded() -> None:
    rng = random.Random(1)
    attempt = None
    pauses = []
    for _ in range(12):
        attempt = rules.next_join_refusal(attempt, NOW + 5, MessageCode.GROUP_IS_FULL, NOW, rng)
        assert attempt.retry_at is not None
        pauses.append(attempt.retry_at - NOW)
    assert attempt is not None
    assert pauses[0] < 0.25
    assert max(pauses) <= 2.0
    assert min(pauses[5:]) > pauses[0]
    often = rules.next_join_refusal(replace(attempt, count=5000), NOW + 5, MessageCode.GROUP_IS_FULL, NOW, rng).retry_at
    assert often is not None
    assert 1.0 <= often - NOW <= 2.0
    assert rules.next_join_refusal(attempt, NOW + 6, MessageCode.GROUP_IS_FULL, NOW, rng).count == 1
    assert rules.next_join_refusal(attempt, NOW + 5, MessageCode.BAD_SCHEMA_HASH, NOW, rng).retry_at is None


def test_a_silent_peer_pauses_for_as_long_as_was_waited_despite_a_new_declaration() -> None:
    own = Declaration(NOW + 9, "z:1")
    silent = rules.next_join_refusal(None, NOW + 2, MessageCode.NO_CODE, NOW, random.Random(1), 3.0)
    entries = {"a:1": Entry(rules.pack_looking(True), NOW + 5)}
    assert rules.candidates(own, entries, {"a:1": silent}, NOW + 2.9) == ([], NOW + 3)
    assert rules.candidates(own, entries, {"a:1": silent}, NOW + 3)[0] != []
    refused = rules.next_join_refusal(None, NOW + 2, MessageCode.GROUP_IS_FULL, NOW, random.Random(1), 3.0)
    assert rules.candidates(own, entries, {"a:1": refused}, NOW)[0] != []


def test_candidates_are_ordered_by_standing_and_then_by_declaration() -> None:
    own = Declaration(NOW + 9, "z:1")
    standings = {
        "late:1": LeaderStanding.GOOD,
        "new:1": LeaderStanding.GOOD,
        "silent:1": LeaderStanding.SILENT,
        "gone:1": LeaderStanding.SILENT,
    }
    entries = looking((NOW + 1, "silent:1"), (NOW + 2, "gone:1"), (NOW + 3, "new:1"), (NOW + 4, "late:1"))
    found, again = rules.candidates(own, entries, {}, NOW, standing=standings.__getitem__)
    assert [candidate.endpoint for candidate in found] == ["new:1", "late:1", "silent:1", "gone:1"]
    assert again is None


def test_deserters_are_asked_late() -> None:
    own, entries = Declaration(NOW + 9, "z:1"), looking((NOW + 5, "a:1"))

    def at(now: float) -> tuple[list[Declaration], float | None]:
        deserter = LeaderStanding.DESERTER
        return rules.candidates(own, entries, {}, now, standing=lambda _: deserter, deserters_from=NOW + 2)

    assert at(NOW) == ([], NOW + 2)
    assert at(NOW + 2) == ([Declaration(NOW + 5, "a:1")], None)


@pytest.mark.parametrize(
    ("modes", "enough"),
    [
        ([Mode.NODE], False),
        ([Mode.NODE, Mode.NODE], True),
        ([Mode.AUXILIARY, Mode.AUXILIARY], False),
        ([Mode.AUXILIARY, Mode.CLIENT], True),
        ([Mode.NODE, Mode.CLIENT], True),
    ],
)
def test_a_group_begins_only_if_a_member_contributes(modes: list[Mode], enough: bool) -> None:
    members = [Member(f"h:{port + 1}", mode=mode) for port, mode in enumerate(modes)]
    state = LeaderCandidate(members[0], HASH, 8, followers={m.endpoint: m for m in members[1:]})
    assert (rules.followers_for_group(state, 2) is not None) is enough


@given(own=st.integers(2, 7), sizes=st.lists(st.integers(2, 9), max_size=6))
def test_a_group_begins_with_the_most_followers_whose_min_group_size_it_reaches(own: int, sizes: list[int]) -> None:
    wanted = {f"f:{number + 1}": size for number, size in enumerate(sizes)}
    state = searching(followers={name: Member(name) for name in wanted}, requests=wanting(wanted), target_group_size=10)
    sound = [
        set(some)
        for count in range(1, len(wanted) + 1)
        for some in itertools.combinations(wanted, count)
        if max(own, *(wanted[name] for name in some)) <= 1 + count
    ]
    found = rules.followers_for_group(state, own)
    assert (set() if found is None else set(found)) == max(sound, key=len, default=set())


def test_target_contributors_must_be_reached_without_followers_that_want_a_larger_group() -> None:
    followers = {"f:1": Member("f:1"), "f:2": Member("f:2")}
    state = searching(
        target_group_size=5, target_contributors=3, followers=followers, requests=wanting({"f:1": 4, "f:2": 2})
    )
    assert not rules.is_complete(state)
    state.requests |= wanting({"f:1": 3})
    assert rules.is_complete(state)
    state.target_contributors = 2
    state.requests |= wanting({"f:1": 5})
    assert rules.is_complete(state), "the others are enough"


def test_a_request_for_a_larger_group_than_the_leader_forms_is_refused() -> None:
    state = searching(target_group_size=4)
    assert rules.verdict(replace(REQUEST, min_group_size=4), state)[0] is MessageCode.ACCEPTED
    assert rules.verdict(replace(REQUEST, min_group_size=5), state)[0] is MessageCode.GROUP_IS_FULL


@pytest.mark.parametrize(
    ("modes", "complete"),
    [
        ([Mode.NODE, Mode.NODE], True),
        ([Mode.NODE, Mode.CLIENT], True),
        ([Mode.NODE, Mode.AUXILIARY], False),
        ([Mode.NODE, Mode.AUXILIARY, Mode.CLIENT], True),
        ([Mode.NODE, Mode.AUXILIARY, Mode.AUXILIARY, Mode.AUXILIARY], True),
    ],
)
def test_target_contributors_complete_a_group(modes: list[Mode], complete: bool) -> None:
    members = [Member(f"h:{port + 1}", mode=mode) for port, mode in enumerate(modes)]
    followers = {member.endpoint: member for member in members[1:]}
    assert (
        rules.is_complete(LeaderCandidate(members[0], HASH, 4, target_contributors=2, followers=followers)) is complete
    )
    assert not rules.is_complete(
        LeaderCandidate(members[0], HASH, 5, target_contributors=2, min_group_size=5, followers=followers)
    )


def begin(**changes: object) -> MessageFromLeader:
    message = MessageFromLeader(
        MessageCode.BEGIN_ALLREDUCE, group_id=b"g" * 20, ordered_group_endpoints=("l:1", "me:1"), gathered=(b"", b"")
    )
    return replace(message, **changes)  # type: ignore[arg-type]


def test_every_order_of_the_members_occurs() -> None:
    gathered = {name: name.encode() for name in ("me:1", *FULL)}
    orders, ids = set(), set()
    for seed in range(100):
        message = rules.assemble(searching(followers=FULL), gathered, random.Random(seed))
        orders.add(message.ordered_group_endpoints)
        ids.add(message.group_id)
        assert message.gathered == tuple(gathered[name] for name in message.ordered_group_endpoints)
    assert len(orders) == 6  # the shards follow from the order
    assert len(ids) == 100


def test_a_leader_may_not_change_the_gather_of_a_member() -> None:
    with pytest.raises(ProtocolViolationError, match="weight 1 and mode NODE; it sent 2 and NODE"):
        rules.read_group(begin(), "me:1", "l:1", pack_gather(2.0, None, Mode.NODE))


@pytest.mark.parametrize(
    "changes",
    [
        {"group_id": b""},
        {"group_id": b"x" * 257},
        {"ordered_group_endpoints": ("l:1",), "gathered": (b"",)},
        {"gathered": (b"",)},
        {"ordered_group_endpoints": ("l:1", "other:1")},
        {"ordered_group_endpoints": ("other:1", "me:1")},
        {"ordered_group_endpoints": ("l:1", "me:1", "me:1"), "gathered": (b"", b"", b"")},
        {"ordered_group_endpoints": ("l:1", "me:1", "nonsense"), "gathered": (b"", b"", b"")},
        {"gathered": (b"", b"\xc1")},
    ],
)
def test_a_malformed_announcement_is_a_protocol_violation(changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolViolationError):
        rules.read_group(begin(**changes), "me:1", "l:1", b"")


def test_the_quorum_that_followers_state_is_the_lower_median_and_checked() -> None:
    def stated(*values: object) -> rules.Quorum | None:
        return rules.stated_quorum([Member(f"h:{n}", user={"quorum": value}) for n, value in enumerate(values, 1)])

    assert stated([2, 1.0, True], [1000, 1.0, True], [2, 0.5, True]) == rules.Quorum(2, 1.0)
    assert stated([2, 1.0, True], [1000, 600.0, False]) == rules.Quorum(2, 1.0)
    hostile: list[object] = [None, 3, [2], [True, 1.0, True], [2, float("nan"), True], [2, 1e9, True], [-1, 1.0, True]]
    assert stated(*hostile) is None
    assert rules.stated_quorum([Member("h:1", user="text")]) is None

"""The dealing of blocks as a pure function: peers on virtual time that hear of each other late, come, leave and die."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, strategies as st

from averaging.common import pack
from averaging.data.dealing import (
    LEASE_SECONDS,
    MAX_BLOCKS,
    MAX_CLAIMS,
    SETTLE,
    UNSETTLED,
    DataRecord,
    Dealer,
    Division,
)
from averaging.errors import ConfigError, ProtocolViolationError

TICK, LIFETIME = 0.05, 15.0
SPEC = Division(64 * 8 - 3, 8, 0)


@dataclass
class SimulatedPeer:
    """A peer that trains one sample in `per_sample` seconds, and announces with random delays.

    Attributes:
        heard: the records of this peer as the others have them, by their time of arrival.
    """

    dealer: Dealer
    per_sample: float
    rng: random.Random
    most_delay: float
    published: list[tuple[float, float, DataRecord]] = field(default_factory=list)
    version: int = -1
    block: int | None = None
    left: float = 0.0
    dies_at: float = float("inf")
    gone_at: float = float("inf")

    def publish(self, now: float) -> None:
        if self.dealer.version != self.version:
            self.version = self.dealer.version
            self.published.append((now, now + self.rng.uniform(0.01, self.most_delay), self.dealer.record))

    def seen_at(self, now: float) -> DataRecord | None:
        if now >= min(self.gone_at, self.dies_at + LIFETIME):
            return None
        # An older record that arrives later does not replace a newer one.
        arrived = [(published, record) for published, arrival, record in self.published if arrival <= now]
        return max(arrived, key=lambda each: each[0])[1] if arrived else None


def simulate(
    seed: int,
    *,
    peers: int = 4,
    epochs: int = 1,
    most_delay: float = 0.4,
    kills: int = 1,
    joins: int = 1,
    leaves: int = 0,
) -> tuple[list[SimulatedPeer], Counter[tuple[int, int]]]:
    """Runs epochs to their end. Returns the peers, and how often each sample of each epoch was trained."""
    rng, trained = random.Random(seed), Counter[tuple[int, int]]()

    def peer(number: int) -> SimulatedPeer:
        dealer = Dealer(SPEC, f"10.0.{seed}.{number}:4222")  # other names have other blocks
        return SimulatedPeer(dealer, rng.uniform(0.05, 0.2), random.Random(rng.random()), most_delay)

    there = [peer(number) for number in range(peers)]
    span = SPEC.length * 0.1 / peers
    victims = rng.sample(there, kills + leaves)
    for victim in victims[:kills]:
        victim.dies_at = rng.uniform(0.2, 0.8) * span
    for victim in victims[kills:]:
        victim.gone_at = rng.uniform(0.2, 0.8) * span
    coming = sorted(rng.uniform(0.1, 0.7) * span for _ in range(joins))
    now = 0.0
    while now < 100 * span + 60:
        now += TICK
        while coming and coming[0] <= now:
            coming.pop(0)
            there.append(peer(len(there)))
        alive = [each for each in there if now < min(each.dies_at, each.gone_at)]
        if all(each.dealer.epoch >= epochs for each in alive):
            return there, trained
        for each in alive:
            turn(each, there, now, epochs, trained)
    raise AssertionError("the epochs did not end")


def turn(
    each: SimulatedPeer, there: list[SimulatedPeer], now: float, epochs: int, trained: Counter[tuple[int, int]]
) -> None:
    dealer = each.dealer
    records = {other.dealer.name: record for other in there if other is not each and (record := other.seen_at(now))}
    dealer.see(records, now)
    if dealer.is_complete:
        dealer.next_epoch()
        each.block = None
    if each.block is not None and each.block not in dealer.claims:
        each.block = None  # another peer has it by right
    if dealer.epoch < epochs:
        dealer.claim(now, 2)
        if each.block is None and (begun := dealer.begin(now)) is not None:
            each.block, each.left = begun, each.per_sample
    if each.block is not None:
        each.left -= TICK
        claim = dealer.claims[each.block]
        while each.left <= 0 and claim.handed < SPEC.size(each.block):
            trained[dealer.epoch, each.block * SPEC.block_size + claim.handed] += 1
            claim.handed += 1
            dealer.trained(1)
            each.left += each.per_sample
        if claim.handed == SPEC.size(each.block):
            dealer.finish(each.block)
            each.block = None
    each.publish(now)


def check(trained: Counter[tuple[int, int]], epochs: int, most_duplicates: int) -> int:
    expected = {(epoch, sample) for epoch in range(epochs) for sample in range(SPEC.length)}
    assert trained.keys() == expected, "a sample was not trained"
    duplicates = trained.total() - len(expected)
    assert duplicates <= most_duplicates
    return duplicates


@pytest.mark.parametrize("seed", range(20))
def test_four_peers_of_which_one_dies_and_one_comes_train_each_sample(seed: int) -> None:
    """At most one block is trained twice, since records arrive before a claim that might be another's is begun."""
    peers, trained = simulate(seed)
    check(trained, 1, SPEC.block_size)
    assert len([each for each in peers if each.dealer.statistics.blocks_here]) == 5


# In these a peer that begins an epoch does not see yet that another one, whose block it would take, is in it.
@pytest.mark.parametrize("seed", [8, 16, 18, 61])
def test_without_a_loss_no_sample_is_trained_twice(seed: int) -> None:
    _, trained = simulate(seed, epochs=2, kills=0, joins=2)
    assert check(trained, 2, 0) == 0


@pytest.mark.parametrize("seed", range(10))
def test_records_that_are_late_cost_duplicates_that_are_counted(seed: int) -> None:
    """Peers that claim the same block and have begun it before they hear of each other."""
    peers, trained = simulate(seed, peers=6, most_delay=2.0, kills=2, joins=2, leaves=1)
    counted = sum(each.dealer.statistics.most_duplicates for each in peers)
    lost = 2 * SPEC.block_size  # by those that died, and could not count
    check(trained, 1, counted + lost)


@pytest.mark.parametrize("seed", range(3))
def test_a_peer_that_is_alone_trains_all(seed: int) -> None:
    _, trained = simulate(seed, peers=1, kills=0, joins=0, epochs=2)
    assert check(trained, 2, 0) == 0


def dealers(count: int) -> list[Dealer]:
    return [Dealer(SPEC, f"peer {number}") for number in range(count)]


def settle(all_of_them: list[Dealer], now: float) -> None:
    """Lets all see all, twice, so that what they changed is seen."""
    for _ in range(2):
        for each in all_of_them:
            each.see({other.name: other.record for other in all_of_them if other is not each}, now)


def test_who_has_begun_a_block_keeps_it_else_the_greater_hash() -> None:
    one, other = dealers(2)
    both = set(range(3))
    one.done = other.done = ((1 << SPEC.blocks) - 1) ^ sum(1 << block for block in both)
    for dealer in (one, other):
        dealer.see({}, 0.0)
        dealer.claim(0.0, 3)
    assert one.claims.keys() == other.claims.keys() == both, "neither knows of the other"
    begun = other.begin(SETTLE)
    assert begun is not None
    settle([one, other], SETTLE)
    assert begun in other.claims
    assert begun not in one.claims
    assert one.claims.keys() | other.claims.keys() == both
    assert not one.claims.keys() & other.claims.keys()
    assert (one.statistics.conflicts, one.statistics.most_duplicates) == (0, 0), "it had not begun"


def test_settled_peers_begin_at_once_and_divide_the_blocks() -> None:
    four = dealers(4)
    settle(four, 0.0)
    now = UNSETTLED
    settle(four, now)
    for dealer in four:
        dealer.claim(now, 4)
        assert dealer.begin(now) is not None, "no claim that has to settle"
    claimed = [block for dealer in four for block in dealer.claims]
    assert len(claimed) == len(set(claimed)) == 16, "although none has heard of the others' claims"


def test_a_peer_that_hangs_loses_its_lease() -> None:
    hanging, other = dealers(2)
    other.done = ((1 << SPEC.blocks) - 1) ^ 1
    hanging.done = other.done
    hanging.see({}, 0.0)
    hanging.claim(0.0, 1)
    hanging.begin(SETTLE)
    records = {hanging.name: hanging.record}
    other.see(records, 1.0)
    assert not other.has_free(1.0 + LEASE_SECONDS - 1)
    assert other.has_free(1.0 + LEASE_SECONDS)
    other.see({hanging.name: replace(hanging.record, trained=1)}, 1.0 + LEASE_SECONDS)
    assert not other.has_free(1.0 + LEASE_SECONDS), "it goes on"


def test_an_epoch_far_away_needs_most_of_the_others() -> None:
    dealer, *others = dealers(4)
    records = {other.name: replace(other.record, epoch=epoch) for other, epoch in zip(others, (9, 0, 0), strict=True)}
    dealer.see(records, 0.0)
    assert dealer.epoch == 0, "one peer alone cannot make the others skip epochs"
    dealer.see({name: replace(record, epoch=7) for name, record in records.items()}, 1.0)
    assert dealer.epoch == 7


RECORDS = st.builds(
    DataRecord,
    st.binary(min_size=8, max_size=8),
    st.integers(0, 1 << 31),
    st.integers(0, (1 << MAX_BLOCKS) - 1),
    st.dictionaries(st.integers(0, MAX_BLOCKS - 1), st.booleans(), max_size=MAX_CLAIMS),
    st.integers(0, 1 << 60),
)


@given(RECORDS)
def test_a_record_fits_and_comes_back_as_it_was(record: DataRecord) -> None:
    packed = record.pack()
    assert len(packed) <= 1024
    assert DataRecord.unpack(packed) == record


GOOD = [b"12345678", 0, 0, b"", [], 0]


@pytest.mark.parametrize(
    ("index", "value"),
    [
        *((0, "text"), (1, -1), (1, 1 << 40), (1, 1.5), (2, -1), (2, MAX_BLOCKS + 8), (3, b"x" * 600), (3, "x")),
        *((4, [2 * MAX_BLOCKS]), (4, [-1]), (4, ["x"]), (4, [1] * (MAX_CLAIMS + 1)), (4, None), (5, -1), (5, True)),
    ],
)
def test_a_record_that_is_malformed_is_refused(index: int, value: object) -> None:
    DataRecord.unpack(pack(GOOD))
    with pytest.raises(ProtocolViolationError):
        DataRecord.unpack(pack([*GOOD[:index], value, *GOOD[index + 1 :]]))


@pytest.mark.parametrize("wrong", [(0, 1), (1, 0), (10, -1), (10, 1.5), (MAX_BLOCKS + 1, 1)])
def test_a_division_that_is_none_raises(wrong: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="must be a whole number|give a block_size of at least 2"):
        Division(*wrong, None)

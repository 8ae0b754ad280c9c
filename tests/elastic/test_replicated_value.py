"""What a job's nodes keep in a register: authentic, brought back when it is lost, and of one lineage."""

from __future__ import annotations

import logging
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.elastic.register import MemoryRegister, RegisterEntry, SwapResult
from averaging.elastic.replicated_value import (
    FORGOTTEN,
    Fenced,
    ReplicatedValue,
    Seal,
    Sealed,
    clock_skew,
    is_newer,
    overrules,
)
from averaging.errors import ConfigError, PeerUnreachableError, ProtocolViolationError

KEY = "elastic/job/state"
TOKENS = ("a-token-0123456789",)


class Place:
    """A register that can lose everything, or the next answer; and the time."""

    def __init__(self) -> None:
        self.register = MemoryRegister()
        self.lose_answer = False
        self.now = 1_000_000.0

    def restart(self) -> None:
        self.register = MemoryRegister()

    async def get(self, key: str) -> RegisterEntry | None:
        return await self.register.get(key)

    async def compare_and_set(self, key: str, value: bytes, token: bytes | None) -> SwapResult:
        written = await self.register.compare_and_set(key, value, token)
        if self.lose_answer:
            self.lose_answer = False
            raise PeerUnreachableError("register", "connection lost")
        return written

    async def overwrite(self, value: bytes) -> None:
        entry = await self.register.get(KEY)
        assert (await self.register.compare_and_set(KEY, value, entry.token if entry else None)).done

    def cell(
        self, writer: str = "a", tokens: tuple[str, ...] = TOKENS, world: str = "1:2", ahead: float = 0.0
    ) -> ReplicatedValue:
        return ReplicatedValue(
            self,
            KEY,
            tokens,
            writer=writer,
            world=world,
            clock=lambda: self.now + ahead,
            monotonic=lambda: self.now,
        )


def payload(fenced: Fenced | None) -> bytes | None:
    return fenced.payload if fenced else None


@pytest.mark.asyncio
async def test_states_follow_each_other_and_a_stale_one_loses() -> None:
    place = Place()
    a, b = place.cell("a"), place.cell("b")
    assert await a.read() is None
    first, done = await a.write(b"1", None)
    assert done
    assert payload(await b.read()) == b"1"
    second, done = await b.write(b"2", first)
    assert done
    now, done = await a.write(b"lost", first)
    assert (payload(now), done) == (b"2", False)
    assert now is not None
    assert second is not None
    assert now.sealed.version == second.sealed.version == 2


@pytest.mark.asyncio
async def test_a_write_whose_answer_was_lost_is_recognised() -> None:
    place = Place()
    a = place.cell()
    place.lose_answer = True
    with pytest.raises(PeerUnreachableError):
        await a.write(b"1", None)
    fenced, done = await a.write(b"1", None)
    assert (payload(fenced), done) == (b"1", True)


@pytest.mark.asyncio
async def test_the_newest_is_brought_back_to_a_register_that_lost_all() -> None:
    place = Place()
    a, b = place.cell("a"), place.cell("b")
    first, _ = await a.write(b"1", None)
    await b.read()
    second, _ = await a.write(b"2", first)
    place.restart()
    assert payload(await b.read()) == b"1"  # all that this node has seen
    assert payload(await a.read()) == b"2"
    assert payload(await b.read()) == b"2"
    place.restart()
    fenced, done = await b.write(b"3", await b.read())
    assert (payload(fenced), done) == (b"3", True)
    assert payload(await a.read()) == b"3"
    place.restart()
    now, done = await a.write(b"4", second)  # with a token of the lost register
    assert (payload(now), done) == (b"3", False)


@pytest.mark.asyncio
async def test_a_newcomer_at_an_empty_register_takes_over_what_the_others_bring_back() -> None:
    place = Place()
    a = place.cell("a")
    await a.write(b"running", None)
    place.restart()
    place.now += 10
    newcomer = place.cell("c")
    assert await newcomer.read() is None
    await newcomer.write(b"new job", None)
    assert payload(await a.read()) == b"running"
    assert payload(await newcomer.read()) == b"running"
    assert payload(await a.read()) == b"running"


@pytest.mark.asyncio
async def test_a_node_that_slept_for_long_takes_over_the_job_that_it_finds() -> None:
    place = Place()
    sleeper = place.cell("a")
    await sleeper.write(b"old", None)
    place.restart()
    place.now += FORGOTTEN + 1
    await place.cell("b").write(b"new", None)
    assert payload(await sleeper.read()) == b"new"


@pytest.mark.asyncio
@pytest.mark.parametrize("age", [10.0, FORGOTTEN + 10])
async def test_a_kept_state_of_an_earlier_job_is_refused(age: float) -> None:
    """Also if it is older than the own lineage, which otherwise makes it the one that stays."""
    place = Place()
    earlier = place.cell("a")
    await earlier.write(b"closed", (await earlier.write(b"running", None))[0], ended=True)
    entry = await place.get(KEY)
    assert entry is not None
    place.restart()
    place.now += age
    b, c = place.cell("b"), place.cell("c")
    await b.write(b"new", None)
    assert payload(await c.read()) == b"new"
    for _ in range(3):
        await place.overwrite(entry.value)
        assert payload(await b.read()) == b"new"
        await place.overwrite(entry.value)
        assert payload(await c.read()) == b"new"
        assert payload(await place.cell("late").read()) == b"new"


@pytest.mark.asyncio
async def test_no_older_state_of_the_own_lineage_is_taken_however_long_a_node_was_away() -> None:
    place = Place()
    a = place.cell("a")
    first, _ = await a.write(b"1", None)
    assert first is not None
    await a.write(b"2", first)
    place.now += FORGOTTEN + 1
    await place.overwrite(first.sealed.raw)
    assert payload(await a.read()) == b"2"


@pytest.mark.asyncio
async def test_a_node_that_was_away_takes_no_job_older_than_its_own() -> None:
    place = Place()
    await place.cell("a").write(b"earlier", None)
    entry = await place.get(KEY)
    assert entry is not None
    place.restart()
    place.now += 1
    b = place.cell("b")
    await b.write(b"own", None)
    place.now += FORGOTTEN + 1
    await place.overwrite(entry.value)
    assert payload(await b.read()) == b"own"


@pytest.mark.asyncio
async def test_a_newcomer_that_is_shown_an_earlier_job_does_not_bring_it_to_the_others() -> None:
    """It has the token, so it could name their lineage as an older one does."""
    place = Place()
    earlier = place.cell("earlier")
    await earlier.write(b"earlier", None)
    kept = await place.get(KEY)
    assert kept is not None
    place.restart()
    place.now += 10
    node = place.cell("node")
    await node.write(b"running", None)
    newcomer = place.cell("newcomer")
    await place.overwrite(kept.value)
    shown, done = await newcomer.write(b"earlier, joined", await newcomer.read())
    assert (payload(shown), done) == (b"earlier, joined", True)
    for _ in range(3):
        place.now += 1
        assert payload(await node.read()) == b"running"
        assert payload(await newcomer.read()) == b"running"
        await place.overwrite(kept.value if shown is None else shown.sealed.raw)
    assert (await node.write(b"still running", await node.read()))[1]
    assert payload(await newcomer.read()) == b"still running"


@pytest.mark.asyncio
async def test_a_node_on_whose_write_another_has_built_overrules_as_the_first_does() -> None:
    place = Place()
    first, second = place.cell("first"), place.cell("second")
    await first.write(b"1", None)
    await second.write(b"2", await second.read())
    await first.write(b"3", await first.read())
    await second.read()
    place.restart()
    place.now += 1
    newcomer = place.cell("newcomer")
    await newcomer.write(b"new", None)
    assert payload(await second.read()) == b"3"  # the first one is gone
    assert payload(await newcomer.read()) == b"3"


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(40))
async def test_all_nodes_agree_after_any_losses_and_replays(seed: int) -> None:
    """Whoever runs the register may show any state that it has seen, or none, also to newcomers.

    Versions never go back at a node, no node of the job takes the state of an earlier job, and once the register is
    honest all agree.
    """
    rng, place, kept = random.Random(seed), Place(), list[bytes]()

    async def keep() -> None:
        if (entry := await place.get(KEY)) is not None:
            kept.append(entry.value)

    earlier = place.cell("earlier")
    base, _ = await earlier.write(b"earlier", None)
    for _ in range(3):
        await keep()
        base, _ = await earlier.write(b"earlier", base, ended=rng.random() < 0.5)
    place.restart()
    cells = [place.cell("first")]
    await cells[0].write(b"job", None)
    seen: dict[int, tuple[bytes, int]] = {}
    for step in range(200):
        place.now += rng.random() / 4
        if len(cells) < 5 and rng.random() < 0.05:
            cells.append(place.cell(f"node{len(cells)}"))
        number = rng.randrange(len(cells))
        fenced = await cells[number].read()
        if fenced is None or rng.random() < 0.3:
            text = f"job {step}" if fenced is None or payload(fenced) != b"earlier" else "earlier"
            fenced, _ = await cells[number].write(text.encode(), fenced)
        await keep()
        if fenced is not None:
            assert number != 0 or fenced.payload.startswith(b"job")
            origin, version = seen.get(number, (fenced.sealed.origin, 0))
            assert origin != fenced.sealed.origin or version <= fenced.sealed.version
            seen[number] = fenced.sealed.origin, fenced.sealed.version
        if rng.random() < 0.1:
            place.restart()
        elif rng.random() < 0.2:
            await place.overwrite(rng.choice(kept))
    for _ in range(6):
        found = [await cell.read() for cell in cells]
    assert len({(one.sealed.origin, one.sealed.version, one.payload) for one in found if one is not None}) == 1
    assert found[0] is not None
    assert found[0].payload.startswith(b"job")


@pytest.mark.asyncio
async def test_a_job_that_ended_long_ago_is_nobodys() -> None:
    place = Place()
    await place.cell("a", world="1:2").write(b"old", None)
    place.now += FORGOTTEN + 1
    b = place.cell("b", world="2:2")
    assert await b.read() is None
    fenced, done = await b.write(b"new", None)
    assert (payload(fenced), done) == (b"new", True)


@pytest.mark.asyncio
async def test_a_job_id_in_use_by_another_world_is_refused_by_name() -> None:
    place = Place()
    await place.cell("a", world="--nnodes=1:2").write(b"state", None)
    with pytest.raises(ConfigError, match=r"in use by another job \(--nnodes=1:2, last written by a\).*--nnodes=3:3"):
        await place.cell("b", world="--nnodes=3:3").read()


@pytest.mark.asyncio
async def test_tampered_bytes_are_refused_and_overwritten(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    a = place.cell("a")
    fenced, _ = await a.write(b"state", None)
    assert fenced is not None
    await place.overwrite(fenced.sealed.raw[:-1] + b"x")
    with pytest.raises(ProtocolViolationError, match="nobody with this run's token wrote"):
        await place.cell("b").read()
    assert payload(await a.read()) == b"state"
    assert "refused" in caplog.text
    assert payload(await place.cell("b").read()) == b"state"


@pytest.mark.asyncio
async def test_tokens_can_be_changed_one_node_after_the_other() -> None:
    place = Place()
    await place.cell("a", ("old-token-0123456789",)).write(b"state", None)
    both = place.cell("b", ("new-token-0123456789", "old-token-0123456789"))
    assert payload(await both.read()) == b"state"
    with pytest.raises(ProtocolViolationError):
        await place.cell("c", ("new-token-0123456789",)).read()


@pytest.mark.asyncio
async def test_clocks_that_differ_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    a, ahead = place.cell("a"), place.cell("fast", ahead=20.0)
    base, _ = await a.write(b"1", None)
    for _ in range(2):
        await ahead.read()
        base, _ = await ahead.write(b"2", base)
        await a.read()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text for text in told if "node fast is about 20 s ahead of that of this node (a)" in text]
    assert sum("node fast" in text for text in told) == 1


def test_how_far_clocks_differ() -> None:
    assert clock_skew(sent=100.0, after=99.0, before=101.0) == 0.0
    assert clock_skew(sent=121.0, after=99.0, before=101.0) == 20.0
    assert clock_skew(sent=79.0, after=99.0, before=101.0) == -20.0
    assert clock_skew(sent=1.0, after=None, before=101.0) == 0.0


@given(st.binary(max_size=300), st.integers(0, 299), st.integers(1, 255))
def test_no_change_of_one_byte_is_believed(body: bytes, place: int, change: int) -> None:
    seal = Seal(KEY, TOKENS)
    raw = bytearray(sealed(seal, body).raw)
    raw[place % len(raw)] ^= change
    with pytest.raises(ProtocolViolationError):
        seal.open(bytes(raw))


def test_bytes_of_another_place_or_token_are_refused() -> None:
    raw = sealed(Seal(KEY, TOKENS), b"x").raw
    assert Seal(KEY, TOKENS).open(raw).payload == b"x"
    for other in (Seal("elastic/other/state", TOKENS), Seal(KEY, ()), Seal(KEY, ("another-token-012345",))):
        with pytest.raises(ProtocolViolationError):
            other.open(raw)


def sealed(
    seal: Seal,
    body: bytes = b"",
    origin: bytes = b"o",
    created: float = 1.0,
    version: int = 1,
    overruled: tuple[bytes, ...] = (),
) -> Sealed:
    return seal.close(
        body,
        origin=origin,
        created=created,
        version=version,
        sent=2.0,
        writer="a",
        world="w",
        nonce=b"n",
        overruled=overruled,
    )


@given(*[st.tuples(st.sampled_from([b"a", b"b"]), st.sampled_from([1.0, 2.0]), st.integers(1, 3))] * 2)
def test_of_two_states_the_same_one_stays_everywhere(
    one: tuple[bytes, float, int], other: tuple[bytes, float, int]
) -> None:
    seal = Seal(KEY, TOKENS)
    if one[0] == other[0]:
        other = (other[0], one[1], other[2])  # a lineage has one beginning
    first, second = (sealed(seal, origin=o, created=c, version=v) for o, c, v in (one, other))
    assert is_newer(first, None)
    assert not overrules(first, None)
    if one[0] == other[0]:
        assert is_newer(first, second) + is_newer(second, first) == (one[2] != other[2])
        assert not overrules(first, second)
        return
    assert is_newer(first, second)
    assert is_newer(second, first)  # until one of them names the other
    assert overrules(first, second) + overrules(second, first) == 1
    winner, loser = (first, second) if overrules(first, second) else (second, first)
    named = sealed(seal, origin=winner.origin, created=winner.created, overruled=(loser.origin,))
    assert not is_newer(loser, named)
    assert is_newer(named, loser)

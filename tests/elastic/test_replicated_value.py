"""What a job's nodes keep in a register: authentic, brought back when it is lost, and the same at all."""

import random

import pytest
from hypothesis import given, strategies as st

from averaging.elastic.register import MemoryRegister, RegisterEntry, SwapResult
from averaging.elastic.rendezvous_state import FORGOTTEN, Fenced, ReplicatedValue, Seal, Sealed
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
            self, KEY, tokens, writer=writer, world=world, clock=lambda: self.now + ahead, monotonic=lambda: self.now
        )


def payload(fenced: Fenced | None) -> bytes | None:
    return fenced.payload if fenced else None


async def test_a_write_whose_answer_was_lost_is_recognised() -> None:
    place = Place()
    a = place.cell()
    place.lose_answer = True
    with pytest.raises(PeerUnreachableError):
        await a.write(b"1", None)
    fenced, done = await a.write(b"1", None)
    assert (payload(fenced), done) == (b"1", True)


async def test_a_newcomer_at_an_empty_register_takes_over_what_the_others_bring_back() -> None:
    place = Place()
    a = place.cell("a")
    await a.write(b"running", (await a.write(b"begun", None))[0])
    place.restart()
    place.now += 10
    newcomer = place.cell("c")
    assert await newcomer.read() is None
    await newcomer.write(b"new job", None)
    assert payload(await a.read()) == b"running"
    assert payload(await newcomer.read()) == b"running"
    assert payload(await a.read()) == b"running"


async def test_a_node_that_slept_for_long_takes_over_the_job_that_it_finds() -> None:
    place = Place()
    sleeper = place.cell("a")
    await sleeper.write(b"old", None)
    place.restart()
    place.now += FORGOTTEN + 1
    await place.cell("b").write(b"new", None)
    assert payload(await sleeper.read()) == b"new"


async def test_no_older_state_is_taken_however_long_a_node_was_away() -> None:
    place = Place()
    a = place.cell("a")
    first, _ = await a.write(b"1", None)
    assert first is not None
    await a.write(b"2", first)
    place.now += FORGOTTEN + 1
    await place.overwrite(first.sealed.raw)
    assert payload(await a.read()) == b"2"


@pytest.mark.parametrize("seed", range(40))
async def test_all_nodes_agree_after_any_losses(seed: int) -> None:
    """The register loses everything, or goes back to an earlier state; versions never go back at a node."""
    rng, place, kept = random.Random(seed), Place(), list[bytes]()
    cells = [place.cell("first")]
    await cells[0].write(b"job", None)
    seen: dict[int, int] = {}
    for step in range(200):
        place.now += rng.random() / 4
        if len(cells) < 5 and rng.random() < 0.05:
            cells.append(place.cell(f"node{len(cells)}"))
        number = rng.randrange(len(cells))
        fenced = await cells[number].read()
        if fenced is None or rng.random() < 0.3:
            fenced, _ = await cells[number].write(f"job {step}".encode(), fenced)
        if (entry := await place.get(KEY)) is not None:
            kept.append(entry.value)
        if fenced is not None:
            assert seen.get(number, 0) <= fenced.sealed.version
            seen[number] = fenced.sealed.version
        if rng.random() < 0.1:
            place.restart()
        elif rng.random() < 0.2:
            await place.overwrite(rng.choice(kept))
    for _ in range(6):
        found = [await cell.read() for cell in cells]
    assert len({one.sealed.raw for one in found if one is not None}) == 1
    assert None not in found


async def test_a_job_that_ended_long_ago_is_nobodys() -> None:
    place = Place()
    await place.cell("a", world="1:2").write(b"old", None)
    place.now += FORGOTTEN + 1
    b = place.cell("b", world="2:2")
    assert await b.read() is None
    fenced, done = await b.write(b"new", None)
    assert (payload(fenced), done) == (b"new", True)


async def test_a_job_id_in_use_by_another_world_is_refused_by_name() -> None:
    place = Place()
    await place.cell("a", world="--nnodes=1:2").write(b"state", None)
    with pytest.raises(ConfigError, match=r"in use by another job \(--nnodes=1:2, last written by a\).*--nnodes=3:3"):
        await place.cell("b", world="--nnodes=3:3").read()


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


async def test_tokens_can_be_changed_one_node_after_the_other() -> None:
    place = Place()
    await place.cell("a", ("old-token-0123456789",)).write(b"state", None)
    both = place.cell("b", ("new-token-0123456789", "old-token-0123456789"))
    assert payload(await both.read()) == b"state"
    with pytest.raises(ProtocolViolationError):
        await place.cell("c", ("new-token-0123456789",)).read()


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


def sealed(seal: Seal, body: bytes = b"") -> Sealed:
    return seal.close(body, version=1, sent=2.0, writer="a", world="w", nonce=b"n")

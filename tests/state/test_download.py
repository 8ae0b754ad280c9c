"""Donors that are cut or change: what is kept of them, and who is asked again."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given, strategies as st
from msgspec import msgpack

from averaging.errors import PeerUnreachableError, StateError
from averaging.protocol.messages import DownloadData, Resume, WireTensor
from averaging.state.assembler import ReceivedState, StateAssembler, StateLimits
from averaging.state.downloads import TRIES_PER_DONOR, download
from averaging.state.manifest import State, check_state, pack, seal
from averaging.tensors.schema import Schema, describe
from averaging.testing import virtual_time
from tests.support.fake_transport import OneLane

NAMES = ("a", "b", "c", "d")


def state(seed: int, version: int = 3, extra: float = 0.0) -> State:
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(5, generator=generator) for name in NAMES}
    return State(version, {**tensors, "moment": torch.full((2,), extra)})


SCHEMA = describe(NAMES, [torch.zeros(5)] * len(NAMES), part_size_bytes=1024)


@dataclass
class Donors:
    """A transport behind which every donor has a list of states, one per call, and stops after so many messages."""

    states: dict[str, list[State]]
    cuts: dict[str, list[int]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    clean: bool = False
    resumes: bool = False

    async def download_state(self, endpoint: str, resume: Resume | None = None) -> AsyncGenerator[DownloadData, None]:
        self.calls.append(endpoint)
        queue = self.states[endpoint]
        cuts = self.cuts.get(endpoint) or [99]
        cut = cuts.pop(0) if len(cuts) > 1 else cuts[0]
        sealed = seal(queue.pop(0) if len(queue) > 1 else queue[0])
        for number, message in enumerate(pack(sealed, resume if self.resumes else None)):
            if number == cut:
                if self.clean:
                    return
                raise PeerUnreachableError(endpoint, "connection lost")
            yield message

    async def fetch(
        self, schema: Schema | None = SCHEMA, declared: Mapping[str, float] | None = None
    ) -> tuple[State, str]:
        readers: list[StateAssembler] = []
        return await download(
            cast(Any, self), list(self.states), schema, silence=5.0, declared=declared, on_progress=readers.append
        )


def equal(found: State, expected: State) -> bool:
    same = [torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items()]
    return all(same) and list(found.tensors) == list(expected.tensors) and found.version == expected.version


async def test_a_cut_download_goes_on_at_the_next_donor_with_what_is_there() -> None:
    donors = Donors({"x:1": [state(1)], "y:1": [state(1)]}, cuts={"x:1": [3]})
    found, donor = await donors.fetch()
    assert donor == "y:1"
    assert equal(found, state(1))


async def test_one_donor_that_is_cut_and_delivers_more_each_time_is_asked_again() -> None:
    donors = Donors({"x:1": [state(1)]}, cuts={"x:1": [1, 2, 4, 99]})
    found, _ = await donors.fetch()
    assert equal(found, state(1))
    assert len(donors.calls) == 4


@pytest.mark.parametrize(("cuts", "calls"), [([2], 2), ([0], 1), ([1, 2, 3, 4], TRIES_PER_DONOR)])
async def test_one_that_delivers_nothing_more_is_given_up(cuts: list[int], calls: int) -> None:
    donors = Donors({"x:1": [state(1)]}, cuts={"x:1": cuts})
    with pytest.raises(StateError, match="x:1: connection lost.*nothing was changed"):
        await donors.fetch()
    assert len(donors.calls) == calls


async def test_one_that_ends_too_early_on_purpose_is_not_asked_again() -> None:
    donors = Donors({"x:1": [state(1)]}, cuts={"x:1": [2]}, clean=True)
    with pytest.raises(StateError, match="ended after 2 of 5"):
        await donors.fetch()
    assert donors.calls == ["x:1"]


async def test_one_that_was_started_anew_since_it_declared_its_version_comes_after_all_others() -> None:
    donors = Donors({"x:1": [state(1, version=0)], "y:1": [state(2, version=3)]})
    found, donor = await donors.fetch(declared={"x:1": 4.0, "y:1": 3.0})
    assert (donor, donors.calls) == ("y:1", ["x:1", "y:1"])
    assert equal(found, state(2, version=3))
    donors.cuts = {"y:1": [0]}
    found, donor = await donors.fetch(declared={"x:1": 4.0, "y:1": 3.0})
    assert donor == "x:1"
    assert equal(found, state(1, version=0))


async def test_another_state_is_not_mixed_with_what_was_kept() -> None:
    donors = Donors({"x:1": [state(1)], "y:1": [state(2)]}, cuts={"x:1": [3]})
    found, _ = await donors.fetch()
    assert equal(found, state(2))


SIZES = st.lists(st.sampled_from([0, 1, 3, 8, 20]), max_size=6)


@given(SIZES, st.lists(st.integers(0, 80), max_size=3), st.integers(1, 9))
@example([3], [1, 1], 2)  # the second time it is continued from the same byte as the first
def test_whatever_is_cut_and_resumed_comes_whole_and_once(sizes: list[int], cuts: list[int], chunk: int) -> None:
    """A state cut after so many messages again and again, with chunks of so many bytes."""
    sealed = seal(State(1, {f"t{n}": torch.arange(size, dtype=torch.uint8) + n for n, size in enumerate(sizes)}))
    held, received = ReceivedState(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("averaging.state.manifest.CHUNK_BYTES", chunk)
        for cut in [*cuts, 1000]:
            reader = StateAssembler(None, earlier=held)
            for message in list(pack(sealed, held.resume))[:cut]:
                reader.feed(message)
                received += len(message.tensor_part.buffer) if message.tensor_part else 0
            held = max(held, reader.kept, key=lambda held: held.nbytes)
    found = reader.finish()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in sealed.state.tensors.items())
    assert received == reader.received == sum(sizes)


def test_small_tensors_come_together_and_large_ones_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("averaging.state.manifest.CHUNK_BYTES", 100)
    monkeypatch.setattr("averaging.state.manifest.MAX_JOINED", 4)
    sizes = [0, 10, 20, 0, 30, 60, 60, 250, 0, 100, 99, 1, *[1] * 9, 0]
    sealed = seal(State(1, {f"t{n}": torch.full((size,), n, dtype=torch.uint8) for n, size in enumerate(sizes)}))
    messages = list(pack(sealed, Resume(joins=True)))
    lengths = [len(message.tensor_part.buffer) for message in messages if message.tensor_part is not None]
    assert lengths == [30, 90, 60, 100, 100, 50, 0, 100, 100, 4, 4, 1]
    reader = StateAssembler(None)
    for message in messages:
        reader.feed(message)
    found = reader.finish()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in sealed.state.tensors.items())
    assert reader.received == sum(sizes)
    # A reader that does not ask for it, such as one of other software, gets each tensor with its description.
    assert all(m.tensor_part is not None and m.tensor_part.dtype for m in pack(sealed) if m.tensor_part.chunks)  # type: ignore[union-attr]
    assert len(list(pack(sealed))) == len(sizes) + 2


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda buffer: bytes([buffer[0] ^ 1]) + buffer[1:], "'t0' does not match its digest"),
        (lambda buffer: buffer[:-1], "belongs to no tensor"),
        (lambda buffer: buffer + b"x", "belongs to no tensor"),
        (lambda buffer: b"", "belongs to no tensor"),
    ],
)
def test_tensors_that_came_together_are_each_verified(change: Callable[[bytes], bytes], error: str) -> None:
    sealed = seal(State(1, {f"t{n}": torch.full((3,), float(n)) for n in range(3)}))
    (message,) = pack(sealed, Resume(joins=True))
    assert message.tensor_part is not None
    wrong = message.tensor_part.with_buffer(change(bytes(message.tensor_part.buffer)))
    reader = StateAssembler(None)
    with pytest.raises(StateError, match=error):
        reader.feed(replace(message, tensor_part=wrong))


def with_skipped(message: DownloadData, skipped: object) -> DownloadData:
    return replace(message, metadata=msgpack.encode(msgpack.decode(message.metadata) | {"skipped": skipped}))


@pytest.mark.parametrize("skipped", [-1, 1, 20, 40, 1 << 62, 1 << 63])
def test_what_was_not_asked_for_may_not_be_left_out(skipped: int) -> None:
    message = with_skipped(next(pack(seal(state(1)))), skipped)
    with pytest.raises(StateError, match=f"skipped {skipped} bytes that this peer does not have"):
        StateAssembler(SCHEMA).feed(message)


@pytest.mark.parametrize("offset", [0, 1, 20, 87, 88, 89, 1 << 59])
def test_a_donor_leaves_nothing_out_for_an_odd_question(offset: int) -> None:
    for fingerprint in (b"", bytes(32)):
        assert list(pack(seal(state(1)), Resume(offset, fingerprint))) == list(pack(seal(state(1))))


@dataclass
class Slow(OneLane):
    """A transport whose donors begin to send only after so many seconds, call by call; the last number holds."""

    seconds: dict[str, list[float]]
    calls: list[str] = field(default_factory=list)

    async def download_state(self, endpoint: str, resume: Resume | None = None) -> AsyncGenerator[DownloadData, None]:
        self.calls.append(endpoint)
        times = self.seconds[endpoint]
        await asyncio.sleep(times.pop(0) if len(times) > 1 else times[0])
        for message in pack(seal(state(1))):
            yield message


class Preparing(Slow):
    """Donors that may answer, so soon, that they live."""

    def __init__(self, seconds: dict[str, list[float]], answers: dict[str, float]) -> None:
        super().__init__(seconds)
        self.answers = answers

    async def get_schema(self, endpoint: str) -> Schema:
        if endpoint not in self.answers:
            raise PeerUnreachableError(endpoint, "connection lost")
        await asyncio.sleep(self.answers[endpoint])
        return SCHEMA


def test_a_donor_that_lives_is_given_time_to_prepare_a_large_state(caplog: pytest.LogCaptureFixture) -> None:
    """It is asked after all others, and those that do not answer are not asked again."""
    donors = Preparing({"dead:1": [999.0], "x:1": [60.0], "hung:1": [999.0]}, {"x:1": 1.0, "hung:1": 99.0})

    async def main() -> tuple[float, str]:
        names, loop = list(donors.seconds), asyncio.get_running_loop()
        began = loop.time()
        _, donor = await download(cast(Any, donors), names, SCHEMA, silence=10.0)
        return loop.time() - began, donor

    seconds, donor = virtual_time.run(main())
    assert donor == "x:1"
    assert donors.calls.count("dead:1") == donors.calls.count("hung:1") == 1
    assert donors.calls == ["dead:1", "x:1", "hung:1", "x:1"]
    assert seconds == pytest.approx(2 * 1.0 + 10.0 + 10.0 / 3 + 60.0, abs=1.0)  # "hung:1" has a third to answer
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("x:1 answers but has not begun to send its state" in line for line in told)


def test_a_donor_that_lives_and_never_begins_is_given_up_in_the_end() -> None:
    donors = Preparing({"x:1": [9999.0]}, {"x:1": 1.0})

    async def main() -> float:
        began = asyncio.get_running_loop().time()
        with pytest.raises(StateError, match=r"x:1: silent for 100 s, deadline 100 s = 10 × timeout"):
            await download(cast(Any, donors), ["x:1"], SCHEMA, silence=10.0)
        return asyncio.get_running_loop().time() - began

    assert virtual_time.run(main()) == pytest.approx(10.0 + 1.0 + 100.0 + 1.0, abs=2.0)
    assert donors.calls == ["x:1"] * 2


def metadata(**told: object) -> DownloadData:
    """The first message of a state, with other fields in its metadata."""
    first = next(pack(seal(state(1))))
    return replace(first, metadata=msgpack.encode(msgpack.decode(first.metadata) | told))


DESCRIBED = msgpack.decode(next(pack(seal(state(1)))).metadata)
OTHER_NAMES = [[name, *DESCRIBED["tensors"][0][1:]] for name in (None, 3, ["w"])]


@pytest.mark.parametrize(
    ("told", "error"),
    [
        *[({"version": number}, "its (version|metadata) is") for number in (-1, 2**63, 2**64 - 1, 1e300, float("inf"))],
        *[({"version": odd}, "its metadata is unreadable") for odd in (None, "3", b"-" + b"9" * 400, [3])],
        *[({"tensors": [other, *DESCRIBED["tensors"][1:]]}, "its metadata is unreadable") for other in OTHER_NAMES],
        *[({"user": user}, "its metadata is unreadable") for user in (msgpack.encode({"step": 3}), [["step", 3]])],
        ({"digest": DESCRIBED["digest"][:-1]}, "tensors and [0-9]+ digests"),
        ({"digest": [*DESCRIBED["digest"], bytes(32)]}, "tensors and [0-9]+ digests"),
        ({"tensors": DESCRIBED["tensors"] * 2, "digest": DESCRIBED["digest"] * 2}, "have the same name"),
    ],
)
def test_a_description_that_cannot_be_is_refused(told: dict[str, object], error: str) -> None:
    with pytest.raises(StateError, match=error):
        StateAssembler(None).feed(metadata(**told))


@pytest.mark.parametrize(("chunks", "pieces"), [(2, [21]), (9, [10, 11]), (1, [19])])
def test_no_more_or_fewer_bytes_come_than_were_announced(chunks: int, pieces: list[int]) -> None:
    """Of a tensor of 20 bytes: who sent on and on would fill the memory. It is refused as it comes, not at the end."""
    reader = StateAssembler(SCHEMA)
    first = next(pack(seal(state(1))))
    assert first.tensor_part is not None
    messages = [DownloadData(tensor_part=WireTensor(bytes(length))) for length in pieces]
    messages[0] = replace(first, tensor_part=replace(first.tensor_part, buffer=bytes(pieces[0]), chunks=chunks))
    for message in messages[:-1]:
        reader.feed(message)
    with pytest.raises(StateError, match="does not fit its announcement: a tensor takes"):
        reader.feed(messages[-1])


@pytest.mark.parametrize(
    ("tensors", "user", "words"),
    [
        ({"w": torch.zeros(1)}, {}, "'w' has the name of an averaged tensor"),
        ({"z": torch.zeros(1, dtype=torch.complex64)}, {}, "'z' is torch.complex64; .*bool can be shared"),
        ({"z": torch.eye(3).to_sparse()}, {}, "'z' has no dense values"),
        ({"z": torch.ones(3, device="meta")}, {}, "'z' has no dense values"),
        ({}, {"model": object()}, "msgpack cannot pack"),
        ({}, {"step": 2**65}, "msgpack cannot pack"),
        ({}, {"names": {"a"}}, "msgpack cannot pack the state's user dict: can not serialize 'set' object"),
        ({}, {1.5: 2}, "newcomers could not read the state's user dict: a dict has the key 1.5; keys can be text, by"),
        ({}, {"table": [{(1, (2,)): 3}]}, "a dict has the key .1, .2,.."),
    ],
)
def test_what_cannot_be_packed_is_named(tensors: dict[str, torch.Tensor], user: dict[str, Any], words: str) -> None:
    with pytest.raises(StateError, match=words):
        check_state(["w"], tensors, user)


@pytest.mark.parametrize("place", [0, 1], ids=["averaged", "of the application"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_state_that_is_not_finite_is_refused_and_the_next_donor_asked(value: float, place: int) -> None:
    poisoned = [torch.ones(5), torch.ones(5)]
    poisoned[place][3] = value
    states = {"x:1": poisoned, "y:1": [torch.ones(5), torch.ones(5)]}

    class Donors:
        async def download_state(self, endpoint: str, resume: Resume | None) -> AsyncGenerator[DownloadData, None]:
            for message in pack(seal(State(1, dict(zip("ab", states[endpoint], strict=True))))):
                yield message

    schema = describe(["a"], [torch.ones(5)], part_size_bytes=1024)

    async def main(finite: bool) -> str:
        _, donor = await download(
            cast(Any, Donors()), ["x:1", "y:1"], schema, silence=5.0, limits=StateLimits(finite=finite)
        )
        return donor

    assert virtual_time.run(main(True)) == "y:1"
    assert virtual_time.run(main(False)) == "x:1"


def feed_names(names: Sequence[str], **changed: object) -> None:
    """Feeds the first message of a donor whose averaged tensors have these names."""
    named = dict(zip(names, state(0).tensors.values(), strict=False))
    first = next(pack(seal(State(3, named))))
    metadata = msgpack.encode({**msgpack.decode(first.metadata), **changed})
    StateAssembler(SCHEMA).feed(DownloadData(metadata))


@pytest.mark.parametrize("names", [("a", "c", "b", "d"), ("b", "a", "c", "d"), ("a", "b", "c", "e")])
def test_a_state_with_other_names_is_refused_by_name(names: Sequence[str]) -> None:
    place = next(place for place, name in enumerate(names) if name != NAMES[place])
    with pytest.raises(StateError, match=f"averages '{names[place]}' where this peer has '{NAMES[place]}'"):
        feed_names(names)


def test_a_state_whose_tensors_have_no_names_or_wrappers_prefixes_is_accepted() -> None:
    feed_names([f"_orig_mod.{name}" for name in NAMES])
    feed_names([f"group0.param{place}" for place in range(4)])


def test_other_software_may_name_tensors_in_its_own_way_but_not_mix_them() -> None:
    feed_names(["t0", "t1", "t2", "t3"], named=None)
    with pytest.raises(StateError, match="averages 'b' where this peer has 'a'"):
        feed_names(["b", "a", "c", "d"], named=None)

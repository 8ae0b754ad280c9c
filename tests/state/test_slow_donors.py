"""Donors that deliver slowly, on purpose or not: each holds a newcomer for a bounded time, and what it sent is kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch

from averaging.errors import PeerUnreachableError, StateError
from averaging.protocol.messages import DownloadData, Resume
from averaging.state.downloads import TRIES_PER_DONOR, download
from averaging.state.manifest import Snapshot, State, pack, seal
from averaging.tensors.schema import Schema, describe
from averaging.testing import virtual_time
from averaging.timing.learned_deadlines import Deadlines

STALL_TIMEOUT = 30.0
LINK_10_MBIT, LINK_256_KBIT = 10e6 / 8, 256e3 / 8
LEAST = 16 * 1024


def snapshot(mib: float, tensors: int = 1, value: float = 1.0) -> Snapshot:
    numel = int(mib * (1 << 18)) // tensors
    return seal(State(3, {f"t{number}": torch.full((numel,), value) for number in range(tensors)}))


def schema_of(sealed: Snapshot) -> Schema:
    tensors = sealed.state.tensors
    return describe(list(tensors), list(tensors.values()), part_size_bytes=1 << 20)


@dataclass
class Donor:
    """Sends its state at so many bytes per second; as a dripper byte by byte.

    Attributes:
        pause: seconds between two messages of `drip` bytes, if it is a dripper.
        hangs_up_after: bytes.
    """

    state: Snapshot
    rate: float = 1e9
    drip: int = 0
    pause: float = 0.7
    hangs_up_after: float = float("inf")
    still: float = 0.0

    async def send(self, endpoint: str, resume: Resume | None) -> AsyncGenerator[DownloadData, None]:
        sent = 0
        for message in self._messages(resume):
            piece = message.tensor_part
            assert piece is not None
            await asyncio.sleep(self.pause if self.drip else len(piece.buffer) / self.rate)
            sent += len(piece.buffer)
            if sent > self.hangs_up_after:
                raise PeerUnreachableError(endpoint, "connection lost")
            if self.still and sent > 1 << 20:
                virtual_time.stand_still(self.still)  # of all, the reader too
                self.still = 0.0
            yield message

    def _messages(self, resume: Resume | None) -> Iterator[DownloadData]:
        for message in pack(self.state, resume):
            if not self.drip:
                yield message
                continue
            piece = message.tensor_part
            assert piece is not None
            for start in range(0, len(piece.buffer), self.drip):
                some = replace(piece, buffer=piece.buffer[start : start + self.drip], chunks=2**31 - 1)
                yield (
                    DownloadData(message.metadata, some)
                    if not start
                    else DownloadData(b"", replace(some, dtype="", size=(), chunks=0))
                )


@dataclass
class Network:
    """A transport to donors by name."""

    donors: dict[str, Donor]
    calls: list[tuple[str, int]] = field(default_factory=list)
    """Whom was asked, and how many bytes were there already."""

    async def download_state(self, endpoint: str, resume: Resume | None = None) -> AsyncGenerator[DownloadData, None]:
        self.calls.append((endpoint, resume.offset if resume else 0))
        async for message in self.donors[endpoint].send(endpoint, resume):
            yield message

    async def get_schema(self, endpoint: str) -> Schema:
        return schema_of(self.donors[endpoint].state)

    @property
    def asked(self) -> list[str]:
        return [endpoint for endpoint, _ in self.calls]


def fetch(
    donors: dict[str, Donor], *, earlier: Sequence[Donor] = (), at_most: float = 1e6
) -> tuple[Network, float, str, str]:
    """Downloads after earlier downloads; returns the network, the virtual seconds, and the donor or the error."""

    async def main() -> tuple[Network, float, str, str]:
        deadlines, loop = Deadlines(1.0, STALL_TIMEOUT), asyncio.get_running_loop()
        for one in earlier:
            await load(Network({"earlier:1": one}), deadlines)
        network, began = Network(donors), loop.time()
        async with asyncio.timeout(at_most):
            try:
                state, donor = await load(network, deadlines)
            except StateError as error:
                return network, loop.time() - began, "", str(error)
        whole = donors[donor].state.state
        assert all(torch.equal(state.tensors[name], tensor) for name, tensor in whole.tensors.items())
        return network, loop.time() - began, donor, ""

    async def load(network: Network, deadlines: Deadlines) -> tuple[State, str]:
        first = next(iter(network.donors.values()))
        names = list(network.donors)
        return await download(
            cast(Any, network), names, schema_of(first.state), silence=STALL_TIMEOUT, deadlines=deadlines
        )

    return virtual_time.run(main())


def test_a_donor_that_drips_is_given_up_and_what_it_sent_is_kept() -> None:
    state = snapshot(8)
    network, seconds, donor, _ = fetch({"drip:1": Donor(state, drip=1), "x:1": Donor(state, LINK_10_MBIT)})
    assert donor == "x:1"
    assert network.calls == [("drip:1", 0), ("x:1", 43)]  # one byte more than 42, in 30 s
    assert seconds == pytest.approx(STALL_TIMEOUT + (8 << 20) / LINK_10_MBIT, abs=2.0)


def test_one_that_drips_as_the_only_donor_ends_in_an_error_that_shows_how_slow_it_was() -> None:
    network, seconds, _, error = fetch({"drip:1": Donor(snapshot(8), drip=1)})
    assert network.asked == ["drip:1"]
    assert seconds == pytest.approx(STALL_TIMEOUT + 0.7, abs=0.5)
    assert (
        "drip:1: delivered 42 bytes in 30 s, expected at least 491520: 16 KiB/s, the minimum for every donor and reader"
        in error
    )


@pytest.mark.parametrize("drip", [0, 1])
def test_the_log_reports_it_where_another_donor_had_the_state(drip: int, caplog: pytest.LogCaptureFixture) -> None:
    state = snapshot(8)
    slow = Donor(state, drip=1) if drip else Donor(state, LINK_256_KBIT)
    fetch({"slow:1": slow, "x:1": Donor(state, LINK_10_MBIT)})
    (told,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert told == (
        f"could not download the state from slow:1: delivered {42 if drip else 3 << 18} bytes in 30 s, "
        "expected at least 4687500: 1/8 of the 10 Mbit/s assumed for slow links; downloaded it from x:1"
    )


@dataclass
class Silent(Donor):
    """Sends so many of its messages and then nothing more; answers small calls."""

    messages: int = 0
    mtu: float = float("inf")

    async def send(self, endpoint: str, resume: Resume | None) -> AsyncGenerator[DownloadData, None]:
        for message in list(pack(self.state, resume))[: self.messages]:
            assert message.tensor_part is not None
            if len(message.metadata) + len(message.tensor_part.buffer) > self.mtu:
                break
            yield message
        await asyncio.sleep(1e6)


@pytest.mark.parametrize(
    ("donor", "hinted"),
    [
        (Silent(snapshot(8)), True),
        (Silent(snapshot(8), messages=9, mtu=1400), True),
        (Silent(seal(State(3, {"a": torch.zeros(8), "b": torch.zeros(1 << 20)})), messages=9, mtu=1400), True),
        (Silent(snapshot(8), messages=2), False),
        (Donor(snapshot(8), hangs_up_after=0), False),
    ],
)
def test_a_donor_of_which_only_small_messages_arrive_is_named_with_the_path_as_a_possible_cause(
    donor: Donor, hinted: bool
) -> None:
    _, _, _, error = fetch({"x:1": donor})
    assert error
    assert ("may lose large packets: `averaging doctor --deep`" in error) is hinted


@pytest.mark.parametrize("dead", [0, 3])
def test_a_slow_link_as_the_only_one_is_read_to_the_end(dead: int) -> None:
    state = snapshot(8)
    others = {f"dead:{number}": Donor(state, hangs_up_after=0) for number in range(dead)}
    network, seconds, donor, _ = fetch(others | {"slow:1": Donor(state, LINK_256_KBIT)}, earlier=[Donor(state, 10e6)])
    assert donor == "slow:1"
    assert network.asked == [*others, "slow:1"]
    assert seconds == pytest.approx((8 << 20) / LINK_256_KBIT, abs=1.0)


def test_two_slow_links_deliver_in_the_end_and_what_came_over_the_first_is_kept() -> None:
    state = snapshot(8)
    network, seconds, donor, _ = fetch({f"slow:{number}": Donor(state, LINK_256_KBIT) for number in (1, 2)})
    assert donor == "slow:1"
    assert network.asked == ["slow:1", "slow:2", "slow:1"]
    kept = [offset for _, offset in network.calls]
    assert kept[1] >= STALL_TIMEOUT * LINK_256_KBIT - (256 << 10)
    assert kept[2] >= 2 * kept[1]
    # The messages that were under way come again.
    assert seconds == pytest.approx((8 << 20) / LINK_256_KBIT, abs=2 * (256 << 10) / LINK_256_KBIT + 2.0)


def test_the_newcomer_s_own_standstill_is_not_held_against_a_slow_donor() -> None:
    donor = Donor(snapshot(8), LINK_256_KBIT, still=500.0)
    network, _, name, _ = fetch({"slow:1": donor})
    assert name == "slow:1"
    assert network.asked == ["slow:1"]


def test_several_that_drip_cost_a_window_each() -> None:
    """They are asked again only after the one with a slow link, which is found too slow at first as they are."""
    state = snapshot(8)
    drippers = {f"drip:{number}": Donor(state, drip=1) for number in range(1, 9)}
    network, seconds, donor, _ = fetch(drippers | {"slow:1": Donor(state, LINK_256_KBIT)})
    assert donor == "slow:1"
    assert network.asked == [*drippers, "slow:1"] * 2
    assert seconds <= 2 * len(drippers) * (STALL_TIMEOUT + 1.0) + (8 << 20) / LINK_256_KBIT + 10.0


def test_what_earlier_downloads_have_shown_is_expected_of_others() -> None:
    state = snapshot(32)
    donors = {"greedy:1": Donor(state, 200e3), "x:1": Donor(state, 5e6)}
    _, _, donor, _ = fetch(donors)
    assert donor == "greedy:1"  # more than an eighth of 10 Mbit/s
    network, seconds, donor, _ = fetch(donors, earlier=[Donor(state, 10e6)])
    assert donor == "x:1"
    assert seconds < STALL_TIMEOUT + 1.0 + (32 << 20) / 5e6
    assert network.calls[1][1] >= 200e3 * STALL_TIMEOUT - (256 << 10)


def test_of_those_that_are_all_slower_than_earlier_ones_the_slowest_does_not_win() -> None:
    state = snapshot(32)
    donors = {"greedy:1": Donor(state, 40e3), "x:1": Donor(state, 1e6)}
    network, seconds, donor, _ = fetch(donors, earlier=[Donor(state, 10e6)])
    assert donor == "x:1"
    assert network.asked == ["greedy:1", "x:1"] * 2
    assert seconds < 3 * (STALL_TIMEOUT + 1.0) + (32 << 20) / 1e6


def test_a_state_that_came_at_once_says_little_about_how_long_others_may_take() -> None:
    donors = {"x:1": Donor(snapshot(8), 200e3), "y:1": Donor(snapshot(8), 5e6)}
    _, _, donor, _ = fetch(donors, earlier=[Donor(snapshot(0.5), 1e9)])
    assert donor == "x:1"


@pytest.mark.long
def test_many_small_tensors_do_not_have_to_come_as_fast_as_their_bytes() -> None:
    """10,000 of 4 bytes, 200 a second: what is slow about them is not the link."""
    state = seal(State(3, {f"t{number}": torch.full((1,), 1.0) for number in range(10_000)}))
    network, _, donor, _ = fetch({"x:1": Donor(state, 800.0), "y:1": Donor(state, 800.0)})
    assert donor == "x:1"
    assert network.asked == ["x:1"]


def test_tensors_without_bytes_do_not_let_a_donor_go_on_for_ever() -> None:
    state = seal(State(3, {f"t{number}": torch.zeros(0) for number in range(10_000)}))

    @dataclass
    class Drip(Donor):
        async def send(self, endpoint: str, resume: Resume | None) -> AsyncGenerator[DownloadData, None]:
            for message in pack(self.state):  # without joining them
                await asyncio.sleep(20.0)
                yield message

    network, seconds, _, error = fetch({"drip:1": Drip(state)}, at_most=500.0)
    assert network.asked == ["drip:1"]
    assert seconds < 2 * STALL_TIMEOUT
    assert "drip:1: delivered 1024 bytes in 30 s, expected at least 491520" in error


def test_a_donor_that_does_just_enough_and_is_lost_again_and_again_is_asked_so_often() -> None:
    """The most that one donor can take of a newcomer."""
    state = snapshot(16)
    donor = Donor(state, 1.1 * LEAST, hangs_up_after=1 << 20)
    network, seconds, _, error = fetch({"x:1": donor})
    assert "x:1: connection lost" in error
    assert len(network.calls) == TRIES_PER_DONOR
    assert seconds <= len(network.calls) * (STALL_TIMEOUT + (16 << 20) / LEAST + STALL_TIMEOUT)

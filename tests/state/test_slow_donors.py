"""Donors that deliver slowly: while others are left they are asked instead, and what came is kept."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from averaging.errors import PeerUnreachableError, StateError
from averaging.protocol.messages import DownloadData, Resume
from averaging.state.downloads import TRIES_PER_DONOR, download
from averaging.state.manifest import Snapshot, State, pack, seal
from averaging.tensors.schema import Schema, describe
from averaging.testing import virtual_time

STALL_TIMEOUT = 30.0
LINK_10_MBIT, LINK_1_MBIT, LINK_256_KBIT = 10e6 / 8, 1e6 / 8, 256e3 / 8


def snapshot(mib: float) -> Snapshot:
    return seal(State(3, {"t": torch.ones(int(mib * (1 << 18)))}))


def schema_of(sealed: Snapshot) -> Schema:
    tensors = sealed.state.tensors
    return describe(list(tensors), list(tensors.values()), part_size_bytes=1 << 20)


@dataclass
class Donor:
    """Sends its state at so many bytes per second.

    Attributes:
        hangs_up_after: bytes.
        still: seconds in which all stand still, the reader too, after a MiB.
    """

    state: Snapshot
    rate: float = 1e9
    hangs_up_after: float = float("inf")
    still: float = 0.0

    async def send(self, endpoint: str, resume: Resume | None) -> AsyncGenerator[DownloadData, None]:
        sent = 0
        for message in pack(self.state, resume):
            piece = message.tensor_part
            assert piece is not None
            await asyncio.sleep(len(piece.buffer) / self.rate)
            sent += len(piece.buffer)
            if sent > self.hangs_up_after:
                raise PeerUnreachableError(endpoint, "connection lost")
            if self.still and sent > 1 << 20:
                virtual_time.stand_still(self.still)
                self.still = 0.0
            yield message


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


def fetch(donors: dict[str, Donor]) -> tuple[Network, float, str, str]:
    """Returns the network, the virtual seconds, and the donor or the error."""
    network = Network(donors)

    async def main() -> tuple[Network, float, str, str]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        schema = schema_of(next(iter(donors.values())).state)
        try:
            state, donor = await download(cast(Any, network), list(donors), schema, silence=STALL_TIMEOUT)
        except StateError as error:
            return network, loop.time() - began, "", str(error)
        whole = donors[donor].state.state
        assert all(torch.equal(state.tensors[name], tensor) for name, tensor in whole.tensors.items())
        return network, loop.time() - began, donor, ""

    return virtual_time.run(main())


def test_a_slow_donor_is_left_for_a_faster_one_and_what_it_sent_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    state = snapshot(8)
    network, seconds, donor, _ = fetch({"slow:1": Donor(state, LINK_1_MBIT), "x:1": Donor(state, LINK_10_MBIT)})
    assert donor == "x:1"
    (_, nothing), (_, kept) = network.calls
    assert nothing == 0
    assert kept >= STALL_TIMEOUT * LINK_1_MBIT - (256 << 10)
    assert seconds <= STALL_TIMEOUT + 2 * 2.1 + ((8 << 20) - kept) / LINK_10_MBIT  # 2.1 s are a message
    (told,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert "could not download the state from slow:1: delivered" in told
    assert "downloaded it from x:1" in told


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
    assert ("may lose large packets" in error) is hinted


@pytest.mark.parametrize("dead", [0, 3])
def test_a_slow_link_as_the_only_one_is_read_to_the_end(dead: int) -> None:
    state = snapshot(8)
    others = {f"dead:{number}": Donor(state, hangs_up_after=0) for number in range(dead)}
    network, seconds, donor, _ = fetch(others | {"slow:1": Donor(state, LINK_256_KBIT)})
    assert donor == "slow:1"
    assert network.asked == [*others, "slow:1"]
    assert seconds == pytest.approx((8 << 20) / LINK_256_KBIT, abs=1.0)


def test_of_two_slow_links_one_delivers_in_the_end_and_nothing_comes_twice() -> None:
    state = snapshot(8)
    network, seconds, donor, _ = fetch({f"slow:{number}": Donor(state, LINK_256_KBIT) for number in (1, 2)})
    assert donor
    kept = [offset for _, offset in network.calls]
    assert kept == sorted(kept)
    assert seconds == pytest.approx((8 << 20) / LINK_256_KBIT, abs=len(kept) * (256 << 10) / LINK_256_KBIT)


def test_the_newcomer_s_own_standstill_is_not_held_against_a_slow_donor() -> None:
    donor = Donor(snapshot(8), LINK_256_KBIT, still=500.0)
    network, _, name, _ = fetch({"slow:1": donor})
    assert name == "slow:1"
    assert network.asked == ["slow:1"]


def test_a_donor_that_is_lost_again_and_again_is_asked_so_often() -> None:
    network, _, _, error = fetch({"x:1": Donor(snapshot(16), LINK_10_MBIT, hangs_up_after=1 << 20)})
    assert "x:1: connection lost" in error
    assert len(network.calls) == TRIES_PER_DONOR

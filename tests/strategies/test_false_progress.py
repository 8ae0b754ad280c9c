"""False progress records delay neither training peers nor newcomers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import cache
from typing import Any, cast

import pytest
from msgspec import msgpack

from averaging.discovery.gossip import GossipDiscovery
from averaging.discovery.gossip.identity import UnsignedIdentity
from averaging.errors import CallRefusedError
from averaging.protocol.group import donors_key, progress_key
from averaging.protocol.messages import DownloadData, JoinRequest, MessageFromLeader, Resume
from averaging.tensors.schema import Schema
from averaging.testing import virtual_time
from averaging.training.history import History, Origin, Progress, Rank
from averaging.transport.base import AveragingService
from tests.support.selection import rest_is_long
from tests.support.training_run import Run, Site, agree

SECONDS = 20.0

FAR_AHEAD = Progress(History(10**12, 1e9, "ff", Origin(Rank.APPOINTED, -1.0, "evil")))


class Silent:
    """Accepts every call and answers none but the check whether it is alive."""

    async def download_state(self, resume: Resume | None, caller: str) -> AsyncGenerator[DownloadData, None]:
        await asyncio.Event().wait()
        yield DownloadData()

    async def join_group(self, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        await asyncio.Event().wait()
        raise AssertionError
        yield

    def get_schema(self) -> Schema:
        raise CallRefusedError("evil:1", "does not say")


def three(seed: int, strategy: str) -> Run:
    names = [f"peer-{number}:1" for number in range(3)]
    return Run(
        seed,
        strategy,
        [Site(name, [names[0]] if number else [], 0.1 * number) for number, name in enumerate(names)],
        until=SECONDS,
    )


def claiming(
    run: Run, name_of: Callable[[int], str], pause: float, *, serves: bool, progress: Progress = FAR_AHEAD
) -> Callable[[], Coroutine[Any, Any, None]]:
    """A member of discovery that repeatedly announces progress under other names.

    Args:
        name_of: in whose name it does so, by the number of the claim.
        pause: seconds between two claims.
        serves: whether all these names lead to a peer that accepts calls and stays silent; else to nobody.
        progress: the progress that it announces.
    """

    async def claim() -> None:
        await asyncio.sleep(2.0)
        transport = run.network.transport("evil:1")
        rng = random.Random(run.seed)
        discovery = GossipDiscovery(
            "run",
            "evil:1",
            transport,
            join=["peer-0:1"],
            identity=UnsignedIdentity(rng),
            clock=virtual_time.clock,
            rng=rng,
        )
        await transport.serve(cast(AveragingService, Silent()), discovery)
        async with discovery:
            number = 0
            while True:
                name = name_of(number)
                if serves and name != "evil:1":
                    other = run.network.transport(name)
                    await other.serve(cast(AveragingService, Silent()), None)
                now = virtual_time.clock()
                await discovery.store(donors_key("run"), name, msgpack.encode(1e12), now + 15.0)
                await discovery.store(progress_key("run"), name, progress.pack(), now + 15.0)
                number += 1
                await asyncio.sleep(pause)

    return claim


@cache
def undisturbed_steps(strategy: str) -> int:
    """Global steps without any false claim."""
    return min(site.global_step or 0 for site in three(1, strategy).simulate())


@pytest.mark.parametrize("strategy", rest_is_long(["diloco", "gradients"]))
@pytest.mark.parametrize(
    ("name_of", "pause", "serves"),
    [
        (lambda number: "nobody:1", 5.0, False),
        (lambda number: "evil:1", 5.0, True),
        (lambda number: f"nobody-{number}:1", 0.5, False),
        (lambda number: f"silent-{number}:1", 0.5, True),
    ],
    ids=["nobody", "silent", "nobody under many names", "silent under many names"],
)
def test_a_claim_that_nobody_backs_stops_nobody(
    strategy: str, name_of: Callable[[int], str], pause: float, serves: bool
) -> None:
    run = three(1, strategy)
    disturbed = run.simulate(claiming(run, name_of, pause, serves=serves))
    assert len(disturbed) == 3
    assert agree(disturbed)
    assert min(site.global_step or 0 for site in disturbed) >= 0.9 * undisturbed_steps(strategy)


@pytest.mark.parametrize("serves", [False, True])
def test_a_newcomer_begins_with_the_state_of_those_that_have_one(serves: bool) -> None:
    run = three(2, "gradients")
    run.sites[2].starts = 6.0
    survivors = run.simulate(claiming(run, lambda number: "evil:1" if serves else "nobody:1", 5.0, serves=serves))
    assert len(survivors) == 3
    assert agree(survivors)


def test_other_options_of_one_host_end_no_starter(caplog: pytest.LogCaptureFixture) -> None:
    """The second site sees the stranger and the first one only, which has made no round yet."""
    run = three(3, "diloco")
    run.sites[1].starts, run.sites[2].starts = 6.0, 8.0
    differing = Progress(History(), donates=False, terms={"sync_every": "a number of steps", "quorum": "7"})
    names = [f"evil:{port}" for port in (1, 2, 3)]
    survivors = run.simulate(claiming(run, lambda number: names[number % 3], 0.5, serves=True, progress=differing))
    assert len(survivors) == 3
    assert agree(survivors)
    assert "quorum is off at this peer, but 7 at evil:1; give all peers of the run the same" in caplog.text

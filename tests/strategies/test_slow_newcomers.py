"""Newcomers whose download of the state takes longer than the others take for a global step, on virtual time."""

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest

from averaging import DecentralizedAverager, DiLoCo, GradientAveraging, LocalSGD, Strategy
from averaging.errors import PeerUnreachableError
from averaging.strategies import lockstep
from averaging.testing.transport import MemoryTransport
from tests.support.ledger import Ledger, Step
from tests.support.selection import rest_is_long
from tests.support.training_run import Noise, Run, Site, agree

STEPS, STEP_SECONDS = 12, 0.1
CYCLE = STEPS * STEP_SECONDS
COMES = 5.0

STRATEGIES: dict[str, Callable[[int], Strategy]] = {
    "diloco": lambda peers: DiLoCo(STEPS),
    "gradients": lambda peers: GradientAveraging(Noise.batch_size * STEPS * peers),
    "delay": lambda peers: DiLoCo(STEPS, delay=3),
    "fragments": lambda peers: DiLoCo(STEPS, fragments=3),
    "clock": lambda peers: DiLoCo(f"{CYCLE}s"),
    "top_k": lambda peers: DiLoCo(STEPS, compression="top_k"),
    "local": lambda peers: LocalSGD(STEPS),
    "diloco, quorum": lambda peers: DiLoCo(STEPS, delay=3, quorum=2),
    "local, quorum": lambda peers: LocalSGD(STEPS, quorum=2),
}


def trained(
    monkeypatch: pytest.MonkeyPatch,
    strategy: Callable[[], Strategy],
    peers: int,
    cycles: float,
    seed: int,
    until: float,
) -> list[Site]:
    """All peers but the last one train; that comes later, with a link on which a download takes so many cycles."""
    rng, download, newcomer = random.Random(seed), MemoryTransport.download_state, f"peer-{peers - 1}:1"

    async def slow(self: MemoryTransport, endpoint: str, resume: Any = None) -> AsyncGenerator[Any, None]:
        async with aclosing(download(self, endpoint, resume)) as messages:
            async for message in messages:
                yield message
        if self.endpoint == newcomer:
            await asyncio.sleep(cycles * CYCLE)  # the stream ends when the last bytes have come

    monkeypatch.setattr(MemoryTransport, "download_state", slow)
    sites = [
        Site(
            f"peer-{number}:1",
            ["peer-0:1"] if number else [],
            COMES + rng.random() if number == peers - 1 else 0.05 * number,
            step_seconds=STEP_SECONDS * rng.uniform(1.0, 1.1),
            strategy=strategy,
            learner=lambda rng: Noise(rng, {}, 3),
            options={"group_size": peers},
        )
        for number in range(peers)
    ]
    if isinstance(strategy(), GradientAveraging):
        audited(sites)
    run = Run(seed, "diloco", sites, until=until, group_wait=2.0)
    run.stall_timeout = 60.0  # the link is slow, but not silent
    return run.simulate()


def audited(sites: Sequence[Site]) -> None:
    """Checks after each step of `GradientAveraging` that no sample is lost or counts twice."""
    ledger = Ledger()

    def tamper(site: Site, seen: list[int]) -> Callable[[DecentralizedAverager, int], None]:
        def note(opt: DecentralizedAverager, number: int) -> None:
            step, version = opt.strategy.history.step, opt.strategy.history.phase
            new = tuple(site.receipts[seen[-1] :])
            if len(seen) == 1:
                ledger.begins(site.name, 1, step, version)
            else:
                ledger.step(site.name, 1, Step(Noise.batch_size, opt.strategy.samples, step, version, new))
            seen.append(len(site.receipts))

        return note

    for site in sites:
        site.tamper = tamper(site, [0])


def averaged(site: Site) -> int:
    return sum(receipt.averaged for receipt in site.receipts)


CYCLES = (0.25, 1, 4, 16)
CASES = [("diloco", 3, 4, 0), ("gradients", 3, 4, 0)] + [
    (name, max(2 + seed * 7 % 15, 3 if "quorum" in name else 2), CYCLES[seed // len(STRATEGIES) % len(CYCLES)], seed)
    for seed, name in zip(range(200), itertools.cycle(STRATEGIES), strict=False)
]


@pytest.mark.parametrize(("name", "peers", "cycles", "seed"), rest_is_long(CASES, 2))
def test_a_newcomer_is_in_step_after_a_bounded_number_of_downloads(
    name: str, peers: int, cycles: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The download of its start, at most two while the others put off their step, and a few cycles."""
    downloads = 1 if "local" in name else 3
    until = COMES + 1.0 + (downloads * cycles + 12) * CYCLE
    sites = trained(monkeypatch, partial(STRATEGIES[name], peers), peers, cycles, seed, until)
    assert len(sites) == peers
    assert averaged(sites[-1]) >= 3
    assert agree(sites)
    assert len({site.global_step for site in sites}) == 1


@pytest.mark.parametrize("name", ["gradients", "delay"])
def test_it_is_named_by_all_and_its_time_is_bounded(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of the others says once for whom it waits, and once that it waits no longer; the newcomer what it lacks."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(lockstep, "HELD_SECONDS", 3.0)
    sites = trained(monkeypatch, partial(STRATEGIES[name], 3), 3, 8, 1, 50.0)
    said = [record.getMessage() for record in caplog.records]
    assert sum("waits for up to 3 s for peer-2:1, which downloads the state" in text for text in said) == 2
    assert sum("peer-2:1 has not become level" in text for text in said) == 2
    (still,) = [text for text in said if "downloads the state of" in text]
    assert "MB/s" in still
    assert "the others put off their next step" in still
    assert averaged(sites[0]) > 20
    assert averaged(sites[2]) == 0
    assert agree(sites)


@pytest.mark.parametrize("name", ["gradients", "clock", "local"])
def test_peers_whose_rounds_fail_say_so_once_within_a_few_cycles(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def unreachable(self: MemoryTransport, endpoint: str, request: Any) -> AsyncGenerator[Any, None]:
        raise PeerUnreachableError(endpoint, "no way to it")
        yield

    monkeypatch.setattr(MemoryTransport, "join_group", unreachable)
    sites = trained(monkeypatch, partial(STRATEGIES[name], 2), 2, 0.25, 1, COMES + 20 * CYCLE)
    said = [record.getMessage() for record in caplog.records if "makes no step of the run" in record.getMessage()]
    assert len(said) == len(sites)
    reasons = "its last round failed: ", "it is at global step", "all others come to a later moment"
    assert all(any(reason in text for reason in reasons) for text in said), said


@pytest.mark.parametrize("name", ["fragments", "local"])
def test_peers_whose_rounds_succeed_say_nothing_of_the_kind(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trained(monkeypatch, partial(STRATEGIES[name], 2), 2, 0.01, 1, COMES + 8 * CYCLE)
    assert not [record for record in caplog.records if "makes no step of the run" in record.getMessage()]

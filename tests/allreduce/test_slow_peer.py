"""One of four peers is much slower than the rest: the receipts of the others name it, with its step rate."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import median
from typing import Any

import pytest

from averaging import Peer
from averaging.protocol.group import Mode
from averaging.receipts.explanation import explain
from averaging.receipts.receipt import LateArrival, Receipt, Role
from tests.support.selection import rest_is_long
from tests.support.swarm import Swarm, scalars
from tests.support.training_run import STEP_SECONDS, STRATEGIES, Run, Site

NAMES = [f"peer-{number}:1" for number in range(4)]
SLOW = NAMES[-1]
TIMES = 10.0


def simulated(strategy: str, *, times: float, until: float) -> list[Site]:
    """A run of four peers; a step of the last one takes so many times as long as one of the others."""
    sites = [Site(name, [NAMES[0]] if number else [], 0.05 * number) for number, name in enumerate(NAMES)]
    sites[-1].step_seconds = times * STEP_SECONDS
    return Run(1, strategy, sites, until=until, group_wait=40.0).simulate()


def receipts_of(sites: Sequence[Site], name: str) -> list[Receipt]:
    """The receipts of one peer in which all four took part."""
    found = next(site for site in sites if site.name == name).receipts
    return [receipt for receipt in found if len(receipt.members) == len(NAMES)]


def rate_of(receipts: Sequence[Receipt], name: str) -> float:
    rates = [one.step_rate for receipt in receipts for one in receipt.accounts if one.endpoint == name]
    return median(rate for rate in rates if rate is not None)


REMEDIES = {"local": "fewer local steps", "diloco": "every", "gradients": "target_batch_size"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_others_name_the_slow_peer_its_step_rate_and_what_to_do(strategy: str) -> None:
    sites = simulated(strategy, times=TIMES, until=80.0)
    units = 4 if strategy == "gradients" else 1  # samples of a step
    for name in NAMES[:-1]:
        receipts = receipts_of(sites, name)
        assert len(receipts) >= 3
        for receipt in receipts:
            late = receipt.last_to_arrive
            assert late is not None
            assert late.endpoint == SLOW
            assert 0.5 * receipt.phases["looking"] < late.seconds <= receipt.phases["looking"]
            waited = {account.endpoint: account.waited for account in receipt.accounts}
            assert waited[name] == pytest.approx(receipt.phases["looking"], abs=0.05)
            assert waited[SLOW] == pytest.approx(0.0, abs=0.05)
            assert all(seconds is None or seconds >= late.seconds for other, seconds in waited.items() if other != SLOW)
    own = receipts_of(sites, SLOW)
    assert own
    assert all(receipt.last_to_arrive is None for receipt in own)
    for teller in NAMES:  # the time in which a peer waits is no part of its rate
        for name in NAMES:
            seconds = STEP_SECONDS * (TIMES if name == SLOW else 1.0)
            assert rate_of(receipts_of(sites, teller), name) == pytest.approx(units / seconds, rel=0.15)
    for tellers in (NAMES, NAMES[:1]):
        lines = list(explain([one for name in tellers for one in receipts_of(sites, name)], summary_only=True))
        assert f"last to arrive: {SLOW}" in next(line for line in lines if line.startswith("last to arrive"))
        assert SLOW in next(line for line in lines if line.startswith("step rate"))
        assert REMEDIES[strategy] in next(line for line in lines if line.startswith("hint"))


@pytest.mark.parametrize("strategy", rest_is_long(reversed(STRATEGIES)))
def test_peers_of_equal_speed_are_not_named(strategy: str) -> None:
    """Their steps take from 0.8 to 1.2 times the usual time."""
    sites = simulated(strategy, times=1.0, until=30.0)
    told = [receipt for name in NAMES for receipt in receipts_of(sites, name)]
    assert len(told) > 20
    assert not [receipt for receipt in told if receipt.last_to_arrive is not None]
    assert "last to arrive: no peer regularly" in list(explain(told, summary_only=True))


def averaging(swarm: Swarm, peers: Sequence[Peer], starts: Sequence[float]) -> list[Receipt]:
    """The receipts of one round, for which each peer begins to look so many seconds after all have been entered."""

    async def average(peer: Peer, start: float) -> Receipt:
        await asyncio.sleep(start)
        return await peer.average()

    async def main() -> list[Receipt]:
        async with AsyncExitStack() as stack:
            for peer in peers:
                await stack.enter_async_context(peer)
            return await asyncio.gather(*map(average, peers, starts))

    receipts: list[Receipt] = swarm.simulate(main())
    assert {len(receipt.members) for receipt in receipts} == {len(peers)}
    return receipts


def patient(swarm: Swarm, modes: Sequence[Mode], group_wait: float = 30.0) -> list[Peer]:
    """Peers that wait for each other."""
    tensors = scalars(len(modes), 1)
    return [
        swarm.peer(
            f"{number}:1",
            [tensor],
            mode=mode,
            group_size=len(modes),
            min_group_size=len(modes),
            round_timeout=60.0,
            group_wait=group_wait,
        )
        for number, (mode, tensor) in enumerate(zip(modes, tensors, strict=True))
    ]


def named(receipt: Receipt) -> tuple[str, Any]:
    """Who arrived last, and how many seconds after the others; nobody and 0 if nobody is named."""
    late = receipt.last_to_arrive or LateArrival("", 0.0)
    return late.endpoint, late.seconds


@pytest.mark.parametrize("seed", range(2))
def test_a_client_that_comes_late_is_named_by_its_leader_and_nobody_else_is(seed: int) -> None:
    swarm = Swarm(seed)
    peers = patient(swarm, [Mode.NODE, Mode.NODE, Mode.NODE, Mode.CLIENT])
    receipts = averaging(swarm, peers, [0.0, 0.1, 0.2, 5.0])
    client = receipts[3].endpoint
    for receipt in receipts:
        if receipt.role is Role.LEADER:
            assert named(receipt) == (client, pytest.approx(4.8, abs=0.1))
        else:
            assert receipt.last_to_arrive is None
            waited = {account.endpoint: account.waited for account in receipt.accounts}
            assert (waited[client] is None) == (receipt.endpoint != client)
    assert all(one.step_rate is None for receipt in receipts for one in receipt.accounts)  # nobody trains

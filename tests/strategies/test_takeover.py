"""Whoever lies about a history takes no run over: it is worth the members that made it."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from msgspec import msgpack

from averaging.discovery.gossip import GossipDiscovery
from averaging.discovery.gossip.identity import UnsignedIdentity
from averaging.errors import AveragingError, CallRefusedError
from averaging.protocol.group import donors_key, progress_key
from averaging.protocol.messages import DownloadData, JoinRequest, MessageFromLeader, Resume
from averaging.state.assembler import StateAssembler
from averaging.state.manifest import State, pack, seal
from averaging.tensors.schema import Schema
from averaging.testing import virtual_time
from averaging.training.history import History, Made, Origin, Progress, Rank
from averaging.transport.base import AveragingService, Transport
from tests.support.training_run import STRATEGIES, Run, Site, agree

WRONG, RIGHT = 1e6, 1e3
"""Every parameter of a false state, and more than any parameter of an honest run: 108 was seen."""

FAR = 10**6
"""Steps that a liar claims."""


class Liar:
    """Serves a well-formed state with the history that it announces: that of an honest peer with other values."""

    def __init__(self, transport: Transport, honest: str) -> None:
        self._transport, self._honest = transport, honest
        self.history = History()
        self.value = WRONG

    async def download_state(self, resume: Resume | None, caller: str) -> AsyncGenerator[DownloadData, None]:
        reader = StateAssembler(None)
        async for message in self._transport.download_state(self._honest, None):
            reader.feed(message)
        true = reader.finish()
        tensors = {
            name: torch.full_like(tensor, self.value) if tensor.is_floating_point() else tensor
            for name, tensor in true.tensors.items()
        }
        strategy = true.user["strategy"] | {"history": self.history.pack(), "trail": self.history.pack_trail()}
        user = {**true.user, "strategy": strategy, "local_step": min(self.history.step, FAR)}
        for message in pack(seal(State(1 << 40, tensors, user))):
            yield message

    async def join_group(self, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        await asyncio.Event().wait()
        raise AssertionError
        yield

    def get_schema(self) -> Schema:
        raise CallRefusedError("evil:1", "does not say")


def lying(
    run: Run, names: list[str], begins: float, *, same_origin: bool, value: float = WRONG
) -> Callable[[], Coroutine[Any, Any, None]]:
    """Somebody that announces a history of `FAR` steps under several names, from a time on, and serves such a state."""

    async def lie() -> None:
        await asyncio.sleep(begins)
        rng = random.Random(run.seed)
        transport = run.network.transport(names[0])
        liar = Liar(transport, "peer-0:1")
        liar.value = value
        discovery = GossipDiscovery(
            "run",
            names[0],
            transport,
            join=["peer-0:1"],
            identity=UnsignedIdentity(rng),
            clock=virtual_time.clock,
            rng=rng,
        )
        for name in names:
            serving = transport if name == names[0] else run.network.transport(name)
            await serving.serve(cast(AveragingService, liar), discovery if name == names[0] else None)
        async with discovery:
            while True:
                honest = Progress.unpack(_record(discovery.get(progress_key("run"))))
                liar.history = History(FAR, 1e6, "f" * 16, Origin(Rank.APPOINTED, -1.0, "evil"))
                if same_origin and honest is not None:
                    trail = (*honest.history.trail, honest.history.lineage)
                    liar.history = replace(liar.history, origin=honest.history.origin, trail=trail)
                if run.strategy == "local":
                    liar.history = replace(liar.history, lineage="")
                now = virtual_time.clock()
                for name in names:
                    await discovery.store(donors_key("run"), name, msgpack.encode(1e12), now + 15.0)
                    claim = Progress(liar.history, made=Made.TOGETHER)
                    await discovery.store(progress_key("run"), name, claim.pack(), now + 15.0)
                await asyncio.sleep(1.0)

    async def keep_lying() -> None:
        while True:
            try:
                await lie()
            except AveragingError:
                await asyncio.sleep(1.0)

    return keep_lying


def _record(entries: Mapping[str, Any]) -> bytes:
    """The record of an honest peer."""
    return next((entry.value for name, entry in sorted(entries.items()) if name.startswith("peer-")), b"")


def some(count: int, seed: int, strategy: str, until: float, **options: Any) -> Run:
    names = [f"peer-{number}:1" for number in range(count)]
    sites = [Site(name, [names[0]] if number else [], 0.1 * number) for number, name in enumerate(names)]
    return Run(seed, strategy, sites, until=until, **options)


def honest(run: Run, disturb: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Checks that all end with the same parameters, which are not those of the liar."""
    survivors = [site for site in run.simulate(disturb) if site.name.startswith("peer-")]
    assert len(survivors) == sum(site.name.startswith("peer-") for site in run.sites), run.seed
    assert agree(survivors), (run.seed, survivors)
    assert all(math.isfinite(value) and abs(value) < RIGHT for value in survivors[0].parameters), (run.seed, survivors)


@pytest.mark.parametrize("value", [WRONG, float("nan")])
@pytest.mark.parametrize("same_origin", [False, True], ids=["another run", "the same run"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_stranger_takes_no_run_over(
    strategy: str, same_origin: bool, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    run = some(3, 1, strategy, until=24.0)
    run.sites[2].starts = 17.0  # a newcomer that sees both histories
    honest(run, lying(run, ["evil:1"], 12.0, same_origin=same_origin, value=value))
    if strategy != "local" or not same_origin:  # of one run, peers with LocalSGD may differ and follow nobody
        assert "too few members stand behind the history of evil:1, which is said to be at step 1000000" in caplog.text
    if not same_origin:
        assert "the peers of run 'run' have different histories" in caplog.text


def test_a_newcomer_whose_local_steps_come_from_a_false_state_adds_none_of_them() -> None:
    """It is cut off with many liars of one host, which are gone from the majority's sight, and comes back."""
    honest(*scenario(212))


def scenario(seed: int) -> tuple[Run, Callable[[], Coroutine[Any, Any, object]]]:
    """Liars of every kind: strangers and former members, one or many of one host, also during a cut."""
    rng = random.Random(seed)
    count = rng.choice([2, 3, 3, 4, 5])
    begins = rng.uniform(8.0, 30.0)
    cut = count > 3 and rng.random() < 0.4
    member = count > 2 and rng.random() < 0.3
    run = some(count, seed, rng.choice(list(STRATEGIES)), until=begins + (40.0 if cut or member else 15.0))
    evil = [f"evil:{number}" for number in range(1, rng.choice([2, 2, 11]))]
    if member:  # it trains along, is gone, and its name is used by the liar once its records have expired
        run.sites = [*run.sites, Site("evil:1", ["peer-0:1"], 0.5, lives=rng.uniform(5.0, 7.0))]
        begins = max(begins, 40.0)
        run.until = begins + 30.0
    if count > 2 and rng.random() < 0.4:  # of two peers, one that has only trained alone takes over the longer history
        run.sites[count - 1].starts = begins + rng.uniform(-3.0, 10.0)
    disturb = lying(run, evil, begins, same_origin=rng.random() < 0.5)

    async def cut_and_lie() -> None:
        lies = asyncio.create_task(disturb())
        try:
            await asyncio.sleep(begins + rng.uniform(-5.0, 5.0))
            names = [site.name for site in run.sites if site.name.startswith("peer-")]
            run.network.cut(frozenset([*names[:2], *evil]), frozenset(names[2:]))
            await asyncio.sleep(rng.uniform(3.0, 20.0))
            run.network.heal()
            await lies
        finally:
            lies.cancel()

    return run, cut_and_lie if cut else disturb


SOME, ALL = range(8), range(8, 1000)
"""Seeds of the usual tests, and of the long ones besides."""


@pytest.mark.parametrize("seed", SOME)
def test_no_liar_takes_a_run_over(seed: int) -> None:
    honest(*scenario(seed))


@pytest.mark.long
@pytest.mark.parametrize("seed", ALL)
def test_the_same_with_many_seeds(seed: int) -> None:
    honest(*scenario(seed))

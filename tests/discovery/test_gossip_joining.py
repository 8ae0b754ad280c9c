"""Joining a run through seeds that refuse, fail or are late, in virtual time: the result, when, and what is logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

import pytest

from averaging.discovery.gossip.bootstrap import DEFINITE_SECONDS, Waiting
from averaging.errors import CallRefusedError, JoinError
from averaging.protocol.messages import Digest, ExchangeReply
from averaging.testing import virtual_time
from tests.support.gossip_swarm import NO_AVERAGING, GossipSwarm, joined, members, now
from tests.support.simulated import in_virtual_time


@pytest.mark.parametrize("endpoint", ["a:1", None], ids=["node", "client"])
@in_virtual_time
async def test_a_wrong_run_ends_the_join_at_once(endpoint: str | None) -> None:
    async with GossipSwarm(50) as swarm:
        await joined(swarm.start("x:1", run_id="another"))
        await joined(swarm.start("y:1", run_id="another"))
        began = now()
        host = swarm.start(endpoint, ["x:1", "y:1"], join_timeout=60.0)
        with pytest.raises(JoinError, match="cannot be in one run as they are configured") as caught:
            await joined(host)
        assert DEFINITE_SECONDS <= now() - began < 2
        assert set(caught.value.reasons) == {"x:1", "y:1"}
        for reason in caught.value.reasons.values():
            assert reason == "the called peer belongs to run 'another', not to 'run'; give both peers the same run id"
        swarm.hosts.pop(host.transport.endpoint)


@in_virtual_time
async def test_one_wrong_seed_does_not_fail_the_join_while_another_may_answer() -> None:
    async with GossipSwarm(51) as swarm:
        await joined(swarm.start("wrong:1", run_id="another"))
        host = swarm.start("a:1", ["wrong:1", "late:1"], join_timeout=20.0)
        await asyncio.sleep(15)
        assert not host.task.done()
        await joined(swarm.start("late:1"))
        await joined(host)
        assert now() < 19
        assert members(swarm["a:1"]) >= {"a:1", "late:1"}


# What is logged meanwhile


@in_virtual_time
async def test_unanswered_seeds_are_reported_after_a_second_and_then_at_growing_intervals(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reports: list[tuple[float, Waiting]] = []
    caplog.set_level(logging.INFO, "averaging.discovery.gossip.bootstrap")
    async with GossipSwarm(54) as swarm:
        swarm.network.freeze("frozen:1")
        host = swarm.start(
            "a:1",
            ["dead:1", "frozen:1"],
            join_timeout=40.0,
            on_joining=lambda waiting: reports.append((now(), waiting)),
        )
        with pytest.raises(JoinError):
            await joined(host)
        del swarm.hosts["a:1"]
    assert [moment for moment, _ in reports] == [pytest.approx(after, abs=0.1) for after in (1, 3, 7, 15, 31)]
    assert [waiting.seconds for _, waiting in reports] == [pytest.approx(after, abs=0.1) for after in (1, 3, 7, 15, 31)]
    assert all(waiting.reasons == {"dead:1": "connection refused", "frozen:1": "no answer"} for _, waiting in reports)
    assert caplog.messages[0] == (
        "no peer to join has answered for 1 s (dead:1: connection refused; frozen:1: no answer); giving up after 40 s"
    )
    assert len(caplog.messages) == len(reports)


# Clocks


class Broken:
    """A seed that begins to answer and fails; its clock is far off."""

    async def exchange(self, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        if digest.complete:
            raise CallRefusedError("", "is broken")
        yield ExchangeReply(differs=True, sent=virtual_time.clock() - 75)


@in_virtual_time
async def test_the_error_names_clocks_that_differ_too_much_if_no_seed_answered() -> None:
    async with GossipSwarm(56) as swarm:
        await swarm.network.transport("broken:1").serve(NO_AVERAGING, Broken())  # type: ignore[arg-type]
        host = swarm.start("a:1", ["broken:1"], join_timeout=2.0)
        with pytest.raises(JoinError) as caught:
            await joined(host)
        assert "(broken:1: is broken)" in str(caught.value)
        hint = (
            "The clocks are too far apart: that of broken:1 is 75 s behind this peer's; set them, for example with NTP."
        )
        assert str(caught.value).endswith(hint)
        del swarm.hosts["a:1"]

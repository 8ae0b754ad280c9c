"""Processes with `top_k`: one dies in the middle of a round, one joins, and nothing that was trained is lost."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.processes import JsonProcess

STEPS, PAUSES_AT = 12, 5


def start(stack: ExitStack, **options: Any) -> JsonProcess:
    options = {"steps": STEPS, "strategy": "top_k", **options}
    return stack.enter_context(JsonProcess("python", "-m", "tests.support.trainer", json.dumps(options)))


@pytest.mark.parametrize("mode", ["node", pytest.param("client", marks=pytest.mark.long)])
def test_a_peer_dies_in_a_round_and_another_joins(mode: str) -> None:
    """A node that dies is a lost reducer, so the round fails; a client is only a dropped sender."""
    with ExitStack() as stack:
        # The peers make a step in milliseconds: they wait for the newcomer, which would never be in a group else.
        peers = [start(stack, number=0, peers=4, pauses_at=PAUSES_AT)]
        ready = peers[0].expect("ready")
        join = [ready["endpoint"]]
        peers += [start(stack, number=number, peers=4, join=join, pauses_at=PAUSES_AT) for number in (1, 2)]
        victim = start(stack, number=3, peers=4, join=join, death="in the round", options={"mode": mode})
        for process in [*peers[1:], victim]:
            process.expect("ready")
        for process in [*peers, victim]:
            process.send("train")
        assert victim.wait() == -9
        for process in peers:
            while process.expect("step")["step"] < PAUSES_AT:
                continue
        newcomer = start(stack, number=4, peers=4, join=join, seed=7)
        assert newcomer.expect("ready")["global_step"] == PAUSES_AT
        peers.append(newcomer)
        for process in peers:
            process.send("train")
        done = [process.expect("done") for process in peers]
        assert [one["step"] for one in done] == [STEPS] * 4
        assert max(one["lost"] for one in done) < 2e-6
        assert max(one["loss"] for one in done) < ready["loss"] - 0.02  # of 0.13 that can be learned
        digests: dict[int, set[str]] = {}
        members = set()
        for process in [*peers, victim]:
            for event in process.events("step"):
                digests.setdefault(event["step"], set()).add(event["digest"])
                members.add(event["members"])
        assert {step: len(found) for step, found in digests.items()} == dict.fromkeys(range(1, STEPS + 1), 1)
        assert 4 in members
        for process in peers:
            process.send("quit")
            assert process.wait() == 0

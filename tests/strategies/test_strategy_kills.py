"""Training peers are killed at critical moments and others join; all that finish hold the same parameters."""

import json
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from tests.support.processes import JsonProcess

STEPS, TOP_K_STEPS, PAUSES_AT = 5, 12, 5


def start(stack: ExitStack, **options: Any) -> JsonProcess:
    return stack.enter_context(
        JsonProcess("python", "-m", "tests.support.trainer", json.dumps({"steps": STEPS, **options}))
    )


@pytest.mark.parametrize("death", ["before the round", "in the round", "between round and step"])
@pytest.mark.parametrize("strategy", ["gradients", "diloco"])
def test_all_who_finish_hold_the_same_parameters(strategy: str, death: str) -> None:
    with ExitStack() as stack:
        peers = [start(stack, strategy=strategy, number=0, peers=3)]
        seed = peers[0].expect("ready")["endpoint"]
        peers.append(start(stack, strategy=strategy, number=1, peers=3, join=[seed]))
        victim = start(stack, strategy=strategy, number=2, peers=3, join=[seed], death=death)
        for process in [peers[1], victim]:
            process.expect("ready")
        for process in [*peers, victim]:
            process.send("train")
        assert victim.wait() == -9
        newcomer = start(stack, strategy=strategy, number=3, join=[seed], seed=7)
        newcomer.expect("ready")
        newcomer.send("train")
        peers.append(newcomer)
        for process in peers:
            assert process.expect("done")["step"] == STEPS
        digests: dict[int, set[str]] = {}
        for process in [*peers, victim]:
            seen = [event["step"] for event in process.events("step")]
            assert seen == sorted(set(seen)), "a step was made twice"
            for event in process.events("step"):
                digests.setdefault(event["step"], set()).add(event["digest"])
        assert {step: len(found) for step, found in digests.items()} == dict.fromkeys(digests, 1)
        assert STEPS in digests
        for process in peers:
            process.send("quit")
            assert process.wait() == 0


@pytest.mark.parametrize("mode", ["node", pytest.param("client", marks=pytest.mark.long)])
def test_a_peer_dies_in_a_round_and_another_joins(mode: str) -> None:
    """With `top_k` nothing is lost. A node that dies is a lost reducer, so its round fails; a client only a sender."""
    top_k = partial(start, strategy="top_k", steps=TOP_K_STEPS)
    with ExitStack() as stack:
        # The peers make a step in milliseconds: they wait for the newcomer, which would never be in a group else.
        peers = [top_k(stack, number=0, peers=4, pauses_at=PAUSES_AT)]
        ready = peers[0].expect("ready")
        join = [ready["endpoint"]]
        peers += [top_k(stack, number=number, peers=4, join=join, pauses_at=PAUSES_AT) for number in (1, 2)]
        victim = top_k(stack, number=3, peers=4, join=join, death="in the round", options={"mode": mode})
        for process in [*peers[1:], victim]:
            process.expect("ready")
        for process in [*peers, victim]:
            process.send("train")
        assert victim.wait() == -9
        for process in peers:
            while process.expect("step")["step"] < PAUSES_AT:
                continue
        newcomer = top_k(stack, number=4, peers=4, join=join, seed=7)
        assert newcomer.expect("ready")["global_step"] == PAUSES_AT
        peers.append(newcomer)
        for process in peers:
            process.send("train")
        done = [process.expect("done") for process in peers]
        assert [one["step"] for one in done] == [TOP_K_STEPS] * 4
        assert max(one["lost"] for one in done) < 2e-6
        assert max(one["loss"] for one in done) < ready["loss"] - 0.02  # of 0.13 that can be learned
        digests: dict[int, set[str]] = {}
        members = set()
        for process in [*peers, victim]:
            for event in process.events("step"):
                digests.setdefault(event["step"], set()).add(event["digest"])
                members.add(event["members"])
        assert {step: len(found) for step, found in digests.items()} == dict.fromkeys(range(1, TOP_K_STEPS + 1), 1)
        assert 4 in members
        for process in peers:
            process.send("quit")
            assert process.wait() == 0

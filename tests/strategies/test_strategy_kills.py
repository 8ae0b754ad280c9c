"""Training peers are killed at critical moments and others join; all that finish hold the same parameters."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.processes import JsonProcess

STEPS = 5


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

"""Peers in separate processes that start at the same time with the same `join` list form one run."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.ports import free_address
from tests.support.processes import JsonProcess, all_expect, averaging_command
from tests.support.selection import rest_is_long


@pytest.mark.parametrize("strategy", rest_is_long(["gradients", "diloco", "local"]))
def test_three_processes_with_the_same_arguments_hold_the_same_parameters(strategy: str, tmp_path: Path) -> None:
    """Each peer joins all of them, itself included, and has its own parameters."""
    addresses = [free_address() for _ in range(3)]
    files = [tmp_path / f"{number}.jsonl" for number in range(3)]
    with ExitStack() as stack:
        processes = []
        for number, address in enumerate(addresses):
            options = {"strategy": strategy, "number": number, "seed": number, "join": addresses}
            options |= {"way": "together", "peers": 3, "steps": 9}
            options["options"] = {"listen": address, "receipts": str(files[number])}
            worker = ("python", "-m", "tests.support.trainer", json.dumps(options))
            processes.append(stack.enter_context(JsonProcess(*worker)))
        found = all_expect(processes, "found")
        assert [event["peers"] for event in found] == [True] * 3
        assert len({event["digest"] for event in found}) == 1
        ends = all_expect(processes, "finished")
        assert [event["alike"] for event in ends] == [True] * 3
        assert {event["text"].partition("; no average has")[0] for event in ends} == {
            "all 3 peers hold the same weights"
        }
        assert len({event["digest"] for event in ends}) == 1
        assert [process.wait() for process in processes] == [0] * 3
    explained = averaging_command("explain", "--summary", *map(str, files)).stdout
    assert "states: the same in all of" in explained

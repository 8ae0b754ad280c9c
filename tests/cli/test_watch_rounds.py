"""Receipts over gRPC and on the command line: watched as they come, written down, and explained."""

import asyncio
import json
import signal
import subprocess
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from averaging import Outcome, Peer, Receipt
from averaging.receipts.receipt_log import loads, read
from tests.support.grpc_fakes import client
from tests.support.processes import DEADLINE, JsonProcess, averaging_command, averaging_process


async def test_a_watcher_gets_every_receipt_until_the_peer_leaves() -> None:
    async with asyncio.timeout(DEADLINE), client() as watcher:
        seen: list[Receipt] = []
        given: list[Receipt] = []
        watches = asyncio.Event()

        async def watch(endpoint: str) -> None:
            async with aclosing(watcher.watch_rounds(endpoint, last=5)) as watched:
                async for one in watched:
                    assert one.skipped == 0
                    seen.append(one.receipt)
                    watches.set()

        async with (
            Peer([torch.ones(5)], run_id="run", group_size=2) as first,
            Peer([torch.zeros(5)], run_id="run", group_size=2, join=[first.endpoint]) as second,
        ):
            given.append((await asyncio.gather(first.average(gather=1), second.average()))[0])
            watching = asyncio.create_task(watch(first.endpoint))
            await watches.wait()
            given.append((await asyncio.gather(first.average(), second.average()))[0])
        await watching  # the first peer's leaving ends it, in order
        assert [receipt.outcome for receipt in given] == [Outcome.AVERAGED] * 2
        assert seen == [replace(receipt, gathered={}) for receipt in given]


def explain(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return averaging_command("explain", *map(str, arguments))


def test_peers_write_receipts_that_explain_shows(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for number in range(2):
        save_file({"w": torch.full((1000,), float(number))}, tmp_path / f"{number}.safetensors")

    def options(number: int) -> list[str]:
        return [
            str(tmp_path / f"{number}.safetensors"),
            *("--run-id", "demo", "--group-size", "2", "--rounds", "2", "--receipts", str(files[number])),
        ]

    with averaging_process("peer", *options(0), "--serve") as first:
        endpoint = first.expect("ready")["endpoint"]
        with (
            JsonProcess("python", "-m", "averaging", "watch", endpoint, "--last", "64", "--json") as watching,
            averaging_process("peer", *options(1), "--join", endpoint) as second,
        ):
            rounds = [second.expect("round") for _ in range(2)]
            assert second.wait() == 0
            first.expect("serving")
            for _ in range(2):
                watching.expect(None)
            first.signal(signal.SIGINT)
            assert first.wait() == 0
            assert watching.wait() == 0
            assert watching.stderr == ""
            watched = [loads(json.dumps(line)) for line in watching.seen]
    with files[0].open("rb") as lines:
        written = read(lines).receipts
    assert watched == [replace(receipt, gathered={}) for receipt in written]
    assert [receipt.averaged for receipt in written] == [True, True, False]  # it looked for another one until the end
    assert [receipt.group_id.hex() for receipt in written[:2]] == [told["group_id"] for told in rounds]

    told = explain(*files)
    assert (told.returncode, told.stderr) == (0, "")
    lines_told = told.stdout.splitlines()
    assert [line[:15] for line in lines_told[1:3]] == ["round 1: 2 of 2", "round 2: 2 of 2"]
    assert all(line.endswith("; all 2 agree") for line in lines_told[1:3])
    assert "averages: the same in all of 2 rounds that can be compared" in lines_told
    assert explain(files[0], tmp_path / "none").returncode == 2

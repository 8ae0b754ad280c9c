"""The example of slow links: what it concludes from what was measured, its links, and the whole in small."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from examples import slow_links
from examples.links import CHUNK_BYTES, Link, relay
from examples.slow_links import Result, Team, verdict
from tests.examples.test_examples import Example

DENSE = Result("int8", 2.0, 10e6, 60.0, 30.0, 6, True, ((20.0, 2.4), (40.0, 2.2), (60.0, 2.0)))
SPARSE = Result("top-k", 2.0, 1e6, 45.0, 9.0, 6, True)


def concluded(sparse: Result, dense: Result = DENSE) -> list[str]:
    return list(verdict(dense, sparse))


def test_the_verdict_is_of_what_was_measured() -> None:
    assert concluded(replace(SPARSE, loss=2.1)) == [
        "top-k sent 10.0 times fewer bytes, and ended at 2.100 instead of 2.000 bits per byte (+5.0%) after 45 instead "
        "of 60 s. Its peers trained 80% of the time, those of int8 50%.",
        "After 45 s top-k was done at 2.100, int8 was at 2.200.",
        "top-k is faster over this link, and int8 is better after the same steps.",
    ]


@pytest.mark.parametrize(
    ("sparse", "told"),
    [
        (replace(SPARSE, loss=1.8), "Over this link top-k is better and faster."),
        (replace(SPARSE, loss=2.2, seconds=70.0), "Over this link int8 is better and faster."),
        (replace(SPARSE, loss=1.8, seconds=70.0), "int8 is faster over this link, and top-k is better after the"),
        (replace(SPARSE, loss=2.005), "The losses are equal within 0.5%; over this link top-k is faster."),
        (replace(SPARSE, loss=1.995, seconds=70.0), "The losses are equal within 0.5%; over this link int8 is faster."),
    ],
)  # fmt: skip
def test_whoever_loses_is_said_to(sparse: Result, told: str) -> None:
    assert concluded(sparse)[-1].startswith(told)


def test_more_bytes_are_said_to_be_more() -> None:
    assert concluded(replace(SPARSE, bytes=20e6))[0].startswith("top-k sent 2.0 times as many bytes")


def test_teams_with_unequal_rounds_are_not_compared() -> None:
    [told] = concluded(replace(SPARSE, rounds=4))
    assert told.startswith("All peers took part in 6 rounds of int8 and in 4 of top-k, so the two cannot be compared")


def test_a_team_counts_bytes_from_its_last_peers_first_step() -> None:
    team = Team("int8", links=[Link(1e6) for _ in range(4)])
    for number, member in enumerate(team.members):
        team.links[number].take(0.0, 1000)  # the model that newcomers download
        team.take(member, {"event": "found"}, 5.0)
    for number, member in enumerate(team.members):
        team.links[number].take(0.0, 500)
        event = {
            "event": "round",
            "outcome": "averaged",
            "members": [""] * (4 - number // 3),
            "dropped": [],
            "seconds": 2,
        }
        team.take(member, event, 6.0)
        team.take(member, {"event": "held_out", "step": 1, "loss": 3.0 + number}, 7.0)
        team.take(member, {"event": "done", "loss": 2.5, "sha256": "ab"}, 9.0 + number)
    assert team.result() == Result("int8", 2.5, 500.0, 7.0, 2.0, 0, True, ((2.0, 3.0),))  # the fourth saw three


def test_a_peer_without_a_result_is_an_error() -> None:
    with pytest.raises(ValueError, match="a peer of int8 ended without a result"):
        Team("int8").result()


def test_a_link_carries_all_connections_one_after_the_other() -> None:
    link = Link(1000.0)
    assert link.take(10.0, 500) == pytest.approx(0.5)
    assert link.take(10.25, 500) == pytest.approx(0.75)
    assert link.take(20.0, 100) == pytest.approx(0.1)  # it was idle
    assert link.passed == 1100


@pytest.mark.asyncio
async def test_a_relay_is_as_slow_as_its_link_and_changes_nothing() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(4 * CHUNK_BYTES))
        await writer.drain()
        writer.close()

    sent = bytes(range(256)) * (4 * CHUNK_BYTES // 256)
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server:
        link = Link(8 * CHUNK_BYTES / 0.4)
        async with relay(link, server.sockets[0].getsockname()[1]) as port:
            begun = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            received = await reader.read(-1)
            writer.close()
    assert received == sent
    assert link.passed == 8 * CHUNK_BYTES
    assert time.monotonic() - begun > 0.39


@pytest.mark.asyncio
async def test_a_peer_that_is_not_there_ends_the_connection() -> None:
    link = Link(1e9)
    async with relay(link, 1) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--steps 0", "argument --steps: must be a whole number above 0, not '0'"),
        ("--mbit nan", "argument --mbit: must be a number above 0, not 'nan'"),
        ("--sync-every 30 --steps 20", "--sync-every must be at most --steps: there would be no round"),
        ("--output /dev/null/there", "cannot write to /dev/null/there: Not a directory; give --output another folder"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(arguments: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        slow_links.main(arguments.split())
    assert ended.value.code == 2
    usage, line = capsys.readouterr().err.splitlines()
    assert usage == "usage: python -m examples.slow_links [options]"
    assert told in line


@pytest.mark.long
@pytest.mark.timeout(400)
def test_both_teams_train_and_the_verdict_has_their_figures(tmp_path: Path) -> None:
    with Example("slow_links", "--steps=20", "--start-steps=20", f"--output={tmp_path}", limit=380) as example:
        printed = example.end(0)
    rows = dict(re.findall(r"^ (int8|top-k) +20/20 +(\d+) ", printed, re.MULTILINE))
    assert rows == {"int8": "2", "top-k": "2"}
    assert re.search(
        r"top-k sent [\d.]+ times fewer bytes, and ended at \d\.\d+ instead of \d\.\d+ bits per byte", printed
    )
    assert "do NOT hold the same bytes" not in printed


@pytest.mark.long
def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    with Example("slow_links", f"--output={tmp_path}") as example:
        example.read_until("one process trains")
        children = psutil.Process(example.pid).children()
        example.interrupt()
        assert example.end(130).endswith("Stopped; all processes have ended.\n")
    assert not [child for child in children if child.is_running()]

"""The command of `--exec`: its result, its time limit, and the end of all its processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from averaging.cli.follow import run_command


async def until(condition: Callable[[], object]) -> None:
    """Waits for other processes."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - nothing tells when they have done it
            await asyncio.sleep(0.01)


async def begins(file: Path) -> int:
    """Returns the process that the command writes to the file."""
    await until(lambda: file.exists() and file.read_text())
    return number_in(file)


def number_in(file: Path) -> int:
    return int(file.read_text())


def lives(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_the_exit_code_and_the_output(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        assert await run_command('echo "$WORD"; exit 3', {"WORD": "hello"}, 20.0, stdout=out.fileno()) == 3
    assert (tmp_path / "out").read_text() == "hello\n"
    assert await run_command("kill -9 $$", {}, 20.0) == -9


async def test_all_processes_end_when_the_time_is_over(tmp_path: Path) -> None:
    command = f"trap '' TERM; sleep 999 & echo $! > {tmp_path}/child; wait; sleep 999"
    running = asyncio.ensure_future(run_command(command, {}, 1.0))
    child = await begins(tmp_path / "child")
    assert await running is None
    await until(lambda: not lives(child))


async def test_all_processes_end_when_it_is_cancelled(tmp_path: Path) -> None:
    running = asyncio.ensure_future(run_command(f"sleep 999 & echo $! > {tmp_path}/child; wait", {}, 999.0))
    child = await begins(tmp_path / "child")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: not lives(child))


async def test_what_it_leaves_in_the_background_goes_on(tmp_path: Path) -> None:
    assert await run_command(f"sleep 999 & echo $! > {tmp_path}/child", {}, 20.0) == 0
    child = number_in(tmp_path / "child")
    try:
        assert lives(child)
    finally:
        os.kill(child, 9)

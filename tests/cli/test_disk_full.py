"""What happens where a file cannot be written: an error that says what to do, nothing lost, and averaging goes on.

The limit of a file's size is a real error of the system's (`EFBIG`), at the same place as a full disk's, and needs no
rights; /dev/full is a full disk for what is written to a stream.
"""

import contextlib
import io
import json
import logging
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from averaging.cli import main
from averaging.cli.files import Output
from averaging.cli.running import CommandError, CommandOutput, Stopped
from averaging.receipts.receipt import Receipt
from tests.cli.test_cli_session import AVERAGED, ScriptedPeer, perform, play, while_looking

TENSORS = {"w": torch.arange(10_000.0)}


@contextlib.contextmanager
def full_disk(nbytes: int = 16) -> Iterator[None]:
    """No file can grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_result_that_finds_no_room_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")
    output = Output(path, overwrite=True)
    with (
        full_disk(),
        pytest.raises(CommandError, match=r"unchanged\. Free disk space, or give another --output") as caught,
    ):
        output.write(TENSORS, None)
    assert (caught.value.exit_code, path.read_bytes()) == (1, b"old")
    assert list(tmp_path.iterdir()) == [path]


def test_a_peer_that_serves_goes_on_and_writes_when_there_is_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out"
    disk = contextlib.ExitStack()

    async def fill(_: ScriptedPeer) -> Receipt:
        assert torch.equal(load_file(path)["w"], torch.ones(2))
        disk.enter_context(full_disk())
        return AVERAGED

    async def free(_: ScriptedPeer) -> Receipt:
        assert torch.equal(load_file(path)["w"], torch.ones(2))  # the last one that could be written
        disk.close()
        return AVERAGED

    with disk:
        session, peer = play([AVERAGED, fill, AVERAGED, free, while_looking], path, rounds=9, serve=True)
        with pytest.raises(Stopped):
            perform(session, peer)
    assert torch.equal(load_file(path)["w"], peer.tensor)
    assert (session.output, session.unwritten) == (str(path), "")
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in told] == ["ready", *["round"] * 2, "unwritten", "round", "unwritten", "round"]
    assert [(event["round"], event["output"]) for event in told if event["event"] == "unwritten"] == [
        (1, str(path)),
        (2, str(path)),
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_a_peer_that_ends_with_its_result_unwritten_says_so(tmp_path: Path) -> None:
    session, peer = play([AVERAGED], tmp_path / "out", serve=False)
    with full_disk(), pytest.raises(CommandError, match="could not be written"):
        perform(session, peer)
    session, peer = play([AVERAGED, while_looking], tmp_path / "out", serve=True)
    with full_disk(), pytest.raises(Stopped):
        perform(session, peer)
    assert session.output is None
    assert "could not be written" in session.unwritten
    assert list(tmp_path.iterdir()) == []


def test_certificates_are_replaced_both_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ca = CliRunner().invoke
    assert ca(main, ["ca", "init"]).exit_code == 0
    assert ca(main, ["ca", "issue", "a", "--host", "x"]).exit_code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    for command in (["init"], ["issue", "a", "--host", "y"], ["issue", "b", "--host", "y"]):
        with full_disk(300):  # a key finds room, its certificate does not
            result = ca(main, ["ca", *command, "--force"])
        assert result.exit_code == 1
        assert "ca cannot be written: File too large; nothing was replaced. Free disk space" in result.stderr
        assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before


def test_a_full_stdout_is_reported_once_and_a_full_stderr_or_a_closed_stdout_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        report = CommandOutput(as_json=True)
        for _ in range(3):
            report.emit({"event": "round"}, "")
        monkeypatch.setattr(sys, "stdout", None)  # as Python starts where nobody has opened one
        report.emit({"event": "round"}, "")
        monkeypatch.undo()
        monkeypatch.setattr(sys, "stderr", full)
        with report.logging(0):
            logging.getLogger("averaging.receipts").warning("a receipt could not be written")
        monkeypatch.undo()
        told = capsys.readouterr().err
        with contextlib.suppress(OSError):
            full.close()
    assert told == "cannot write to stdout: No space left on device; the command continues, free space there\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_reader_that_goes_away_stops_nothing(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    with contextlib.suppress(BrokenPipeError), os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        report = CommandOutput(as_json=as_json)
        report.emit({"event": "ready"}, "ready")
        assert os.read(reader, 100).rstrip() == (b'{"event": "ready"}' if as_json else b"ready")
        os.close(reader)
        for _ in range(2):
            report.emit({"event": "round"}, "round")
        monkeypatch.undo()
    told = "cannot write to stdout: its reader has closed it; the command continues, Ctrl+C ends it\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_that_stdout_lacks_stop_nothing(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    with io.TextIOWrapper(written, encoding=encoding) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with contextlib.suppress(CommandError):
            main(["explain", "none"], standalone_mode=False)
        CommandOutput(as_json=False).emit({}, "run \u2014")
        assert written.getvalue() == b"run \\u2014\n"
        monkeypatch.undo()

"""What the demo concludes, and how it divides its text."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import examples.demo.__main__ as demo
from examples import train
from examples.demo.record import Member, Record, judge
from examples.demo.view import View
from examples.sources import divide


def record(*peers: tuple[float, str], alone: float = 3.0) -> Record:
    """Of a run whose peers ended with these losses and digests; its first peer was killed."""
    first = Member("peer 1", 1)
    first.killed()
    others = [
        Member(f"peer {number}", number, result=loss, sha256=digest) for number, (loss, digest) in enumerate(peers, 2)
    ]
    return Record(100, [first, Member("alone", 1, alone=True, result=alone), *others])


def test_better_with_the_same_bytes_is_good() -> None:
    verdict = judge(record((2.4, "a"), (2.4, "a")))
    assert verdict.good
    assert str(verdict) == (
        "The averaged model is better than the one trained alone: "
        "2.400 against 3.000 bits per byte on held-out text, 20.0 % less."
    )


@pytest.mark.parametrize("loss", [3.0, 3.5, float("nan")])
def test_not_better_is_said_and_not_good(loss: float) -> None:
    verdict = judge(record((loss, "a"), (loss, "a")))
    assert verdict.same_bytes
    assert not verdict.good
    assert "NOT better" in str(verdict)


def test_different_bytes_are_not_good_and_the_worst_peer_counts() -> None:
    verdict = judge(record((2.4, "a"), (2.9, "b")))
    assert verdict.averaged == 2.9
    assert not verdict.same_bytes
    assert not verdict.good


def test_without_all_results_there_is_no_verdict() -> None:
    unfinished = record((2.4, "a"))
    unfinished.members.append(Member("peer 3", 3))
    with pytest.raises(ValueError, match="without a result"):
        judge(unfinished)


def test_what_a_killed_peer_had_still_in_its_pipe_does_not_revive_it() -> None:
    peer = Member("peer 1", 1)
    peer.take({"event": "step", "step": 7, "loss": 3.0})
    peer.killed()
    assert peer.take({"event": "step", "step": 8, "loss": 2.0}) is None
    assert (peer.state, peer.step, peer.killed_at) == ("KILLED", 7, 7)


def test_endpoints_in_a_line_get_their_names_but_not_within_longer_ones() -> None:
    peers = [Member("peer 1", 1, endpoint="127.0.0.1:44"), Member("peer 2", 2, endpoint="127.0.0.1:445")]
    line = Record(1, peers).explain("lost 127.0.0.1:445 in a round", peers[0])
    assert line == "lost peer 2 (127.0.0.1:445) in a round"


@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_parts_and_held_out_text_are_disjoint_and_about_equal(tmp_path: Path, parts: int) -> None:
    files = []
    for number in range(200):
        file = tmp_path / f"{number:03}.py"
        file.write_bytes(b"x" * (number % 13 + 1))
        files.append(file)
    sources = divide(files, parts)
    assert sorted(path for block in (*sources.parts, sources.held_out) for path in block) == files
    assert sources.held_out == tuple(files[7::8])
    assert all(tuple(sorted(block)) == block for block in sources.parts)
    sizes = [sum(path.stat().st_size for path in block) for block in sources.parts]
    assert max(sizes) - min(sizes) <= 2 * 13


Demo = Callable[[str], tuple[object, str]]
"""Runs the demo with a command line; returns its exit code, or its last word, and what it has printed."""


@pytest.fixture
def run_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Demo:
    def run(arguments: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["demo", *arguments.split()])
        with pytest.raises(SystemExit) as ended:
            demo.main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out + printed.err

    return run


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--steps 0", "--steps must be at least 10"),
        ("--sync-every 0", "--sync-every at least 1"),
        ("--peers 1", "--peers must be at least 2"),
        ("--peers 500", "too little text for 500 peers; give --peers a smaller number"),
    ],
)
def test_what_cannot_work_is_reported_before_anything_starts(
    run_demo: Demo, arguments: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(*_: object) -> None:
        raise AssertionError("it began")

    monkeypatch.setattr(demo, "Conductor", begin)
    code, printed = run_demo(f"--quick --output {tmp_path} {arguments}")
    assert told in f"{code} {printed}"


@pytest.mark.parametrize("arguments", ["--part 0", "--part 5", "--peers 0", "--sync-every 0", "--steps 0"])
def test_a_process_of_the_demo_refuses_what_cannot_work(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        train.parse_arguments()
    assert ended.value.code == 2
    assert "must be" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_reported(run_demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "folder"):
        code, _ = run_demo(f"--quick --output {output}")
        assert str(code).startswith(f"cannot write to {output}: ")
        assert str(code).endswith("; give --output another folder")


def test_logs_that_cannot_be_written_are_reported(run_demo: Demo, tmp_path: Path) -> None:
    for name in ("alone", "peer-1"):
        (tmp_path / f"{name}.log").mkdir()
    code, printed = run_demo(f"--quick --output {tmp_path}")
    assert code == 1
    assert ".log cannot be written: Is a directory; give --output another folder" in " ".join(printed.split())


class Trained:
    """Stands in for the conductor of processes that have been trained."""

    def __init__(self, options: object, parts: object, record: Record, view: View) -> None:
        self.record, self.view = record, view

    async def conduct(self) -> None:
        self.record.members += record((2.4, "a")).members
        self.view.say("one … other")


def test_a_terminal_whose_encoding_lacks_a_letter_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setattr(sys, "argv", ["demo", "--quick", f"--output={tmp_path}"])
    monkeypatch.setattr(demo, "Conductor", Trained)
    monkeypatch.setattr(demo, "draw", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == 0
    printed.seek(0)
    assert "one \\u2026 other" in printed.read()


def test_no_curves_are_named_that_could_not_be_drawn(
    run_demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo, "Conductor", Trained)
    monkeypatch.setattr(demo, "draw", full)
    code, printed = run_demo(f"--quick --output {tmp_path}")
    assert code == 0
    assert "could not be written" in printed
    assert "The averaged model is better" in printed
    assert "Curves: " not in printed

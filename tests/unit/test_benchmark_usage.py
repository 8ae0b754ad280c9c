"""Wrong arguments of benchmarks are told before anything is measured, or waited for without end."""

from __future__ import annotations

import json
import signal
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from benchmarks import allreduce, codecs, convergence, gossip, output, overlap, recovery, scale, wan


@pytest.mark.parametrize(
    ("benchmark", "arguments", "told"),
    [
        (gossip, ["--peers", "0"], "at least 2 peers"),
        (gossip, ["--records", "0"], "1 record"),
        (gossip, ["--simulate", "--seconds", "nan"], "--seconds above 0"),
        (recovery, ["--kills", "0"], "at least 1 kill"),
        (recovery, ["--matchmaking-time", "0"], "--matchmaking-time above 0"),
        (recovery, ["--hivemind", "/none/python"], "/none/python: there is no such program"),
        (allreduce, ["--peers", "1"], "at least 2 peers"),
        (allreduce, ["--hivemind", "/none/python"], "/none/python: there is no such program"),
    ],
)
def test_a_wrong_argument_is_told(
    benchmark: object,
    arguments: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def begin(*_: object) -> None:
        raise AssertionError("it began")

    for name in ("asyncio", "machine", "compare"):  # with these they begin
        if hasattr(benchmark, name):
            monkeypatch.setattr(benchmark, name, begin)
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    with pytest.raises(SystemExit) as caught:
        benchmark.main()  # type: ignore[attr-defined]
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", [allreduce, codecs, convergence, overlap, recovery, scale, wan])
def test_a_folder_that_cannot_be_made_is_told_before_anything_is_measured(
    benchmark: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin(*_: object) -> None:
        raise AssertionError("it began")

    (tmp_path / "file").touch()
    for name in ("asyncio", "machine", "measure", "compare"):
        if hasattr(benchmark, name):
            monkeypatch.setattr(benchmark, name, begin)
    monkeypatch.setattr(wan, "check_tools", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["benchmark", "--output", str(tmp_path / "file")])
    with pytest.raises(SystemExit) as caught:
        benchmark.main()  # type: ignore[attr-defined]
    assert caught.value.code == 2
    assert f"--output {tmp_path / 'file'}: File exists; give another folder" in capsys.readouterr().err


def test_results_that_cannot_be_written_spoil_nothing_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    results = tmp_path / "results.json"
    output.write(results, {"of": "hours"})
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space"):
            output.write(results, {"of": "more hours"})
    assert json.loads(results.read_text()) == {"of": "hours"}
    assert list(tmp_path.iterdir()) == [results]


@pytest.mark.parametrize("benchmark", [allreduce, codecs, convergence, overlap, recovery, scale, wan])
def test_recorded_results_are_overwritten_only_on_purpose(benchmark: object, monkeypatch: pytest.MonkeyPatch) -> None:
    class ParsedError(Exception):
        pass

    def parse(parser: ArgumentParser) -> None:
        raise ParsedError(parser.get_default("output"))

    monkeypatch.setattr(ArgumentParser, "parse_args", parse)
    with pytest.raises(ParsedError) as caught:
        benchmark.main()  # type: ignore[attr-defined]
    (folder,) = caught.value.args
    assert Path("runs/benchmarks") in (folder, *folder.parents)

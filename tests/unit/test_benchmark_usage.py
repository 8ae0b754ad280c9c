"""Wrong arguments of benchmarks are told before anything is measured, or waited for without end."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from benchmarks import allreduce, codecs, convergence, gossip, overlap, recovery, scale, wan


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
def test_recorded_results_are_overwritten_only_on_purpose(benchmark: object, monkeypatch: pytest.MonkeyPatch) -> None:
    class ParsedError(Exception):
        pass

    def parse(parser: ArgumentParser) -> None:
        raise ParsedError(parser.get_default("output"))

    monkeypatch.setattr(ArgumentParser, "parse_args", parse)
    with pytest.raises(ParsedError) as caught:
        benchmark.main()  # type: ignore[attr-defined]
    (output,) = caught.value.args
    assert Path("runs/benchmarks") in (output, *output.parents)

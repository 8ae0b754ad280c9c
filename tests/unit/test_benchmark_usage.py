"""Wrong arguments of benchmarks are told before anything is measured, or waited for without end."""

from __future__ import annotations

import sys

import pytest

from benchmarks import allreduce, gossip, recovery


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

"""Each benchmark runs with its smallest input; wrong arguments are told before anything is measured."""

import json
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.runner import make_folder, make_parser
from benchmarks.wan.limits import best_shares, equal_shares, limit, transfer
from benchmarks.workers import ROOT

SMALLEST = {
    "allreduce": "--peers 2 --kib 64 --tensors 4 --codecs none --systems averaging --rounds 1",
    "codecs": "--codes float16 --mib 4 --passes 1",
    "convergence": "--list --rows page",
    "feed": "--environments 1 --seconds 0.5 --repeats 1",
    "following": "--target loopback --mib 1 --repeats 1",
    "scale": "--real 2 --simulate 8 --one-key --rounds 1 --turns 1 --seconds 0.1",
    "recovery": "--kills 1 --group-wait 0.5",
}
"""`unequal` has tests/strategies/test_unequal_processes.py; `gpu` and `wan` need a GPU and root."""

SLOW = ("feed", "following", "recovery", "scale")

WRONG = {
    "allreduce": ("--kib 1", "1 KiB is too little for --tensors gpt2"),
    "codecs": ("--passes 0", "1 pass"),
    "convergence": ("--cells nothing", "there are no such cells"),
    "feed": ("--atropos /none/python", "/none/python: there is no such program"),
    "following": ("--repeats 0", "1 repeat"),
    "gpu": ("--mib 100", "--mib must be a multiple of 64"),
    "scale": ("--simulate 12", "there must be a power of 2 of peers"),
    "recovery": ("--group-wait inf", "--group-wait above 0"),
    "unequal": ("--slower 0", "--slower at least 1"),
    "wan": ("--rounds 0", "1 round"),
}


def ended(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in SLOW else name for name in SMALLEST]
)
def test_it_runs(name: str, tmp_path: Path) -> None:
    done = ended(name, *SMALLEST[name].split(), "--output", str(tmp_path))
    assert "Traceback" not in done.stderr
    assert done.returncode in ((0, 1) if name == "following" else (0,)), done.stderr
    written = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert bool(written) is (name != "convergence")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_reported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, told = WRONG[name]
    found = find_spec(f"benchmarks.{name}")
    package = found is not None and found.submodule_search_locations is not None
    benchmark = import_module(f"benchmarks.{name}.__main__" if package else f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments.split(), "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        benchmark.main()
    assert caught.value.code == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        make_folder(make_parser(""), tmp_path / "file")
    assert f"--output {tmp_path / 'file'}: File exists; give another folder" in capsys.readouterr().err


# The emulated links, whose devices need root


def test_equal_links_carry_twice_what_a_peer_does_not_reduce_itself() -> None:
    nbytes = 64 * 2**20
    assert transfer(nbytes, [12.5e6] * 4, equal_shares(4)) == pytest.approx(2 * nbytes * 3 / 4 / 12.5e6)
    assert limit(nbytes, [12.5e6] * 4, equal_shares(4), 0.04) == pytest.approx(8.053 + 0.08, abs=1e-3)


def test_a_peer_at_a_tenth_reduces_nothing_and_its_own_tensors_are_the_limit() -> None:
    rates = [125e6, 125e6, 125e6, 12.5e6]
    assert best_shares(rates) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert transfer(1e9, rates, best_shares(rates)) == pytest.approx(1e9 / 12.5e6)

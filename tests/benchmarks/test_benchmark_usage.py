"""Wrong arguments of benchmarks are told before anything is measured; Ctrl+C ends them in one line."""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from argparse import ArgumentParser
from pathlib import Path

import pytest

import benchmarks
import benchmarks.allreduce.__main__ as allreduce
import benchmarks.convergence.__main__ as convergence
import benchmarks.following.__main__ as following
import benchmarks.scale.__main__ as scale
import benchmarks.wan.__main__ as wan
from averaging.testing import virtual_time
from averaging.testing.transport import MemoryNetwork
from benchmarks import codecs, feed, gossip, gpu, output, overlap, recovery, site_memory
from benchmarks.allreduce.worker import Memory, process_tree
from benchmarks.convergence import runner as convergence_runner
from benchmarks.convergence.cases import Cell
from benchmarks.convergence.train import Recipe
from benchmarks.workers import ROOT, without_interrupts


@pytest.mark.parametrize(
    ("benchmark", "arguments", "told"),
    [
        (gossip, ["--peers", "0"], "at least 2 peers"),
        (gossip, ["--records", "0"], "1 record"),
        (gossip, ["--simulate", "--seconds", "nan"], "--seconds above 0"),
        (gossip, ["--simulate", "--seconds", "inf"], "--seconds above 0"),
        (scale, ["--seconds", "nan"], "--seconds above 0"),
        (scale, ["--seconds", "0"], "--seconds above 0"),
        (scale, ["--one-key", "0"], "at least 2 peers"),
        (scale, ["--rumours", "64", "1"], "at least 2 peers"),
        (convergence, ["--minutes", "0"], "--minutes: must be a number above 0, not '0'"),
        (convergence, ["--cases", "joined,none"], "no such case: none; there are joined"),
        (convergence, ["--seeds", "0,7"], "--seeds: '7' is none of 0, 1"),
        (convergence, ["--processes", "0"], "--processes must be 1 to 64, not 0"),
        (convergence, ["--cases", "gradients", "--by", "plain"], "there are no such cells"),
        (convergence, ["--rows", "some"], "--rows: invalid choice: 'some'"),
        (convergence, ["--merge", "/nowhere.json"], "--merge /nowhere.json: there is no such file"),
        (convergence, ["--lr", "nan"], "--lr: must be a number above 0, not 'nan'"),
        (recovery, ["--group-wait", "inf"], "--group-wait above 0"),
        (recovery, ["--kills", "0"], "at least 1 kill"),
        (recovery, ["--group-wait", "0"], "--group-wait above 0"),
        (recovery, ["--hivemind", "/none/python"], "/none/python: there is no such program"),
        (allreduce, ["--kib", "0"], "1 MiB or 1 KiB"),
        (allreduce, ["--kib", "1"], "1 KiB is too little for --tensors gpt2"),
        (gpu, ["--mib", "100"], "--mib must be a multiple of 64"),
        (gpu, ["--steps", "1"], "--steps at least 5"),
        (feed, ["--environments", "8", "0"], "at least 1 environment"),
        (feed, ["--seconds", "nan"], "--seconds above 0"),
        (feed, ["--atropos", "/none/python"], "/none/python: there is no such program"),
        (following, ["--followers", "0"], "at least 1 follower"),
        (site_memory, ["--ranks", "4", "0"], "at least 1 MiB, 1 rank"),
        (site_memory, ["--mib", "0"], "at least 1 MiB, 1 rank"),
        (allreduce, ["--peers", "1"], "at least 2 peers"),
        (allreduce, ["--hivemind", "/none/python"], "/none/python: there is no such program"),
    ],
)
def test_a_wrong_argument_is_reported(
    benchmark: object,
    arguments: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def begin(*_: object) -> None:
        raise AssertionError("it began")

    for name in ("asyncio", "machine", "compare", "train", "make_folder"):  # with these they begin
        if hasattr(benchmark, name):
            monkeypatch.setattr(benchmark, name, begin)
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    with pytest.raises(SystemExit) as caught:
        benchmark.main()  # type: ignore[attr-defined]
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", [allreduce, codecs, convergence, overlap, recovery, scale, site_memory, wan])
def test_a_folder_that_cannot_be_made_is_reported_before_anything_is_measured(
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
        path.open("w").close()
        raise OSError(28, "No space left on device")

    results = tmp_path / "results.json"
    output.write(results, {"of": "hours"})
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space"):
            output.write(results, {"of": "more hours"})
    assert json.loads(results.read_text()) == {"of": "hours"}
    assert list(tmp_path.iterdir()) == [results]


@pytest.mark.parametrize("benchmark", [allreduce, codecs, convergence, overlap, recovery, scale, site_memory, wan])
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


NAMES = ["allreduce", "codecs", "convergence", "gossip", "overlap", "recovery", "scale", "wan"]


def interrupted(module: str, folder: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """What a program comes to that gets SIGINT in the middle of its first import, once these lines are done."""
    (folder / "argparse.py").write_text("\n".join(("import signal", *lines, "signal.raise_signal(signal.SIGINT)")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
    command = [sys.executable, "-m", module]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c_ends_a_benchmark_in_one_line(name: str, tmp_path: Path) -> None:
    ended = interrupted(f"benchmarks.{name}", tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "stopped; no results were written\n")


def test_ctrl_c_reports_what_has_been_written(tmp_path: Path) -> None:
    wrote = "from benchmarks.output import write; from pathlib import Path; write(Path('a.json'), 1)"
    # `output` imports what stands here for argparse, too, but only once.
    ended = interrupted("benchmarks.gossip", tmp_path, "class ArgumentParser: pass", wrote)
    assert (ended.returncode, ended.stderr) == (130, "stopped; what was measured until then is in a.json\n")
    assert (tmp_path / "a.json").read_text() == "1\n"


def test_another_error_is_reported_as_it_is(tmp_path: Path) -> None:
    ended = interrupted("benchmarks.gossip", tmp_path, "raise OSError('no disk')")
    assert ended.returncode == 1
    assert ended.stderr.endswith("OSError: no disk\n")


def test_only_a_benchmark_changes_how_a_program_ends() -> None:
    assert sys.excepthook is not benchmarks._end


def interrupts_its_parent_and_works_on(*_: object) -> None:
    os.kill(os.getppid(), signal.SIGINT)
    threading.Event().wait()


def convergence_run(folder: Path) -> int:
    """Runs a cell of the convergence benchmark."""
    results = convergence_runner.Results(folder / "convergence.json", Recipe())
    job = convergence_runner.Job(Cell("random", 4, "plain", "joined", 0))
    return convergence_runner.Runner(Recipe(), results, folder, 1, math.inf).run([job])


def test_ctrl_c_ends_the_processes_that_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would train for an hour, in a pool that waits for them."""
    monkeypatch.setattr(convergence_runner, "run", interrupts_its_parent_and_works_on)
    with pytest.raises(KeyboardInterrupt):
        convergence_run(tmp_path)
    assert multiprocessing.active_children() == []


def is_killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_a_process_that_trains_and_is_killed_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(convergence_runner, "run", is_killed)
    arguments = ["--cases", "joined", "--starts", "random", "--peers", "4", "--seeds", "0", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["convergence", *arguments])
    with pytest.raises(SystemExit) as caught:
        convergence.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "random/4/plain/joined/0: begins",
        "a training process was killed, perhaps because memory ran out; run the same command again to continue",
    ]
    assert multiprocessing.active_children() == []


def test_processes_that_others_end_do_not_hear_ctrl_c() -> None:
    """The terminal sends it to all; each would write a traceback."""
    command = [sys.executable, "-c", "import signal; signal.raise_signal(signal.SIGINT); print('goes on')"]
    with without_interrupts():
        started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert started.communicate()[0] == "goes on\n"


def test_a_peer_that_ctrl_c_met_before_its_process_was_there_has_nothing_to_kill() -> None:
    asyncio.run(recovery.Process("averaging", sys.executable, "", 1.0).kill())


def test_a_peer_whose_process_has_ended_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'no module named hivemind' >&2\n")
    program.chmod(0o755)
    monkeypatch.setattr(recovery, "LIMIT", 1e9)
    done = asyncio.run(recovery.measure("hivemind", str(program), 2, 1.0, 0))
    assert done["failures"] == [
        f"kill {number}: no start, because a process ended: no module named hivemind" for number in (1, 2)
    ]


def test_ctrl_c_lets_the_peers_of_the_gossip_benchmark_leave_first() -> None:
    """Else asyncio cancels their tasks together with gRPC's own, whose calls crash then."""
    network, leaving = MemoryNetwork(random.Random(0)), []

    async def interrupted() -> None:
        async with gossip.hosting() as hosts:
            transport = network.transport("a:1")
            hosts.append(gossip.Host(transport, lambda name: gossip.simulated("x", name, transport, random.Random(0))))
            await hosts[0].ready()
            leaving.extend(hosts)
            raise asyncio.CancelledError

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await interrupted()
        assert [host.task.done() for host in leaving] == [True]

    virtual_time.run(main())


def test_a_child_that_has_just_ended_holds_no_memory() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its parent has not asked for its status yet
        assert child.pid in process_tree()
        assert Memory.now().held > 0


def test_the_feeds_table_has_medians_and_ratios() -> None:
    results = [
        feed.Figures(system, 8, batches, batches * feed.BATCH_SIZE, cpu)
        for system, batches, cpu in (("ours", 9.0, 1.0), ("run-api", 2.0, 4.0), ("ours", 6.0, 2.0), ("ours", 7.0, 3.0))
    ]
    assert feed.table(results).splitlines()[2:] == [
        "| 8 | ours | 7.0 | 448 | 3.5 × | 2.00 |",
        "| 8 | run-api | 2.0 | 128 | 1.0 × | 4.00 |",
    ]
    assert feed.table(results[:1]).splitlines()[2:] == ["| 8 | ours | 9.0 | 576 | - | 1.00 |"]

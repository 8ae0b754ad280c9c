"""`averaging` as people and programs run it: real processes, real files, real signals."""

import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from averaging.cli import main
from tests.support.ports import free_address
from tests.support.processes import DEADLINE, JsonProcess, averaging_command, averaging_process
from tests.support.selection import rest_is_long

Start = Callable[..., JsonProcess]
PAIR = ("--run-id", "demo", "--group-size", "2")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `averaging …`; whatever still runs at the end of the test is killed."""
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(averaging_process(*map(str, arguments)))


def model(value: float) -> dict[str, torch.Tensor]:
    return {
        "layer.weight": torch.arange(600.0).reshape(20, 30) * value,
        "layer.bias": torch.full((7,), value, dtype=torch.bfloat16),
        "scale": torch.tensor(value, dtype=torch.float64),
        "empty": torch.empty(0, 4),
    }


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three files with the same tensors, scaled by 1, 2 and 3."""
    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for value, path in enumerate(paths, 1):
        save_file(model(float(value)), path, {"owner": path.stem})
    return paths


def assert_holds(path: Path, value: float) -> None:
    found = load_file(path)
    expected = model(value)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


def out(path: Path) -> Path:
    return path.with_name(f"{path.stem}-mean.safetensors")


def command(*arguments: str | Path | float) -> subprocess.CompletedProcess[str]:
    """Runs `averaging …` to its end."""
    return averaging_command(*map(str, arguments))


def test_a_peer_that_the_other_cannot_reach_leaves_no_half_average(start: Start, files: list[Path]) -> None:
    limits = ("--round-timeout", 3, "--retries", 0)
    first = start("peer", files[0], *PAIR, *limits, "--output", out(files[0]))
    join = first.expect("ready")["join"]
    second = start(
        "peer", files[1], *PAIR, *limits, "--join", join, "--advertise", free_address(), "--output", out(files[1])
    )
    assert [first.wait(), second.wait()] == [1, 1]
    assert not any(out(path).exists() for path in files)


def test_two_peers_average_their_files(start: Start, files: list[Path]) -> None:
    first = start("peer", files[0], *PAIR, "--output", out(files[0]))
    ready = first.expect("ready")
    second = start("peer", files[1], *PAIR, "--join", ready["join"], "--output", out(files[1]), "--weight", 3)
    endpoints = {ready["endpoint"], second.expect("ready")["endpoint"]}
    for process, path in zip((first, second), files, strict=False):
        assert process.wait() == 0, process.stderr
        assert process.stderr == ""
        assert process.other_lines == []
        assert [event["event"] for event in process.seen] == ["ready", "round", "done"]
        ready, averaged, done = process.seen
        assert ready["endpoint"] in endpoints
        assert ready["join"] == ready["endpoint"]
        assert ready["schema_hash"] == first.seen[0]["schema_hash"]
        assert (ready["run_id"], ready["mode"], ready["tensors"]) == ("demo", "node", 4)
        assert (averaged["round"], averaged["dropped"], averaged["dropped_reasons"]) == (1, [], {})
        assert set(averaged["members"]) == endpoints
        assert averaged["gathered"] == dict.fromkeys(endpoints)
        assert 0 < averaged["allreduce_seconds"] <= averaged["seconds"]
        assert averaged["bytes_sent"] > 0
        assert averaged["bytes_received"] > 0
        assert (done["rounds"], done["output"]) == (1, str(out(path)))
        assert_holds(out(path), (1 * 1 + 3 * 2) / 4)
        with safe_open(out(path), framework="pt") as file:
            assert file.metadata() == {"owner": path.stem}
    assert out(files[0]).read_bytes()[-100:] == out(files[1]).read_bytes()[-100:]
    assert_holds(files[0], 1.0)


def test_several_files_are_averaged_without_a_run(start: Start, files: list[Path], tmp_path: Path) -> None:
    mean = tmp_path / "mean.safetensors"
    process = start("peer", *files, "--output", mean)
    assert process.wait() == 0, process.stderr
    assert process.seen == [{"event": "done", "files": 3, "output": str(mean)}]
    assert_holds(mean, 2.0)
    save_file({"layer.bias": torch.ones(7)}, tmp_path / "other.safetensors")
    for arguments, complaint in [
        ((files[0], tmp_path / "other.safetensors", "--output", tmp_path / "no"), "differs from"),
        ((*files, "--join", "127.0.0.1:1", "--output", tmp_path / "no"), "leave out --join; a peer of a run"),
        ((*files, "--weight", "2", "--output", tmp_path / "no"), "leave out --weight"),
        (files, "give --output"),
    ]:
        result = CliRunner().invoke(main, ["peer", *map(str, arguments)])
        assert result.exit_code == 2
        assert complaint in " ".join(result.output.split())
    assert not (tmp_path / "no").exists()


def test_counters_and_excluded_tensors_stay_as_they_are(start: Start, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for value, path in enumerate(paths, 1):
        layer = {"0.weight": torch.full((3,), float(value)), "head.weight": torch.full((2,), float(value))}
        save_file(layer | {"1.num_batches_tracked": torch.tensor(10 * value)}, path)
    first = start("peer", paths[0], *PAIR, "--output", out(paths[0]), "--exclude", "head.*")
    ready = first.expect("ready")
    assert (ready["tensors"], ready["kept"]) == (1, ["1.num_batches_tracked", "head.weight"])
    second = start("peer", paths[1], *PAIR, "--output", out(paths[1]), "--only", "0.*", "--join", ready["join"])
    for value, (process, path) in enumerate(zip((first, second), paths, strict=True), 1):
        assert process.wait() == 0, process.stderr
        found = load_file(out(path))
        assert torch.equal(found["0.weight"], torch.full((3,), 1.5))
        assert torch.equal(found["head.weight"], torch.full((2,), float(value)))
        assert found["1.num_batches_tracked"].item() == 10 * value


@pytest.mark.parametrize("number", rest_is_long([signal.SIGTERM, signal.SIGINT]))
def test_a_serving_peer_leaves_in_order(start: Start, files: list[Path], number: signal.Signals) -> None:
    serve = (*PAIR, "--serve", "--group-wait", 2)
    staying = start("peer", files[0], *serve, "--output", out(files[0]))
    join = ("--join", staying.expect("ready")["join"])
    leaving = start("peer", files[1], *serve, *join, "--rounds", 1, "--output", out(files[1]))
    assert leaving.expect("serving")["output"] == str(out(files[1]))
    assert_holds(out(files[1]), 1.5)
    leaving.signal(number)
    assert leaving.wait() == 0, leaving.stderr
    (done,) = leaving.events("done")
    assert done["rounds"] == len(leaving.events("round")) >= 1
    assert_holds(out(files[1]), 1.5)
    newcomer = start("peer", files[2], *PAIR, *join)
    members = newcomer.expect("round")["members"]
    assert newcomer.wait() == 0, newcomer.stderr
    assert set(members) == {staying.seen[0]["endpoint"], newcomer.seen[0]["endpoint"]}
    while staying.expect("round")["members"] != members:
        pass
    staying.signal(number)
    assert staying.wait() == 0, staying.stderr
    for process in (staying, leaving, newcomer):
        assert process.events("error") == []
        assert process.stderr == ""
    assert_holds(out(files[0]), (1.5 + 3) / 2)


@pytest.mark.parametrize(("number", "code"), rest_is_long([(signal.SIGTERM, 143), (signal.SIGINT, 130)]))
def test_a_signal_without_serve_writes_nothing(
    start: Start, files: list[Path], number: signal.Signals, code: int
) -> None:
    alone = start("peer", files[0], *PAIR, "--output", out(files[0]))
    alone.expect("ready")
    alone.signal(number)
    assert alone.wait() == code
    (error,) = alone.events("error")
    assert error["message"] == f"stopped by {number.name} after 0 of 1 round; nothing was written"
    assert alone.stderr == f"Error: {error['message']}\n"
    assert not out(files[0]).exists()


def test_a_peer_that_finds_nobody_says_so(files: list[Path]) -> None:
    result = command("peer", files[0], *PAIR, "--round-timeout", 1, "--output", out(files[0]))
    assert result.returncode == 1
    assert "no group within 1." in result.stderr
    assert "no other peer is in the run: start more peers of it, or wait longer" in result.stderr
    assert re.search(r"\(this peer was given no --join, so the others must join 127\.0\.0\.1:\d+, or", result.stderr)
    assert "Nothing was written" in result.stderr
    assert "Traceback" not in result.stderr
    assert not out(files[0]).exists()


def test_a_peer_that_is_waited_for_is_reported_while_a_peer_joins(start: Start, files: list[Path]) -> None:
    arguments = ("peer", files[0], *PAIR, "--join", "127.0.0.1:1", "--join-timeout", 3)
    told = start(*arguments)
    result = command(*arguments)
    assert told.wait() == 1
    assert result.returncode == 1
    assert "127.0.0.1:1: connection refused" in result.stderr
    assert "Check the addresses" in result.stderr
    assert "Traceback" not in result.stderr
    reports = told.events("joining")  # when they come say the tests of discovery
    assert reports
    assert all(report["waiting_for"] == {"127.0.0.1:1": "connection refused"} for report in reports)
    assert {report["timeout"] for report in reports} == {3}
    moments = [report["seconds"] for report in reports]
    assert moments == sorted(moments)
    assert moments[0] >= 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("joining: ")]
    assert lines
    assert re.match(r"joining: no peer to join has answered for \d s \(127.0.0.1:1: connection refused\)", lines[0])
    assert result.stdout == ""


def test_a_state_is_what_its_donor_holds(start: Start, files: list[Path], tmp_path: Path) -> None:
    join = start("peer", files[1], *PAIR, "--serve").expect("ready")["join"]
    target = tmp_path / "state.safetensors"
    download = start("state", join, "--output", target)
    assert download.wait() == 0, download.stderr
    started, done = download.seen
    nbytes = sum(tensor.nbytes for tensor in model(2.0).values())
    assert started == {"event": "started", "version": 0, "tensors": 4, "bytes": nbytes}
    assert done == started | {"event": "done", "user": {}, "output": str(target)}
    found = load_file(target)
    for name, tensor in load_file(files[1]).items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
    with safe_open(target, framework="pt") as file:
        assert file.metadata() == {"averaging.version": "0", "averaging.user": "{}"}

    again = command("state", join, "--output", target)
    assert again.returncode == 2
    assert "give --overwrite" in again.stderr
    again = command("state", join, "--output", target, "--overwrite")
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.splitlines()[-1] == f"done: version 0, 4 tensors, 2.4 KiB, wrote {target}"

    small = command("state", join, "--output", tmp_path / "none", "--max-bytes", 100)
    assert small.returncode == 1
    assert f"it announces {nbytes} bytes, more than the 100 of --max-bytes" in small.stderr
    assert not (tmp_path / "none").exists()


def test_states_that_do_not_come(start: Start, files: list[Path], tmp_path: Path) -> None:
    join = start("peer", files[0], *PAIR, "--serve", "--no-share-state").expect("ready")["join"]
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system accepts connections, and nobody reads
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for donor, reason in ((join, "it shares no state"), (address, "silent for 1 s"), ("127.0.0.1:1", "refused")):
            result = command("state", donor, "--output", tmp_path / "none", "--timeout", 1)
            assert result.returncode == 1
            assert f"{donor}: " in result.stderr
            assert reason in result.stderr
            assert "Traceback" not in result.stderr
    assert result.stderr.endswith("nothing was changed; check the address, and that a peer is up there\n")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "means", rest_is_long([{}, {"TERM": "dumb"}, {"TERM": "xterm", "PYTHONIOENCODING": "latin-1"}]), ids=str
)
def test_a_terminal_shows_progress(start: Start, files: list[Path], means: dict[str, str]) -> None:
    join = start("peer", files[0], *PAIR, "--serve").expect("ready")["join"]
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "averaging", "peer", str(files[1]), *PAIR, "--join", join, "-v"],
        stdout=slave,
        stderr=slave,
        env=os.environ | {"TERM": "xterm"} | means,
    ) as process:
        os.close(slave)
        shown = b""
        while chunk := read_terminal(master):
            shown += chunk
        assert process.wait(DEADLINE) == 0, shown
    os.close(master)
    assert b"looking for a group" in shown
    assert (b"\r\x1b[K" in shown) == (means.get("TERM") != "dumb")  # the line changes in its place
    assert f"averaged with {join} in".encode() in shown
    assert b"INFO averaging" in shown
    assert b"Traceback" not in shown


def test_a_terminal_that_is_closed_ends_no_peer(files: list[Path]) -> None:
    master, slave = pty.openpty()
    line = [sys.executable, "-m", "averaging", "peer", str(files[0]), *PAIR, "--serve"]
    with subprocess.Popen(line, stdout=slave, stderr=slave, env=os.environ | {"TERM": "xterm"}) as process:
        os.close(slave)
        shown = b""
        while b"looking for a group" not in shown and (chunk := read_terminal(master)):
            shown += chunk
        found = re.search(rb"--join (\S+)", shown)
        assert found is not None, shown.decode()
        os.close(master)  # whoever shrugs off SIGHUP, as with `disown`, goes on with a terminal that fails
        try:
            for _ in range(2):
                result = command("peer", files[1], *PAIR, "--join", found[1].decode())
                assert result.returncode == 0, result.stderr
            process.terminate()
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()


def read_terminal(master: int) -> bytes:
    """What came; nothing once all writers are gone, which Linux tells with an error."""
    try:
        return os.read(master, 1 << 16)
    except OSError:
        return b""


def test_help_does_not_wait_for_torch() -> None:
    script = (
        "import sys, click\n"
        "from averaging.cli import main\n"
        "main(['peer', '--help'], standalone_mode=False)\n"
        "main(['state', '--help'], standalone_mode=False)\n"
        "print(sorted({'torch', 'grpc', 'safetensors', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "missing", ["del signal.SIGHUP", "sys.modules['resource'] = None", "sys.modules['termios'] = None"]
)
def test_an_operating_system_that_is_not_supported_is_named_in_one_sentence(missing: str) -> None:
    script = f"import runpy, signal, sys; {missing}; sys.argv = ['averaging', 'doctor']"
    script += "; runpy.run_module('averaging', run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("Error: averaging does not run on this operating system (")
    assert ended.stderr.endswith("); use Linux, macOS for peers, or WSL 2 on Windows\n")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "extra"), [(["plan", "--parameters", "1e6"], "."), (["serve", "m"], "'.[serve]'")]
)
def test_a_command_without_torch_names_it_and_how_to_install_it(arguments: list[str], extra: str) -> None:
    script = f"import runpy, sys; sys.modules['torch'] = None; sys.argv = ['averaging', *{arguments}]"
    script += "; runpy.run_module('averaging', run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stderr == f"Error: torch is not installed; run in the checkout: pip install {extra}\n"
    assert ended.returncode == 2


def test_a_script_on_such_a_system_gets_that_sentence_too() -> None:
    script = "import signal; del signal.SIGHUP; from averaging import Peer"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stderr.splitlines()[-1].startswith("ImportError: averaging does not run on this operating system (")

"""`averaging follow` as a process: the file, the command after each version, faults and exit codes."""

import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from averaging import WeightPublisher
from averaging.weights import publisher as publishing
from tests.support.ports import free_address
from tests.support.processes import JsonProcess, averaging_command, averaging_process
from tests.weights.test_weights import Publishing, same, state, stepped


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def follow(endpoint: str, path: Path, *arguments: str) -> JsonProcess:
    return averaging_process("follow", endpoint, "--output", str(path), "--timeout", "20", *arguments)


def test_a_file_follows_and_a_command_runs_after_each_version(tmp_path: Path) -> None:
    publisher, weights, path = WeightPublisher(), state(), tmp_path / "now.safetensors"
    command = f'cp "$AVERAGING_FILE" {tmp_path}/v$AVERAGING_VERSION; test $AVERAGING_VERSION != 2'
    with Publishing(publisher) as endpoint, follow(endpoint, path, "--exec", command) as process:
        ready = process.expect("ready")
        assert ready["publishers"] == [endpoint]
        assert ready["endpoint"].startswith("127.0.0.1:")
        for version in (1, 2, 3):
            publisher.publish_now(weights, version)
            written = process.expect("written")
            assert publisher.digest is not None
            assert (written["version"], written["digest"]) == (version, publisher.digest.hex())
            assert written["received"] < (1.1 if version == 1 else 0.1) * written["bytes"]
            assert written["output"] == str(path)
            executed = process.expect("executed")
            assert (executed["version"], executed["exit_code"]) == (version, version == 2)
            assert same(load_file(tmp_path / f"v{version}"), weights)
            weights = stepped(weights)
        assert metadata(path)["averaging.version"] == "3"
        process.signal(signal.SIGINT)
        assert process.wait() == 0
    assert [file.name for file in tmp_path.iterdir() if file.name.endswith("tmp")] == []


@pytest.mark.parametrize("end", ["its time is over", "Ctrl+C", "its terminal closes"])
def test_a_command_that_hangs_is_ended_with_its_children(end: str, tmp_path: Path) -> None:
    publisher, weights, path = WeightPublisher(), state(), tmp_path / "now.safetensors"
    child = tmp_path / "child"
    command = f"echo hello; sleep 999 & echo $! > {child}.new; mv {child}.new {child}; wait"
    seconds = "2" if end == "its time is over" else "999"
    publisher.publish_now(weights, 1)
    with (
        Publishing(publisher) as endpoint,
        follow(endpoint, path, "--exec", command, "--exec-timeout", seconds) as process,
    ):
        assert process.expect("written")["version"] == 1
        while not child.exists():
            time.sleep(0.01)
        number = int(child.read_text())
        for version in (2, 3):
            weights = stepped(weights)
            publisher.publish_now(weights, version)
        if end == "its time is over":
            executed = process.expect("executed")
            assert (executed["version"], executed["exit_code"]) == (1, None)
            assert "was not done after 2 s (--exec-timeout); it was ended with its children" in executed["message"]
            assert process.expect("written")["version"] == 3, "the newest"
            assert same(load_file(path), weights)
            assert not _lives(number)
            while int(child.read_text()) == number:  # until the command runs for that version
                time.sleep(0.01)
            number = int(child.read_text())
        process.signal(signal.SIGHUP if end == "its terminal closes" else signal.SIGINT)
        assert process.wait() == 0
        assert not _lives(number)
    assert process.stderr.count("hello") == (2 if end == "its time is over" else 1), "its output is no event"


def _lives(number: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_full_disk_leaves_the_old_file_and_the_next_version_is_tried(tmp_path: Path) -> None:
    publisher, weights, path = WeightPublisher(), state(), tmp_path / "now.safetensors"
    publisher.publish_now(weights, 1)
    with Publishing(publisher) as endpoint, follow(endpoint, path) as process:
        process.expect("written")
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        publisher.publish_now(stepped(weights), 2)
        unwritten = process.expect("unwritten")
        assert unwritten["version"] == 2
        assert "the old file is unchanged. Free disk space" in unwritten["message"]
        assert same(load_file(path), weights)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        weights = stepped(stepped(weights))
        publisher.publish_now(weights, 3)
        assert process.expect("written")["version"] == 3
        assert same(load_file(path), weights)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_killed_follower_leaves_a_whole_file_and_its_followers_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "CHAIN_BYTES", 1)
    publisher, published = WeightPublisher(), {0: state()}
    publisher.publish_now(published[0], 0)
    paths = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    with Publishing(publisher) as endpoint, follow(endpoint, paths[0]) as first:
        first.expect("written")
        with follow(endpoint, paths[1]) as second:
            second.expect("written")
            for version in range(1, 20):
                published[version] = stepped(published[version - 1])
                publisher.publish_now(published[version], version)
                if version == 10:
                    first.kill()
            while second.expect("written")["version"] < 19:
                pass
            assert same(load_file(paths[1]), published[19])
            assert same(load_file(paths[0]), published[int(metadata(paths[0])["averaging.version"])])
            second.signal(signal.SIGTERM)
            second.wait()


def test_a_version_that_is_never_published(tmp_path: Path) -> None:
    publisher, path = WeightPublisher(), tmp_path / "now.safetensors"
    publisher.publish_now(state(), 3)
    with Publishing(publisher) as endpoint:
        process = averaging_command(
            "follow", endpoint, "--output", str(path), "--once", "--min-version", "9", "--wait", "0.5"
        )
    assert process.returncode == 1
    assert "did not publish version 9 or newer within 0.5 s: the newest is 3" in process.stderr
    assert not path.exists()


@pytest.mark.parametrize(
    ("write", "arguments", "code", "told"),
    [
        (lambda path: path.write_bytes(b"mine"), [], 2, "give --overwrite"),
        (lambda path: None, ["--wait", "3"], 2, "--wait needs --once"),
        (lambda path: None, ["--timeout", "0.3"], 1, "no publisher answered within 0.3 s"),
    ],
)
def test_what_cannot_work_is_told(
    write: Callable[[Path], Any], arguments: list[str], code: int, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "now.safetensors"
    write(path)
    before = path.read_bytes() if path.is_file() else None
    process = averaging_command("follow", free_address(), "--output", str(path), *arguments)
    assert process.returncode == code
    assert told in process.stderr
    assert (path.read_bytes() if path.is_file() else None) == before


def test_an_engine_of_a_run_with_a_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("a-token-of-this-run\n")
    engine = ["--engine", "vllm=http://127.0.0.1:1", "--token-file", str(token), "--timeout", "0.3"]
    process = averaging_command("follow", free_address(), *engine)
    assert process.returncode == 1
    assert "no publisher answered within 0.3 s" in process.stderr


def test_ctrl_c_before_anything_was_published(tmp_path: Path) -> None:
    with (
        Publishing(WeightPublisher()) as endpoint,
        follow(endpoint, tmp_path / "now.safetensors", "--once") as process,
    ):
        process.expect("ready")
        process.signal(signal.SIGINT)
        assert process.wait() == 130
    assert list(tmp_path.iterdir()) == []

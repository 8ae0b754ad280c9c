"""`averaging doctor` as people and programs run it."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.ports import free_address
from tests.support.processes import averaging_command, averaging_process

MODEL = {"layer.weight": torch.ones(30, 20, dtype=torch.bfloat16), "layer.bias": torch.ones(30), "seen": torch.ones(1)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    save_file({**MODEL, "counter": torch.ones(1, dtype=torch.int64)}, path)
    return path


@pytest.fixture
def peer(model: Path) -> Iterator[str]:
    """The address of `averaging peer --serve` with these tensors."""
    address = free_address()
    with ExitStack() as stack:
        process = stack.enter_context(
            averaging_process("peer", str(model), "--run-id", "demo", "--listen", address, "--serve")
        )
        process.expect("ready")
        yield address


def events(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    with averaging_process("doctor", *arguments) as process:
        return process.wait(), process.seen


def test_a_run_that_will_work(peer: str, model: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'run_id = "demo"\njoin = ["{peer}"]\n')
    done = averaging_command("doctor", str(model), "--config", str(config))
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert lines[0] == "this machine"
    assert peer in lines
    assert any(line.startswith("  ✓ schema ") and "3 tensors" in line for line in lines)
    assert any(line.startswith("  ✓ memory ") for line in lines)
    assert lines[-1].startswith("nothing that will not work was found")
    assert not any("\x1b" in line for line in lines)


def test_what_will_not_work_is_an_exit_code_and_events(peer: str, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"layer.weight": torch.ones(30, 21)}, other)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, found = events(
            *(str(other), "--run-id", "demo", "--join", peer, "--listen", f"127.0.0.1:{port}"),
            *("--aggregation", "median"),
        )
    assert code == 1
    failures = {event["check"] for event in found if event.get("severity") == "failure"}
    assert failures == {"port", "options", "schema"}
    assert found[-1]["event"] == "done"
    assert found[-1]["failures"] == 3
    assert all(event["event"] in ("finding", "done") for event in found)
    assert all(event["remedy"] for event in found if event.get("severity") == "failure" and event["check"] != "port")


def test_without_options_it_checks_this_machine() -> None:
    code, found = events()
    assert code == 0, found
    checks = [event["check"] for event in found if event["event"] == "finding"]
    assert checks[:4] == ["python", "torch", "grpcio", "protobuf"]
    assert {"port", "listen", "advertise", "certificate", "token-file", "memory", "open-files", "processors"} < {
        *checks
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--run-id", "a.b"), "without a dot"),
        (("missing.safetensors",), "does not exist"),
        (("--deep",), "give --join HOST:PORT"),
        (("--listen", "127.0.0.1:0", "--group-size", "1"), "--group-size"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], says: str) -> None:
    done = averaging_command("doctor", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "grpc.py").write_text('raise ImportError("libstdc++.so.6 is too old")\n')
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "averaging", "doctor"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "libstdc++.so.6 is too old" in done.stderr
    assert "Traceback" not in done.stderr

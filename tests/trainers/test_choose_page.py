"""The scripts of docs/how-to/choose.md that need transformers: a LoRA among friends, and a trainer with GRPO."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from averaging.rl.feed import FeedEnvironment, RegisterEnv, ScoredData
from examples.posttrain.model import CHARACTERS, write_model
from tests.support.pages import ROOT, blocks_of
from tests.support.ports import free_port
from tests.support.processes import averaging_process

pytestmark = pytest.mark.integrations

SCRIPTS = {block.title: block.text for block in blocks_of((ROOT / "docs/how-to/choose.md").read_text()) if block.title}


def run_averaging(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "averaging", *arguments], cwd=folder, check=True, capture_output=True)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *arguments], cwd=folder, **output)  # type: ignore[call-overload,no-any-return]


def test_friends_end_with_one_adapter(tmp_path: Path) -> None:
    write_model(tmp_path / "base", 0)
    (tmp_path / "my.txt").write_text("".join(random.Random(0).choices(CHARACTERS, k=1000)))
    run_averaging(tmp_path, "ca", "init")
    run_averaging(tmp_path, "ca", "issue", "a", "--host", "localhost")
    run_averaging(tmp_path, "ca", "issue", "b", "--client-mode")
    endpoint = f"localhost:{free_port()}"
    text = SCRIPTS["tune.py"].replace("a.example.org:4222", endpoint)
    text = text.replace("0.0.0.0:4222", endpoint.replace("localhost", "127.0.0.1")).replace("< 500", "< 150")
    text = text.replace("    while opt", "    assert opt.wait_for_peers(2, 60)\n    while opt")
    (tmp_path / "tune.py").write_text(text.replace('save_adapter("adapter")', "save_adapter(name)"))
    first = start(tmp_path, "tune.py", "base", "my.txt", "a")
    second = start(tmp_path, "tune.py", "base", "my.txt", "b", endpoint)
    try:
        told = [process.communicate(timeout=200)[0] for process in (first, second)]
    finally:
        first.kill()
        second.kill()
    assert all("all 2 peers hold the same weights" in each for each in told), told
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in "ab")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_trainer_takes_batches_and_publishes(tmp_path: Path) -> None:
    write_model(tmp_path / "base", 0)
    run_averaging(tmp_path, "ca", "init")
    run_averaging(tmp_path, "ca", "issue", "trainer", "--host", "localhost")
    (tmp_path / "token").write_text("secret-of-the-test\n")
    (tmp_path / "token").chmod(0o600)
    files: dict[str, Any] = {name: str(tmp_path / file) for name, file in FILES.items()}
    options = [word for name, path in files.items() for word in (f"--{name.replace('_', '-')}", path)]
    port = free_port()
    listen, url = f"127.0.0.1:{port}", f"https://localhost:{port}"
    text = SCRIPTS["grpo.py"].replace(":8000", f":{port}").replace("num_steps=200", "num_steps=2")
    text = text.replace("0.0.0.0:4222", "127.0.0.1:0")
    (tmp_path / "grpo.py").write_text(text)
    with averaging_process("feed", "--listen", listen, "--store", str(tmp_path / "feed.sqlite"), *options) as feed:
        feed.expect("ready")
        trainer = start(tmp_path, "grpo.py", "base", "localhost")
        try:
            config = RegisterEnv(max_token_length=64, desired_name="digits", weight=1.0, group_size=8)
            with FeedEnvironment(url, config, **files) as environment:
                for _ in range(8):
                    tokens = [[3 + answer, 4, 5 + answer] for answer in range(8)]
                    masks = [[-100, -100, each[2]] for each in tokens]
                    environment.post(ScoredData(tokens=tokens, masks=masks, scores=[1.0, -1.0] * 4))
            told = trainer.communicate(timeout=120)[0]
        finally:
            trainer.kill()
    assert trainer.returncode == 0, told
    assert [line for line in told.splitlines() if line.startswith("step")] == ["step 1 score 0.0", "step 2 score 0.0"]


FILES = {"token_file": "token", "tls_ca": "ca/ca.pem", "tls_cert": "ca/trainer.pem", "tls_key": "ca/trainer.key"}

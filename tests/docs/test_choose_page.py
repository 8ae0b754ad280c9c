"""What the six people of docs/how-to/choose.md run: the files, the page for a phone, and the two clusters."""

import json
import os
import shlex
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from averaging.cli import main
from tests.support.pages import ROOT, Block, blocks_of
from tests.support.processes import averaging_process

PAGE = (ROOT / "docs" / "how-to" / "choose.md").read_text()


def section(title: str) -> list[Block]:
    return blocks_of(PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0])


def lines(block: Block) -> list[list[str]]:
    return [shlex.split(line) for line in block.text.splitlines()]


def test_each_of_six_has_at_most_60_lines() -> None:
    sections = PAGE.split("\n## ")[1:]
    assert len(sections) == 6
    assert all(text.count("\n") <= 60 for text in sections), [text.count("\n") for text in sections]


def test_two_files_are_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"w": torch.zeros(3)}, "a.safetensors")
    save_file({"w": torch.ones(3)}, "b.safetensors")
    [[program, *arguments]] = lines(section("Two files")[0])
    assert program == "averaging"
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert load_file("mean.safetensors")["w"].tolist() == [0.5] * 3


def test_the_page_of_a_phone_has_a_certificate_that_others_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commands, dashboard = section("A phone")
    for line in commands.text.replace("192.168.1.20", "127.0.0.1").splitlines():
        command = line.replace("averaging ", f"{sys.executable} -m averaging ", 1)
        subprocess.run(command, shell=True, check=True, capture_output=True)
    [[program, *arguments]] = lines(dashboard)
    assert program == "averaging"
    with averaging_process(*(word.replace("0.0.0.0:8443", "127.0.0.1:0") for word in arguments)) as process:
        url = process.expect("ready")["url"]
        trusted = ssl.create_default_context(cafile="page/ca.pem")
        password = ("anybody", Path("password").read_text().strip())
        assert url.startswith("https://127.0.0.1:")
        assert httpx.get(url, verify=trusted, auth=password, trust_env=False, timeout=30).status_code == 200
        assert httpx.get(url, verify=trusted, trust_env=False, timeout=30).status_code == 401


@pytest.mark.long
def test_two_clusters_average(tmp_path: Path) -> None:
    (script, _) = section("Two clusters")
    text = script.text.replace("    while opt", "    assert opt.wait_for_peers(2, 120)\n    while opt")
    text = text.replace(") as opt:\n", ') as opt:\n    print(f"AT {opt.endpoint}", flush=True)\n').replace(
        "1000", "200"
    )
    (tmp_path / "train.py").write_text(text)

    def site(join: str) -> subprocess.Popen[str]:
        place = tmp_path / f"site{len(join)}"
        place.mkdir()
        (place / "peer.toml").write_text(f'run_id = "clusters"\ngroup_size = 2\njoin = {json.dumps(join.split())}\n')
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "../train.py"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=place)

    with site("") as first:
        try:
            assert first.stdout is not None
            endpoint = next(line.split()[1] for line in first.stdout if line.startswith("AT "))
            with site(endpoint) as second:
                told = first.communicate(timeout=200)[0] + second.communicate(timeout=200)[0]
                assert first.returncode == second.returncode == 0
        finally:
            first.kill()
    assert told.count("all 2 peers hold the same weights") == 4

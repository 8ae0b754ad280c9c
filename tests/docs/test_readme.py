"""The code and the command of the README, run as they stand but for the address."""

import queue
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from safetensors.torch import load_file, save_file

import averaging
from averaging import DecentralizedAverager, Receipt
from tests.support.processes import averaging_process

README = (Path(__file__).parents[2] / "README.md").read_text()
[SCRIPT] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
[COMMAND] = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
ADDRESS = "192.0.2.7:4222"


def test_the_training_script_averages() -> None:
    assert f'["{ADDRESS}"]' in SCRIPT
    script = SCRIPT.replace(f'["{ADDRESS}"]', "JOIN")
    endpoints: queue.Queue[str] = queue.Queue()

    def run(join: list[str]) -> list[Receipt]:
        receipts: list[Receipt] = []

        class Recorded(DecentralizedAverager):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options | {"on_round": receipts.append, "group_size": 2})
                endpoints.put(self.endpoint)

            def __enter__(self) -> Self:
                assert self.wait_for_peers(2, timeout=60)
                return super().__enter__()

        names = {"DecentralizedAverager": Recorded, "LocalSGD": averaging.LocalSGD, "JOIN": join}
        exec(script.replace("from averaging import DecentralizedAverager, LocalSGD", ""), names)
        return receipts

    with ThreadPoolExecutor(2) as pool:
        founder = pool.submit(run, [])
        newcomer = pool.submit(run, [endpoints.get(timeout=60)])
        for receipts in (founder.result(), newcomer.result()):
            assert len(receipts) == 20 + 1  # the last one is that of finish()
            assert all(receipt.averaged and len(receipt.members) == 2 for receipt in receipts)


def test_the_command_averages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file({"w": torch.full((3,), value)}, tmp_path / f"{name}.safetensors")
    quickly = ("--group-size", "2")
    with averaging_process("peer", str(tmp_path / "b.safetensors"), "--run-id", "demo", "--serve", *quickly) as other:
        program, *arguments = shlex.split(COMMAND.replace(ADDRESS, other.expect("ready")["endpoint"]))
        assert program == "averaging"
        files = [str(tmp_path / word) if word.endswith(".safetensors") else word for word in arguments]
        with averaging_process(*files, *quickly) as process:
            assert process.wait() == 0, process.stderr
    assert load_file(tmp_path / "mean.safetensors")["w"].tolist() == [1.5] * 3

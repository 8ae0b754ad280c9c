"""The training script of the README, run as it stands but for the addresses, by two peers."""

from __future__ import annotations

import queue
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from click.testing import CliRunner

import averaging
from averaging import DecentralizedAverager, Receipt
from averaging.cli import main

README = (Path(__file__).parents[2] / "README.md").read_text()
ADDRESSES = {
    'join=["192.0.2.7:4222"]': "join=JOIN",
    'listen="0.0.0.0:4222"': 'listen="127.0.0.1:0"',
    'advertise="198.51.100.4:4222"': "advertise=None",
    "group_size=4": "group_size=2",
    '"ca/ca.pem"': "str(CA / 'ca.pem')",
    '"ca/a.pem"': "str(CA / 'a.pem')",
    '"ca/a.key"': "str(CA / 'a.key')",
}


def test_the_training_script_averages(tmp_path: Path) -> None:
    for command in (["init"], ["issue", "a", "--host", "127.0.0.1"]):
        assert CliRunner().invoke(main, ["ca", *command, "--directory", str(tmp_path)]).exit_code == 0
    script = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "LocalSGD" in block)
    for told, here in ADDRESSES.items():
        assert told in script
        script = script.replace(told, here)
    endpoints: queue.Queue[str] = queue.Queue()

    def run(join: list[str]) -> list[Receipt]:
        receipts: list[Receipt] = []

        class Recorded(DecentralizedAverager):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options | {"on_round": receipts.append})
                endpoints.put(self.endpoint)

        names = {"DecentralizedAverager": Recorded, "LocalSGD": averaging.LocalSGD, "JOIN": join, "CA": tmp_path}
        exec(script.replace("from averaging import DecentralizedAverager, LocalSGD", ""), names)
        return receipts

    with ThreadPoolExecutor(2) as pool:
        founder = pool.submit(run, [])
        newcomer = pool.submit(run, [endpoints.get(timeout=60)])
        for receipts in (founder.result(), newcomer.result()):
            assert len(receipts) == 20 + 1  # the last one is that of finish()
            assert all(receipt.averaged and len(receipt.members) == 2 for receipt in receipts)

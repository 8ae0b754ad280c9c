"""The script of the page about sites, started by torchrun as two sites, with DDP as it stands and with FSDP2."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/how-to/sites.md").read_text()
SCRIPT, RESTORED = re.findall(r"^```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)[:2]

WAIT = """)
import json
def say(**event): print(json.dumps(event) + "\\n", end="", flush=True)
if dist.get_rank() == 0: say(endpoint=opt.endpoint)
assert opt.wait_for_peers(2, timeout=120)
"""

END = """
say(rank=dist.get_rank(), averaged=opt.last_receipt.averaged, members=len(opt.last_receipt.members))
dist.destroy_process_group()"""


def site(script: Path, join: str, ranks: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    environment = os.environ | {"JOIN": join, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=script.parent)


def divided(text: str, ranks: int) -> str:
    """The script with FSDP2 in the place of DDP."""
    text = text.replace("model = DistributedDataParallel(model)", "pass")
    return text.replace(
        "model = torch.nn.Linear(10, 1)\n",
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        f"model = fully_shard(torch.nn.Linear(10, 2), mesh=init_device_mesh('cpu', ({ranks},)))\n",
    )


@pytest.mark.long
@pytest.mark.parametrize("inside", ["ddp", "fsdp"])
def test_two_sites_run_the_script_of_the_page(tmp_path: Path, inside: str) -> None:
    text = SCRIPT.replace(
        "process_group=dist.group.WORLD,\n)", "process_group=dist.group.WORLD,\n    group_size=2,\n" + WAIT
    )
    text = text.replace("\ndist.destroy_process_group()", END)
    if inside == "fsdp":
        text = divided(text, 2)
    script = tmp_path / "train.py"
    script.write_text(text)
    with site(script, "") as first:
        try:
            assert first.stdout is not None
            endpoint = json.loads(first.stdout.readline())["endpoint"]
            with site(script, endpoint) as second:
                told = first.communicate(timeout=150)[0] + second.communicate(timeout=150)[0]
                assert first.returncode == second.returncode == 0
        finally:
            first.kill()
    ends = [event for event in map(json.loads, told.splitlines()) if "rank" in event]
    assert len(ends) == 4
    assert all(event["averaged"] and event["members"] == 2 for event in ends)


@pytest.mark.long
@pytest.mark.parametrize("inside", ["ddp", "fsdp"])
def test_a_site_of_another_size_goes_on_from_the_checkpoint_of_the_page(tmp_path: Path, inside: str) -> None:
    loads, saves = RESTORED.split("...\n")
    script = tmp_path / "train.py"
    counts = []
    for ranks, last in ((2, 52), (1, 54)):
        text = SCRIPT.replace(
            "model = DistributedDataParallel", f"{loads}\nbegun = opt.local_step\nmodel = DistributedDataParallel"
        )
        tells = "print(str(begun), str(opt.local_step) + chr(10), end='')"
        text = text.replace("< 200", f"< {last}").replace("\ndist.destroy", f"\n{saves}\n{tells}\ndist.destroy")
        script.write_text(divided(text, ranks) if inside == "fsdp" else text)
        with site(script, "", ranks) as process:
            counts.append(process.communicate(timeout=150)[0].split())
            assert process.returncode == 0
    assert counts == [["0", "52"] * 2, ["52", "54"]]

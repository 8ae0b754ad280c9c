"""The code of docs/how-to/trainers.md, and what it is run with."""

import os
import re
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LinearLR

from averaging import DecentralizedAverager, LocalSGD, Receipt
from tests.support.ports import free_port
from tests.trainers.forked import tell

_PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "trainers.md").read_text()
TRAINER, ACCELERATE, LIGHTNING, TENSORBOARD, WANDB = re.findall(r"```python\n(.*?)```", _PAGE, re.DOTALL)

JOIN = 'join=["192.0.2.7:4222"]'
STEPS = 20


def run_as_one_of_two(code: str, number: int, endpoints: SimpleQueue[str], names: dict[str, Any]) -> None:
    """Runs code of the page as the founder (0) or the newcomer (1) of a run, and tells how it ended.

    The code trains the model `names["model"]`, or makes a LightningModule `Averaged`, in STEPS steps with a round after
    every fifth.
    """
    torch.set_num_threads(1)
    averagers, receipts = [], list[Receipt]()

    class Told(DecentralizedAverager):
        """Tells the newcomer where to join, and keeps the receipts."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, on_round=receipts.append, group_wait=30.0, group_size=2, **options)
            averagers.append(self)
            if number == 0:
                endpoints.put(self.endpoint)

    assert JOIN in code
    assert "sync_every=50" in code
    here = code.replace(JOIN, "join=JOIN").replace("sync_every=50", "sync_every=5").replace("1000", str(STEPS))
    names |= {
        "DecentralizedAverager": Told,
        "JOIN": [] if number == 0 else [endpoints.get()],
        "LinearLR": LinearLR,
        "LocalSGD": LocalSGD,
        "partial": partial,
        "torch": torch,
    }
    exec(here, names)
    (opt,) = averagers
    tell(
        "page_peer",
        steps=opt.local_step,
        rounds=[len(receipt.members) for receipt in receipts if receipt.averaged],
        weights=[value for group in opt.param_groups for p in group["params"] for value in p.flatten().tolist()],
        rate=opt.param_groups[0]["lr"],
    )


def as_rank(number: int, ports: SimpleQueue[str]) -> None:
    """Makes this process one of two of a single trainer, as torchrun does."""
    if number == 0:
        port = str(free_port())
        ports.put(port)
    else:
        port = ports.get()
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def tell_error(error: Exception) -> None:
    """Tells an error of a rank."""
    tell("rank", error=f"{type(error).__name__}: {error}")

"""Trains with an averager in a process of its own, in one of several ways, and prints what happens as JSON lines.

Run as `python -m tests.averager.worker WAY`.
"""

import sys
import threading
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from averaging import DecentralizedAverager, LocalSGD, Receipt
from tests.support.worker import tell


def averager(sync_every: int, **options: Any) -> DecentralizedAverager:
    model = torch.nn.Linear(40, 30, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return DecentralizedAverager(
        optimizer, model=model, run_id="worker", strategy=LocalSGD(sync_every), group_size=2, **options
    )


def step(opt: DecentralizedAverager, target: torch.Tensor) -> None:
    opt.zero_grad()
    (opt.param_groups[0]["params"][0] - target.mean()).pow(2).sum().backward()
    opt.step()


def interrupted() -> None:
    """Waits in a round that nobody joins until it is interrupted."""
    with averager(2, round_timeout=1000.0) as opt:
        average = opt._peer.average

        async def average_for_long(*topic: Any, **arguments: Any) -> Receipt:
            tell("averaging")
            return await average(*topic, **(arguments | {"search_timeout": 1000.0}))

        opt._peer.average = average_for_long  # type: ignore[method-assign]
        try:
            for _ in range(2):
                step(opt, torch.ones(1))
        except KeyboardInterrupt:
            tell("interrupted", local_step=opt.local_step, looking=opt.status.peer.looking, endpoint=opt.endpoint)
    tell("left", threads=[thread.name for thread in threading.enumerate() if thread.daemon])


def loaders() -> None:
    """Forks workers of data loaders while two averagers train."""
    first = averager(4)
    second = averager(4, join=[first.endpoint])
    data = TensorDataset(torch.randn(32, 3))

    def train(opt: DecentralizedAverager) -> None:
        for _ in range(3):
            for (batch,) in DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork"):
                step(opt, batch)

    with first, second:
        other = threading.Thread(target=train, args=(second,))
        other.start()
        train(first)
        other.join()
        equal = torch.equal(*(opt.param_groups[0]["params"][0] for opt in (first, second)))
        tell("trained", equal=equal, rounds=[opt.status.peer.rounds for opt in (first, second)])


if __name__ == "__main__":
    torch.manual_seed(0)
    {"interrupted": interrupted, "loaders": loaders}[sys.argv[1]]()

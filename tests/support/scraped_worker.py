"""Trains in a run until it is ended, with metrics, and prints where it is as a JSON line.

Run as `python -m tests.support.scraped_worker OPTIONS`, with the options of the averager as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from averaging import DecentralizedAverager, DiLoCo, WeightPublisher

STEP_SECONDS = 0.05


def main() -> None:
    options = json.loads(sys.argv[1])
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    publisher = WeightPublisher(model)
    with DecentralizedAverager(
        optimizer, model=model, strategy=DiLoCo(sync_every=20), services=[publisher], **options
    ) as opt:
        place = {"endpoint": opt.endpoint, "metrics": opt.metrics_endpoint}
        print(json.dumps({"event": "ready", **place}), flush=True)
        while True:
            opt.zero_grad()
            model(torch.randn(8, 100)).pow(2).mean().backward()
            opt.step(batch_size=8)
            time.sleep(STEP_SECONDS)


if __name__ == "__main__":
    main()

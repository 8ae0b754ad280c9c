"""Peers that share the epochs of one dataset: together they train each sample once in each.

    python -m examples.epoch                        # in one terminal; it prints where it listens
    python -m examples.epoch --join HOST:PORT       # in others, while the first one trains; kill one, if you like

Each peer says at the end which part it has trained.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

from averaging import DecentralizedAverager, LocalSGD
from averaging.data import RunSampler
from examples.command_line import in_order, positive

SAMPLES = 200_000


def train(epochs: int, batch_size: int, join: list[str], peers: int) -> None:
    """Learns a sine from a fixed dataset, which is the same at all peers."""
    torch.set_num_threads(1)  # several processes share few cores
    x = 8 * torch.rand(SAMPLES, 1, generator=torch.Generator().manual_seed(0)) - 4
    dataset = TensorDataset(x, torch.sin(x))
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with DecentralizedAverager(adamw, model=model, run_id="epoch", join=join, strategy=LocalSGD(50)) as optimizer:
        print(f"Other peers join with --join {optimizer.endpoint}", flush=True)
        optimizer.wait_for_peers(peers, 60.0)
        sampler = RunSampler(dataset, optimizer)
        loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
        for epoch in sampler.epochs(epochs):
            for inputs, targets in loader:
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step(batch_size=len(inputs))
            here = sampler.statistics.samples_here
            print(f"epoch {epoch + 1}: loss {loss.item():.6f}, {here} samples trained here so far", flush=True)
        twice = sampler.statistics.most_duplicates
        print(f"Trained here: {sampler.statistics.samples_here} samples, at most {twice} of them twice", flush=True)
        print(f"Done: {optimizer.finish()}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Trains as configured on the command line."""
    prog = "python -m examples.epoch"
    parser = argparse.ArgumentParser(prog=prog, usage=f"{prog} [options]", description="Shares epochs with others.")
    parser.add_argument("--join", nargs="+", default=[], metavar="HOST:PORT", help="any peers of the run")
    parser.add_argument("--epochs", type=positive, default=3, help="of the run, the same at all peers (3)")
    parser.add_argument("--batch-size", type=positive, default=64, help="of this peer (64)")
    parser.add_argument("--wait-for", type=positive, default=1, metavar="N", help="begin with so many peers (1)")
    options = parser.parse_args(arguments)
    with in_order(parser):
        train(options.epochs, options.batch_size, options.join, options.wait_for)


if __name__ == "__main__":
    main()

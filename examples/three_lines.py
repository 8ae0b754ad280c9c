"""A plain training loop that averages with other peers by three changed lines: (1), (2) and (3).

    python -m examples.three_lines                        # in one terminal; it prints where it listens
    python -m examples.three_lines --join HOST:PORT       # in another one, while the first one trains

At the end of the process, also after Ctrl+C, it leaves the run gracefully.
"""

from __future__ import annotations

import argparse

import torch

from averaging import DecentralizedAverager, LocalSGD  # (1)
from examples.command_line import in_order, positive


def train(steps: int, join: list[str]) -> None:
    """Learns a sine."""
    torch.set_num_threads(1)  # several processes share few cores
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = DecentralizedAverager(adamw, model=model, run_id="sine", join=join, strategy=LocalSGD(50))  # (2)
    print(f"Other peers join with --join {optimizer.endpoint}", flush=True)

    for step in range(optimizer.local_step, steps):  # (3) was range(steps); a newcomer begins at the run's present step
        x = 8 * torch.rand(64, 1) - 4
        loss = torch.nn.functional.mse_loss(model(x), torch.sin(x))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if (step + 1) % 2000 == 0:
            print(f"step {step + 1}: loss {loss.item():.6f}, {len(optimizer.peers) - 1} other peers", flush=True)
    print(f"Done: {optimizer.finish()}", flush=True)  # a last average; then the model has the weights to export


def main(arguments: list[str] | None = None) -> None:
    """Trains as configured on the command line."""
    prog = "python -m examples.three_lines"
    parser = argparse.ArgumentParser(
        prog=prog, usage=f"{prog} [options]", description="Learns a sine with other peers."
    )
    parser.add_argument("--join", nargs="+", default=[], metavar="HOST:PORT", help="any peers of the run")
    parser.add_argument("--steps", type=positive, default=50_000, help="of training (50000)")
    options = parser.parse_args(arguments)
    with in_order(parser):
        train(options.steps, options.join)


if __name__ == "__main__":
    main()

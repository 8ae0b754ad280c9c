"""One process of the demo: trains the language model on one part of the text, alone or averaged with other peers.

It reports events as JSON lines on stdout, and ends gracefully when its stdin ends. By hand, in four terminals:

    python -m examples.train --part 1                             # starts a run and prints its endpoint
    python -m examples.train --part 2 --join 127.0.0.1:PORT       # joins it; likewise --part 3 and --part 4
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import signal
import sys
import threading
from dataclasses import dataclass

import torch

from averaging import DecentralizedAverager, LocalSGD, Receipt
from examples.language_model import LanguageModel, Size, read, windows
from examples.sources import divide, standard_library

WAIT_SECONDS = 120.0
"""Seconds for which peers wait for each other before the first step, and for a last average of all."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of the training; the same in all processes.

    Attributes:
        size: size of the model.
        batch: windows per step.
        lr: maximum learning rate.
        watched: number of held-out windows for the progress.
        judged: number of held-out windows for the result.
    """

    size: Size
    batch: int
    lr: float
    watched: int
    judged: int


RECIPES = {
    "full": Recipe(Size(layers=2, width=128, heads=4, context=64), batch=16, lr=4e-3, watched=128, judged=1024),
    "quick": Recipe(Size(layers=1, width=64, heads=4, context=32), batch=16, lr=1e-2, watched=64, judged=1024),
}


def main() -> None:
    """Trains as configured on the command line."""
    options = parse_arguments()
    if not options.spare:
        end_with_stdin()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Several processes share few cores, so more threads would only wait for each other.
    torch.set_num_threads(1)
    torch.manual_seed(1000 * options.seed + options.part)
    training = Training(options)
    if options.spare:
        options.join = sys.stdin.readline().split()
        if not options.join:
            sys.exit("its input ended before it named peers to join")
        end_with_stdin()
    if options.alone:
        report("ready", parameters=training.parameters, step=0)
        training.run(training.optimizer)
    else:
        train_with_others(training, options)
    report("done", loss=training.evaluate(training.recipe.judged), sha256=training.sha256())


def train_with_others(training: Training, options: argparse.Namespace) -> None:
    """Trains as a peer of the run. At the end all peers hold the same model."""
    notes = Notes()
    logging.getLogger("averaging.peer").addHandler(notes)
    averager = DecentralizedAverager(
        training.optimizer,
        model=training.model,
        run_id="demo",
        join=options.join,
        join_timeout=WAIT_SECONDS,
        listen=options.listen,
        strategy=LocalSGD(options.sync_every),
        group_size=options.peers,
        group_wait=3.0,
        round_timeout=30.0,
        stall_timeout=5.0,
        on_round=tell_round,
    )
    logging.getLogger("averaging.peer").removeHandler(notes)
    with averager as opt:
        report(
            "ready", parameters=training.parameters, step=opt.local_step, endpoint=opt.endpoint, notes=notes.messages
        )
        if opt.local_step == 0:
            wait_for_others(opt, options.peers)
        training.run(opt, opt.local_step)
        report("finishing")
        opt.finish(WAIT_SECONDS)


def wait_for_others(opt: DecentralizedAverager, count: int) -> None:
    """Waits until this many peers train in the run, so that none trains alone for long."""
    opt.wait_for_peers(count, WAIT_SECONDS)
    report("found", peers=sorted(opt.peers))


class Training:
    """The model, its text, and the steps.

    Args:
        options: options of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.steps, self.sync_every, self.recipe = options.steps, options.sync_every, RECIPES[options.recipe]
        self.model = LanguageModel(self.recipe.size)
        self.optimizer = torch.optim.AdamW(self.model.named_parameters(), lr=self.recipe.lr, betas=(0.9, 0.95))
        sources = divide(standard_library(), options.peers)
        self.text, self.held_out = read(sources.parts[options.part - 1]), read(sources.held_out)
        self.random = torch.Generator().manual_seed(1000 * options.seed + options.part)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def run(self, optimizer: torch.optim.Optimizer, first_step: int = 0) -> None:
        """Trains from `first_step` to the last step."""
        for step in range(first_step, self.steps):
            for group in optimizer.param_groups:
                group["lr"] = self.recipe.lr * schedule(step, self.steps)
            optimizer.zero_grad()
            loss = self.model.loss(windows(self.text, self.recipe.batch, self.recipe.size.context, self.random))
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            report("step", step=step + 1, loss=loss.item())
            if (step + 1) % self.sync_every == 0:
                report("held_out", step=step + 1, loss=self.evaluate(self.recipe.watched))

    def evaluate(self, count: int) -> float:
        """Loss in bits per byte on `count` windows of the held-out text, the same at each call in each process."""
        generator = torch.Generator().manual_seed(0)
        return self.model.evaluate(windows(self.held_out, count, self.recipe.size.context, generator))

    def sha256(self) -> str:
        """SHA-256 of the bytes of all parameters."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return digest.hexdigest()


def schedule(step: int, steps: int) -> float:
    """Factor of the learning rate: a short linear rise, then half a cosine down to a twentieth."""
    rise = max(1, min(20, steps // 10))
    return min(1.0, (step + 1) / rise) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)


class Notes(logging.Handler):
    """Keeps the library's log messages of the start, such as the donor of a downloaded state."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps one message."""
        self.messages.append(record.getMessage())


def tell_round(receipt: Receipt) -> None:
    """Reports the outcome of a round."""
    report(
        "round",
        outcome=receipt.outcome,
        reason=receipt.reason,
        members=receipt.members,
        dropped=[dropped.endpoint for dropped in receipt.dropped],
        seconds=receipt.seconds,
        sent=receipt.bytes_sent,
    )


def report(event: str, **fields: object) -> None:
    """Prints one JSON line."""
    print(json.dumps({"event": event, **fields}), flush=True)


def end_with_stdin() -> None:
    """Ends this process gracefully when its stdin ends, that is when its parent is gone or wants it to end."""

    def watch() -> None:
        # Not with sys.stdin, whose lock a waiting thread would still hold when the interpreter ends.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    def leave(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    threading.Thread(target=watch, daemon=True).start()


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="One process of the demo.", description="One process of the demo.")
    parser.add_argument("--part", type=int, default=1, help="part of the text on which it trains, from 1 (1)")
    parser.add_argument("--peers", type=int, default=4, help="number of peers, and so of parts (4)")
    parser.add_argument("--steps", type=int, default=700, help="steps of training (700)")
    parser.add_argument("--sync-every", type=int, default=20, help="steps between two averages (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and of the order of its text (0)")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="full", help="size of the model and so on (full)")
    parser.add_argument("--join", nargs="*", default=[], metavar="HOST:PORT", help="peers of the run; none starts one")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="address (a free local port)")
    parser.add_argument("--spare", action="store_true", help="wait for a line of input that names the peers to join")
    parser.add_argument("--alone", action="store_true", help="train without averaging")
    options = parser.parse_args()
    if not 1 <= options.part <= options.peers:
        parser.error(f"--part must be from 1 to --peers, which is {options.peers}")
    if options.steps < 1 or options.sync_every < 1:
        parser.error("--steps and --sync-every must be at least 1")
    return options


if __name__ == "__main__":
    main()

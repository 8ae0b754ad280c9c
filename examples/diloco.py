"""A language model trained with DiLoCo: many local steps, then one outer step with all that they changed.

    python -m examples.diloco --wait-for 2                # in one terminal; it prints where it listens
    python -m examples.diloco --join HOST:PORT            # in another one, or on another machine, and so on

Each peer draws other windows from the Python standard library's sources. Every 20 steps the peers average the changes
of these steps, an outer optimizer makes a step with the average, and all continue from the same model: a twentieth of
the traffic of averaging every gradient. `--fragments 4 --delay 2` sends a quarter of the model at a time while training
continues; `--compression int8` divides the traffic by four again.

On a slow link, Muon inside and the largest changes only, in 2 bits each, outside (MuLoCo, arXiv:2505.23725):

    python -m examples.diloco --optimizer muon --compression top_k --density 1/32 --wait-for 2

With `--publish-to ./run` or `--publish-to s3://bucket/run` one peer writes its weights after each outer step, and
`averaging follow ./run --output now.safetensors` keeps a file at the newest of them.

With a learning rate as in reinforcement learning, only the changes that engines in bfloat16 can see:

    python -m examples.diloco --compression visible --lr 1e-6 --wait-for 2
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LinearLR

from averaging import DecentralizedAverager, DiLoCo, Receipt, WeightPublisher
from averaging.integrations.loggers import TensorBoardRounds
from averaging.protocol import CHANGE_COMPRESSIONS, KEPT_BITS, Mode
from examples.command_line import in_order, parse, parser_of, positive, security_of, share
from examples.language_model import LanguageModel, Size, read, windows
from examples.muon import MuonAndAdamW
from examples.sources import divide, standard_library

SIZE = Size(layers=2, width=128, heads=4, context=64)
BATCH = 16

OPTIMIZERS: dict[str, Callable[[LanguageModel, float], torch.optim.Optimizer]] = {
    "adamw": lambda model, lr: torch.optim.AdamW(model.named_parameters(), lr=lr, betas=(0.9, 0.95)),
    "muon": lambda model, lr: MuonAndAdamW(model, lr=lr),
}
"""The inner optimizers, by the name of the option."""

WAIT_SECONDS = 60.0
"""Seconds for which peers wait for each other before the first step, and after the last one."""


def main(arguments: list[str] | None = None) -> None:
    """Trains as configured on the command line."""
    parser = parser_of("diloco", "A small language model, trained with many local steps between two averages.")
    parser.add_argument(
        "--steps",
        type=positive,
        default=600,
        help="local steps; a newcomer begins at those of the run (600)",
    )
    parser.add_argument("--sync-every", type=int, default=20, help="local steps between two outer steps (20)")
    parser.add_argument("--fragments", type=int, default=1, help="pieces of the model, averaged in rotation (1)")
    parser.add_argument("--delay", type=int, default=0, help="local steps made while a round is in progress (0)")
    parser.add_argument("--alpha", type=float, default=0.0, help="fraction of the local model that is kept, 0 to 1 (0)")
    parser.add_argument(
        "--compression",
        choices=CHANGE_COMPRESSIONS,
        default="none",
        metavar="CODE",
        help="compression, the same at all peers: %(choices)s (none)",
    )
    parser.add_argument("--density", type=share, help="share of the changes that top_k sends (1/64)")
    parser.add_argument("--bits", type=int, choices=KEPT_BITS, help="bits of each of them: %(choices)s (2)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="inner optimizer: %(choices)s (adamw)")
    parser.add_argument("--lr", type=float, default=4e-3, help="learning rate of the inner optimizer (4e-3)")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="write losses and rounds here")
    parser.add_argument("--publish-to", default="", metavar="DIR|URL", help="write each outer step there for followers")
    options = parse(parser, arguments)
    with in_order(parser):
        train(options)


def train(options: argparse.Namespace) -> None:
    """Trains as one peer of the run."""
    torch.set_num_threads(1)  # several processes share few cores
    strategy = DiLoCo(
        sync_every=options.sync_every,
        fragments=options.fragments,
        delay=options.delay,
        alpha=options.alpha,
        compression=options.compression,
        max_norm=1.0,
        density=options.density,
        bits=options.bits,
    )
    board = Board(options.tensorboard)
    sources = divide(standard_library(), 1)
    text, held_out = read(sources.parts[0]), read(sources.held_out)
    watched = windows(held_out, 128, SIZE.context, torch.Generator().manual_seed(0))
    random = torch.Generator()
    random.seed()  # each peer sees another part of the text
    model = LanguageModel(SIZE)
    averager = DecentralizedAverager(
        OPTIMIZERS[options.optimizer](model, options.lr),
        model=model,
        run_id=options.run_id,
        join=options.join,
        listen=options.listen,
        advertise=options.advertise,
        **security_of(options),
        mode=Mode.CLIENT if options.client_mode else Mode.NODE,
        strategy=strategy,
        services=[WeightPublisher(model, to=options.publish_to)] if options.publish_to else [],
        scheduler=partial(LinearLR, start_factor=0.05, total_iters=20),
        on_round=board.note_round,
        group_wait=10.0,  # how long faster peers wait for slower ones
    )
    board.follow(averager)
    with closing(board), averager as opt:
        if options.client_mode:
            say("In client mode.")
        else:
            say(f"Other peers join with --join {opt.endpoint}")
        if opt.local_step == 0 and not opt.wait_for_peers(options.wait_for, WAIT_SECONDS):
            say(f"Fewer than {options.wait_for} peers after {WAIT_SECONDS:g} s; training begins without the others.")
        # A newcomer has downloaded the step counter with the model.
        for step in range(opt.local_step + 1, options.steps + 1):
            opt.zero_grad()
            loss = model.loss(windows(text, BATCH, SIZE.context, random))
            loss.backward()  # type: ignore[no-untyped-call]
            opt.step()
            board.note_loss("own text", step, loss.item())
            if step % options.sync_every == 0 or step == options.steps:
                evaluated = model.evaluate(watched)
                board.note_loss("held-out text", step, evaluated)
                say(
                    f"step {step}: {loss.item():.2f} bits per byte, {evaluated:.2f} on held-out text; "
                    f"{strategy.global_step} outer steps so far."
                )
        finish = opt.finish(WAIT_SECONDS)  # the local steps since the last round go into a last outer step
    say(f"{finish}.")
    say(f"Done: {model.evaluate(watched):.3f} bits per byte on held-out text.")


class Board:
    """Prints the outcome of each round, and writes it and the losses for TensorBoard if a folder is given.

    Args:
        folder: folder of all peers; each writes to a subfolder.
    """

    def __init__(self, folder: Path | None) -> None:
        self._rounds: TensorBoardRounds | None = None
        if folder is not None:
            try:
                self._rounds = TensorBoardRounds(folder / f"{socket.gethostname()}-{os.getpid()}")
            except ImportError as error:
                sys.exit(str(error))
            except OSError as error:
                sys.exit(f"cannot write to {folder}: {error.strerror}; give another --tensorboard folder")

    def follow(self, averager: DecentralizedAverager) -> None:
        """Also writes the averager's status with each round."""
        if self._rounds is not None:
            self._rounds.follow(averager)

    def note_round(self, receipt: Receipt) -> None:
        """Called with the receipt of every round."""
        say(str(receipt))
        if self._rounds is not None:
            self._rounds(receipt)

    def note_loss(self, of: str, step: int, loss: float) -> None:
        """Writes a loss in bits per byte."""
        if self._rounds is not None:
            self._rounds.writer.add_scalar(f"loss/{of}", loss, step)

    def close(self) -> None:
        """Writes buffered data."""
        if self._rounds is not None:
            self._rounds.writer.close()


def say(text: str) -> None:
    """Prints a line without buffering."""
    print(text, flush=True)


if __name__ == "__main__":
    main()

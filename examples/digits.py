"""An image classifier with BatchNorm, trained by unequal peers that share one large batch.

    python -m examples.digits --peers 4                       # four processes on this machine, a table at the end

Or one peer in each terminal, on one machine or on several:

    python -m examples.digits --wait-for 2                    # starts a run and prints where it listens
    python -m examples.digits --join HOST:PORT --batch-size 8

Each peer draws batches of its own size. When all of them together have 256 samples or more, they average their
gradients and the running statistics of the BatchNorm layers, weighted by samples, and make the same step. A slow peer
contributes less but delays no other peer, and in the end all have the same model.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR

from averaging import DecentralizedAverager, GradientAveraging
from averaging.protocol.group import Mode
from examples.children import ending_children
from examples.command_line import in_order, parse, parser_of, positive, security_arguments, security_of

WAIT_SECONDS = 60.0
"""Seconds for which peers wait for each other before the first step and after the last one."""


def main(arguments: list[str] | None = None) -> None:
    """Trains as configured on the command line."""
    parser = parser_of("digits", "Handwritten digits, learnt by unequal peers with one large batch.")
    parser.add_argument("--peers", type=positive, metavar="N", help="start N unequal peers and compare their models")
    parser.add_argument("--batch-size", type=positive, default=64, help="of this peer, or of the fastest of N (64)")
    parser.add_argument("--target-batch-size", type=positive, default=256, help="of all peers together (256)")
    parser.add_argument("--steps", type=positive, default=60, help="global steps of the run (60)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the model here at the end (safetensors)")
    options = parse(parser, arguments)
    if options.peers and (options.join or options.save or options.advertise):
        parser.error("--peers starts peers that find each other here: remove --join, --advertise and --save")
    try:
        if options.save and not options.save.parent.is_dir():
            parser.error(f"there is no folder {options.save.parent} to save the model in")
        if options.save:
            with suppress(FileNotFoundError):
                options.save.stat()  # from Python 3.14 on, is_dir() does not say why a name cannot be used
        if options.save and options.save.is_dir():
            parser.error(f"--save {options.save} is a folder; give the name of a file")
    except OSError as error:  # no permission, or the name is too long
        parser.error(f"--save {options.save} cannot be looked at ({error.strerror}); give another name")
    if options.peers:
        with ending_children(), in_order(parser):
            start_peers(options)
    else:
        with in_order(parser):
            train(options)


# One peer


def train(options: argparse.Namespace) -> None:
    """Trains as one peer of the run, until the run has made all its global steps."""
    torch.set_num_threads(1)  # several processes share few cores
    digits = Digits.load()
    model = make_model()
    strategy = GradientAveraging(target_batch_size=options.target_batch_size)
    averager = DecentralizedAverager(
        torch.optim.AdamW(model.named_parameters(), lr=0.01),
        model=model,
        run_id=options.run_id,
        join=options.join,
        listen=options.listen,
        advertise=options.advertise,
        **security_of(options),
        mode=Mode.CLIENT if options.client_mode else Mode.NODE,
        strategy=strategy,
        scheduler=partial(CosineAnnealingLR, T_max=options.steps),
        group_size=max(32, options.wait_for),
        group_wait=3.0,
        round_timeout=30.0,
    )
    with averager as opt:
        if options.client_mode:
            say(f"In client mode, batches of {options.batch_size}.")
        else:
            say(f"Batches of {options.batch_size}. Other peers join with --join {opt.endpoint}")
        if strategy.global_step == 0 and not opt.wait_for_peers(options.wait_for, WAIT_SECONDS):
            say(f"Fewer than {options.wait_for} peers after {WAIT_SECONDS:g} s; training begins without the others.")
        samples, reported = 0, strategy.global_step
        while strategy.global_step < options.steps:
            images, labels = digits.batch(options.batch_size)
            opt.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            opt.step(batch_size=len(labels))
            samples += len(labels)
            if strategy.global_step // 10 > reported // 10 or strategy.global_step >= options.steps:
                reported = strategy.global_step
                say(
                    f"Global step {reported}: {samples} samples of this peer's, loss {loss.item():.3f}, "
                    f"accuracy {digits.accuracy(model):.1%}, {len(opt.peers) - 1} other peers."
                )
        say(f"Done: {opt.finish(WAIT_SECONDS)}.")  # a peer that missed the last step catches up
    if options.save:
        save(model.state_dict(), options.save, {"samples": str(samples)})


def save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Writes a temporary file and moves it to `path` when it is complete, so that a full disk destroys nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        save_file(tensors, temporary, metadata)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        sys.exit(f"{path} could not be written: {error}. Free disk space, or give another --save")


@dataclass(frozen=True, slots=True)
class Digits:
    """Handwritten digits, 8 x 8 pixels: images [n, 1, 8, 8] of values from 0 to 1, labels [n]."""

    images: torch.Tensor
    labels: torch.Tensor
    held_out_images: torch.Tensor
    held_out_labels: torch.Tensor

    @classmethod
    def load(cls) -> Digits:
        """Loads them from scikit-learn, with every fifth held out."""
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            sys.exit("The digits come with scikit-learn; run in the checkout: python -m pip install '.[examples]'")
        images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
        images = images.reshape(-1, 1, 8, 8).float() / 16
        held_out = torch.arange(len(labels)) % 5 == 0
        return cls(images[~held_out], labels[~held_out], images[held_out], labels[held_out])

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random samples."""
        chosen = torch.randint(len(self.labels), (size,))
        return self.images[chosen], self.labels[chosen]

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Returns the fraction of held-out digits that the model classifies correctly."""
        model.eval()
        right = model(self.held_out_images).argmax(1) == self.held_out_labels
        model.train()
        return float(right.float().mean())


def make_model() -> nn.Module:
    """A small convolutional network."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
    )


def say(text: str) -> None:
    """Prints a line without buffering."""
    print(text, flush=True)


# Several peers


def start_peers(options: argparse.Namespace) -> None:
    """Runs N peers to the end and compares their models. Exits with 1 if they differ."""
    digits = Digits.load()
    with tempfile.TemporaryDirectory() as folder:
        peers = [
            Child(
                number,
                batch_size=max(1, options.batch_size >> (number - 1) % 4),
                client_mode=number == options.peers > 1,
                saved=Path(folder) / f"{number}.safetensors",
            )
            for number in range(1, options.peers + 1)
        ]
        failures: list[str] = []
        try:
            asyncio.run(run_all(peers, options))
        except* ChildError as failed:
            failures += map(str, failed.exceptions)
        if failures:
            sys.exit("\n".join(failures))
        if not compare(peers, digits):
            sys.exit("The models differ.")


@dataclass(frozen=True, slots=True)
class Child:
    """One of several peers, in its own process."""

    number: int
    batch_size: int
    client_mode: bool
    saved: Path


class ChildError(Exception):
    """A peer's process has failed."""


async def run_all(peers: list[Child], options: argparse.Namespace) -> None:
    """Starts the first peer, then those that join it, and waits until all have ended."""
    common = [f"--run-id={options.run_id}", f"--steps={options.steps}", f"--wait-for={len(peers)}"]
    common += [f"--target-batch-size={options.target_batch_size}", *security_arguments(options)]
    endpoint: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(run_child(peers[0], [*common, f"--listen={options.listen}"], endpoint))
        either: list[asyncio.Future[Any]] = [first, endpoint]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        for peer in peers[1:] if endpoint.done() else []:
            tasks.create_task(run_child(peer, [*common, "--join", endpoint.result()]))


async def run_child(peer: Child, arguments: list[str], endpoint: asyncio.Future[str] | None = None) -> None:
    """Runs one peer and prints its output. Cancelling this lets the peer leave gracefully."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "examples.digits", *arguments),
        *(f"--batch-size={peer.batch_size}", f"--save={peer.saved}", *["--client-mode"] * peer.client_mode),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=Path(__file__).parent.parent,
        start_new_session=True,  # so that only this process gets Ctrl+C
    )
    if process.stdout is None:
        raise ValueError("started without a pipe")
    try:
        async for line in process.stdout:
            text = line.decode().rstrip()
            say(f"peer {peer.number}: {text}")
            if endpoint and not endpoint.done() and "--join " in text:
                endpoint.set_result(text.split("--join ")[1])
        if code := await process.wait():
            raise ChildError(f"Peer {peer.number} ended with exit code {code}; the others have been stopped.")
    finally:
        if process.returncode is None:
            process.terminate()  # the averager of the peer leaves its run; SIGINT may be ignored, see `ending_children`
            await process.communicate()


def compare(peers: list[Child], digits: Digits) -> bool:
    """Prints the accuracy of each peer's model; returns whether all models are the same bytes."""
    model = make_model()
    table = Table("peer", "batch size", "mode", "its samples", "accuracy", "sha256 of its model")
    digests = set()
    for peer in peers:
        with safe_open(peer.saved, "pt") as file:
            samples = file.metadata()["samples"]
        state = load_file(peer.saved)
        model.load_state_dict(state)
        # BatchNorm's count of batches differs between peers; everything else is averaged.
        averaged = [tensor.numpy().tobytes() for _, tensor in sorted(state.items()) if tensor.is_floating_point()]
        digests.add(digest := hashlib.sha256(b"".join(averaged)).hexdigest())
        table.add_row(
            str(peer.number),
            str(peer.batch_size),
            "client" if peer.client_mode else "node",
            samples,
            f"{digits.accuracy(model):.1%}",
            digest[:16],
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    if same := len(digests) == 1:
        say("All parameters and running statistics are the same bytes.")
    return same


if __name__ == "__main__":
    main()

"""Measures what averaging costs a model on a GPU: the copies, and the training that is lost while a round runs.

The copies between the GPU and the host are compared with a plain copy to page-locked memory, in the same process. Then
the GPU trains in blocks: `alone` with the plain optimizer, and `averaged` with a strategy around it, whose round begins
in the block's first step. Its partner is a process without a GPU, which only waits for rounds. Blocks alternate.

    lost = (seconds of an averaged block - seconds of one alone) / seconds of the round

Of a strategy that waits for its rounds about everything is lost. The exit code is 1 if a round failed or a copy reached
less than 80 % of the plain one. The results go to `gpu.json`.
"""

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from averaging import DecentralizedAverager, DiLoCo, LocalSGD, Receipt, Strategy
from averaging.tensors import HostCopies, sent
from benchmarks.runner import machine, make_folder, make_parser, write
from benchmarks.workers import without_interrupts
from examples.children import ending_children

WIDTH = 4096
"""Of the layers of the model; one layer is 64 MiB."""

BATCH = 8192

WANTED = 0.8
"""Share of a plain copy."""

REPEATS = 7


@dataclass(frozen=True, slots=True)
class Copy:
    """One direction of the bus: bytes per second of a plain copy, and of ours."""

    direction: str
    tensors: int
    plain: float
    ours: float


@dataclass(frozen=True, slots=True)
class Block:
    """Some training steps, and the round that ran meanwhile; 0 seconds without one."""

    seconds: float
    round_seconds: float = 0.0
    failed: int = 0


def strategies(steps: int) -> dict[str, Callable[[], Strategy]]:
    """What is measured. The partner of DiLoCo has DiLoCo, too."""
    late = 4 * steps // 5
    return {
        "LocalSGD(overlap=True)": partial(LocalSGD, steps, overlap=True),
        f"DiLoCo(delay={late})": partial(DiLoCo, steps, delay=late),
        "LocalSGD, waits": partial(LocalSGD, steps),
    }


def seconds_of(action: Callable[[], object]) -> float:
    """The median of several runs, without the first two, from an idle device to an idle device."""
    measured = []
    for _ in range(REPEATS + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        torch.cuda.synchronize()
        measured.append(time.perf_counter() - began)
    return statistics.median(measured[2:])


def copies(mib: int, tensors: int) -> list[Copy]:
    """Copies of `mib` MiB in so many tensors in both directions."""
    count = (mib << 18) // tensors
    there = [torch.randn(count, device="cuda") for _ in range(tensors)]
    nbytes = 4 * count * tensors
    plain = torch.zeros(nbytes // 4, pin_memory=True)
    whole = torch.zeros(nbytes // 4, device="cuda")
    host = HostCopies(there)

    def to_host() -> None:
        host.begin()
        host.wait()

    def to_device() -> None:
        for _ in sent(host.copies, there):
            pass

    return [
        Copy(
            "GPU to host",
            tensors,
            nbytes / seconds_of(lambda: plain.copy_(whole, non_blocking=True)),
            nbytes / seconds_of(to_host),
        ),
        Copy(
            "host to GPU",
            tensors,
            nbytes / seconds_of(lambda: whole.copy_(plain, non_blocking=True)),
            nbytes / seconds_of(to_device),
        ),
    ]


def model_of(layers: int) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


OPTIONS: dict[str, Any] = {"run_id": "gpu", "group_size": 2, "group_wait": 60.0, "round_timeout": 120.0}


def partner(pipe: Connection, strategy: Callable[[], Strategy], layers: int) -> None:
    """A peer without a GPU that does nothing but average, until it is ended."""
    torch.set_num_threads(4)
    model = model_of(layers)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-5)  # without gradients it changes nothing
    averager = DecentralizedAverager(inner, model=model, strategy=strategy(), **OPTIONS)
    pipe.send(averager.endpoint)
    averager.wait_for_peers(2, OPTIONS["round_timeout"])
    while not pipe.poll():
        averager.step()


def measure(mine: Callable[[], Strategy], join: str, layers: int, steps: int, blocks: int) -> list[dict[str, Block]]:
    """Blocks of both kinds alternately. The first pair is a warm-up and does not count."""
    model = model_of(layers).to("cuda")
    inner = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    receipts: list[Receipt] = []
    averager = DecentralizedAverager(
        inner, model=model, strategy=mine(), join=[join], on_round=receipts.append, **OPTIONS
    )
    inputs = torch.randn(BATCH, WIDTH, device="cuda")

    def train(optimizer: torch.optim.Optimizer, count: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss: Any = model(inputs).float().pow(2).mean()
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    pairs = []
    assert averager.wait_for_peers(2, 60.0)
    train(averager, steps - 1)  # up to the step that begins a round
    for number in range(blocks + 1):
        receipts.clear()
        alone = Block(train(inner, steps))
        seconds = train(averager, steps)
        averaged = [receipt for receipt in receipts if receipt.averaged]
        rounds = [receipt.allreduce_seconds for receipt in averaged]
        block = Block(seconds, max(rounds, default=0.0), len(receipts) - len(averaged) + (not averaged))
        if number:
            pairs.append({"alone": alone, "averaged": block})
        print(f"    {alone.seconds:.2f} s alone, {block}", file=sys.stderr, flush=True)
    averager.close()
    return pairs


def with_partner(name: str, layers: int, steps: int, blocks: int) -> list[dict[str, Block]]:
    """Measures one strategy beside a partner in a process of its own."""
    mine, others = strategies(steps)[name], partial(DiLoCo if name.startswith("DiLoCo") else LocalSGD, 1)
    pipe, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=partner, args=(theirs, others, layers), daemon=True)
    with without_interrupts():
        process.start()
    theirs.close()
    try:
        return measure(mine, pipe.recv(), layers, steps, blocks)
    finally:
        process.kill()
        process.join()


def lost(pair: dict[str, Block]) -> float:
    """Seconds that one round has cost the training."""
    return pair["averaged"].seconds - pair["alone"].seconds


def report(name: str, pairs: Sequence[dict[str, Block]], steps: int) -> str:
    """One line about a strategy."""
    step = statistics.median(pair["alone"].seconds for pair in pairs) / steps
    cost = statistics.median(map(lost, pairs))
    rounds = [pair for pair in pairs if pair["averaged"].round_seconds]
    if not rounds:
        return f"{name}: no round"
    share = statistics.median(lost(pair) / pair["averaged"].round_seconds for pair in rounds)
    seconds = statistics.median(pair["averaged"].round_seconds for pair in rounds)
    return (
        f"{name}: a step takes {1000 * step:.1f} ms; a round of {seconds:.2f} s costs {1000 * cost:.0f} ms of training "
        f"({cost / step:.1f} steps), {100 * share:.1f} % of its time"
    )


@ending_children()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--mib", type=int, default=512, help="of the model: a multiple of 64 (512)")
    parser.add_argument("--steps", type=int, default=150, help="in a block, in which a round must have room (150)")
    parser.add_argument("--blocks", type=int, default=3, help="of each kind and strategy, after the warm-up (3)")
    options = parser.parse_args()
    if min(options.mib, options.blocks) < 1 or options.mib % 64 or options.steps < 5:
        parser.error("--mib must be a multiple of 64, --steps at least 5 and --blocks at least 1")
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU, and a torch with CUDA")
    make_folder(parser, options.output)
    card = torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}", file=sys.stderr)
    measured = [copy for tensors in (1, 8, 1000) for copy in copies(options.mib, tensors)]
    for copy in measured:
        print(
            f"{copy.direction}, {options.mib} MiB in {copy.tensors} tensors: {copy.ours / 1e9:.1f} GB/s, "
            f"{100 * copy.ours / copy.plain:.0f} % of a plain copy ({copy.plain / 1e9:.1f} GB/s)"
        )
    layers = options.mib // 64
    results = {}
    for name in strategies(options.steps):
        results[name] = with_partner(name, layers, options.steps, options.blocks)
        print(report(name, results[name], options.steps), flush=True)
    path = options.output / "gpu.json"
    blocks = {name: [{kind: asdict(pair[kind]) for kind in pair} for pair in pairs] for name, pairs in results.items()}
    write(path, machine() | {"card": card, "copies": [asdict(copy) for copy in measured], "blocks": blocks})
    print(path)
    slow = any(copy.ours < WANTED * copy.plain for copy in measured if copy.tensors < 1000)
    failed = any(pair["averaged"].failed for pairs in results.values() for pair in pairs)
    sys.exit(1 if slow or failed else 0)


if __name__ == "__main__":
    main()

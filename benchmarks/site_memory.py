"""Measures the memory that averaging adds to a rank of a site whose model FSDP2 divides, with 1, 2 or 4 ranks.

Two sites train with AdamW. DiLoCo averages the shards of each rank with the same rank of the other site. The peak is
the largest resident memory from before the model is made until after some rounds, less what a process has before.
FSDP2 needs much memory on the CPU, so the same training is measured without an averager. The difference is what it
adds: the anchor and the momentum of DiLoCo, the copy of the state that newcomers download, and a round. `alone` is
without that copy (`share_state=False`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from averaging import DecentralizedAverager, DiLoCo
from benchmarks.output import make_folder, write
from examples.children import ending_children

ROOT = Path(__file__).parents[1]

LAYERS, EVERY = 8, 2

KINDS = ("plain", "averaging", "alone")


def memory(name: str) -> float:
    """A line of /proc/self/status in MiB: `VmRSS`, or `VmHWM`, the peak."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def train(mib: int, rounds: int, kind: str, listen: str, join: str) -> None:
    """One rank. Prints what it has measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    width = int((mib * 2**20 / 4 / LAYERS) ** 0.5)
    base = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    with torch.device("meta"):  # no rank ever holds the whole model
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().normal_(0, 0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(of: torch.optim.Optimizer) -> None:
        of.zero_grad()
        torch.autograd.backward(model(torch.randn(4, width)).square().mean())
        of.step()

    if kind == "plain":
        for _ in range(EVERY * rounds):
            step(optimizer)
        report(base)
        dist.barrier()
        dist.destroy_process_group()
        return
    with DecentralizedAverager(
        optimizer,
        run_id="memory",
        listen=listen,
        join=[listen, join],
        strategy=DiLoCo(sync_every=EVERY),
        process_group=dist.group.WORLD,
        group_wait=60.0,
        share_state=kind == "averaging",
    ) as opt:
        opt.wait_for_peers(2, 120.0)
        averaged = 0
        while averaged < rounds:
            step(opt)
            receipt = opt.last_receipt
            if opt.local_step % EVERY == 0:
                averaged += receipt is not None and receipt.averaged and len(receipt.members) == 2
                assert opt.local_step < 100 * rounds, "the sites do not average"
        report(base)
        opt.finish(60.0)
    dist.barrier()
    dist.destroy_process_group()


def report(base: float) -> None:
    line = json.dumps({"rank": dist.get_rank(), "peak": memory("VmHWM") - base})
    os.write(1, f"\n{line}\n".encode())  # at once, since all ranks of a site share the pipe


def measure(mib: int, ranks: int, rounds: int, kind: str) -> list[float]:
    """The peaks of all ranks of two sites, in MiB."""
    ports: list[int] = []
    while len(ports) < 2:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            ports.append(one.getsockname()[1])
        time.sleep(0.01)
    sites = []
    for number in range(2):
        listen, join = (f"127.0.0.1:{ports[one]}" for one in (number, 1 - number))
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        module = ["-m", "benchmarks.site_memory", "--train", kind, listen, join, f"--mib={mib}", f"--rounds={rounds}"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MALLOC_ARENA_MAX": "2"}
        sites.append(
            subprocess.Popen([sys.executable, *launch, *module], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)
        )
    told: list[dict[str, Any]] = []
    for site in sites:
        printed, _ = site.communicate(timeout=900)
        if site.returncode:
            sys.exit(f"a site of {ranks} ranks has failed; its message is above")
        told += [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return [one["peak"] for one in told]


@ending_children()
def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.site_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mib", type=int, default=256, help="MiB of parameters of the whole model (256)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="ranks of each site (1 2 4)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds before the peak is read (3)")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"), help="folder of the result")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.mib, options.rounds, *options.train)
        return
    if min(options.mib, options.rounds, *options.ranks) < 1:
        parser.error("needs at least 1 MiB, 1 rank and 1 round")
    make_folder(parser, options.output)
    rows = []
    print(f"{options.mib} MiB of parameters in {LAYERS} layers; all figures in MiB")
    for ranks in options.ranks:
        peaks = {kind: max(measure(options.mib, ranks, options.rounds, kind)) for kind in KINDS}
        shard = options.mib / ranks
        added = {kind: peaks[kind] - peaks["plain"] for kind in KINDS[1:]}
        rows.append({"ranks": ranks, "shard": shard, "peaks": peaks})
        print(
            f"{ranks} ranks, shards of {shard:.0f}: peak {peaks['plain']:.0f} without averaging; it adds "
            f"{added['averaging']:.0f} ({added['averaging'] / shard:.1f} shards), and {added['alone']:.0f} "
            f"({added['alone'] / shard:.1f} shards) without the copy for newcomers",
            flush=True,
        )
    write(options.output / "site_memory.json", {"mib": options.mib, "layers": LAYERS, "rows": rows})


if __name__ == "__main__":
    main()

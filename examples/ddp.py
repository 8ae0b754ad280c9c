"""Machines with several GPUs each: DistributedDataParallel inside a machine, averaging between the machines.

    torchrun --standalone --nproc-per-node 2 -m examples.ddp                     # it prints where it listens
    torchrun --standalone --nproc-per-node 2 -m examples.ddp --join HOST:PORT    # another machine, or terminal

Each machine is one peer of the run: its first process, which alone has an optimizer. The parameters after each step or
round are broadcast from there to the machine's other processes, so any strategy works, and the optimizer's state takes
memory once per machine. Without GPUs the processes use the CPU.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from averaging import DecentralizedAverager, LocalSGD
from averaging.protocol.group import Mode
from examples.command_line import in_order, parse, parser_of, positive, security_of

BATCH = 64
"""Batch size of each process."""

WAIT_SECONDS = 60.0
"""Seconds for which machines wait for each other before the first step, and after the last one."""


def main(arguments: list[str] | None = None) -> None:
    """Trains as configured on the command line."""
    parser = parser_of("ddp", "Learns a sine with DDP inside a machine and averaging between machines.")
    parser.add_argument("--steps", type=positive, default=20_000, help="of training (20000)")
    parser.add_argument(
        "--every", type=positive, default=50, help="steps between two averages with other machines (50)"
    )
    options = parse(parser, arguments)
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --standalone --nproc-per-node 2 -m examples.ddp")
    with in_order(parser):
        train(options)


def train(options: argparse.Namespace) -> None:
    """Trains as one process of a machine."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)

    opt, averaged = None, list[bool]()
    if dist.get_rank() == 0:
        opt = DecentralizedAverager(
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            run_id=options.run_id,
            join=options.join,
            listen=options.listen,
            advertise=options.advertise,
            **security_of(options),
            mode=Mode.CLIENT if options.client_mode else Mode.NODE,
            strategy=LocalSGD(every=options.every),
            on_round=lambda receipt: averaged.append(receipt.averaged),
            weight=dist.get_world_size(),  # a machine counts as many samples as all its processes
        )
    with opt or nullcontext():
        if opt:
            print(f"Other peers join with --join {opt.endpoint}", flush=True)
            if opt.local_step == 0 and not opt.wait_for_peers(options.wait_for, WAIT_SECONDS):
                print(f"Fewer than {options.wait_for} machines after {WAIT_SECONDS:g} s.", flush=True)
        # Created after the averager, so that the other processes begin with a state that rank 0 may have downloaded.
        ddp = DistributedDataParallel(model)
        begin = torch.tensor(opt.local_step if opt else 0, device=device)
        dist.broadcast(begin, 0)
        for step in range(int(begin), options.steps):
            x = 8 * torch.rand(BATCH, 1, device=device) - 4
            loss = torch.nn.functional.mse_loss(ddp(x), torch.sin(x))
            ddp.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if opt:
                opt.step()
                if (step + 1) % 1000 == 0 or step + 1 == options.steps:
                    times, others = averaged.count(True), len(opt.peers) - 1
                    progress = f"loss {loss.item():.6f}, averaged {times} times, {others} other machines"
                    print(f"step {step + 1}: {progress}", flush=True)
            for parameter in model.parameters():
                dist.broadcast(parameter.detach(), 0)
        if opt:
            print(f"Done: {opt.finish(WAIT_SECONDS)}", flush=True)
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)
    dist.barrier()  # rank 0 has left the run; torch's Gloo fails if some processes end long before the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

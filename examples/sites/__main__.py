"""Two sites train a divided model together; one of them loses a node, goes on without it, and takes it back.

    python -m examples.sites

Each site is a torchrun job whose processes divide the model with FSDP2. The first site has two nodes of two processes,
the second one has one. Each knows one half of the ten digits only. Between the sites the model is averaged with DiLoCo.
One node is killed without warning, and started again. At the end all sites must hold the same model, which knows all
digits; one site alone knows its own half.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch.nn import functional

from examples.children import ending_children
from examples.command_line import positive
from examples.digits import Digits
from examples.outputs import claim, clear, write_plot
from examples.ports import free_ports
from examples.sites.rank import SITES, batch_of, data_of, model_of, optimizer_of

KILLED_AFTER = 0.15
"""Part of the steps after which a node is killed."""

STEPS_WITHOUT = 20
"""Steps that its site makes before the node comes back."""

PATIENCE = 120.0
"""Seconds without any event after which the example fails."""


@dataclass
class Node:
    """A torchrun and its processes."""

    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Ends all of it without warning, as when the machine fails."""
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            for one in [root, *root.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGKILL)
        self.process.wait()


@dataclass
class Run:
    """The state of the run.

    Attributes:
        events: of each site, in order.
        moments: what happened to the node: killed, without, back; in seconds since the epoch.
    """

    events: list[list[dict[str, Any]]] = field(default_factory=lambda: [[] for _ in range(SITES)])
    moments: dict[str, float] = field(default_factory=dict)

    def read(self, directory: Path) -> None:
        """Reads what the sites have reported."""
        for number in range(SITES):
            file = directory / f"site-{number + 1}.jsonl"
            if file.exists():
                whole = file.read_text().rpartition("\n")[0]  # a killed process may leave half a line
                self.events[number] = [json.loads(line) for line in whole.splitlines()]

    def last(self, number: int) -> dict[str, Any]:
        """The last event of a site."""
        return self.events[number][-1] if self.events[number] else {"event": "starts", "step": 0, "processes": 0}


class SiteError(Exception):
    """The example cannot go on."""


@ending_children()
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the example. Exits with 1 if a promise was not kept."""
    parser = argparse.ArgumentParser(prog="python -m examples.sites", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=positive, default=600, help="local steps of each site (%(default)s)")
    parser.add_argument("--directory", type=Path, default=Path("runs/sites"), help="for logs and plot (%(default)s)")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    directory = options.directory.resolve()
    try:
        claim(directory)
        if (directory / "logs").exists():
            clear(directory)
        (directory / "logs").mkdir(parents=True)
    except OSError as error:
        sys.exit(f"{parser.prog}: cannot write to {directory}: {error.strerror}; give another --directory")
    torch.set_num_threads(1)
    alone = [train_alone(number, options.steps) for number in range(SITES)]
    console.print(f"alone, a site learns its own digits: accuracy {alone[0]:.1%} and {alone[1]:.1%} on all ten")
    run = Run()
    try:
        follow(run, options.steps, directory, console)
    except KeyboardInterrupt:
        console.print("Stopped; all processes have ended.")
        sys.exit(130)
    except SiteError as error:
        sys.exit(f"{parser.prog}: {error}; the logs are in {directory / 'logs'}")
    from examples.sites.plot import draw

    write_plot(directory / "sites.png", lambda file: draw(run, alone, file))
    sys.exit(judge(run, alone, console, directory / "sites.png"))


def train_alone(number: int, steps: int) -> float:
    """The accuracy on all digits of one site that trains alone, in this process."""
    digits, model = Digits.load(), model_of(0)
    data, optimizer = data_of(digits, number), optimizer_of(model)
    for step in range(steps):
        images, labels = batch_of(data, steps * number + step)
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(model(images), labels))
        optimizer.step()
    return digits.accuracy(model)


def follow(run: Run, steps: int, directory: Path, console: Console) -> None:
    """Starts the sites, kills a node and starts it again, until both sites have ended.

    Raises:
        SiteError: a site has failed, or nothing happens any more.
    """
    with ExitStack() as stack:
        ports = free_ports(2 * SITES)

        def start(number: int, name: str) -> Node:
            listen, join = (f"127.0.0.1:{ports[one]}" for one in (number, 1 - number))
            job = [
                "--nnodes=1:2",
                "--nproc-per-node=2",
                "--rdzv-backend=averaging",
                f"--rdzv-endpoint=127.0.0.1:{ports[SITES + number]}",
                f"--rdzv-id=site-{number + 1}",
                "--rdzv-conf=last_call_timeout=5,keep_alive_interval=1",
                "--max-restarts=5",
            ]
            script = ["-m", "examples.sites.rank", str(directory), str(number), listen, join, str(steps)]
            with (directory / "logs" / f"{name}.log").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "torch.distributed.run", *job, *script],
                    env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl+C is for this process, which ends the others
                )
            node = Node(process)
            stack.callback(node.kill)
            return node

        nodes = {name: start(int(name[5]) - 1, name) for name in ("site-1-node-1", "site-1-node-2", "site-2-node-1")}
        live = stack.enter_context(Live(console=console, auto_refresh=False)) if console.is_terminal else None
        printed, moved, seen = time.monotonic(), time.monotonic(), 0
        while any(run.last(number)["event"] != "done" for number in range(SITES)):
            time.sleep(0.25)
            run.read(directory)
            care_for_node(run, steps, nodes, lambda: start(0, "site-1-node-2"), console)
            if live is not None:
                live.update(table_of(run, steps), refresh=True)
            elif time.monotonic() > printed + 10:
                printed = time.monotonic()
                console.print(
                    "; ".join(
                        f"site {n + 1}: {one['processes']} processes, step {one['step']} of {steps}"
                        for n, one in enumerate(map(run.last, range(SITES)))
                    )
                )
            count = sum(map(len, run.events))
            if count > seen:
                moved, seen = time.monotonic(), count
            if time.monotonic() > moved + PATIENCE:
                raise SiteError(f"nothing has happened for {PATIENCE:.0f} s")
            for name, node in nodes.items():
                if node.process.poll() not in (None, 0):
                    raise SiteError(f"{name} has ended with exit code {node.process.returncode}")


def care_for_node(run: Run, steps: int, nodes: dict[str, Node], start: Any, console: Console) -> None:
    """Kills the second node of site 1 when it is time, and starts it again when its site has gone on without it."""
    moments, events = run.moments, run.events[0]
    if "killed" not in moments:
        if run.last(0)["step"] >= KILLED_AFTER * steps and run.last(0)["event"] == "step":
            nodes.pop("site-1-node-2").kill()
            moments["killed"] = time.time()
            console.print("node 2 of site 1 is killed without warning", style="red")
        return
    without = [one for one in events if one["processes"] == 2 and one["event"] == "step"]
    if "without" not in moments and without:
        moments["without"] = without[0]["at"]
        console.print(
            f"site 1 goes on with one node after {moments['without'] - moments['killed']:.1f} s", style="green"
        )
    if "started" not in moments and without and without[-1]["step"] >= without[0]["step"] + STEPS_WITHOUT:
        nodes["site-1-node-2"] = start()
        moments["started"] = time.time()
        console.print("node 2 of site 1 is started again")
    back = [one for one in events if one["at"] > moments.get("started", float("inf")) and one["processes"] == 4]
    if "back" not in moments and back and back[-1]["event"] != "start":
        moments["back"] = back[-1]["at"]
        console.print(f"site 1 has both nodes again after {moments['back'] - moments['started']:.1f} s", style="green")


def judge(run: Run, alone: Sequence[float], console: Console, plot: Path) -> bool:
    """Prints the verdict. Returns whether a promise was broken."""
    ends = [run.last(number) for number in range(SITES)]
    findings = [
        (len({end["digest"] for end in ends}) == 1, f"both sites hold the same model: {ends[0]['text']}"),
        (
            min(end["accuracy"] for end in ends) > max(alone) + 0.1,
            f"it knows all digits: accuracy {ends[0]['accuracy']:.1%}, alone {max(alone):.1%}",
        ),
        ("without" in run.moments, "site 1 went on after the loss of a node"),
        ("back" in run.moments, "and took it back"),
    ]
    for kept, text in findings:
        console.print(f"{'kept  ' if kept else 'BROKEN'}  {text}", style="" if kept else "bold red", soft_wrap=True)
    console.print(f"plot: {plot}", soft_wrap=True)
    return not all(kept for kept, _ in findings)


def table_of(run: Run, steps: int) -> Table:
    """What is shown on a terminal."""
    table = Table(title="Two sites, one model")
    for column in ("site", "processes", "step", "averages with", "accuracy"):
        table.add_column(column, justify="right")
    for number in range(SITES):
        last = run.last(number)
        accuracy = [one["accuracy"] for one in run.events[number] if "accuracy" in one][-1:]
        table.add_row(
            str(number + 1),
            str(last["processes"]),
            f"{last['step']}/{steps}",
            f"{last.get('others', 0)} others",
            *(f"{one:.1%}" for one in accuracy or [0.0]),
        )
    return table


if __name__ == "__main__":
    main()

"""Nodes of a torchrun job with our rendezvous, as processes that can be killed with all their workers."""

import os
import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.support.ports import free_address
from tests.support.processes import JsonProcess

SOON = {"last_call_timeout": 2, "keep_alive_interval": 1, "keep_alive_max_attempt": 4, "join_timeout": 150}
"""Options of the rendezvous that suit a test."""

PATIENCE = 150.0
"""Seconds for a node to start, with torch in two processes, or for nodes to meet again."""


class Node(JsonProcess):
    """A torchrun and its workers."""

    def tree(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.pid)
            return [own, *own.children(recursive=True)]
        return []

    def signal_all(self, number: signal.Signals) -> None:
        """The whole node, as when its machine stops."""
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def __exit__(self, *error: Any) -> None:
        self.signal_all(signal.SIGKILL)
        super().__exit__(*error)

    def until_step(self, step: int, world: int | None = None) -> dict[str, Any]:
        """The first step from `step` on, in a world of that size."""
        while True:
            found = self.expect("step", PATIENCE)
            if found["step"] >= step and world in (None, found["world"]):
                return found

    def starts(self) -> list[tuple[int, int]]:
        return [(event["world"], event["restarts"]) for event in self.events("start") if event["LOCAL_RANK"] == 0]


class Job:
    """One job of several nodes on this machine.

    Args:
        stack: ends the nodes.
        directory: for the checkpoint.
        nnodes: as torchrun takes it.
        endpoint: of the register; a free port of this machine, which the first node hosts, if None.
        conf: options of the rendezvous beside `SOON`.
    """

    def __init__(
        self,
        stack: ExitStack,
        directory: Path,
        nnodes: str,
        *,
        nproc: str = "1",
        steps: int = 1_000_000,
        pace: float = 0.05,
        endpoint: str | None = None,
        conf: dict[str, Any] | None = None,
        max_restarts: int = 3,
    ) -> None:
        self._stack = stack
        self.endpoint = endpoint or free_address()
        self.checkpoint = directory / "checkpoint"
        told = ",".join(f"{name}={value}" for name, value in (SOON | (conf or {})).items())
        self.options = [
            f"--nnodes={nnodes}",
            f"--nproc-per-node={nproc}",
            "--rdzv-backend=averaging",
            f"--rdzv-endpoint={self.endpoint}",
            "--rdzv-id=job",
            f"--rdzv-conf={told}",
            f"--max-restarts={max_restarts}",
            "--monitor-interval=0.2",
        ]
        self._script = [str(Path(__file__).with_name("worker.py")), str(self.checkpoint), str(steps), str(pace)]

    def finish(self, *nodes: Node) -> None:
        """Lets the workers end, and the nodes with them."""
        self.checkpoint.with_name("stop").touch()
        for node in nodes:
            assert node.wait(PATIENCE) == 0, node.stderr

    def node(self, launcher: tuple[str, ...] = ("python", "-m", "torch.distributed.run"), **env: str) -> Node:
        """Starts a node."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | env
        return self._stack.enter_context(Node(*launcher, *self.options, *self._script, env=environment))

"""The processes of the story: started, killed without warning, and started again."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from examples.posttrain.story import Story, local

ROOT = Path(__file__).parents[2]

NODES, EXPLORERS = 2, 2
"""Nodes and explorers of each site."""


class ChildProcesses:
    """Processes by name, each with a log of that name; they end with the context.

    Args:
        logs: folder of the logs.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name in list(self._running):
            self.kill(name)

    def kill(self, name: str) -> None:
        """Kills a process and all that it has started, as when a machine fails."""
        process = self._running.pop(name)
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            for one in [root, *root.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        process.wait()

    def ended(self) -> str | None:
        """A process that has ended by itself, except one that has done all its work."""
        for name, process in self._running.items():
            code = process.poll()
            if code is not None and not (self.may_end(name) and code == 0):
                return f"{name} has ended with exit code {code}; its log is {self.log(name)}"
        return None

    def may_end(self, name: str) -> bool:
        """Whether a process has work that ends."""
        return False

    def log(self, name: str) -> Path:
        """The file with the output of a process."""
        return self._logs / f"{name}.log"

    def start(self, name: str, module: str, *arguments: str) -> str:
        """Starts a module of Python."""
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with self.log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl+C is for this process, which ends the others
            )
        return name


class Processes(ChildProcesses):
    """All processes of the story."""

    def __init__(self, story: Story, file: Path) -> None:
        super().__init__(story.path / "logs")
        self._story, self._file = story, str(file)
        self._lives: dict[str, int] = {}

    def start_site(self, site: int) -> None:
        """Starts everything of a site."""
        self.start_feed(site)
        for node in range(NODES):
            self.start_node(site, node)
        for module in ("reward", "master"):
            self._start(f"site-{site + 1}-{module}", f"examples.posttrain.{module}", self._file, str(site))
        for number in range(1, EXPLORERS + 1):
            self.start_explorer(site, number)

    def start_feed(self, site: int) -> str:
        """Starts the feed of a site, which goes on with what its store holds."""
        store = self._story.path / f"site-{site + 1}-feed.sqlite"
        listen = f"--listen={local(self._story.sites[site].feed)}"
        return self._start(f"site-{site + 1}-feed", "averaging", "feed", listen, f"--store={store}")

    def start_node(self, site: int, node: int) -> str:
        """Starts a node: torchrun and its two ranks."""
        return self._start(
            f"site-{site + 1}-node-{node + 1}",
            "torch.distributed.run",
            f"--nnodes=1:{NODES}",
            "--nproc-per-node=2",
            "--rdzv-backend=averaging",
            f"--rdzv-endpoint={local(self._story.sites[site].rendezvous)}",
            f"--rdzv-id=site-{site + 1}",
            "--rdzv-conf=last_call_timeout=5,keep_alive_interval=1",
            "--max-restarts=20",
            "--monitor-interval=0.2",
            "-m",
            "examples.posttrain.ranks",
            self._file,
            str(site),
        )

    def start_explorer(self, site: int, number: int) -> str:
        """Starts an explorer."""
        name = f"site-{site + 1}-explorer-{number}"
        life = str(self._lives.get(name, 0) + 1)
        return self._start(name, "examples.posttrain.explorer", self._file, str(site), str(number), life)

    def names(self, kind: str) -> list[str]:
        """The running processes of one kind, such as `explorer`."""
        return [name for name in self._running if f"-{kind}" in name]

    def may_end(self, name: str) -> bool:
        """A master ends when it has made all its steps."""
        return name.endswith("-master")

    def _start(self, name: str, module: str, *arguments: str) -> str:
        self._lives[name] = self._lives.get(name, 0) + 1
        return self.start(name, module, *arguments)

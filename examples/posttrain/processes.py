"""The processes of the story: the site, the feed, the engine, and what makes rollouts."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from examples.posttrain.story import (
    ANSWER_TOKENS,
    ENVIRONMENT,
    GROUP_SIZE,
    MAX_STALENESS,
    MODEL_NAME,
    RUN_ID,
    Story,
    local,
)

ROOT = Path(__file__).parents[2]

RANKS = 2
"""Processes of the site."""

SITE, FEED, ENGINE, ROLLOUTS = "site", "feed", "engine", "rollouts"


class Processes:
    """All processes of the story, each with a log of its name; they end with the context."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._running):
            self.kill(name)

    def kill(self, name: str) -> None:
        """Kills a process and all that it has started, as when a machine fails."""
        process = self._running.pop(name)
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            for each in [root, *root.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        process.wait()

    def ended(self) -> str | None:
        """A process that has ended by itself, except the site after its last step."""
        for name, process in self._running.items():
            code = process.poll()
            if code is not None and (name, code) != (SITE, 0):
                return f"{name} has ended with exit code {code}; its log is {self._log(name)}"
        return None

    def start_site(self) -> None:
        """Starts torchrun with the ranks; it starts them again if one fails."""
        self._start(
            SITE,
            "torch.distributed.run",
            "--nnodes=1",
            f"--nproc-per-node={RANKS}",
            "--rdzv-backend=averaging",
            f"--rdzv-endpoint={local(self._story.ports.rendezvous)}",
            "--rdzv-id=site",
            "--max-restarts=3",
            "--monitor-interval=0.2",
            "-m",
            "examples.posttrain.rank",
            str(self._story.file),
        )

    def start_feed(self) -> None:
        """Starts the feed, which refuses answers of old weights; it goes on with what its store holds."""
        listen, store = f"--listen={local(self._story.ports.feed)}", f"--store={self._story.path / 'feed.sqlite'}"
        self._start(FEED, "averaging", "feed", listen, store, f"--max-staleness={MAX_STALENESS}", "--json")

    def start_engine(self) -> None:
        """Starts the engine, which follows the site."""
        self._start(
            ENGINE,
            "averaging",
            "serve",
            str(self._story.model),
            f"--name={MODEL_NAME}",
            f"--follow={local(self._story.ports.publisher)}",
            f"--run-id={RUN_ID}",
            f"--listen={local(self._story.ports.engine)}",
            "--batch=64",
            "--json",
        )

    def start_rollouts(self) -> None:
        """Starts what lets the engine answer the environment's questions, and posts the scored answers."""
        self._start(
            ROLLOUTS,
            "averaging",
            "rollouts",
            f"--environment={ENVIRONMENT}",
            f"--engine=http://{local(self._story.ports.engine)}",
            f"--feed=http://{local(self._story.ports.feed)}",
            f"--tokenizer={self._story.model}",
            f"--group-size={GROUP_SIZE}",
            f"--max-tokens={ANSWER_TOKENS}",
            "--truncated=train",
            "--concurrency=64",
            "--json",
        )

    def _log(self, name: str) -> Path:
        return self._story.path / "logs" / f"{name}.log"

    def _start(self, name: str, module: str, *arguments: str) -> None:
        with self._log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl+C is for this process, which ends the others
            )

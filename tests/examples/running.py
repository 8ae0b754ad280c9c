"""An example in a process of its own, and all processes that come from it."""

import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Self

import psutil

ROOT = Path(__file__).parents[2]
NAME = "TEST_EXAMPLE"

DEADLINE = 110.0
"""Seconds for one example, most of which take about 10 on two idle cores; tests run on slow and shared machines."""


class Example:
    """A running example. At the end of the block all that it has started is killed if it still runs.

    Args:
        arguments: of the interpreter.
        limit: seconds after which it is killed.
    """

    def __init__(self, *arguments: str, limit: float = DEADLINE) -> None:
        self._name = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ | {NAME: self._name},
        )
        self._limit = threading.Timer(limit, self.process.kill)
        self._limit.start()
        self.printed = ""

    def read_until(self, text: str) -> str:
        """The next line with `text` in it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line
            if text in line:
                return line.rstrip()
        raise AssertionError(f"ended without {text!r}: {self.printed}")

    def end(self, code: int) -> str:
        """All that it printed, once it has ended with that exit code."""
        assert self.process.stdout is not None
        self.printed += self.process.stdout.read()
        assert self.process.wait() == code, self.printed
        assert "Traceback" not in self.printed
        return self.printed

    def others(self) -> list[psutil.Process]:
        """All processes that it has started and that still run, also those that others of them have started."""
        running = psutil.process_iter(["environ"])
        named = [each for each in running if (each.info["environ"] or {}).get(NAME) == self._name]
        return [each for each in named if each.pid != self.process.pid]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._limit.cancel()
        with self.process:
            self.process.kill()
            for each in self.others():
                each.kill()
            self.process.communicate()


def example(name: str, *arguments: str, limit: float = DEADLINE) -> Example:
    return Example("-m", f"examples.{name}", *arguments, limit=limit)

"""Pages of the documentation are run: files are written, commands executed, and outputs compared.

A page is read from its first fenced block to its last:

- A block with a title that is a file name, such as `python title="train.py"`, becomes that file.
- `sh` is a command that is run to its end; `text` after it is what it prints.
- `sh title="Terminal 1"` is a command that goes on while those of the other terminals run. All terminals have to end
  before the next command begins. `^C` as the last line of what a terminal prints ends its command in this way.

Outputs are compared word by word, but for measured times, dates, free ports and the names of clients.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sysconfig
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.support.forking import ForkedProcess
from tests.support.ports import free_port
from tests.support.processes import DEADLINE

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
HOST = "a.example.org"
PORT = "4222"
"""Of the peers on the pages; a test takes a free port of this machine."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    title: str
    text: str


def blocks_of(page: str) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(page)]


MEASURED = re.compile(
    r"\d+(?:\.\d+)? (?:s|ms|min|h)\b|\d+(?:\.\d+)?%"
    r"|\d{4}-\d\d-\d\d(?: \d\d:\d\d:\d\d(?:,\d+)?)?"
    r"|127\.0\.0\.1:\d{5}\b|(?<=client::)[\w-]+"
)
"""Times, shares, dates, free ports and the names of clients: they differ from run to run."""

FACT = re.compile(
    r"client::|[\w.-]+:\d{2,5}\b|[\w/-]+\.(?:safetensors|pem|key|jsonl|pt|py)\b|--[\w-]+|'[\w-]+'"
    r"|\b\d+(?:\.\d+)?\b|[^\W\d]+"
)


def facts(text: str) -> list[str]:
    """The words of a line: also addresses, files, options, quoted names and counts."""
    return FACT.findall(MEASURED.sub("", text))


def missing(expected: str, printed: str) -> list[str]:
    """The lines of `expected` that are not in `printed`, in this order; others may be between them."""
    lines = iter(printed.splitlines())
    absent = []
    for line in expected.splitlines():
        wanted = facts(line)
        if line.strip(" .") and not any(contains(facts(other), wanted) for other in lines):
            absent.append(line)
            lines = iter(printed.splitlines())
    return absent


def contains(found: list[str], wanted: list[str]) -> bool:
    """Whether all of `wanted` are among `found`, in this order."""
    rest = iter(found)
    return all(fact in rest for fact in wanted)


class Terminal:
    """A terminal in which the command of one block runs."""

    def __init__(self, block: Block, script: str, directory: Path, port: int) -> None:
        self.block, self._port = block, port
        self._process = start(script, directory)
        self._lines: list[str] = []
        self._printed = threading.Condition()
        self._readers = [threading.Thread(target=self._read, args=(pipe,), daemon=True) for pipe in self._pipes]
        for reader in self._readers:
            reader.start()

    @property
    def _pipes(self) -> list[IO[str]]:
        return [pipe for pipe in (self._process.stdout, self._process.stderr) if pipe is not None]

    def _read(self, pipe: IO[str]) -> None:
        for line in pipe:
            with self._printed:
                self._lines.append(line.replace(f"127.0.0.1:{self._port}", f"127.0.0.1:{PORT}"))
                self._printed.notify()

    def until(self, expected: str) -> None:
        """Waits for the first line of what it is to print."""
        first = expected.partition("\n")[0]
        with self._printed:
            assert self._printed.wait_for(lambda: not missing(first, "".join(self._lines)), DEADLINE), self._lines

    def interrupt(self) -> None:
        os.kill(self._process.pid, signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """The exit code, and what was printed."""
        code = self._process.wait(DEADLINE)
        for reader in self._readers:
            reader.join(DEADLINE)
        return code, "".join(self._lines)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self.end()
        for pipe in [*self._pipes, self._process.stdin]:
            if pipe is not None:
                pipe.close()


def start(script: str, directory: Path) -> ForkedProcess | subprocess.Popen[str]:
    """Runs a command of Python in a process that has imported torch, anything else in a shell."""
    parser = shlex.shlex(script.replace("\\\n", " ").strip(), posix=True, punctuation_chars=True)
    parser.whitespace_split = True
    programs = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": programs}
    match list(parser) if "\n" not in script.replace("\\\n", " ").strip() else []:
        case words if any(set(word) <= set("();<>|&") for word in words):
            pass
        case ["averaging", *arguments]:
            return ForkedProcess("averaging", *arguments, env=environment, directory=directory)
        case ["python", program, *arguments]:
            return ForkedProcess(program, *arguments, env=environment, directory=directory)
    return subprocess.Popen(
        ["bash", "-euc", script],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def here(text: str, port: int) -> str:
    """A block with this machine in the place of the page's."""
    local = re.sub(rf"(?:{re.escape(HOST)}|0\.0\.0\.0|127\.0\.0\.1):{PORT}", f"127.0.0.1:{port}", text)
    return local.replace(HOST, "127.0.0.1")


def run_page(page: str, directory: Path) -> None:
    """Runs a page from top to bottom.

    Raises:
        AssertionError: a command failed, or printed something else.
    """
    port = free_port()
    blocks = blocks_of(page)
    outputs = [
        following.text.replace(HOST, "127.0.0.1") if following.language == "text" and not following.title else ""
        for following in [*blocks[1:], Block("", "", "")]
    ]
    with ExitStack() as stack:
        terminals: list[tuple[Terminal, str]] = []
        for block, expected in zip(blocks, outputs, strict=True):
            text = here(block.text, port)
            if block.language == "sh" and block.title.startswith("Terminal"):
                if any(other.block.title == block.title for other, _ in terminals):
                    close(terminals)
                terminal = stack.enter_context(Terminal(block, text, directory, port))
                terminals.append((terminal, expected))
                if "--serve" in text:
                    terminal.until(expected)
                continue
            if block.title:
                (directory / block.title).write_text(text)
            elif block.language == "sh":
                close(terminals)
                with Terminal(block, text, directory, port) as shell:
                    compare(*shell.end(), block, expected)
        close(terminals)


def close(terminals: list[tuple[Terminal, str]]) -> None:
    """Waits until the commands of all terminals have ended, and ends those by Ctrl+C where the page says so."""
    for waits_for_interrupt in (False, True):
        for terminal, expected in terminals:
            interrupted = expected.rstrip().endswith("^C") or "\n^C\n" in expected
            if interrupted is not waits_for_interrupt:
                continue
            if interrupted:
                terminal.interrupt()
            compare(*terminal.end(), terminal.block, expected.replace("^C\n", ""))
    terminals.clear()


def compare(code: int, printed: str, block: Block, expected: str) -> None:
    """Whether a block did what its page says."""
    print(f"$ {block.text}{printed}")  # pytest -s shows what the pages should quote
    fails = "Error:" in expected
    assert (code != 0) is fails, f"{block.text}ended with exit code {code}:\n{printed}"
    assert not missing(expected, printed), f"{block.text}printed:\n{printed}but not:\n{missing(expected, printed)}"

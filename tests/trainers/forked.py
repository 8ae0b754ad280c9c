"""Calls functions in two processes each, which import their libraries once together: that takes seconds.

Run as `python -m tests.trainers.forked MODULE FOLDER FUNCTION...`. One after the other, each function is called in both
processes with a number, 0 or 1, and a queue that the two share. What it tells with `tell` is written to stdout, as JSON
lines; what the libraries print goes to stderr. The exit code is 1 if one fails.
"""

import json
import multiprocessing
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.processes import JsonProcess

STDOUT = "FORKED_STDOUT"
"""Has the number of what was stdout."""


def main(module: str, folder: str, *functions: str) -> None:
    os.chdir(folder)
    os.environ[STDOUT] = str(os.dup(1))
    os.dup2(2, 1)
    found = import_module(module)
    context = multiprocessing.get_context("fork")
    for function in functions:
        shared = context.SimpleQueue()
        called = getattr(found, function)
        processes = [context.Process(target=called, args=(number, shared)) for number in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(f"{function} failed")


def tell(event: str, **values: Any) -> None:
    """Tells in one write, so that the lines of two processes do not mix."""
    os.write(int(os.environ[STDOUT]), (json.dumps({"event": event, **values}) + "\n").encode())


def told_by(module: str, folder: Path, *functions: str) -> dict[str, list[dict[str, Any]]]:
    """What each function tells in the two processes, by its name; they work in a folder, and all end well.

    What they tell has the function's name as `event`.
    """
    with JsonProcess("python", "-m", "tests.trainers.forked", module, str(folder), *functions) as process:
        assert process.wait(110.0) == 0, process.stderr + "".join(process.other_lines)
        return {function: process.events(function) for function in functions}


if __name__ == "__main__":
    main(*sys.argv[1:])

"""How a story is told on the command line: its directory, its end by Ctrl+C or an error, and its verdict."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from examples.outputs import claim, clear
from examples.posttrain.verdict import Finding


class StoryError(Exception):
    """The story cannot go on."""


def tell_in(
    directory: Path, program: str, tell: Callable[[Console], Sequence[Finding]], last_line: str = ""
) -> NoReturn:
    """Tells a story in an empty directory with the folders `events` and `logs`; exits with 1 if a promise is broken.

    Args:
        directory: is emptied if an earlier story is in it.
        program: name of the command, for errors.
        tell: runs the story, prints what happens, and returns the verdict.
        last_line: printed behind the verdict.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # some terminals' encodings lack "…"
    console = Console(highlight=False)
    try:
        claim(directory)
        if (directory / "story.json").exists():
            clear(directory)
        for name in ("events", "logs"):
            (directory / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"{program}: cannot write to {directory}: {error.strerror}; give another --directory")
    try:
        findings = tell(console)
    except KeyboardInterrupt:
        console.print("Stopped; all processes have ended.")
        sys.exit(130)
    except StoryError as error:
        sys.exit(f"{program}: {error}")
    console.print()
    for finding in findings:
        verdict = "kept  " if finding.kept else "BROKEN"
        console.print(f"{verdict}  {finding.text}", style="" if finding.kept else "bold red")
    if last_line:
        console.print(last_line)
    sys.exit(not all(finding.kept for finding in findings))

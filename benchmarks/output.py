"""Where benchmarks write: found out before anything is measured, and never at the cost of what was there."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import benchmarks


def make_folder(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Makes a folder for results, and tries whether files can be made in it; wrong usage if not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        parser.error(f"--output {folder}: {error.strerror}; give another folder")


def write(path: Path, results: Any) -> None:
    """Writes JSON beside its place and moves it there when it is whole: a full disk spoils nothing that was there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(results, indent=1) + "\n")
        temporary.replace(path)
        benchmarks.kept[path] = None
    finally:
        temporary.unlink(missing_ok=True)

"""Where benchmarks write: found out before anything is measured, and never at the cost of what was there."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import benchmarks
from averaging.cli.atomic_files import replaced_atomically


def make_folder(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Makes a folder for results, and tries whether files can be made in it; wrong usage if not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        parser.error(f"--output {folder}: {error.strerror}; give another folder")


def write(path: Path, results: Any) -> None:
    """Writes JSON whole or not at all."""
    with replaced_atomically(path) as temporary:
        temporary.write_text(json.dumps(results, indent=1) + "\n")
    benchmarks.kept[path] = None

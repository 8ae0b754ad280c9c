"""The output folder of benchmarks, which is checked before anything is measured."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import benchmarks
from averaging.cli.files import replaced_atomically


def make_folder(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Creates a folder for results and checks that files can be written to it; else it is wrong usage."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        parser.error(f"--output {folder}: {error.strerror}; give another folder")


def write(path: Path, results: Any) -> None:
    """Writes a JSON file atomically."""
    with replaced_atomically(path) as temporary:
        temporary.write_text(json.dumps(results, indent=1) + "\n")
    benchmarks.kept[path] = None

"""docs/design/architecture.md names every room and no file that does not exist; pure modules import nothing impure."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import averaging

PACKAGE = Path(averaging.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "design" / "architecture.md").read_text()
NAME = re.compile(r"`([\w/]+(?:\.py|/))`")

TREES = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py") if "_pb2" not in path.name}

IMPURE = {"asyncio", "grpc", "socket", "threading", "time"}


def test_every_room_has_its_row() -> None:
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    rooms = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    rows = {name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for name in NAME.findall(row)}
    assert modules | rooms <= rows


def test_every_file_that_is_named_exists() -> None:
    folders = [PACKAGE, PACKAGE.parent, *(path.parent for path in PACKAGE.rglob("__init__.py"))]
    for name in NAME.findall(PAGE):
        assert any((folder / name).exists() for folder in folders), name


def test_modules_that_call_themselves_pure_import_no_network_loop_or_clock() -> None:
    checked = 0
    for path, tree in TREES.items():
        if not re.search(r"\bPure\b", ast.get_docstring(tree) or ""):
            continue
        checked += 1
        imported = {
            name.partition(".")[0]
            for node in ast.walk(tree)
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert not imported & IMPURE, path
    assert checked > 30


def test_no_two_classes_have_the_same_name() -> None:
    """Except the callbacks of two trainers, which users import from the module of theirs."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert twice.keys() <= {"AveragingCallback"}, twice

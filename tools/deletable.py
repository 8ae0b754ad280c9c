"""Deletes a room around the core from a copy of the tree, and checks that the rest still stands.

    python -m tools.deletable ROOM …
    python -m tools.deletable --any 2    # as many rooms, drawn by chance

With a room go its folders in `averaging/` and `tests/`, its lines in the registries (`COMMANDS` of the command line,
the names of `averaging`, the layers in pyproject.toml), and what imports it among commands, tests, examples and
benchmarks.
Another room that imports it goes as well. The core must not: then this fails and names the import.
"""

from __future__ import annotations

import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]

ROOMS = (
    "data",
    "doctor",
    "elastic",
    "engine",
    "integrations",
    "dashboard",
    "monitor",
    "weights",
    "rl/feed",
    "rl/rollouts",
    "rl/synchronizer",
    "rl/workers",
)
"""The rooms around the core; the others are the core and the command line."""

PARTS = ("averaging", "tests", "examples", "benchmarks")


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imported(source: str) -> Iterator[str]:
    """The modules that a file imports, and what it imports from them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def to_delete(imports: dict[Path, frozenset[str]], room: str) -> tuple[set[Path], list[str]]:
    """The files that go with a room, and the imports by which the core would break."""
    gone = {path for path in imports if path.is_relative_to(f"averaging/{room}")}
    gone |= {path for path in imports if path.is_relative_to(f"tests/{room.rpartition('/')[2]}")}
    while True:
        modules = {module_of(path) for path in gone}
        more = {path for path, names in imports.items() if path not in gone and names & modules}
        rooms = {other for other in ROOMS for path in more if path.is_relative_to(f"averaging/{other}")}
        more |= {path for path in imports for other in rooms if path.is_relative_to(f"averaging/{other}")}
        kept = [path for path in more if path.parts[0] == "averaging" and not _may_go(path)]
        more -= {path for path in kept if path.name == "__init__.py"}
        if broken := [f"{path} imports what goes with {room}" for path in kept if path.name != "__init__.py"]:
            return gone, broken
        if more <= gone:
            return gone, []
        gone |= more


def _may_go(path: Path) -> bool:
    around = any(path.is_relative_to(f"averaging/{room}") for room in ROOMS)
    return around or (path.is_relative_to("averaging/cli") and path.name != "__init__.py")


def without(text: str, gone: set[str]) -> str:
    """A registry without the lines that name a module, or a name, that is gone."""
    names = "|".join(map(re.escape, sorted(gone)))
    return "".join(
        line for line in text.splitlines(keepends=True) if not re.search(rf'["\s.]({names})["\s.\]:,]', line)
    )


def delete(tree: Path, room: str) -> None:
    """Deletes a room from a tree.

    Raises:
        SystemExit: the core imports it.
    """
    files = [path.relative_to(tree) for part in PARTS for path in (tree / part).rglob("*.py")]
    imports = {path: frozenset(imported((tree / path).read_text())) for path in files if "wire" not in path.parts}
    gone, broken = to_delete(imports, room)
    if broken:
        sys.exit("\n".join(broken))
    for path in gone:
        (tree / path).unlink()
    offered = (tree / "averaging/__init__.py").read_text()
    lines = re.findall(rf"from averaging\.{room.replace('/', '.')} import (.*)", offered)
    names = {name.strip() for line in lines for name in line.split(",")} | {room}
    for registry, words in {
        "averaging/__init__.py": names,
        "averaging/cli/__init__.py": {path.stem for path in gone if path.is_relative_to("averaging/cli")},
    }.items():
        if words:
            (tree / registry).write_text(without((tree / registry).read_text(), words))
    pyproject = (tree / "pyproject.toml").read_text()
    for path in {path.parent for path in gone if path.parts[0] == "averaging" and path.parts[1] != "cli"}:
        name = module_of(path)
        pyproject = re.sub(rf'^  "{name}",\n| \| {name}\b|\b{name} \| ', "", pyproject, flags=re.MULTILINE)
        pyproject = re.sub(
            rf"^\[project\.entry-points[^\n]*\]\n[^\n]*{name}\.[^\n]*\n", "", pyproject, flags=re.MULTILINE
        )
    (tree / "pyproject.toml").write_text(pyproject)
    for folder in sorted((tree / "averaging").rglob("*"), reverse=True):
        if folder.is_dir() and not any(path.suffix != ".pyc" for path in folder.rglob("*") if path.is_file()):
            shutil.rmtree(folder)


def import_all(modules: Iterable[str]) -> None:
    """Imports modules, some of which need packages that are not installed."""
    for name in modules:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("averaging"):
                raise


def check(tree: Path) -> None:
    """Checks style, types, import directions and that each module imports, and a few tests of the core.

    Raises:
        CalledProcessError: one of them fails.
    """
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    modules = [
        module_of(path.relative_to(tree))
        for path in (tree / "averaging").rglob("*.py")
        if "integrations" not in path.parts and path.stem != "__main__"  # those need packages of others
    ]
    every = f"from tools.deletable import import_all; import_all({sorted(modules)})"
    for command in (
        ["-m", "ruff", "check", "--quiet", "averaging", "tests"],
        ["-c", "from importlinter.cli import lint_imports_command as lint; lint()"],
        ["-c", every],
        ["-m", "mypy", "averaging"],
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/averager/test_visits.py", "tests/peer/test_peer.py"],
    ):
        subprocess.run([sys.executable, *command], cwd=tree, env=environment, check=True)


def copied(tree: Path) -> None:
    """Copies this tree into an empty folder."""
    known = [".mypy_cache"] if (ROOT / ".mypy_cache").is_dir() else []  # of which mypy reads what is still valid
    for name in (*PARTS, *known, "tools", "protos", "pyproject.toml", "hatch_build.py", "README.md"):
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tree / name)


def main() -> None:
    """Deletes each room that is named or drawn, one after the other, each from a fresh copy."""
    words = sys.argv[1:]
    for room in random.sample(ROOMS, int(words[1])) if words[:1] == ["--any"] else words or ROOMS:
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder)
            copied(tree)
            delete(tree, room)
            check(tree)
            print(f"{room}: the rest stands without it", flush=True)


if __name__ == "__main__":
    main()

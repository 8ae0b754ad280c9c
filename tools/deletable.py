"""Deletes a room around the core from a copy of the tree, and checks that the rest still stands.

    python -m tools.deletable ROOM …
    python -m tools.deletable --any 2    # as many rooms, drawn by chance
    python -m tools.deletable --here ROOM …    # in this tree

With a room go its folders in `averaging/` and `tests/`, its lines in `REGISTRIES` and the layers in pyproject.toml, and
what imports it among commands, tests, examples and benchmarks; it says which. Another room that imports it goes as
well. The core must not: then this fails and names the import. What is not imported remains: the pages, `deploy/`, its
proto, and what only it used in the core.
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

REGISTRIES = ("averaging/__init__.py", "averaging/cli/__init__.py", "averaging/cli/peer.py", "tools/reference.py")
"""Files that stay, without the lines that name a room or what is imported from it."""


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
        more -= set(map(Path, REGISTRIES))
        kept = [path for path in more if path.parts[0] == "averaging" and not _may_go(path)]
        if broken := [f"{path} imports what goes with {room}" for path in kept]:
            return gone, broken
        if more <= gone:
            return gone, []
        gone |= more


def _may_go(path: Path) -> bool:
    return path.is_relative_to("averaging/cli") or any(path.is_relative_to(f"averaging/{room}") for room in ROOMS)


def without(text: str, gone: set[str]) -> str:
    """A registry without the lines that name a module that is gone, or what is imported from it."""
    names = [
        re.escape(name.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module in gone
        for name in node.names
    ]
    modules = "|".join(map(re.escape, sorted(gone)))
    commands = "|".join(name.rpartition(".")[2] for name in sorted(gone) if name.startswith("averaging.cli."))
    named = rf'(from |")({modules})[ "]|^    "\w+": "({commands})",$|\b({"|".join(names) or "$^"})\b'
    return "".join(line for line in text.splitlines(keepends=True) if not re.search(named, line))


def delete(tree: Path, room: str) -> None:
    """Deletes a room from a tree, and prints what goes.

    Raises:
        SystemExit: the core imports it.
    """
    files = [path.relative_to(tree) for part in PARTS for path in (tree / part).rglob("*.py")]
    imports = {path: frozenset(imported((tree / path).read_text())) for path in files if "wire" not in path.parts}
    gone, broken = to_delete(imports, room)
    if broken:
        sys.exit("\n".join(broken))
    for path in sorted(gone):
        print(f"{room}: {path} goes")
        (tree / path).unlink()
    modules = {module_of(path) for path in gone}
    for registry in map(tree.joinpath, REGISTRIES):
        registry.write_text(without(registry.read_text(), modules))
    pyproject = (tree / "pyproject.toml").read_text()
    for name in sorted(module for module in modules if re.match(r"averaging\.(?!cli\.)", module)):
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
        ["-m", "mypy", "averaging", "tests", "benchmarks", "examples", "tools"],
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
    if words[:1] == ["--here"]:
        for room in words[1:]:
            delete(ROOT, room)
        return
    for room in random.sample(ROOMS, int(words[1])) if words[:1] == ["--any"] else words or ROOMS:
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder)
            copied(tree)
            delete(tree, room)
            check(tree)
            print(f"{room}: the rest stands without it", flush=True)


if __name__ == "__main__":
    main()

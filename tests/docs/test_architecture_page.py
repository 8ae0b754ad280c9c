"""docs/design/architecture.md names every room and no file that does not exist; pure modules import nothing impure."""

import re
from collections import Counter
from pathlib import Path

import averaging

PACKAGE = Path(averaging.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "design" / "architecture.md").read_text()
NAME = re.compile(r"`([\w/]+(?:\.py|/))`")

SOURCES = {path: path.read_text() for path in PACKAGE.rglob("*.py") if "_pb2" not in path.name}

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
    pure = {path: text for path, text in SOURCES.items() if re.match(r'"""[^"]*\bPure\b', text)}
    assert len(pure) > 20
    for path, text in pure.items():
        imported = re.findall(r"^\s*(?:import (\w+)|from (\w+)[\w.]* import )", text, re.MULTILINE)
        assert not IMPURE & {name for names in imported for name in names}, path


def test_no_two_classes_have_the_same_name() -> None:
    """Except the callbacks of two trainers, which users import from the module of theirs."""
    code = [text.split('"""', 2)[-1] for text in SOURCES.values()]  # without the module's docstring
    names = Counter(name for text in code for name in re.findall(r"^class (\w+)[(:]", text, re.MULTILINE))
    assert {name for name, count in names.items() if count > 1} <= {"AveragingCallback"}

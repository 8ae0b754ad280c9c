"""docs/architecture.md: the order in which the code is read leaves nothing out and names nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import averaging

PACKAGE = Path(averaging.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text()
NAME = re.compile(r"`([\w/]+(?:\.py|/))`")

ROWS = [
    (NAME.findall(files), NAME.findall(told))
    for files, told in re.findall(r"^\| (.*?) \| (.*) \|$", PAGE, re.MULTILINE)
    if NAME.search(files)
]
"""The files and folders of each row, and those of which it tells."""


def test_every_file_and_folder_at_the_top_has_its_line() -> None:
    modules = {path.name for path in PACKAGE.glob("*.py")}
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    named = {name for files, _ in ROWS for name in files}
    assert modules <= named
    assert folders <= {f"{name.partition('/')[0]}/" for name in named if "/" in name}


def test_every_file_that_is_named_is_there() -> None:
    for files, told in ROWS:
        folders = {PACKAGE, PACKAGE.parent, *((PACKAGE / name.rpartition("/")[0]) for name in files)}
        for name in files + told:
            assert any((folder / name).exists() for folder in folders), name

"""The rule of `make lint` that the project does not grow: the lines of each room, the files, tests and pages.

`tools/budget.toml` has the figures. They only fall: who goes over one removes something, and
`python -m tools.budget --lower` writes what was won.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGET = ROOT / "tools" / "budget.toml"

Figures = Mapping[str, Mapping[str, int]]

HEADER = """# Upper bounds that only fall, checked by `make lint`. What was won: `python -m tools.budget --lower`.
"""


def room_of(path: Path) -> str:
    """The room of a file of the package: its folder, of `rl` the folder in it; `front` for the files at the top."""
    folders = path.parts[:-1]
    return "/".join(folders[: 2 if folders[:1] == ("rl",) else 1]) or "front"


def count(root: Path) -> Figures:
    """What there is: lines by room, and the numbers of files, lines of tests, pages and so on."""
    package = [path for path in sorted((root / "averaging").rglob("*.py")) if "wire" not in path.parts]
    rooms: Counter[str] = Counter()
    for path in package:
        rooms[room_of(path.relative_to(root / "averaging"))] += _lines([path])
    pages = [path for path in (*root.glob("*.md"), *(root / "docs").rglob("*.md")) if path.name != "CHANGELOG.md"]
    return {
        "rooms": dict(sorted(rooms.items())),
        "all": {
            "lines": rooms.total(),
            "files": len(package),
            "pages": len(pages),
            "page_lines": _lines(pages),
            **{f"{part}_lines": _lines((root / part).rglob("*.py")) for part in ("tests", "benchmarks", "examples")},
        },
    }


def over(found: Figures, allowed: Figures) -> list[str]:
    """A line for each figure that is above its bound, or has none."""
    return [
        f"{part} {name}: {figure}, allowed {allowed.get(part, {}).get(name, 0)}"
        for part, figures in found.items()
        for name, figure in figures.items()
        if figure > allowed.get(part, {}).get(name, 0)
    ]


def lowered(found: Figures, allowed: Figures) -> Figures:
    """The bounds after something was removed; rooms that are gone are left out, and new ones have none."""
    return {
        part: {name: min(figure, allowed.get(part, {}).get(name, 0)) for name, figure in figures.items()}
        for part, figures in found.items()
    }


def spelled(figures: Figures) -> str:
    """The content of the budget's file."""
    parts = [
        "".join([f"\n[{part}]\n", *(f"{_key(name)} = {figure}\n" for name, figure in of_part.items())])
        for part, of_part in figures.items()
    ]
    return HEADER + "".join(parts)


def _key(name: str) -> str:
    return f'"{name}"' if "/" in name else name


def _lines(paths: Iterable[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def main() -> int:
    """Checks the figures; with `--lower` writes those that have fallen."""
    found = count(ROOT)
    allowed = tomllib.loads(BUDGET.read_text()) if BUDGET.exists() else found
    if "--lower" in sys.argv[1:]:
        BUDGET.write_text(spelled(lowered(found, allowed)))
    if exceeding := over(found, allowed):
        print("Over the budget of tools/budget.toml; remove something from:", *exceeding, sep="\n  ")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

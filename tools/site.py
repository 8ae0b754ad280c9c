"""Builds the site of the documentation: `make docs`.

Copies the pages of `docs/` and some files of the root to `build/docs` and adapts their links. Zensical then builds the
site in `build/site`. A broken link or anchor is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAGE = ROOT / "build" / "docs"

FROM_ROOT = {
    "CHANGELOG.md": "reference/changelog.md",
    "CONTRIBUTING.md": "design/contributing.md",
    "SECURITY.md": "operate/security.md",
}
"""Pages in the root of the repository, and their paths in the site."""

LINK = re.compile(r"(?<!`)(\[[^\]\n]*(?:\n[^\]\n]*)?\])\(([^)\s]+)\)")


def main() -> None:
    """Builds the site; exits with 1 if a link is broken."""
    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", STAGE)
    for source, place in FROM_ROOT.items():
        shutil.copyfile(ROOT / source, STAGE / place)
    for page in STAGE.rglob("*.md"):
        page.write_text(LINK.sub(partial(moved, page), page.read_text()))
    built = subprocess.run(
        [Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean"],
        cwd=ROOT,
        env=os.environ | {"NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if built.returncode:
        report = built.stdout.partition("Traceback (most recent call last)")[0]
        sys.exit(re.sub(r"\x1b\[[\d;]*m", "", report))
    print(f"built {(ROOT / 'build' / 'site' / 'index.html').relative_to(ROOT)}")


def moved(page: Path, link: re.Match[str]) -> str:
    """Adapts a link of a staged page. A link to a file outside the site becomes text."""
    text, address = link.groups()
    target, hash_sign, anchor = address.partition("#")
    if not target or re.match(r"[a-z]+:", target):
        return link[0]
    here = page.relative_to(STAGE).as_posix()
    home = {place: source for source, place in FROM_ROOT.items()}.get(here, f"docs/{here}")
    meant = os.path.normpath(Path(home).parent / target)
    place = FROM_ROOT.get(meant) or (meant.removeprefix("docs/") if meant.startswith("docs/") else None)
    if place is None:
        return text[1:-1]
    return f"{text}({os.path.relpath(place, Path(here).parent)}{hash_sign}{anchor})"


if __name__ == "__main__":
    main()

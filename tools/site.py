"""Builds the site of the documentation: `make docs`.

Copies the pages of `docs/` and some files of the root to `build/docs` and adapts their links and lists. Zensical then
builds the site in `build/site`. A broken link or anchor is an error, and so is a list or table that is shown as text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
STAGE = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"

FROM_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "reference/changelog.md",
    "CONTRIBUTING.md": "design/contributing.md",
    "SECURITY.md": "operate/security.md",
}
"""Pages in the root of the repository, and their paths in the site."""

LINK = re.compile(r"(?<!`)(\[[^\]\n]*(?:\n[^\]\n]*)?\])\(([^)\s]+)\)")

LIST_AFTER_TEXT = re.compile(r"^(?!\s*(?:[-*+]|\d+[.)]) )(\S.*\n)(?=(?:[-*+]|1[.)]) )", re.MULTILINE)
"""A line of text that a list follows directly, as CommonMark and GitHub allow."""

FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)

MERMAID = "mermaid@12"

COUNTED = ("li", "table", "tr", "blockquote", "h2", "h3")
"""Elements that a page of the site has as often as CommonMark finds them in its source."""


def main() -> None:
    """Builds the site; exits with 1 if a link is broken, or a list or table is shown as text."""
    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", STAGE)
    for source, place in FROM_ROOT.items():
        shutil.copyfile(ROOT / source, STAGE / place)
    for page in STAGE.rglob("*.md"):
        page.write_text(with_separate_lists(LINK.sub(partial(moved, page), page.read_text())))
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
    add_mermaid()
    if differences := [*shown_otherwise(), *foreign_parts()]:
        sys.exit("\n".join(differences))
    print(f"built {(SITE / 'index.html').relative_to(ROOT)}")


def add_mermaid() -> None:
    """Puts mermaid, which draws the diagrams, into the site; the theme would load it from another host."""
    kept = ROOT / "build" / f"{MERMAID}.min.js"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            packing = ["npm", "pack", "--silent", MERMAID]
            try:
                done = subprocess.run(packing, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"mermaid could not be fetched, so the diagrams of the site need unpkg.com: {error}")
                return
            packed = done.stdout.split()
            with tarfile.open(Path(folder) / packed[-1]) as archive:
                archive.extract("package/dist/mermaid.min.js", folder, filter="data")
            shutil.copyfile(Path(folder) / "package/dist/mermaid.min.js", kept)
    script = SITE / "assets" / "mermaid.min.js"
    shutil.copyfile(kept, script)
    for page in SITE.rglob("*.html"):
        if 'class="mermaid"' in (html := page.read_text()):
            tag = f'<script src="{os.path.relpath(script, page.parent)}"></script>'
            page.write_text(html.replace("</head>", f"{tag}</head>", 1))


def foreign_parts() -> list[str]:
    """A line for each page that loads a script, a font or a style from another host."""
    parts = re.compile(r'<(?:script|link)\b[^>]*(?:src|href)="?https?://[^>]*>')
    loaded = {page: parts.findall(page.read_text()) for page in sorted(SITE.rglob("*.html"))}
    return [f"{page.relative_to(ROOT)} loads {part}" for page, found in loaded.items() for part in found]


def with_separate_lists(text: str) -> str:
    """The text of a page with a blank line before each list, without which Zensical shows a list as one line."""
    pieces = FENCED.split(text)
    return "".join(
        piece if FENCED.fullmatch(piece) else LIST_AFTER_TEXT.sub(lambda line: line[1] + "\n", piece)
        for piece in pieces
    )


def shown_otherwise() -> list[str]:
    """A line for each page whose lists, tables or headings the site does not show as CommonMark does."""
    commonmark = MarkdownIt("commonmark").enable("table")
    differences = []
    for page in sorted(STAGE.rglob("*.md")):
        source = page.read_text()
        if re.search("^::: ", source, re.MULTILINE):  # the API reference is made from docstrings
            continue
        place = page.relative_to(STAGE).with_suffix("")
        built = SITE / (place.parent if place.name == "index" else place) / "index.html"
        article = re.search(r"<article.*</article>", built.read_text(), re.DOTALL)
        there = counts(article[0] if article else "")
        meant = counts(commonmark.render(source))
        differences += [
            f"{page.relative_to(ROOT)}: {meant[tag]} <{tag}> in the source, {there[tag]} on the site"
            for tag in COUNTED
            if meant[tag] != there[tag]
        ]
    return differences


def counts(html: str) -> dict[str, int]:
    """Number of elements of each kind in `COUNTED`."""
    return {tag: len(re.findall(f"<{tag}[ >]", html)) for tag in COUNTED}


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

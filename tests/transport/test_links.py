"""Links of the repository's pages lead to files that are there, and anchors to headings."""

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Of its headings, as GitHub and the site write them; explicit ones too."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    texts = [re.sub(r"[^\w\s-]", "", LINK.sub("", heading).lower()).strip() for heading in headings]
    return frozenset(re.sub(r"\s", "-", text) for text in texts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for address in LINK.findall(prose(page)):
        target, _, anchor = address.partition("#")
        if re.match(r"[a-z]+:", address):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(address)
    assert not broken


def test_every_page_of_the_docs_is_in_the_site() -> None:
    nav = (ROOT / "zensical.toml").read_text()
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if f'"{page}"' not in nav} == set()


def test_docstrings_name_pages_that_are_there() -> None:
    sources = [
        *(ROOT / "averaging").rglob("*.py"),
        *(ROOT / "benchmarks").glob("*.py"),
        *ROOT.glob("protos/**/*.proto"),
    ]
    named = {page for source in sources for page in re.findall(r"docs/[\w/-]+\.md", source.read_text())}
    assert {page for page in named if not (ROOT / page).exists()} == set()


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()

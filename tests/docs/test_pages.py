"""Every command of the tutorial and of the how-tos is run as it stands there, and prints what the page says."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from averaging import PeerConfig
from tests.support.pages import ROOT, blocks_of, run_page

INSTALL = "python3 -m venv .venv\n. .venv/bin/activate\npip install .\n"
"""test_packaging.py builds and installs the package."""

PAGES = [
    "tutorial/one-machine.md",
    "tutorial/two-machines.md",
    "how-to/end-a-run.md",
    "how-to/follow.md",
    "how-to/resume.md",
    "how-to/seeds.md",
    "how-to/plan.md",
    "how-to/slow-link.md",
]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_works(page: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / page).read_text()
    unnamed = "".join(block.text for block in blocks_of(text) if block.language not in ("python", "sh", "text"))
    assert unnamed in ("", INSTALL), "all of the rest is run"
    run_page(text, tmp_path)


def test_the_bits_of_many_peers_are_spread_evenly() -> None:
    block, *_ = blocks_of((ROOT / "docs" / "how-to" / "many-peers.md").read_text())
    bits = Counter[str]()
    for n in range(64):
        names: dict[str, Any] = {"n": n}
        exec(block.text, names)
        bits[PeerConfig(run_id="run", **names["options"]).group_bits] += 1
    assert set(bits.values()) == {4}
    assert {len(one) for one in bits} == {4}

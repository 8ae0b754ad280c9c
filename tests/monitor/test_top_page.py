"""docs/operate/top.md names every column and every field of --json, and no others."""

import re

from averaging.monitor import PeerView, RunSnapshot, snapshot_json
from averaging.monitor.table import COLUMNS
from averaging.receipts.progress import TrainingProgress
from tests.support.pages import ROOT

PAGE = (ROOT / "docs" / "operate" / "top.md").read_text()


def first_cells(head: str) -> list[str]:
    """What stands in code in the first cells of the table with this head."""
    table = PAGE.split(f"| {head} |", 1)[1].split("\n\n", 1)[0]
    return [name for row in table.split("\n")[2:] for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def test_every_column_is_explained() -> None:
    assert first_cells("column | what it is") == [column.title for column in COLUMNS]


def test_every_field_of_json_is_explained() -> None:
    snapshot = snapshot_json(RunSnapshot(0.0, "demo", (PeerView("10.0.0.1:1"),)))
    [peer] = snapshot["peers"]
    assert sorted(first_cells("field | what it is")) == sorted(snapshot)
    assert sorted(first_cells("field of a peer | what it is")) == sorted(peer)
    assert all(f"`{name}`" in PAGE for name in TrainingProgress.__dataclass_fields__)

"""The code of docs/how-to/trainers.md in two processes of each trainer; and two processes of one trainer."""

from pathlib import Path

import pytest

from tests.trainers import page
from tests.trainers.forked import told_by

pytestmark = pytest.mark.integrations


@pytest.mark.parametrize(
    ("trainer", "remedy"),
    [
        ("transformers", "start it as one process"),
        ("lightning", "devices=1"),
        ("accelerate", "start it with --num_processes 1"),
    ],
)
def test_two_processes_train_together_and_two_of_one_trainer_are_refused(
    trainer: str, remedy: str, tmp_path: Path
) -> None:
    told = told_by(f"tests.trainers.test_{trainer}", tmp_path, "page_peer", "rank")
    first, other = told["page_peer"]
    for peer in (first, other):
        assert peer["steps"] == page.STEPS
        assert peer["rounds"] == [2] * 5  # the last one is that of finish()
        # LinearLR goes from a third to all of the rate in 100 steps.
        assert peer["rate"] == pytest.approx(1e-3 * (1 / 3 + 2 / 3 * page.STEPS / 100))
    assert first["weights"] == other["weights"]
    assert len(told["rank"]) == 2
    for rank in told["rank"]:
        assert rank["error"].startswith("ConfigError")
        assert "2 processes" in rank["error"]
        assert remedy in rank["error"]

"""The demo from end to end, with a tiny model."""

import re
from pathlib import Path

import pytest

from tests.examples.running import Example, example

DEADLINE = 480.0
"""Seconds for a quick run, which takes about 35 on two idle cores; tests run on slow and shared machines."""


def demo(seed: int, output: Path) -> Example:
    return example("demo", "--quick", f"--seed={seed}", f"--output={output}", limit=DEADLINE)


@pytest.mark.long
@pytest.mark.timeout(DEADLINE + 30)
def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    with demo(46021, tmp_path) as running:
        printed = running.end(0)
        assert running.others() == []
    for number in range(1, 5):
        assert f"peer {number}: has found 3 other peers" in printed
    assert re.search(r"peer 1: killed without warning \(SIGKILL\) at step \d+", printed)
    newcomer = re.search(
        r"peer 5: listens on \S+; took over the state of peer [234] \(\S+\), version (\d+); begins at step (\d+)",
        printed,
    )
    assert newcomer is not None, printed
    version, step = int(newcomer[1]), int(newcomer[2])
    assert version > 1
    assert step > 0
    rows = re.findall(r"peer (\d) +│ +(\d+) │ +(killed|[\d.]+) │ +([\d.]*) │ +([-+\d.]*) │ (\w*)", printed)
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"]
    assert rows[0][2] == "killed"
    assert len({row[5] for row in rows[1:]}) == 1
    assert all(float(row[2]) < float(row[3]) for row in rows[1:])
    assert "All 4 peers hold the same bytes after the last average." in printed
    assert "The averaged model is better than the one trained alone" in printed
    picture = (tmp_path / "losses.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000

"""Ten minutes of everything at once under faults."""

import subprocess
import sys
from pathlib import Path

import pytest

MINUTES = 10


@pytest.mark.long
@pytest.mark.timeout(60 * MINUTES + 1500)
def test_everything_holds_under_faults_for_ten_minutes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.endurance", "--minutes", str(MINUTES), "--log", str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

"""How much slower a machine is than an idle one, for tests whose bounds follow from what the machine gives."""

from __future__ import annotations

import subprocess
import sys
import time

IDLE_SECONDS = 2.0
"""What `start_seconds` is on an idle machine of 2026 with two cores (AMD EPYC: 1.4 to 2.0 s)."""


def start_seconds(timeout: float = 300.0) -> float:
    """Seconds until a new process has imported the package and torch: 1.4 s of one core, and some reading.

    Raises:
        subprocess.TimeoutExpired: it has not ended in time.
    """
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import averaging, torch"], check=True, timeout=timeout)
    return time.monotonic() - began


def slowness(seconds: float) -> float:
    """How many times as long as on an idle machine something takes, by `start_seconds`; at least 1."""
    return max(1.0, seconds / IDLE_SECONDS)

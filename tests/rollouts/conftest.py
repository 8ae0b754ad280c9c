"""Tests of rollouts. Those with the real verifiers are run by `make test-integrations`."""

import os
from pathlib import Path

import pytest

# Nothing is looked for outside this machine.
os.environ |= {"HF_HUB_OFFLINE": "1"}

WITH_VERIFIERS = ("test_verifiers_rollouts.py", "test_rollouts_command.py", "test_served_rollouts.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Looks at some files only with `-m integrations`: verifiers need not be installed for the other tests."""
    needs_it = collection_path.name in WITH_VERIFIERS
    return True if needs_it and config.option.markexpr != "integrations" else None

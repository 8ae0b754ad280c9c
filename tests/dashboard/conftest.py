"""Tests of the page of a run. Those in a browser run with `make test-dashboard`."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Looks at the tests in a browser only with `-m browser`: Playwright need not be installed for the others."""
    in_browser = collection_path.name.startswith("test_browser")
    return True if in_browser and config.option.markexpr != "browser" else None

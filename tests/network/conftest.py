"""Tests with bad paths between two sites in network namespaces, which `make test-network` runs as root."""

from collections.abc import Iterator

import pytest

from tests.network.namespaces import TwoSites


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Looks at these files only with `-m network`: the other tests need neither root nor the kernel's filters."""
    return None if config.option.markexpr == "network" else True


@pytest.fixture
def sites() -> Iterator[TwoSites]:
    """Two sites with IPv4 and IPv6, and a good path between them."""
    with TwoSites() as two:
        yield two

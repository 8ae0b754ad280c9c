"""Tests with bad paths between two sites in network namespaces, which `make test-network` runs as root."""

from collections.abc import Iterator

import pytest

from tests.network.namespaces import TwoSites


@pytest.fixture
def sites() -> Iterator[TwoSites]:
    """Two sites with IPv4 and IPv6, and a good path between them."""
    with TwoSites() as two:
        yield two

"""The pure parts of the codecs' benchmark."""

from __future__ import annotations

import pytest

from averaging.protocol import TopK
from benchmarks.codecs import (
    SPARSE_HEADER,
    sparse_rows,
    sparse_speeds,
)


def test_the_speeds_of_top_k_are_measured_and_shown() -> None:
    found = sparse_speeds(TopK(1 / 64, 2), mib=1, passes=1, groups=[2])
    assert found["bits_a_weight"] == pytest.approx(0.21875, rel=0.01)
    assert found["replies"]["2"]["bits_a_weight"] == pytest.approx(2 * 0.21875, rel=0.01)  # as they came
    assert all(reply["seconds_of_a_billion"] > 0 for reply in found["replies"].values())
    [row] = sparse_rows([found])
    assert [row[place] for place in (0, 1, 2, 5)] == ["1/64", "2", "0.219", "2"]
    assert len(row) == len(SPARSE_HEADER)

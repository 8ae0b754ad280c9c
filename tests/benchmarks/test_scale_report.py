"""The pure parts of the scale benchmark."""

from __future__ import annotations

import random

import pytest

from benchmarks.scale.peers import GAP, PATTERNS, divide, moments, summary, totals
from benchmarks.scale.report import cells_of, growth, number
from benchmarks.scale.simulation import first_bits


def test_growth_is_the_factor_per_doubling() -> None:
    assert growth([2, 4, 8], [3.0, 6.0, 24.0]) == pytest.approx([2.0, 4.0])
    assert growth([16, 256], [1.0, 16.0]) == pytest.approx([2.0])
    assert growth([16, 32, 64, 128], [0.0, 1.0, None, 3.0]) == [None, None, None]
    assert growth([4], [1.0]) == []


def test_cells_show_the_growth_beside_the_figure() -> None:
    rows = [{"peers": 1024, "x": 0.1234}, {"peers": 4096, "x": 1.974}]
    assert cells_of(rows, {"x": lambda row: row["x"]}) == [["1,024", "0.123"], ["4,096", "1.97 (4.00)"]]
    assert (number(None), number(float("inf")), number(12345.6), number(0.0)) == ("-", "-", "12,346", "0")


@pytest.mark.parametrize("peers", range(1, 70))
def test_peers_are_divided_equally(peers: int) -> None:
    counts = divide(peers, 8)
    assert sum(counts) == peers
    assert len(counts) == min(peers, 8)
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("pattern", PATTERNS)
def test_when_peers_call(pattern: str) -> None:
    calls = sorted(moments(pattern, 6, random.Random(1)))
    gaps = {"last": calls[-1] - calls[-2] >= GAP, "apart": calls[-1] <= 0.1, "together": calls[-1] <= 0.01}
    assert len(calls) == 6
    assert calls[0] >= 0
    assert gaps[pattern]


def test_a_round_counts_from_the_last_ones_call() -> None:
    def one(called: float, begun: float, ended: float, members: int, group: str) -> dict[str, object]:
        return {"called": called, "begun": begun, "ended": ended, "members": members, "group": group}

    found = summary([one(1, 4, 7, 2, "a"), one(3, 5, 6, 2, "a"), one(2, 9, 9, 0, "")])
    assert found == {
        "begun_seconds": 2,
        "first_begun_seconds": 1,
        "ended_seconds": 6,
        "groups": [2],
        "alone": 1,
    }
    assert totals([{"calls": {"push": 1}}, {"calls": {"push": 2, "exchange": 3}}]) == {"exchange": 3, "push": 3}


def test_every_key_has_as_many_as_a_group() -> None:
    keys = [first_bits(number, 64, 8) for number in range(64)]
    assert {keys.count(key) for key in keys} == {8}
    assert {len(key) for key in keys} == {3}
    assert {first_bits(number, 8, 8) for number in range(8)} == {""}

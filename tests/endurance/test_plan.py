"""Faults are drawn by a seed, and a log repeats them."""

from __future__ import annotations

import json

import pytest

from tests.endurance.plan import (
    REST_SECONDS,
    FaultKind,
    Header,
    LogError,
    Strike,
    Target,
    draw,
    header_line,
    read_log,
    strike_line,
)

ALL = frozenset(FaultKind) - {FaultKind.ETCD}
TARGETS = [
    *(Target(f"p{number}", "peers", ALL) for number in range(6)),
    Target("s0", "sites", frozenset({FaultKind.KILL, FaultKind.STOP})),
    Target("etcd", "etcd", frozenset({FaultKind.ETCD})),
]


def test_a_seed_draws_the_same_faults_and_another_one_others() -> None:
    assert draw(7, 600, TARGETS, 6.0) == draw(7, 600, TARGETS, 6.0)
    assert draw(7, 600, TARGETS, 6.0) != draw(8, 600, TARGETS, 6.0)


def test_every_kind_comes_and_lasts_as_long_as_it_may() -> None:
    strikes = draw(1, 7200, TARGETS, 6.0)
    assert {strike.kind for strike in strikes} == set(FaultKind)
    assert 600 < len(strikes) < 1300
    stops = [strike.seconds for strike in strikes if strike.kind is FaultKind.STOP]
    assert min(stops) >= 3
    assert max(stops) <= 60
    assert {strike.detail for strike in strikes if strike.kind is FaultKind.CLOCK} == {-20.0, 20.0}


def test_no_victim_is_hit_twice_at_once_and_most_of_a_plane_is_well() -> None:
    strikes = draw(3, 7200, TARGETS, 2.0)
    for strike in strikes:
        hit = [one for one in strikes if one.at < strike.at < one.at + one.seconds + REST_SECONDS]
        assert strike.victim not in {one.victim for one in hit}
        peers = [one for one in hit if one.victim.startswith("p")]
        assert len(peers) < 2 or not strike.victim.startswith("p")


def test_what_cannot_be_made_is_not_drawn() -> None:
    only = [Target("p0", "peers", frozenset({FaultKind.RESET}))]
    assert {strike.kind for strike in draw(1, 600, only, 6.0)} == {FaultKind.RESET}
    assert draw(1, 600, [Target("p0", "peers", frozenset())], 6.0) == []


def test_a_log_gives_the_faults_back() -> None:
    header = Header(7, 600.0, 6.0, ["gradients"], {"etcd-leader-killed": "etcd is missing"})
    strikes = draw(7, 600, TARGETS, 6.0)
    lines = [header_line(header)]
    for strike in strikes:
        lines += [strike_line(strike), json.dumps({"t": strike.at, "ready": strike.victim})]
    assert read_log(lines) == (header, strikes)
    assert read_log([*lines, '{"strike": {"numb']) == (header, strikes)  # it was killed while it wrote


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "not a header"),
        (["{}"], "not a header"),
        (["[1]"], "not a header"),
        ([json.dumps({"endurance": 99, "seed": 1})], "version 99"),
        ([header_line(Header(1, 1.0, 1.0)), "{", "{}"], "line 2"),
        ([header_line(Header(1, 1.0, 1.0)), '{"strike": {"number": 1}}', "{}"], "line 2"),
        (
            [header_line(Header(1, 1.0, 1.0)), '{"strike": {"number": 1, "at": 1, "kind": "x", "victim": "p"}}'],
            "no fault",
        ),
    ],
)
def test_what_is_no_log_is_refused(lines: list[str], why: str) -> None:
    with pytest.raises(LogError, match=why):
        read_log(lines)


def test_a_fault_reads_as_a_line() -> None:
    assert str(Strike(1, 12.34, FaultKind.STOP, "p0", 17.2)) == "   12.3 s  sigstop of p0 for 17 s"

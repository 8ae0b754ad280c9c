"""Why no other peer joined a group, as far as discovery knows, and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping
from datetime import UTC, datetime

from averaging.common.sanitize import counted, listed
from averaging.discovery.base import Diagnosis, KnownPeer, clock_difference
from averaging.matchmaking.rules import CLOCK_TOLERANCE, unpack_looking

_MAX_KEYS = 2  # that are listed of those under which one peer looks


def explain_absence(key: str, diagnosis: Diagnosis) -> str:
    """Why no peer was seen that looks for a group under `key`: clocks, silence, peers that are not ready, or none."""
    reasons = explain_faults(diagnosis)
    idle = {
        name: peer
        for name, peer in diagnosis.peers.items()
        if name not in diagnosis.clock_offsets and name not in diagnosis.silent
    }
    if idle:
        activities = [f"{name} ({describe(peer, key)})" for name, peer in sorted(idle.items())]
        reasons.append(
            f"{counted(len(idle), 'other peer')} in the run, none of them ready for a group under {key}: "
            f"{listed(activities)}; let all average at about the same time and with the same options, or wait longer"
        )
    if not reasons:
        why = f" ({diagnosis.isolation})" if diagnosis.isolation else ""
        reasons.append(f"no other peer is in the run: start more peers of it, or wait longer{why}")
    return "; ".join(reasons)


def explain_faults(diagnosis: Diagnosis, known_silent: Container[str] = ()) -> list[str]:
    """What keeps peers apart; those in `known_silent` are not listed again as silent."""
    reasons = []
    if offsets := diagnosis.clock_offsets:
        clocks = [f"that of {name} is {clock_difference(ahead)} this peer's" for name, ahead in offsets.items()]
        reasons.append(
            f"clocks are more than {CLOCK_TOLERANCE:g} s apart: {listed(clocks)}; set them, for example with NTP"
        )
    silent = [f"{name} ({why})" for name, why in sorted(diagnosis.silent.items()) if name not in known_silent]
    if silent:
        reasons.append(
            f"{counted(len(silent), 'peer')} did not answer: {listed(silent)}; check that they are up and that this "
            "machine reaches their addresses"
        )
    return reasons


def describe(peer: KnownPeer, key: str) -> str:
    """What a peer does that looks for no group under `key`: `in the run since 12:03:25 UTC, trains`."""
    return f"in the run since {_clock_time(peer.since)}, {_activity(peer.values, key)}"


def _activity(values: Mapping[str, bytes], key: str) -> str:
    keys = sorted(other for other, value in values.items() if other != key and ".0b" in other and unpack_looking(value))
    if keys:
        return f"looks for a group under {' and '.join(keys[:_MAX_KEYS])}"
    if key in values:
        return "has ended its search"
    if any(other.endswith(".progress") for other in values):
        return "trains, and does not look for a group"
    return "does not look for a group"


def _clock_time(since: float) -> str:
    """The time of day; `since` comes from another peer, so it may be any number."""
    try:
        return f"{datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return "an unreadable time"

"""Why nobody else came to a group, as far as discovery knows, and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping
from datetime import UTC, datetime

from averaging.common.sanitize import counted, listed
from averaging.discovery.base import Outlook, Sighting, clock_difference
from averaging.matchmaking.rules import CLOCK_TOLERANCE, unpack_looking

_MOST_KEYS = 2  # of those under which one peer looks, that are told


def explain_absence(key: str, outlook: Outlook) -> str:
    """Why nobody was seen that looks for a group under `key`: clocks, silence, others that are not ready, or nobody."""
    told = explain_faults(outlook)
    idle = {name: one for name, one in outlook.peers.items() if name not in {*outlook.apart, *outlook.silent}}
    if idle:
        doing = [f"{name} ({describe(one, key)})" for name, one in sorted(idle.items())]
        told.append(
            f"{counted(len(idle), 'other peer')} in the run, none of them ready for a group under {key}: "
            f"{listed(doing)}; let all average at about the same time and with the same options, or wait longer"
        )
    if not told:
        why = f" ({outlook.alone})" if outlook.alone else ""
        told.append(f"no other peer is in the run: start more peers of it, or wait longer{why}")
    return "; ".join(told)


def explain_faults(outlook: Outlook, known: Container[str] = ()) -> list[str]:
    """What keeps peers from each other; of those in `known` it is told already that they do not answer."""
    told = []
    if outlook.apart:
        clocks = [f"that of {name} is {clock_difference(ahead)} this peer's" for name, ahead in outlook.apart.items()]
        told.append(
            f"clocks are more than {CLOCK_TOLERANCE:g} s apart: {listed(clocks)}; set them, for example with NTP"
        )
    silent = [f"{name} ({why})" for name, why in sorted(outlook.silent.items()) if name not in known]
    if silent:
        told.append(
            f"{counted(len(silent), 'peer')} did not answer: {listed(silent)}; check that they are up and that this "
            "machine reaches their addresses"
        )
    return told


def describe(one: Sighting, key: str) -> str:
    """What a peer does that looks for no group under `key`: `in the run since 12:03:25 UTC, trains`."""
    return f"in the run since {_clock_time(one.since)}, {_doing(one.values, key)}"


def _doing(values: Mapping[str, bytes], key: str) -> str:
    looking = sorted(one for one, value in values.items() if one != key and ".0b" in one and unpack_looking(value))
    if looking:
        return f"looks for a group under {' and '.join(looking[:_MOST_KEYS])}"
    if key in values:
        return "has ended its search"
    if any(one.endswith(".progress") for one in values):
        return "trains, and does not look for a group"
    return "does not look for a group"


def _clock_time(since: float) -> str:
    """By the other peer's clock, which may show anything."""
    try:
        return f"{datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return "an unreadable time"

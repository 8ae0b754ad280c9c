"""What a page shows of a run at one moment, from the snapshots of the collector. Pure but for the waiting."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from averaging.common import CLIENT_PREFIX, duration
from averaging.dashboard.history import CurvePoint, Json, RunHistory
from averaging.errors import printable
from averaging.monitor import Collector, PeerView, RunSnapshot, ServiceView, clean

RECEIPTS = 64
"""Receipts of each peer that are asked for at first; a peer keeps as many."""

MAX_TEXT = 500
"""Characters of a text of a peer that are shown in the table."""

GONE_SECONDS, MAX_GONE = 3600.0, 64
"""Seconds for which peers are shown that the run does not name any more, and their greatest number."""


def views_of(collector: Collector) -> Callable[[RunHistory], AsyncGenerator[Json, None]]:
    """Returns the views of the run that a collector watches, for a `DashboardServer`.

    Args:
        collector: it is entered, and asks the peers for `RECEIPTS`.
    """
    gone = GonePeers()

    async def views(history: RunHistory) -> AsyncGenerator[Json, None]:
        async with aclosing(collector.snapshots()) as snapshots:
            async for snapshot in snapshots:
                remember(snapshot, history)
                gone.observe(snapshot)
                view = view_of(snapshot)
                view["others"] += gone.to_json(snapshot.time)
                yield view

    return views


class GonePeers:
    """The peers that answered once, and that the run does not name any more."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, str]] = {}  # the last answer, and why there was none after it
        self._present: set[str] = set()

    def observe(self, snapshot: RunSnapshot) -> None:
        """Takes the peers of a snapshot."""
        self._present = {peer.endpoint for peer in snapshot.peers}
        for peer in snapshot.peers:
            if peer.answers:
                self._last.pop(peer.endpoint, None)
                self._last[peer.endpoint] = snapshot.time, ""
            elif peer.endpoint in self._last:
                self._last[peer.endpoint] = self._last[peer.endpoint][0], _error(peer)
        for name, (answered, _) in list(self._last.items()):
            if name not in self._present and snapshot.time - answered > GONE_SECONDS:
                del self._last[name]

    def to_json(self, now: float) -> list[Json]:
        """A line for each, the last one first, at most `MAX_GONE`."""
        gone = [item for item in reversed(self._last.items()) if item[0] not in self._present]
        lines: list[Json] = clean(
            [
                {"kind": "gone peer", "name": name, "version": None, "error": "", "text": _farewell(now - at, error)}
                for name, (at, error) in gone[:MAX_GONE]
            ]
        )
        return lines


def _farewell(seconds: float, error: str) -> str:
    return f"last answer {duration(max(0.0, seconds))} ago{f'; then {error}' if error else ''}"


def remember(snapshot: RunSnapshot, history: RunHistory) -> None:
    """Adds the receipts and rates in a snapshot to the history."""
    for peer in snapshot.peers:
        for receipt in peer.receipts:
            history.add_receipt(peer.endpoint, receipt, snapshot.time)
    speeds = {
        clean(peer.endpoint): peer.training.steps_per_second
        for peer in snapshot.answering
        if peer.training and peer.training.steps_per_second is not None
    }
    sent, received = _total(snapshot, "bytes_sent"), _total(snapshot, "bytes_received")
    history.add_point(CurvePoint(snapshot.time, received, sent, speeds))


def view_of(snapshot: RunSnapshot) -> Json:
    """What the page shows of a snapshot, as JSON. All texts are printable, and there is no NaN."""
    view: Json = clean(
        {
            "run": {
                "id": snapshot.run_id,
                "time": snapshot.time,
                "problem": _problem(snapshot),
                "rounds_per_minute": snapshot.rounds_per_minute,
                "waiting": snapshot.waiting_share,
                "terms": printable("; ".join(snapshot.terms[:3]), MAX_TEXT),
                "phases": snapshot.phase_seconds,
                "drops": snapshot.dropped,
                "bytes_in": _total(snapshot, "bytes_received"),
                "bytes_out": _total(snapshot, "bytes_sent"),
            },
            "peers": [_shortened(_peer(peer)) for peer in snapshot.peers],
            "others": [*_readers(snapshot), *_services(snapshot)],
        }
    )
    return view


def _total(snapshot: RunSnapshot, name: str) -> float:
    return sum(getattr(peer, name) or 0.0 for peer in snapshot.answering)


def _problem(snapshot: RunSnapshot) -> str:
    if snapshot.answering:
        return " ".join(f"{note}." for note in snapshot.notes)
    reasons = "; ".join(f"{peer.endpoint}: {_error(peer)}" for peer in snapshot.peers[:4] if peer.error)
    return f"No peer of the run answers. {reasons}" if reasons else ""


def _shortened(values: Json) -> Json:
    return {name: printable(value, MAX_TEXT) if isinstance(value, str) else value for name, value in values.items()}


def _error(peer: PeerView) -> str:
    if peer.endpoint.startswith(CLIENT_PREFIX):  # nobody calls it, so that it does not answer is no fault
        return ""
    return peer.error.removeprefix(f"{peer.endpoint}: ")


def _peer(peer: PeerView) -> Json:
    status, training, last = peer.status, peer.training, peer.last_round
    totals = status.totals if status else None
    return {
        "endpoint": peer.endpoint,
        "error": _error(peer),
        "role": peer.role,
        "doing": "accepts no calls" if peer.endpoint.startswith(CLIENT_PREFIX) else peer.doing,
        "late": peer.lateness,
        "strategy": training.strategy if training else "",
        "terms": training.terms if training else "",
        "grace": training.grace if training else None,
        "weight": account.weight_text.removeprefix("weight ") if (account := peer.own_account) else "",
        "global_step": training.global_step if training else None,
        "local_step": training.local_step if training else None,
        "rate": training.steps_per_second if training else None,
        "samples": training.samples_per_second if training else None,
        "last": {
            "outcome": "partial" if last.averaged and last.dropped else last.outcome.value,
            "ended": last.started + last.seconds,
            "text": printable(str(last), 2 * MAX_TEXT),
        }
        if last
        else None,
        "lane": " and ".join(peer.lanes),
        "bytes_in": peer.bytes_received,
        "bytes_out": peer.bytes_sent,
        "waits_for": ", ".join(peer.waits_for[:4]) + (" and others" if len(peer.waits_for) > 4 else ""),
        "waiting": peer.waiting_share,
        "version": status.state_version if status else None,
        "software": status.software if status else "",
        "rounds": {outcome.value: count for outcome, count in totals.rounds.items()} if totals else {},
        "drops": {code.value: count for code, count in totals.dropped.items()} if totals else {},
    }


def _readers(snapshot: RunSnapshot) -> list[Json]:
    return [
        {
            "kind": reader.kind,
            "name": reader.name,
            "version": reader.version,
            "error": "",
            "text": f"{_progress(reader.version, reader.newest)} of {peer}"
            + (f"; {reader.status}" if reader.status else ""),
        }
        for peer, reader in snapshot.readers
    ]


def _progress(version: int | None, newest: int | None) -> str:
    if version is None or newest is None:
        return "waits for the first version"
    return "has the newest version" if version >= newest else f"{newest - version} behind version {newest}"


def _services(snapshot: RunSnapshot) -> list[Json]:
    named = (("register", snapshot.register), ("feed", snapshot.feed))
    return [_service(kind, service) for kind, service in named if service is not None]


def _service(kind: str, service: ServiceView) -> Json:
    values: list[tuple[str, Any]] = [item for item in service.values.items() if not isinstance(item[1], dict | list)]
    text = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values[:6])
    return {"kind": kind, "name": service.name, "version": None, "error": service.error, "text": text or "answers"}

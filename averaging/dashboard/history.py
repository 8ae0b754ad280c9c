"""What the page of a run shows: the curves, and the rounds with the receipts of their members. Pure.

Receipts come from other peers. They are bounded in number and size here, and their texts made printable.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from averaging.common import size
from averaging.monitor import Json, RunSnapshot, clean
from averaging.receipts import Outcome, Receipt, Round, describe, to_json

MAX_ROUNDS = 1000  # rounds that are remembered; the oldest are forgotten first
MAX_ACCOUNTS = 200_000  # of members in all remembered receipts, some 300 bytes each; the oldest are forgotten first
MAX_MEMBERS, MAX_PHASES = 1024, 16  # a receipt that names more members or phases is not shown
MAX_POINTS = 1800  # points of the curves: an hour with one in 2 s
AHEAD = 600.0  # seconds by which a peer's clock may be ahead of this one before its receipts are not shown
MAX_SECONDS = 1e7  # a receipt of a longer round is not shown


class CurvePoint(NamedTuple):
    """One point of the curves."""

    time: float  # seconds since the epoch
    bytes_in: float  # bytes per second that all peers received
    bytes_out: float  # bytes per second that they sent
    speeds: Mapping[str, float]  # local steps per second by endpoint


@dataclass(slots=True)
class _ShownRound:
    id: str
    receipts: dict[str, Receipt] = field(default_factory=dict)
    _shown: Json | None = None

    def add(self, receipt: Receipt) -> None:
        self.receipts[receipt.endpoint] = receipt
        self._shown = None

    @property
    def shown(self) -> Json:
        """The round as the page takes it; computed once for all receipts that have come together."""
        if self._shown is None:
            self._shown = _round_json(self)
        return self._shown

    @property
    def round(self) -> Round:
        return Round(tuple(sorted(self.receipts.values(), key=lambda receipt: receipt.started)))

    @property
    def accounts(self) -> int:
        return sum(1 + len(receipt.accounts) for receipt in self.receipts.values())


class RunHistory:
    """The last rounds and curves of a run, and what of them a page does not have yet."""

    def __init__(self) -> None:
        self._points: deque[CurvePoint] = deque(maxlen=MAX_POINTS)
        self._entries: OrderedDict[str, _ShownRound] = OrderedDict()
        self._accounts = 0
        self._changed: set[str] = set()
        self._new_points = 0

    def add_snapshot(self, snapshot: RunSnapshot) -> None:
        """Adds the receipts and rates in a snapshot."""
        for peer in snapshot.peers:
            for receipt in peer.receipts:
                self.add_receipt(peer.endpoint, receipt, snapshot.time)
        peers = snapshot.answering
        speeds = {peer.endpoint: peer.training.steps_per_second for peer in peers if peer.training}
        sent = sum(peer.bytes_sent_per_second or 0.0 for peer in peers)
        received = sum(peer.bytes_received_per_second or 0.0 for peer in peers)
        known = {name: speed for name, speed in speeds.items() if speed is not None}
        self.add_point(CurvePoint(snapshot.time, received, sent, known))

    def add_point(self, point: CurvePoint) -> None:
        """Adds a point to the curves."""
        self._points.append(point)
        self._new_points = min(self._new_points + 1, MAX_POINTS)

    def add_receipt(self, endpoint: str, receipt: Receipt, now: float) -> None:
        """Adds a receipt that the peer at `endpoint` has sent, unless it is known or cannot be shown."""
        if not _can_be_shown(receipt, now):
            return
        receipt = replace(receipt, endpoint=endpoint, gathered={})  # each peer speaks for itself alone
        name = round_id(receipt)
        entry = self._entries.setdefault(name, _ShownRound(name))
        if endpoint in entry.receipts:
            return
        entry.add(receipt)
        self._accounts += 1 + len(receipt.accounts)
        self._changed.add(name)
        while len(self._entries) > MAX_ROUNDS or (self._accounts > MAX_ACCOUNTS and len(self._entries) > 1):
            name, entry = self._entries.popitem(last=False)
            self._accounts -= entry.accounts
            self._changed.discard(name)

    def changes(self) -> Json:
        """What has changed since the last call: points, rounds, and the graph of the last round that averaged."""
        points = list(self._points)[len(self._points) - self._new_points :]
        entries = [entry for name, entry in self._entries.items() if name in self._changed]
        self._new_points = 0
        self._changed.clear()
        return self._json(points, entries)

    def everything(self) -> Json:
        return self._json(self._points, self._entries.values())

    def details(self, name: str) -> Json | None:
        """The receipts of one round, and what each says in words; None if it is not remembered."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        whole = entry.round
        receipts = [
            {
                **to_json(receipt),
                "words": describe(Round((receipt,))),
                "late": {account.endpoint: account.lateness for account in receipt.accounts},
            }
            for receipt in whole.receipts
        ]
        details: Json = clean(
            {
                "id": name,
                "name": whole.name,
                "text": entry.shown["text"],
                "missing": sorted(set(whole.members) - entry.receipts.keys())[:8],
                "receipts": receipts,
            }
        )
        return details

    def _json(self, points: Iterable[CurvePoint], entries: Iterable[_ShownRound]) -> Json:
        rounds = [entry.shown for entry in entries]
        averaged = [entry for entry in self._entries.values() if entry.shown["outcome"] == Outcome.AVERAGED]
        latest = max(averaged, key=lambda entry: entry.shown["started"], default=None)
        is_new = latest is not None and any(round_ is latest.shown for round_ in rounds)
        graph = _graph(latest) if latest is not None and is_new else None
        return {"points": clean(list(points)), "rounds": rounds, "graph": graph}


def round_id(receipt: Receipt) -> str:
    """The name of a round in the page: that of its group, or one of its own if there was no group."""
    if receipt.group_id:
        return receipt.group_id[:32].hex()
    alone = f"{receipt.endpoint} {receipt.round} {receipt.started}"
    return f"alone-{hashlib.sha256(alone.encode(errors='replace')).hexdigest()[:24]}"


def _can_be_shown(receipt: Receipt, now: float) -> bool:
    numbers = (receipt.started, receipt.seconds, receipt.allreduce_seconds, *receipt.phases.values())
    counts = (len(receipt.members), len(receipt.accounts), len(receipt.dropped), len(receipt.drift))
    if not all(map(math.isfinite, numbers)) or min(numbers) < 0 or max(numbers[1:]) > MAX_SECONDS:
        return False
    return receipt.started < now + AHEAD and max(counts) <= MAX_MEMBERS and len(receipt.phases) <= MAX_PHASES


def _round_json(entry: _ShownRound) -> Json:
    whole = entry.round
    receipts = whole.receipts
    started = min(receipt.started for receipt in receipts)
    dropped = len(whole.dropped)
    shown: Json = clean(
        {
            "id": entry.id,
            "text": describe(whole, entry.receipts),
            "outcome": whole.outcome.value,
            "dropped": dropped,
            "fault": bool(dropped or whole.drift or any(not receipt.averaged for receipt in receipts)),
            "started": started,
            "seconds": max(receipt.ended for receipt in receipts) - started,
            "receipts": [
                {
                    "peer": receipt.endpoint,
                    "round": receipt.round,
                    "outcome": receipt.outcome.value,
                    "started": receipt.started,
                    "seconds": receipt.seconds,
                    "phases": list(receipt.phases.items()),
                    "dropped": len(receipt.dropped),
                }
                for receipt in receipts
            ],
        }
    )
    return shown


def _graph(entry: _ShownRound) -> Json:
    """Who reduces for whom: the members, and for each pair the bytes that went from one to the other."""
    whole = entry.round
    members = {name: place for place, name in enumerate(whole.members)}
    accounts = {account.endpoint: account for receipt in reversed(whole.receipts) for account in receipt.accounts}
    edges: dict[tuple[int, int], tuple[int, str, str]] = {}
    for receipt in whole.receipts:
        here = members.get(receipt.endpoint)
        for account in receipt.accounts:
            there = members.get(account.endpoint)
            if here is None or there is None or here == there:
                continue
            edges[here, there] = (account.bytes_sent, account.lane, account.lane_reason)
            edges.setdefault((there, here), (account.bytes_received, "", ""))
    nodes: list[dict[str, Any]] = []
    for name in members:
        node = {"endpoint": name, "share": 0.0, "weight": 0.0, "weight_unit": "", "mode": ""}
        nodes.append({each: getattr(accounts[name], each) for each in node} if name in accounts else node)
    total = size(sum(count for count, _, _ in edges.values()))
    graph: Json = clean(
        {
            "key": f"{entry.id} {len(entry.receipts)}",
            "name": f"{whole.name}, {total}",
            "nodes": nodes,
            "edges": [[here, there, *edge] for (here, there), edge in sorted(edges.items()) if edge[0]],
        }
    )
    return graph

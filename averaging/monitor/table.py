"""The columns of a table of peers, and the lines above it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from averaging.common import counted, duration
from averaging.errors import printable
from averaging.monitor.snapshot import PeerView, RunSnapshot
from averaging.receipts import WeightReader

MAX_CELL = 60  # longest text of a cell on a screen


@dataclass(frozen=True, slots=True)
class Column:
    """One column."""

    title: str  # its head
    # names of the attributes that lead from a `PeerView` to what is shown and sorted by. Peers without it come last.
    value: str
    text: Callable[[Any], str] = str  # writes the value
    right: bool = False  # whether it is aligned at the right, as a number
    # writes the whole cell, given the peer and the time; None if `text` does
    cell: Callable[[PeerView, float], str] | None = None

    def shown(self, peer: PeerView, now: float) -> str:
        """The cell of a peer; empty if nothing is known."""
        key = self.key(peer)
        return "" if key is None else self.text(key) if self.cell is None else self.cell(peer, now)

    def key(self, peer: PeerView) -> Any:
        """The value of a peer; None if it has none."""
        found: Any = peer
        for name in self.value.split("."):
            found = getattr(found, name, None)
        return None if found in ("", ()) else found

    def sorted(self, peers: Sequence[PeerView], *, reverse: bool = False) -> list[PeerView]:
        """Names ascending, numbers descending, unless reversed."""
        known = sorted((peer for peer in peers if self.key(peer) is not None), key=lambda peer: peer.endpoint)
        known.sort(key=self.key, reverse=self.right != reverse)
        return known + [peer for peer in peers if self.key(peer) is None]


MAX_NUMBER = 1e18  # numbers of other peers from which on `?` is shown


def compact(number: float) -> str:
    """A number in at most 5 characters: `0.25`, `9.5`, `128`, `12.3k`, `4.5M`."""
    if not abs(number) < MAX_NUMBER:
        return "?"
    if number < 9.995:
        return f"{number:.2f}".rstrip("0").rstrip(".") or "0"
    for unit in ("", "k", "M", "G", "T"):
        if number < 999.5:
            return f"{number:.0f}{unit}" if not unit or number >= 99.95 else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.0f}P"


def age(seconds: float) -> str:
    """Seconds in one unit: `3s`, `12m`, `5h`, `9d`."""
    if not seconds < MAX_NUMBER:
        return "?"
    for unit, size in (("s", 60), ("m", 60), ("h", 48)):
        if seconds < size:
            return f"{seconds:.0f}{unit}"
        seconds /= 24 if unit == "h" else 60
    return f"{seconds:.0f}d"


def _last(peer: PeerView, now: float) -> str:
    receipt = peer.last_round
    if receipt is None:
        return ""
    ended = age(max(0.0, now - receipt.ended))
    if not receipt.averaged:
        return f"#{receipt.round} {receipt.outcome.value} {ended}"
    lost = f" -{len(receipt.dropped)}" if receipt.dropped else ""
    return f"#{receipt.round} {ended}{lost}"


def _and_more(texts: Sequence[str], most: int) -> str:
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def _state(peer: PeerView, _: float) -> str:
    if peer.state == "late" and peer.training is not None:
        return f"late {compact(peer.training.missed)}"
    return f"silent {age(peer.silent_seconds)}" if peer.state == "silent" and peer.silent_seconds else peer.state


COLUMNS = (
    Column("PEER", "endpoint"),
    Column("STATE", "state", cell=_state),
    Column("STEP", "training.steps_made", lambda steps: "/".join(map(str, steps)), right=True),
    Column("SAMP/S", "training.samples_per_second", compact, right=True),
    Column("LAST ROUND", "last_round.round", right=True, cell=_last),
    Column("OUT/S", "bytes_sent_per_second", compact, right=True),
    Column("IN/S", "bytes_received_per_second", compact, right=True),
    Column("WAIT", "waiting_share", "{:.0%}".format, right=True),
    Column("WAITS FOR", "waits_for", lambda names: _and_more(names, 1)),
    Column("LANE", "lanes", "+".join),
    Column("EVERY", "training.sync_every"),
    Column("QUORUM", "training.quorum"),
    Column("GRACE", "training.grace", duration, right=True),
    Column("WEIGHT", "own_account.weight", right=True, cell=lambda peer, _: peer.weight),
    Column("ROLE", "role"),
    Column("STRATEGY", "training.strategy"),
    Column("STEPS/S", "training.steps_per_second", compact, right=True),
    Column("VERSION", "status.state_version", right=True),
    Column("SOFTWARE", "status.software"),
    Column("REASON", "error"),
)
"""All columns. `VERSION` is that of the state that newcomers get, `REASON` why a peer does not answer."""


def style_of(peer: PeerView) -> str:
    """The colour of a peer's line."""
    if peer.state == "silent":
        return "red"
    if peer.state == "client" or not peer.answers:
        return "dim"
    last = peer.last_round
    bad = last is not None and (not last.averaged or last.dropped or last.drifted)
    return "yellow" if bad else ""


# The lines above the table.


def summary(snapshot: RunSnapshot) -> list[Text]:
    """The run in a few lines, each of which may be longer than a screen is wide."""
    texts = (
        terms_line(snapshot),
        _phases_line(snapshot),
        waits_line(snapshot),
        _silent_line(snapshot),
        readers_line(snapshot.readers),
    )
    lines = [_first_line(snapshot), _rounds_line(snapshot), *(Text(printable(text)) for text in texts if text)]
    return lines + [Text(printable(note), style="yellow") for note in snapshot.notes]


def _first_line(snapshot: RunSnapshot) -> Text:
    answering = len(snapshot.answering)
    line = Text.assemble((f"run {printable(snapshot.run_id) or '?'}", "bold"))
    line.append(f"  {counted(len(snapshot.peers), 'peer')}, {answering} answer{'s' if answering == 1 else ''}")
    if snapshot.global_step is not None:
        line.append(f"  global step {snapshot.global_step}")
    if snapshot.samples_per_second is not None:
        line.append(f"  {compact(snapshot.samples_per_second)} samples/s")
    strategies = Counter(peer.training.strategy for peer in snapshot.answering if peer.training)
    line.append(f"  {', '.join(map(printable, strategies))}" if strategies else "")
    line.append(f"  {datetime.fromtimestamp(snapshot.time):%H:%M:%S}", "dim")
    return line


def _rounds_line(snapshot: RunSnapshot) -> Text:
    rate, waiting = snapshot.rounds_per_minute, snapshot.waiting_share
    line = Text(f"{compact(rate) if rate is not None else '?'} rounds/min")
    if waiting is not None:
        line.append(f"  waiting {waiting:.0%}", "yellow" if waiting > 0.3 else "")
    if snapshot.dropped:
        line.append("  dropped: " + ", ".join(f"{count} {code}" for code, count in snapshot.dropped.items()), "yellow")
    return line


def terms_line(snapshot: RunSnapshot) -> str:
    """When rounds begin and what weights count; all texts if the peers differ. And who is late for a round."""
    late = [f"{peer.endpoint} ({peer.training.missed})" for peer in snapshot.late if peer.training]
    return "; ".join([*snapshot.terms[:3], *([f"late: {_and_more(late, 3)}"] if late else [])])


def _phases_line(snapshot: RunSnapshot) -> str:
    """How long the phases of an average round take, without those of less than 1 % of it."""
    phases = snapshot.phase_seconds
    least = sum(phases.values()) / 100
    texts = [f"{printable(name)} {duration(seconds)}" for name, seconds in phases.items() if seconds >= least > 0]
    return f"a round: {', '.join(texts)}" if texts else ""


def waits_line(snapshot: RunSnapshot) -> str:
    """Who is waited for, and by how many."""
    targets = Counter(name for peer in snapshot.answering for name in peer.waits_for)
    texts = [f"{name} ({counted(count, 'peer')})" for name, count in targets.most_common()]
    return f"waited for: {_and_more(texts, 3)}" if texts else ""


def _silent_line(snapshot: RunSnapshot) -> str:
    silent = [f"{peer.endpoint} ({peer.error})" for peer in snapshot.peers if peer.state == "silent"]
    return f"no answer: {_and_more(silent, 2)}" if silent else ""


def readers_line(readers: Sequence[tuple[str, WeightReader]]) -> str:
    """How many followers and explorers there are, and which versions they have."""
    texts = []
    for kind in ("follower", "explorer"):
        of_kind = [each for _, each in readers if each.kind == kind]
        versions = sorted(each.version for each in of_kind if each.version is not None)
        newest = max((each.newest for each in of_kind if each.newest is not None), default=None)
        if of_kind:
            text = counted(len(of_kind), kind)
            text += f" at version {versions[0]}" if versions else " without a version"
            text += f" to {versions[-1]}" if versions and versions[-1] != versions[0] else ""
            texts.append(text + (f", newest {newest}" if newest is not None else ""))
    return "  ".join(texts)


def reader_lines(readers: Sequence[tuple[str, WeightReader]]) -> list[str]:
    """A line for each follower and explorer."""
    table = _plain_table()
    for peer, each in readers:
        newest = "" if each.newest is None else f" of {each.newest}"
        version = "no version yet" if each.version is None else f"version {each.version}"
        table.add_row(*map(printable, (each.kind, each.name, each.status, version + newest, f"from {peer}")))
    return _rendered(table) if readers else []


def _plain_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)


def _rendered(table: Table) -> list[str]:
    console = Console(file=StringIO(), width=100_000, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def as_text(snapshot: RunSnapshot) -> list[str]:
    """The whole snapshot as lines, as wide as they need to be: the output of --once."""
    table = _plain_table()
    table.show_header = True
    for column in COLUMNS:
        table.add_column(column.title, justify="right" if column.right else "left")
    for peer in COLUMNS[0].sorted(snapshot.peers):
        table.add_row(*(Text(printable(column.shown(peer, snapshot.time))) for column in COLUMNS))
    lines = [line.plain for line in summary(snapshot)]
    lines += ["", *_rendered(table)]
    if readers := reader_lines(snapshot.readers):
        lines += ["", *readers]
    return lines

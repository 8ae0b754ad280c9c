"""The columns of a table of peers, and the lines above it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from averaging.common import counted, duration
from averaging.errors import printable
from averaging.monitor.snapshot import PeerView, RunSnapshot, ServiceView
from averaging.receipts import WeightReader


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        title: its head.
        width: cells on a screen.
        cell: text for a peer, given the time.
        key: value by which peers are sorted; those without one come last.
        right: whether it is aligned at the right.
    """

    title: str
    width: int
    cell: Callable[[PeerView, float], str]
    key: Callable[[PeerView], float | str | None]
    right: bool = False

    def sorted(self, peers: Sequence[PeerView], *, reverse: bool = False) -> list[PeerView]:
        """The peers in the order of this column: names ascending, numbers descending, unless reversed."""
        known = [peer for peer in peers if self.key(peer) is not None]
        known.sort(key=lambda peer: peer.endpoint)
        known.sort(key=self._known_key, reverse=self.right != reverse)
        return known + [peer for peer in peers if self.key(peer) is None]

    def _known_key(self, peer: PeerView) -> tuple[float, str]:
        key = self.key(peer)
        return (0.0, key) if isinstance(key, str) else (key or 0.0, "")


MAX_NUMBER = 1e18
"""Numbers of other peers from which on `?` is shown."""


def compact(number: float | None) -> str:
    """A number in at most 5 characters: `0.25`, `9.5`, `128`, `12.3k`, `4.5M`; empty for None."""
    if number is None:
        return ""
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


def _steps(peer: PeerView, _: float) -> str:
    training = peer.training
    if training is None:
        return ""
    return str(training.local_step) if training.global_step is None else f"{training.global_step}/{training.local_step}"


def _step_key(peer: PeerView) -> float | None:
    training = peer.training
    if training is None:
        return None
    return float(training.global_step or 0) * 2**40 + training.local_step


def _last(peer: PeerView, now: float) -> str:
    receipt = peer.last_round
    if receipt is None:
        return ""
    ended = age(max(0.0, now - receipt.started - receipt.seconds))
    if not receipt.averaged:
        return f"#{receipt.round} {receipt.outcome.value} {ended}"
    lost = f" -{len(receipt.dropped)}" if receipt.dropped else ""
    return f"#{receipt.round} {ended}{lost}"


def _waits_for(peer: PeerView, _: float) -> str:
    names = peer.waits_for
    return f"{names[0]}{f' +{len(names) - 1}' if len(names) > 1 else ''}" if names else ""


def _state(peer: PeerView, _: float) -> str:
    if peer.state == "late" and peer.training is not None:
        return f"late {compact(peer.training.missed)}"
    return f"silent {age(peer.silent)}" if peer.state == "silent" and peer.silent is not None else peer.state


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _every(peer: PeerView, _: float) -> str:
    return peer.training.sync_every if peer.training else ""


def _quorum(peer: PeerView, _: float) -> str:
    return peer.training.quorum if peer.training else ""


def _grace(peer: PeerView, _: float) -> str:
    return duration(peer.training.grace) if peer.training and peer.training.grace is not None else ""


def _weight(peer: PeerView, _: float) -> str:
    account = peer.own_account
    return "" if account is None else f"{compact(account.weight)} {account.weight_unit}".rstrip()


COLUMNS = (
    Column("PEER", 21, lambda peer, _: peer.endpoint, lambda peer: peer.endpoint),
    Column("STATE", 10, _state, lambda peer: peer.state),
    Column("STEP", 10, _steps, _step_key, right=True),
    Column(
        "SAMP/S",
        6,
        lambda peer, _: compact(peer.training.samples_per_second if peer.training else None),
        lambda peer: peer.training.samples_per_second if peer.training else None,
        right=True,
    ),
    Column("LAST ROUND", 11, _last, lambda peer: peer.last_round.round if peer.last_round else None, right=True),
    Column("OUT/S", 5, lambda peer, _: compact(peer.bytes_sent), lambda peer: peer.bytes_sent, right=True),
    Column("IN/S", 5, lambda peer, _: compact(peer.bytes_received), lambda peer: peer.bytes_received, right=True),
    Column("WAIT", 4, lambda peer, _: _percent(peer.waiting_share), lambda peer: peer.waiting_share, right=True),
    Column("WAITS FOR", 24, _waits_for, lambda peer: len(peer.waits_for), right=False),
    Column("LANE", 6, lambda peer, _: "+".join(peer.lanes), lambda peer: "+".join(peer.lanes)),
    Column("EVERY", 10, _every, lambda peer: _every(peer, 0.0) or None),
    Column("QUORUM", 6, _quorum, lambda peer: _quorum(peer, 0.0) or None),
    Column("GRACE", 7, _grace, lambda peer: peer.training.grace if peer.training else None, right=True),
    Column("WEIGHT", 14, _weight, lambda peer: account.weight if (account := peer.own_account) else None, right=True),
    Column("ROLE", 9, lambda peer, _: peer.role, lambda peer: peer.role),
    Column(
        "STRATEGY",
        17,
        lambda peer, _: peer.training.strategy if peer.training else "",
        lambda peer: peer.training.strategy if peer.training else None,
    ),
    Column(
        "STEPS/S",
        7,
        lambda peer, _: compact(peer.training.steps_per_second if peer.training else None),
        lambda peer: peer.training.steps_per_second if peer.training else None,
        right=True,
    ),
    Column(
        "VERSION",
        7,
        lambda peer, _: str(peer.status.state_version) if peer.status else "",
        lambda peer: peer.status.state_version if peer.status else None,
        right=True,
    ),
    Column(
        "SOFTWARE",
        16,
        lambda peer, _: peer.status.software if peer.status else "",
        lambda peer: peer.status.software if peer.status else None,
    ),
)
"""All columns. `VERSION` is that of the state that newcomers get."""


def fitted(text: str, width: int, *, right: bool = False) -> str:
    """Printable text of exactly this width in cells; what is cut off ends with `~`."""
    text = printable(text)
    if cell_len(text) > width:
        return set_cell_size(text, max(0, width - 1)) + "~" * min(1, width)
    padding = " " * (width - cell_len(text))
    return padding + text if right else text + padding


def row(peer: PeerView, columns: Sequence[Column], widths: Sequence[int], now: float) -> Text:
    """One line of the table. A peer that does not answer has its reason in place of what is unknown."""
    cells = [
        fitted(column.cell(peer, now), width, right=column.right) for column, width in zip(columns, widths, strict=True)
    ]
    known = 2 if len(columns) > 1 and columns[1].title == "STATE" else 1
    if peer.error and len(cells) > known:
        rest = sum(widths[known:]) + 2 * (len(widths) - known - 1)
        cells = [*cells[:known], fitted(peer.error, rest)]
    return Text("  ".join(cells), style=style_of(peer))


def style_of(peer: PeerView) -> str:
    """The colour of a peer's line."""
    if peer.state == "silent":
        return "red"
    if peer.state == "client" or not peer.answers:
        return "dim"
    last = peer.last_round
    bad = last is not None and (not last.averaged or last.dropped or last.drifted)
    return "yellow" if bad else ""


def head(columns: Sequence[Column], widths: Sequence[int]) -> Text:
    """The line with the titles."""
    titles = [fitted(column.title, width, right=column.right) for column, width in zip(columns, widths, strict=True)]
    return Text("  ".join(titles), style="bold")


# The lines above the table.


def summary(snapshot: RunSnapshot) -> list[Text]:
    """The run in a few lines, each of which may be longer than a screen is wide."""
    texts = (
        terms_line(snapshot),
        _phases_line(snapshot),
        waits_line(snapshot),
        readers_line(snapshot.readers),
        *services(snapshot),
    )
    lines = [_first_line(snapshot), _rounds_line(snapshot), *(Text(text) for text in texts if text)]
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
    late = [f"{printable(peer.endpoint)} ({peer.training.missed})" for peer in snapshot.late if peer.training]
    more = f" and {len(late) - 3} more" if len(late) > 3 else ""
    lines = [
        *(printable(text) for text in snapshot.terms[:3]),
        *([f"late: {', '.join(late[:3])}{more}"] if late else []),
    ]
    return "; ".join(lines)


def _phases_line(snapshot: RunSnapshot) -> str:
    """How long the phases of an average round take, without those of less than 1 % of it."""
    phases = snapshot.phase_seconds
    least = sum(phases.values()) / 100
    texts = [f"{printable(name)} {duration(seconds)}" for name, seconds in phases.items() if seconds >= least > 0]
    return f"a round: {', '.join(texts)}" if texts else ""


def waits_line(snapshot: RunSnapshot) -> str:
    """Who is waited for, and by how many."""
    targets = Counter(name for peer in snapshot.answering for name in peer.waits_for)
    texts = [f"{printable(name)} ({counted(count, 'peer')})" for name, count in targets.most_common(3)]
    more = f" and {len(targets) - 3} more" if len(targets) > 3 else ""
    return f"waited for: {', '.join(texts)}{more}" if texts else ""


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
    return [
        "  ".join(
            (
                fitted(each.kind, 8),
                fitted(each.name, 24),
                fitted(each.status if each.kind == "explorer" else "-", 12),
                _version_text(each),
                "" if each.newest is None else f"of {each.newest}",
                f"from {printable(peer)}",
            )
        )
        for peer, each in readers
    ]


def _version_text(reader: WeightReader) -> str:
    if reader.version is not None:
        return fitted(f"version {reader.version}", 16)
    return printable(reader.status) if reader.kind == "follower" and reader.status else fitted("no version yet", 16)


def services(snapshot: RunSnapshot) -> list[str]:
    """A line for each named register and feed."""
    named = (("register", snapshot.register), ("feed", snapshot.feed))
    return [_service_line(kind, service) for kind, service in named if service is not None]


def _service_line(kind: str, service: ServiceView) -> str:
    if service.error:
        return f"{kind} {printable(service.name)}: {printable(service.error)}"
    values = ", ".join(
        f"{printable(str(name)).replace('_', ' ')} {printable(compact(value) if _is_real(value) else str(value))}"
        for name, value in service.values.items()
    )
    return f"{kind} {printable(service.name)}: {values}, answers in {duration(service.round_trip)}"


def _is_real(value: object) -> bool:
    return isinstance(value, float)


def as_text(snapshot: RunSnapshot) -> list[str]:
    """The whole snapshot as lines, as wide as they need to be: the output of --once."""
    peers = COLUMNS[0].sorted(snapshot.peers)
    widths = [
        max([len(column.title), *(cell_len(printable(column.cell(peer, snapshot.time))) for peer in peers)])
        for column in COLUMNS
    ]
    lines = [line.plain for line in summary(snapshot)]
    lines += ["", head(COLUMNS, widths).plain]
    lines += [row(peer, COLUMNS, widths, snapshot.time).plain for peer in peers]
    if readers := reader_lines(snapshot.readers):
        lines += ["", *readers]
    return [line.rstrip() for line in lines]

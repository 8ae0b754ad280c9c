"""A run at one moment, and the same as JSON: of `averaging top`, its table and `--json`, and of the page. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from averaging.common import CLIENT_PREFIX, plain
from averaging.errors import printable
from averaging.receipts import Account, PeerStatus, Receipt, Totals, TrainingProgress, WeightReader, to_json

MAX_TEXT = 1000
# Characters of a text of a peer.

VERSION = 1  # version of the JSON format. New fields do not change it


@dataclass(frozen=True, slots=True)
class PeerView:
    """One peer of a run, as it was when it answered last."""

    endpoint: str
    error: str = ""  # why it did not answer the last time, or cannot be asked; empty if it did, or was not asked yet
    silent_seconds: float | None = None  # seconds since its last answer; None if there was none
    status: PeerStatus | None = None  # its last answer
    round_trip_seconds: float = 0.0  # seconds that the last answer took
    window_seconds: float = 0.0  # seconds that the rates below cover; 0 if they are unknown
    rounds_per_minute: float | None = None  # rounds that averaged
    bytes_sent_per_second: float | None = None  # in rounds, as the next
    bytes_received_per_second: float | None = None
    waiting_share: float | None = None  # fraction of the time in which it waited for other peers in rounds
    phase_seconds: Mapping[str, float] = field(default_factory=dict)  # seconds of a round by phase, on average
    receipts: tuple[Receipt, ...] = ()  # those with this answer, the oldest first; none was in an earlier snapshot

    @property
    def answers(self) -> bool:
        return self.status is not None and not self.error

    @property
    def training(self) -> TrainingProgress | None:
        return None if self.status is None else self.status.training

    @property
    def last_round(self) -> Receipt | None:
        return None if self.status is None else self.status.last_round

    @property
    def role(self) -> str:
        """Trainer, auxiliary, or peer; client before it if it accepts no calls; empty while unknown."""
        if self.status is not None:
            return self.status.role if self.status.mode != "client" else f"client {self.status.role}"
        return "client" if self.is_client else ""

    @property
    def doing(self) -> str:
        """What it does: averaging, late for a round, looking, training or a later stage, idle; empty if unknown."""
        status, training = self.status, self.training
        if status is None or self.error:
            return ""
        if status.members:
            return "averaging"
        late = "late" if training and training.missed else "looking" if status.looking else ""
        return late or (training.stage if training else "idle")

    @property
    def waits_for(self) -> tuple[str, ...]:
        """The peers that it waits for; of a member that waits for its leader to begin the round, the leader."""
        status = self.status
        if status is None or self.error:
            return ()
        return status.waiting_for or ((status.leader,) if status.looking and status.leader else ())

    @property
    def lanes(self) -> tuple[str, ...]:
        accounts = self.last_round.accounts if self.last_round else ()
        return tuple(sorted({account.lane for account in accounts if account.lane}))

    @property
    def own_account(self) -> Account | None:
        accounts = self.last_round.accounts if self.last_round else ()
        return next((account for account in accounts if account.endpoint == self.endpoint), None)

    @property
    def weight(self) -> str:
        account = self.own_account
        return "" if account is None else account.weight_text.removeprefix("weight ")

    @property
    def is_client(self) -> bool:
        """Whether it accepts no calls, so that it is no fault that it does not answer."""
        return self.endpoint.startswith(CLIENT_PREFIX)

    @property
    def state(self) -> str:
        if self.answers:
            return self.doing
        return "client" if self.is_client else "silent" if self.error else "asked"


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run at one moment."""

    time: float  # seconds since the epoch
    run_id: str  # its id; empty while nobody has answered
    peers: tuple[PeerView, ...]  # its peers, by endpoint
    notes: tuple[str, ...] = ()  # what the view leaves out, and why

    @property
    def answering(self) -> tuple[PeerView, ...]:
        return tuple(peer for peer in self.peers if peer.answers)

    @property
    def silence(self) -> str:
        """Why no peer answers; empty if one does."""
        reasons = "; ".join(f"{peer.endpoint}: {peer.error or 'no answer'}" for peer in self.peers[:4])
        return "" if self.answering else f"no peer answered: {reasons}"

    @property
    def global_step(self) -> int | None:
        steps = [peer.training.global_step for peer in self.peers if peer.training and peer.training.global_step]
        return max(steps, default=None)

    @property
    def late(self) -> tuple[PeerView, ...]:
        return tuple(peer for peer in self.answering if peer.training and peer.training.missed)

    @property
    def terms(self) -> tuple[str, ...]:
        """When rounds begin, and what weights count, as the peers say: more than one text if they differ."""
        texts = Counter(peer.training.terms for peer in self.answering if peer.training and peer.training.terms)
        return tuple(text for text, _ in texts.most_common())

    @property
    def samples_per_second(self) -> float | None:
        rates = [peer.training.samples_per_second for peer in self.answering if peer.training]
        return sum(known) if (known := [rate for rate in rates if rate is not None]) else None

    @property
    def rounds_per_minute(self) -> float | None:
        """Rounds of the run that averaged. A round with several members counts once. None while unknown."""
        peers = [peer for peer in self.answering if peer.rounds_per_minute is not None]
        names = {peer.endpoint for peer in peers}
        shares = [
            (peer.rounds_per_minute or 0.0) / max(1, len(names & set(seen.members)))
            for peer in peers
            if (seen := peer.last_round)
        ]
        return sum(shares) if peers else None

    @property
    def phase_seconds(self) -> dict[str, float]:
        every = [peer.phase_seconds for peer in self.answering if peer.phase_seconds]
        names = dict.fromkeys(name for phases in every for name in phases)
        return {name: sum(phases.get(name, 0.0) for phases in every) / len(every) for name in names}

    @property
    def waiting_share(self) -> float | None:
        shares = [peer.waiting_share for peer in self.answering if peer.waiting_share is not None]
        return sum(shares) / len(shares) if shares else None

    @property
    def dropped(self) -> dict[str, int]:
        """Members that were dropped, by code, as counted by each of the others since it started."""
        counts: Counter[str] = Counter()
        for peer in self.peers:
            totals = peer.status.totals if peer.status else None
            counts.update({code.value: count for code, count in (totals.dropped if totals else {}).items()})
        return dict(counts.most_common())

    @property
    def readers(self) -> list[tuple[str, WeightReader]]:
        return [(peer.endpoint, each) for peer in self.answering if peer.status for each in peer.status.readers]


Json = dict[str, Any]
# A JSON object.

_OF_RUN = ("time", "run_id", "global_step", "samples_per_second", "rounds_per_minute", "phase_seconds", "waiting_share")
_OF_PEER = (
    *("endpoint", "answers", "error", "silent_seconds", "round_trip_seconds", "role", "doing", "waits_for", "lanes"),
    *("window_seconds", "rounds_per_minute", "bytes_sent_per_second", "bytes_received_per_second", "waiting_share"),
    *("phase_seconds", "weight"),
)
_OF_STATUS = {
    **{"mode": "", "software": "", "started": None, "leader": "", "members": ()},
    **{"state_version": None, "known_peers": None, "rounds": None},
}  # with the values of a peer that has not answered yet


def snapshot_json(snapshot: RunSnapshot, *, receipts: bool = True) -> Json:
    """The snapshot as JSON values. Text of other peers has no control characters, and there is no NaN.

    Args:
        snapshot: the run.
        receipts: whether each peer comes with the receipt of its last round, which names all members.
    """
    values = {
        "version": VERSION,
        **{name: getattr(snapshot, name) for name in _OF_RUN},
        "terms": snapshot.terms[:3],
        "dropped": snapshot.dropped,
        "peers": [_peer_json(peer, receipts) for peer in snapshot.peers],
        "followers": [_reader_json(peer, each) for peer, each in snapshot.readers if each.kind == "follower"],
        "explorers": [_reader_json(peer, each) for peer, each in snapshot.readers if each.kind == "explorer"],
        "notes": snapshot.notes,
    }
    cleaned: Json = clean(values)
    return cleaned


def _peer_json(peer: PeerView, receipts: bool) -> Json:
    status, last = peer.status, peer.last_round
    totals = status.totals if status and status.totals else Totals()
    values = {
        **{name: getattr(peer, name) for name in _OF_PEER},
        **{name: getattr(status, name) if status else unknown for name, unknown in _OF_STATUS.items()},
        "training": {**asdict(peer.training), "terms": peer.training.terms} if peer.training else None,
        "last": {"outcome": _outcome(peer.endpoint, last), "ended": last.ended, "text": str(last)} if last else None,
        "bytes_sent": totals.bytes_sent,
        "bytes_received": totals.bytes_received,
        "outcomes": {outcome.value: count for outcome, count in totals.rounds.items()},
        "dropped": {code.value: count for code, count in totals.dropped.items()},
    }
    return values | {"last_round": to_json(last) if last else None} if receipts else values


def _outcome(name: str, last: Receipt) -> str:
    if last.averaged and any(drift.endpoint == name for drift in last.drifted):
        return "drifted"
    return "partial" if last.averaged and last.dropped else last.outcome.value


def _reader_json(peer: str, reader: WeightReader) -> Json:
    return {"peer": peer, **{name: getattr(reader, name) for name in ("name", "status", "version", "newest")}}


def clean(value: Any) -> Any:
    """A value in a form that JSON can hold, with all text printable."""
    return _printable(plain(value))


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value, MAX_TEXT)
    if isinstance(value, Mapping):
        return {printable(key, MAX_TEXT): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return value


def matching(peers: Iterable[PeerView], text: str) -> list[PeerView]:
    """The peers of which a shown word contains `text`, without regard to case: name, role, strategy, state, version."""
    wanted = text.casefold()
    return [peer for peer in peers if any(wanted in word.casefold() for word in _words(peer))]


def _words(peer: PeerView) -> list[str]:
    software, strategy = peer.status.software if peer.status else "", peer.training.strategy if peer.training else ""
    return [peer.endpoint, peer.role, peer.state, peer.error, software, strategy, *peer.lanes]

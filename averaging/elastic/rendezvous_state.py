"""The state of a rendezvous, as it stands in a register, and how the nodes restore it there.

torch keeps this state as a pickle, with which whoever can write it executes code at every node. So the register holds
msgpack instead: each node encodes torch's object, and builds the object anew from checked values.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, NamedTuple

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from averaging.common import pack, unpack
from averaging.elastic.register import Register, RegisterEntry
from averaging.errors import ConfigError, PeerUnreachableError, ProtocolViolationError

MAX_ADDRESS = 256
"""Maximum length of a node's address, in characters; the name of a host has at most 253."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_MAX_NUMBER = 1 << 53


class _Row(NamedTuple):
    """One node.

    Attributes:
        addr: see torch's `_NodeDesc`.
        pid: see torch's `_NodeDesc`.
        local_id: see torch's `_NodeDesc`.
        rank: None if it takes no part in this round.
        waiting: whether it is in the wait list.
        spare: whether it is in the redundancy list.
        heartbeat: the last one, in microseconds since the epoch; None if there is none.
    """

    addr: str
    pid: int
    local_id: int
    rank: int | None
    waiting: bool
    spare: bool
    heartbeat: int | None


def encode_state(state: _RendezvousState) -> bytes:
    """Encodes a state; equal states have equal bytes."""
    nodes = {*state.participants, *state.wait_list, *state.redundancy_list, *state.last_heartbeats}
    rows = [
        _Row(
            *(node.addr, node.pid, node.local_id, state.participants.get(node)),
            node in state.wait_list,
            node in state.redundancy_list,
            _microseconds(state.last_heartbeats.get(node)),
        )
        for node in sorted(nodes)
    ]
    encoded: bytes = pack(
        [state.round, state.complete, state.closed, _microseconds(state.deadline), [list(row) for row in rows]]
    )
    return encoded


def decode_state(payload: bytes) -> _RendezvousState:
    """Builds a state from untrusted bytes.

    Raises:
        ProtocolViolationError: they are not the state of a rendezvous.
    """
    try:
        fields = unpack(payload)
    except ValueError:
        fields = None
    if not _fits(fields, (int, bool, bool, int | None, list)):
        raise ProtocolViolationError(
            "the register holds bytes that are not the state of a rendezvous; update all nodes"
        )
    state = _RendezvousState()
    state.round, state.complete, state.closed, deadline, rows = fields
    state.deadline = _time(deadline)
    for row in map(_row, rows):
        node = _NodeDesc(row.addr, row.pid, row.local_id)
        if row.rank is not None:
            state.participants[node] = row.rank
        if row.waiting:
            state.wait_list.add(node)
        if row.spare:
            state.redundancy_list.add(node)
        if (heartbeat := _time(row.heartbeat)) is not None:
            state.last_heartbeats[node] = heartbeat
    return state


def decode_place(payload: bytes) -> tuple[bytes, str, int] | None:
    """Returns what the first node of a round announces: round, address and port of its store; None for other bytes."""
    try:
        fields = unpack(payload)
    except ValueError:
        return None
    if not _fits(fields, (bytes, str, int)) or not 0 < fields[2] < 1 << 16 or not _is_address(fields[1]):
        return None
    return fields[0], fields[1], fields[2]


def _row(fields: Any) -> _Row:
    if not _fits(fields, (str, int, int, int | None, bool, bool, int | None)) or not _is_address(fields[0]):
        raise ProtocolViolationError("the register holds a rendezvous with something that is not a node")
    return _Row(*fields)


def _fits(fields: Any, types: Sequence[Any]) -> bool:
    """Whether `fields` is a list with values of these types, whose numbers are in range."""
    if not isinstance(fields, list) or len(fields) != len(types):
        return False
    return all(
        isinstance(value, wanted)
        and (type(value) is not int or 0 <= value < _MAX_NUMBER)
        and not (isinstance(value, bool) and wanted is not bool)
        for value, wanted in zip(fields, types, strict=True)
    )


def _is_address(addr: str) -> bool:
    return 0 < len(addr) <= MAX_ADDRESS and addr.isprintable()


def _microseconds(moment: datetime | None) -> int | None:
    return None if moment is None else (moment - _EPOCH) // _MICROSECOND


def _time(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else _EPOCH + microseconds * _MICROSECOND


logger = logging.getLogger("averaging.elastic")

MAC_BYTES = 32
_PURPOSE = b"averaging register 2"
_FIELDS = (int, float, str, str, bool, bytes, bytes)

FORGOTTEN = 120.0
"""Seconds after its last write from which a state is void: a new job with the same id then starts from nothing."""

TOLERATED_SKEW = 5.0
"""Maximum difference of two clocks, in seconds, without a warning."""

TRIES = 20
"""Maximum number of concurrent writes while a state is restored."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """One write, authenticated with the run's token."""

    version: int  # number of the write, from 1
    sent: float  # when it was made, in seconds since the epoch by its writer's clock
    writer: str  # the node that made it
    world: str  # the options that must be equal at all nodes of the job, as text
    ended: bool  # whether the job has ended
    payload: bytes = field(repr=False)  # the state
    raw: bytes = field(repr=False)  # the complete value in the register

    @property
    def order(self) -> tuple[int, float, bytes]:
        """Of two states the one with the higher order is valid; of two first writes that is the later one."""
        return self.version, self.sent, self.raw[:MAC_BYTES]


class Seal:
    """Seals and opens the value of one key.

    Args:
        key: The key in the register. A value of another key is refused.
        secrets: The run's tokens; the first one seals, all open. Without tokens only accidental changes are detected.
    """

    def __init__(self, key: str, secrets: Sequence[str]) -> None:
        self._key = key
        self._secrets = [sha256(_PURPOSE + secret.encode()).digest() for secret in secrets] or [_PURPOSE]

    def close(
        self, payload: bytes, *, version: int, sent: float, writer: str, world: str, nonce: bytes, ended: bool = False
    ) -> Sealed:
        """Seals a write; `nonce` makes it differ from every other."""
        body = pack([version, sent, writer, world, ended, nonce, payload])
        return Sealed(version, sent, writer, world, ended, payload, self._mac(self._secrets[0], body) + body)

    def open(self, raw: bytes) -> Sealed:
        """Checks and reads a write.

        Raises:
            ProtocolViolationError: It was not written for this key with a token of the run.
        """
        mac, body = raw[:MAC_BYTES], raw[MAC_BYTES:]
        if not any(hmac.compare_digest(mac, self._mac(secret, body)) for secret in self._secrets):
            raise ProtocolViolationError(
                f"the register holds bytes for {self._key!r} that nobody with this run's token wrote. They are "
                "refused. Give all nodes the same token_file, and find out who else can write there"
            )
        try:
            fields: Any = unpack(body)
        except ValueError:
            fields = None
        if not isinstance(fields, list) or tuple(map(type, fields)) != _FIELDS:
            raise ProtocolViolationError(
                f"the register holds another version's bytes for {self._key!r}; update all nodes"
            )
        version, sent, writer, world, ended, _, payload = fields
        return Sealed(version, sent, writer, world, ended, payload, raw)

    def _mac(self, secret: bytes, body: bytes) -> bytes:
        place = self._key.encode()
        return hmac.digest(secret, len(place).to_bytes(4, "big") + place + body, "sha256")


@dataclass(frozen=True, slots=True)
class Fenced:
    """A state, and the token with which it can be replaced."""

    sealed: Sealed
    token: bytes

    @property
    def payload(self) -> bytes:
        return self.sealed.payload


class ReplicatedValue:
    """Reads and writes one key of a register. The highest version wins: nodes put back what the register has lost.

    Args:
        register: The register.
        key: The key.
        secrets: See `Seal`.
        writer: Name of this node, for logs.
        world: The options that must be equal at all nodes of the job, as text; nodes with other ones are refused.
        clock: Seconds since the epoch.
        monotonic: A monotonic clock in seconds.
    """

    def __init__(
        self,
        register: Register,
        key: str,
        secrets: tuple[str, ...],
        *,
        writer: str,
        world: str = "",
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._register, self._key, self._seal = register, key, Seal(key, secrets)
        self._writer, self._world = writer, world
        self._clock, self._monotonic = clock, monotonic
        self._held: Sealed | None = None
        self._held_at = 0.0
        self._void: bytes | None = None  # the token of a void entry, which may be overwritten
        self._unsure: tuple[bytes, bytes | None, Sealed] | None = None
        self._asked_at: float | None = None
        self._skewed: set[str] = set()

    async def read(self) -> Fenced | None:
        """The present state.

        Raises:
            ConfigError: Another job uses the same id.
            PeerUnreachableError: The register does not answer.
            ProtocolViolationError: The value is not authentic, and this node has no state to restore.
        """
        return await self._settle(await self._register.get(self._key))

    async def write(self, payload: bytes, base: Fenced | None, *, ended: bool = False) -> tuple[Fenced | None, bool]:
        """Replaces the state `base`, or sets the first one; `ended` says that the job has ended.

        Returns:
            The present state, and whether it is the caller's.

        Raises:
            AveragingError: As `read`. The state may or may not have been written; repeat the call to find out.
        """
        token = base.token if base else self._void
        if self._unsure and self._unsure[:2] == (payload, token):
            sealed = self._unsure[2]  # the same bytes, so that an earlier write of them is recognised
        else:
            sealed = self._next(payload, base.sealed if base else None, ended=ended)
        self._unsure = payload, token, sealed
        written = await self._register.compare_and_set(self._key, sealed.raw, token)
        self._unsure = None
        if written.entry is not None and written.entry.value == sealed.raw:
            return self._hold(Fenced(sealed, written.entry.token)), True
        return await self._settle(written.entry), False

    def _next(self, payload: bytes, base: Sealed | None, *, ended: bool) -> Sealed:
        return self._seal.close(
            payload,
            version=base.version + 1 if base else 1,
            sent=self._clock(),
            writer=self._writer,
            world=self._world,
            nonce=os.urandom(16),
            ended=ended,
        )

    async def _settle(self, entry: RegisterEntry | None) -> Fenced | None:
        """Returns the valid state: that of the register, or that of this node, which is then restored."""
        for _ in range(TRIES):
            present, refused = self._open(entry)
            own = self._held
            if own is None or self._yields(own, present):
                if refused is not None:
                    raise refused
                return self._take_first(entry, present)
            if present is not None and present.order >= own.order:
                return self._hold(self._fenced(entry, present))
            if refused is not None:
                logger.warning("%s; this node puts back what it holds", refused)
            written = await self._register.compare_and_set(self._key, own.raw, entry.token if entry else None)
            entry = written.entry
            if written.done:
                logger.warning(
                    "the register had lost the state of %r (it restarted, perhaps); this node brought back version %d",
                    self._key,
                    own.version,
                )
        raise PeerUnreachableError("the register", f"{self._key!r} changes too fast; try again")

    def _yields(self, own: Sealed, present: Sealed | None) -> bool:
        # The job of a node that was away for so long may have ended, and another one with the same id may have begun.
        away = self._monotonic() - self._held_at > FORGOTTEN
        return away and present is not None and present.sent > own.sent

    def _open(self, entry: RegisterEntry | None) -> tuple[Sealed | None, ProtocolViolationError | None]:
        if entry is None:
            return None, None
        try:
            return self._seal.open(entry.value), None
        except ProtocolViolationError as error:
            return None, error

    def _take_first(self, entry: RegisterEntry | None, present: Sealed | None) -> Fenced | None:
        self._void = None
        if present is None:
            return None
        fenced = self._fenced(entry, present)
        if self._clock() - present.sent > FORGOTTEN:
            self._void = fenced.token
            return None
        if present.world != self._world:
            raise ConfigError(
                f"{self._key!r} is in use by another job ({present.world}, last written by {present.writer}), and "
                f"this one was started with {self._world}. Give this job another --rdzv-id, or all its nodes the same "
                f"options; an id is free {FORGOTTEN:g} s after its job has ended"
            )
        return self._hold(fenced)

    @staticmethod
    def _fenced(entry: RegisterEntry | None, present: Sealed | None) -> Fenced:
        if entry is None or present is None:
            raise RuntimeError("no entry")
        return Fenced(present, entry.token)

    def _hold(self, fenced: Fenced) -> Fenced:
        now, sealed = self._clock(), fenced.sealed
        if self._held is None or self._held.raw != sealed.raw:
            self._compare_clocks(sealed, now)
        self._held, self._held_at, self._asked_at = sealed, self._monotonic(), now
        return fenced

    def _compare_clocks(self, sealed: Sealed, now: float) -> None:
        """Warns about a node whose clock differs. A new state was written since this node last read the register."""
        skew = clock_skew(sealed.sent, self._asked_at, now)
        if not skew or sealed.writer in self._skewed:
            return
        self._skewed.add(sealed.writer)
        logger.warning(
            "the clock of node %s is about %.0f s %s that of this node (%s). Set both by NTP. No node is "
            "removed for it, but last_call_timeout may end that much earlier or later",
            *(sealed.writer, abs(skew), "ahead of" if skew > 0 else "behind", self._writer),
        )


def clock_skew(sent: float, after: float | None, before: float) -> float:
    """Minimum difference between the clocks of a writer and this node; 0 if none is evident.

    Args:
        sent: When it wrote, by its clock.
        after: By this node's clock, a moment before the write; None if there is none.
        before: By this node's clock, a moment after the write.
    """
    if sent > before + TOLERATED_SKEW:
        return sent - before
    if after is not None and sent < after - TOLERATED_SKEW:
        return sent - after
    return 0.0

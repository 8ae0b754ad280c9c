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
from typing import Annotated, Any

import msgspec
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from averaging.common import pack, unpack
from averaging.elastic.register import Register, RegisterEntry
from averaging.errors import ConfigError, PeerUnreachableError, ProtocolViolationError

logger = logging.getLogger("averaging.elastic")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]  # the name of a host has at most 253 characters
_Place = tuple[bytes, Address, Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]]


class _Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One node; the first three fields are those of torch's `_NodeDesc`."""

    addr: Address
    pid: Count
    local_id: Count
    rank: Count | None  # None if it takes no part in this round
    waiting: bool  # whether it is in the wait list
    spare: bool  # whether it is in the redundancy list
    heartbeat: Count | None  # the last one, in microseconds since the epoch; None if there is none


class _State(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    round: Count
    complete: bool
    closed: bool
    deadline: Count | None  # in microseconds since the epoch
    rows: list[_Row]


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
    encoded = _State(state.round, state.complete, state.closed, _microseconds(state.deadline), rows)
    return msgspec.msgpack.encode(encoded)


def decode_state(payload: bytes) -> _RendezvousState:
    """Builds a state from untrusted bytes.

    Raises:
        ProtocolViolationError: they are not the state of a rendezvous.
    """
    try:
        encoded = msgspec.msgpack.decode(payload, type=_State)
        if not all(row.addr.isprintable() for row in encoded.rows):
            raise ValueError("an address that cannot be printed")
    except ValueError as error:
        raise ProtocolViolationError(
            f"the register holds bytes that are not the state of a rendezvous ({error}); update all nodes"
        ) from None
    state = _RendezvousState()
    state.round, state.complete, state.closed = encoded.round, encoded.complete, encoded.closed
    state.deadline = _time(encoded.deadline)
    for row in encoded.rows:
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
        place = msgspec.msgpack.decode(payload, type=_Place)
    except ValueError:
        return None
    return place if place[1].isprintable() else None


def _microseconds(moment: datetime | None) -> int | None:
    return None if moment is None else (moment - _EPOCH) // _MICROSECOND


def _time(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else _EPOCH + microseconds * _MICROSECOND


MAC_BYTES = 32
_PURPOSE = b"averaging register 2"
_FIELDS = (int, float, str, str, bool, bytes, bytes)

FORGOTTEN = 120.0  # seconds after its last write from which a state is void: a new job with its id starts from nothing
TRIES = 20  # concurrent writes while a state is restored, at most


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
        body = pack([version, sent, writer, world, ended, nonce, payload])
        return Sealed(version, sent, writer, world, ended, payload, self._mac(self._secrets[0], body) + body)

    def open(self, raw: bytes) -> Sealed:
        """Checks and reads a write; raises ProtocolViolationError if it is not the run's, or not of this key."""
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
        self._held, self._held_at = fenced.sealed, self._monotonic()
        return fenced

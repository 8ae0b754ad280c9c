"""The keys in etcd, and how a record becomes the value of one.

A record stands under `averaging/runs/RUN/KEY/SUBKEY/OWNER`, so `etcdctl get --prefix averaging/runs/RUN/` lists a run.
In a run with tokens each value begins with a MAC by a token: who may write into etcd need not be a member of the run.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from averaging.common import Backoff
from averaging.discovery.gossip import Reason, RecordLimits
from averaging.errors import AveragingError, ProtocolViolationError, printable
from averaging.protocol import Record
from averaging.transport import KeyValueStore, parse
from averaging.transport.grpc import RECORD

ROOT = "averaging/runs"

MAX_VALUE = 2048
"""Longest value in bytes: a record with a value of 1 KiB and names of 256 bytes is shorter, also with a MAC."""

_MAC_BYTES = 32
_DOMAIN = b"averaging.v1.EtcdRecord"  # so that the MAC is valid for nothing else
_PLAIN, _SEALED = b"\0", b"\1"


class RefusedValueError(Exception):
    """What stands in etcd is no record of this run; its argument is the `Reason`."""


class RecordLayout:
    """Names and encodes the records of one run. Its first token seals, all are accepted; without any nothing is."""

    def __init__(self, run_id: str, tokens: Sequence[str] = ()) -> None:
        self._run_id = run_id
        self._keys = tuple(token.encode() for token in tokens)

    def prefix(self, *names: str) -> bytes:
        quoted = [quote(name, safe=":.[]@+~", errors="surrogatepass") for name in (self._run_id, *names)]
        return "/".join([ROOT, *quoted, ""]).encode()

    def name(self, record: Record) -> bytes:
        return self.prefix(record.key, record.subkey) + record.owner.hex().encode()

    def pack(self, record: Record) -> bytes:
        body = RECORD.SerializeToString(record)
        return _SEALED + _mac(self._keys[0], body) + body if self._keys else _PLAIN + body

    def unpack(self, value: bytes) -> Record:
        """The record in a value, whose signature is not checked; or raises a RefusedValueError."""
        if len(value) > MAX_VALUE:
            raise RefusedValueError(Reason.OVERSIZED)
        kind, body = value[:1], value[1:]
        if kind not in (_PLAIN, _SEALED):
            raise RefusedValueError(Reason.MALFORMED)
        if bool(self._keys) != (kind == _SEALED):
            raise RefusedValueError(Reason.UNSEALED)
        if kind == _SEALED:
            mac, body = body[:_MAC_BYTES], body[_MAC_BYTES:]
            if not any(hmac.compare_digest(mac, _mac(key, body)) for key in self._keys):
                raise RefusedValueError(Reason.UNSEALED)
        try:
            return parse(RECORD, body)
        except ProtocolViolationError:
            raise RefusedValueError(Reason.MALFORMED) from None


def _mac(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, _DOMAIN + body, "sha256")


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdSettings:
    """Times (in seconds) and sizes of discovery in etcd."""

    name: str = "etcd"  # the cluster as its user wrote it, for errors
    limits: RecordLimits = field(default_factory=RecordLimits)
    join_timeout: float = 10.0  # within which etcd must answer; time in which this peer stood still does not count
    lease: float = 30.0  # after which the records of a dead peer go
    renew: float = 8.0  # interval of the renewals of the lease
    presence: float = 60.0  # interval of the renewals of the record that shows that this peer is in the run
    # Other peers that this peer knows although it reads none of their records. Together the peers know all, so
    # `averaging top` finds the whole run through any of them.
    neighbours: int = 32
    look: float = 20.0  # mean time between two looks for neighbours
    most: int = 1024  # records of one key that it holds
    lapse: float = 60.0  # after which a key is no longer followed that nobody reads
    hold: float = 600.0  # for which expired records stay while etcd does not answer, since nobody can renew them
    wait: float = 3.0  # for the first read of a key
    leave: float = 1.0  # for the withdrawal of this peer's records when it leaves


class EtcdAccess:
    """One peer's access to etcd. It logs once that etcd does not answer, and once that it answers again."""

    def __init__(self, store: KeyValueStore, settings: EtcdSettings, rng: random.Random) -> None:
        self.store, self.settings, self.rng = store, settings, rng
        self._reason = ""  # why the last call failed
        self._lost_at: float | None = None

    @property
    def lost_seconds(self) -> float | None:
        return None if self._lost_at is None else asyncio.get_running_loop().time() - self._lost_at

    def backoff(self) -> Backoff:
        return Backoff(0.1, 3.0, self.rng)

    def note_answer(self) -> None:
        if (seconds := self.lost_seconds) is not None:
            logger.warning("%s answers again after %.0f s", self.settings.name, seconds)
        self._lost_at = None

    def note_failure(self, error: AveragingError) -> None:
        self._reason = printable(error.reason, 300)
        if self._lost_at is None:
            self._lost_at = asyncio.get_running_loop().time()
            logger.warning(
                "%s does not answer: %s. This peer goes on with the peers that it knows, and finds no others until it "
                "answers again",
                *(self.settings.name, self._reason),
            )

    def explain(self) -> str:
        if (seconds := self.lost_seconds) is None:
            return ""
        return f"has not answered for {seconds:.0f} s ({self._reason}); check that a majority of it is up"

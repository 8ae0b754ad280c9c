"""The keys in etcd, and how a record becomes the value of one. Pure.

A record stands under `averaging/runs/RUN/KEY/SUBKEY/OWNER`, so `etcdctl get --prefix averaging/runs/RUN/` lists a run.
In a run with tokens each value begins with a MAC by a token: who may write into etcd need not be a member of the run.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from urllib.parse import quote

from averaging.discovery.gossip import Reason
from averaging.errors import ProtocolViolationError
from averaging.protocol import Record
from averaging.transport import parse
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
    """Names and encodes the records of one run.

    Args:
        tokens: the run's tokens: the first seals, all are accepted. Without any nothing is sealed.
    """

    def __init__(self, run_id: str, tokens: Sequence[str] = ()) -> None:
        self._run_id = run_id
        self._keys = tuple(token.encode() for token in tokens)

    def prefix(self, *names: str) -> bytes:
        """What the keys begin with of all records of the run, under a key, or under a key and subkey."""
        quoted = [quote(name, safe=":.[]@+~", errors="surrogatepass") for name in (self._run_id, *names)]
        return "/".join([ROOT, *quoted, ""]).encode()

    def name(self, record: Record) -> bytes:
        return self.prefix(record.key, record.subkey) + record.owner.hex().encode()

    def pack(self, record: Record) -> bytes:
        body = RECORD.SerializeToString(record)
        return _SEALED + _mac(self._keys[0], body) + body if self._keys else _PLAIN + body

    def unpack(self, value: bytes) -> Record:
        """The record in a value. Its signature is not checked.

        Raises:
            RefusedValueError: it is none, or is not sealed with a token of the run.
        """
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

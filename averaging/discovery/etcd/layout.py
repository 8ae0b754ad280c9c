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

MAX_VALUE = 8192
"""Longest value in bytes: a record with a value of 1 KiB, names of 256 bytes, a certificate and a MAC is shorter."""

_MAC_BYTES = 32
_DOMAIN = b"averaging.v1.EtcdRecord"  # so that the MAC is valid for nothing else
_PLAIN, _SEALED = b"\0", b"\1"


def run_prefix(run_id: str) -> bytes:
    return f"{ROOT}/{_quoted(run_id)}/".encode()


def prefix_of(run_id: str, key: str) -> bytes:
    return run_prefix(run_id) + f"{_quoted(key)}/".encode()


def start_of(run_id: str, key: str, subkey: str) -> bytes:
    return prefix_of(run_id, key) + f"{_quoted(subkey)}/".encode()


def name_of(run_id: str, record: Record) -> bytes:
    return start_of(run_id, record.key, record.subkey) + record.owner.hex().encode()


def _quoted(name: str) -> str:
    return quote(name, safe=":.[]@+~", errors="surrogatepass")


class RefusedValueError(Exception):
    """What stands in etcd is no record of this run; its argument is the `Reason`."""


class RecordSeal:
    """Encodes records for etcd and decodes them.

    Args:
        tokens: the run's tokens: the first seals, all are accepted. Without any nothing is sealed.
    """

    def __init__(self, tokens: Sequence[str] = ()) -> None:
        self._keys = tuple(token.encode() for token in tokens)

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

"""The value of a job in a register: a state with its lineage, authenticated with the run's token. Pure.

A *lineage* is a first write and all writes that follow it. A job has one, unless its register loses everything and a
newcomer begins another. Then the older lineage overrules the other, and its writes name the other, so that the nodes of
the other follow. A node refuses a lineage that does not name its own: it may be that of an earlier job with the same id
and token, whose states somebody kept.

A newcomer cannot tell such a state from a present one. So it overrules nothing, and takes a later state of another
lineage, until it is *rooted*: it has begun its lineage, or a rooted node has built on one of its writes, as no kept
state does.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgpack

from averaging.common.safe_msgpack import unpack
from averaging.errors import ProtocolViolationError

MAC_BYTES = 32
_PURPOSE = b"averaging register 1"
_FIELDS = (bytes, float, int, float, str, str, list, list, bool, bool, bytes, bytes)

MAX_NAMED = 16
"""Lineages, and earlier writes, that a write names: the latest ones."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """One write.

    Attributes:
        origin: Random name of the lineage, equal for all writes that follow the same first one.
        created: When the first write was made, in seconds since the epoch by its writer's clock.
        version: Number of the write in its lineage, from 1.
        sent: When this write was made, by its writer's clock.
        writer: The node that made it.
        world: The options that must be equal at all nodes of the job, as text.
        overruled: Origins of the lineages that this one replaces, the latest last.
        follows: Names of the writes before this one, the latest last.
        rooted: Whether its writer was rooted.
        ended: Whether the job has ended.
        payload: The state.
        raw: The complete value in the register.
    """

    origin: bytes
    created: float
    version: int
    sent: float
    writer: str
    world: str
    overruled: tuple[bytes, ...]
    follows: tuple[bytes, ...]
    rooted: bool
    ended: bool
    payload: bytes = field(repr=False)
    raw: bytes = field(repr=False)

    @property
    def name(self) -> bytes:
        """Identifies this write, 16 bytes."""
        return self.raw[: MAC_BYTES // 2]


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
        self,
        payload: bytes,
        *,
        origin: bytes,
        created: float,
        version: int,
        sent: float,
        writer: str,
        world: str,
        nonce: bytes,
        overruled: tuple[bytes, ...] = (),
        follows: tuple[bytes, ...] = (),
        rooted: bool = False,
        ended: bool = False,
    ) -> Sealed:
        """Seals a write; `nonce` makes it differ from every other."""
        named = list(overruled), list(follows)
        fields = [origin, created, version, sent, writer, world, *named, rooted, ended, nonce, payload]
        body: bytes = msgpack.packb(fields)
        raw = self._mac(self._secrets[0], body) + body
        return Sealed(origin, created, version, sent, writer, world, overruled, follows, rooted, ended, payload, raw)

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
            fields: Any = unpack(body, len(_FIELDS) + 2 * MAX_NAMED + 1)
        except ValueError:
            fields = None
        fits = isinstance(fields, list) and tuple(map(type, fields)) == _FIELDS
        if not fits or not all(isinstance(name, bytes) for name in (*fields[6], *fields[7])):
            raise ProtocolViolationError(
                f"the register holds another version's bytes for {self._key!r}; update all nodes"
            )
        origin, created, version, sent, writer, world, overruled, follows, rooted, ended, _, payload = fields
        named = tuple(overruled), tuple(follows)
        return Sealed(origin, created, version, sent, writer, world, *named, rooted, ended, payload, raw)

    def _mac(self, secret: bytes, body: bytes) -> bytes:
        place = self._key.encode()
        return hmac.digest(secret, len(place).to_bytes(4, "big") + place + body, "sha256")


def is_newer(held: Sealed, found: Sealed | None) -> bool:
    """Whether the state of this node replaces that of the register, which may have lost it in a restart.

    Within one lineage the later write is valid. Another lineage is valid only if it overrules that of this node.
    """
    if found is None:
        return True
    if held.origin == found.origin:
        return held.version > found.version
    return held.origin not in found.overruled


def overrules(held: Sealed, found: Sealed | None) -> bool:
    """Whether the lineage of this node replaces that of the register also at the nodes that hold the latter.

    It is the older one: a node that found an empty register began the other.
    """
    if found is None or held.origin == found.origin:
        return False
    return (held.created, held.origin) < (found.created, found.origin)

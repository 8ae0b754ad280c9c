"""The value of a job in a register: a state with its lineage, authenticated with the run's token.

Authentication is necessary because torch unpickles the state of a rendezvous. Pure.
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
_FIELDS = (bytes, float, int, float, str, str, bytes, bytes)


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
        payload: The state.
        raw: The complete value in the register.
    """

    origin: bytes
    created: float
    version: int
    sent: float
    writer: str
    world: str
    payload: bytes = field(repr=False)
    raw: bytes = field(repr=False)


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
    ) -> Sealed:
        """Seals a write; `nonce` makes it differ from every other."""
        body: bytes = msgpack.packb([origin, created, version, sent, writer, world, nonce, payload])
        raw = self._mac(self._secrets[0], body) + body
        return Sealed(origin, created, version, sent, writer, world, payload, raw)

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
            fields: Any = unpack(body, len(_FIELDS) + 1)
        except ValueError:
            fields = None
        if not isinstance(fields, list) or tuple(map(type, fields)) != _FIELDS:
            raise ProtocolViolationError(
                f"the register holds another version's bytes for {self._key!r}; update all nodes"
            )
        origin, created, version, sent, writer, world, _, payload = fields
        return Sealed(origin, created, version, sent, writer, world, payload, raw)

    def _mac(self, secret: bytes, body: bytes) -> bytes:
        place = self._key.encode()
        return hmac.digest(secret, len(place).to_bytes(4, "big") + place + body, "sha256")


def is_newer(held: Sealed, found: Sealed | None) -> bool:
    """Whether the state of this node replaces that of the register, which may have lost it in a restart.

    Within one lineage the later write is valid. Of two lineages the earlier one is valid: a node that found an empty
    register began the other.
    """
    if found is None:
        return True
    if held.origin == found.origin:
        return held.version > found.version
    return (held.created, held.origin) < (found.created, found.origin)

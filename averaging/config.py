"""What a peer can be told at its start, and whether that can work. Pure."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from numbers import Integral, Real
from typing import TypeAlias, TypedDict

from averaging.common.addresses import parse_address
from averaging.common.validation import one_of
from averaging.errors import ConfigError
from averaging.protocol.aggregation import parse_aggregation
from averaging.protocol.group import Mode
from averaging.protocol.messages import CompressionType, parse_compression
from averaging.protocol.schema import ReplyForm

DEFAULT_PART_SIZE_BYTES = 1 << 20
"""Smaller parts cost more per byte; larger ones gain nothing (docs/performance.md)."""

FilePath: TypeAlias = "str | os.PathLike[str]"

MAX_RUN_ID_BYTES, MAX_GROUP_BITS = 128, 64
"""Both stand in the keys of discovery, which have at most 256 bytes."""

MAX_MATCHMAKING_TIME = 3000.0
"""Longest time of one declaration in seconds; discovery keeps no record longer than an hour."""


class NonFinite(StrEnum):
    """What to do with NaN and infinity in tensors."""

    REFUSE = "refuse"
    """A peer does not start a round with such tensors, and reducers drop a sender whose part holds them."""
    ALLOW = "allow"
    """They are averaged like other numbers, and spread to all members."""


class Inspection(StrEnum):
    """Who may look into a peer: reflection, channelz, its status, and the list of discovery's records."""

    ON = "on"
    """Everybody who can connect, without a token too."""
    TOKEN = "token"  # noqa: S105 - no password
    """Those who have the run's token; everybody who can connect if the run has none."""
    OFF = "off"
    """Nobody: it is not served."""


class PeerOptions(TypedDict, total=False):
    """The keyword arguments of `Peer` and `DecentralizedAverager`; `PeerConfig` says what they mean.

    What is one of a few may be given by its name, as `mode="client"`.
    """

    listen: str
    advertise: str | None
    join: Sequence[str]
    join_timeout: float
    mode: Mode | str
    group_size: int
    min_group_size: int
    group_bits: str
    matchmaking_time: float
    timeout: float
    part_timeout: float
    min_part_timeout: float
    bandwidth: float | None
    compression: CompressionType | str
    reply: ReplyForm | str
    aggregation: str
    part_size_bytes: int
    non_finite: NonFinite | str
    share_state: bool
    verify_donors: int
    in_place: bool
    receipts: FilePath | None
    tls_ca: FilePath | None
    tls_cert: FilePath | None
    tls_key: FilePath | None
    token_file: FilePath | None
    insecure: bool
    inspection: Inspection | str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """What a peer is told at its start. What is one of a few may be given by its name too, in capitals or not.

    Attributes:
        run_id: peers with the same run average together; no dots, at most 128 bytes of UTF-8.
        listen: `host:port` to listen on; port 0 takes a free one. Not used in client mode.
        advertise: `host:port` at which others reach this peer, if it differs from `listen`; port 0 means the one taken.
        join: `host:port` of peers of the run, any of them; none starts a run of its own. Several are safer: who joins
            through one that dies in the next moments may never hear of others that joined through it just then.
        join_timeout: seconds within which one of them must answer.
        mode: node, client (accepts no connection) or auxiliary (reduces, contributes no tensors).
        group_size: a group begins as soon as it has so many members.
        min_group_size: it begins with so many when its leader's waiting time is over. This peer takes part in no
            smaller group, whoever leads. Should be the same at all peers: one that wants more members than there are
            averages with nobody, and the others wait for more until their leader's waiting time is over.
        group_bits: first group key, zeros and ones; empty puts all peers of the run under one key. To mix many peers by
            small groups, log2(group_size) bits for each round after the first, spread evenly: of 64 peers in groups of
            4 the n-th has `f"{n % 16:04b}"`, and all have the mean after 3 rounds.
        matchmaking_time: seconds a peer waits in one declaration before it begins with those who are there.
        timeout: seconds for finding a group, and as many again for the all-reduce with it, besides what this takes on
            links of 10 Mbit/s.
        part_timeout: seconds without any progress after which a member is given up in a round, at the latest: what is
            learned of each member makes it less (docs/reliability.md). A part must get through within it, while a link
            carries one to and one from each other member at once.
        min_part_timeout: but not less than this, unless part_timeout is.
        bandwidth: of this peer's link in bytes/s, so that it is given a share to match. None if unknown: it counts as
            the median of those that are told, so all should tell theirs. Told by the slowest alone it changes nothing.
        compression: how tensors are packed on the wire.
        reply: reducers answer with the average, or with the difference to what was sent.
        aggregation: how contributions become one: `mean`, or `median`, `trimmed:F`, `clip:TAU`, which a minority of
            false ones cannot carry away (docs/robust.md). The same at all peers.
        part_size_bytes: size of a part on the wire.
        non_finite: what to do with NaN and infinity. Should be the same at all peers: who refuses them drops who sends
            them.
        share_state: whether newcomers may download this peer's state. Clients never share.
        verify_donors: a state is downloaded only if so many donors announce the same version and the same digests of
            the averaged tensors; 1 believes the first.
        in_place: averages are written to the tensors as they arrive, not all at the end. That saves the memory of a
            second set of tensors and the time to fill it; a round that is cancelled leaves what had arrived by then.
            So does one that fails since the application holds the tensors' lock.
            With `share_state` only where the last state has been copied for newcomers, as it is before the application
            writes (`Peer.tensors`): else it is kept whole until the next one is.
        receipts: a file to which the receipt of every attempt is appended, one line of JSON each (docs/receipts.md).
        tls_ca: file with the certificates of the authorities whose peers are believed, see `averaging ca`.
        tls_cert: file with this peer's certificate, which must stand for the host at which others reach it.
        tls_key: file with the certificate's private key. The three are given together, and all connections use TLS.
        token_file: file with the run's tokens, one a line: the first is sent, all are accepted. It is read once.
        insecure: whether other machines may connect although there is no TLS.
        inspection: who may look into this peer.

    Raises:
        ConfigError: a value that cannot work; the message says which and why.
    """

    run_id: str
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    join: Sequence[str] = ()
    join_timeout: float = 10.0
    mode: Mode = Mode.NODE
    group_size: int = 8
    min_group_size: int = 2
    group_bits: str = ""
    matchmaking_time: float = 5.0
    timeout: float = 60.0
    part_timeout: float = 30.0
    min_part_timeout: float = 1.0
    bandwidth: float | None = None
    compression: CompressionType = CompressionType.NONE
    reply: ReplyForm = ReplyForm.AVERAGE
    aggregation: str = "mean"
    part_size_bytes: int = DEFAULT_PART_SIZE_BYTES
    non_finite: NonFinite = NonFinite.REFUSE
    share_state: bool = True
    verify_donors: int = 1
    in_place: bool = False
    receipts: FilePath | None = None
    tls_ca: FilePath | None = None
    tls_cert: FilePath | None = None
    tls_key: FilePath | None = None
    token_file: FilePath | None = None
    insecure: bool = False
    inspection: Inspection = Inspection.TOKEN

    def __post_init__(self) -> None:
        self._check_types()
        self._read_names()
        if not self.run_id or "." in self.run_id or not self.run_id.isprintable():
            raise ConfigError(f"run id {self.run_id!r} must be printable, not empty, and without a dot")
        if len(self.run_id.encode()) > MAX_RUN_ID_BYTES:
            raise ConfigError(
                f"run id {self.run_id[:20]!r}… has {len(self.run_id.encode())} bytes of UTF-8; "
                f"it may have {MAX_RUN_ID_BYTES}"
            )
        parse_address(self.listen)
        if self.advertise is not None:
            parse_address(self.advertise)
        for seed in self.join:
            if parse_address(seed)[1] == 0:
                raise ConfigError(f"{seed!r} has port 0; give the port on which that peer listens")
        for name in ("join_timeout", "matchmaking_time", "timeout", "part_timeout", "min_part_timeout"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a finite number of seconds above 0, not {value!r}")
        if self.matchmaking_time > MAX_MATCHMAKING_TIME:
            raise ConfigError(
                f"matchmaking_time must be at most {MAX_MATCHMAKING_TIME:g} s, not {self.matchmaking_time:g}; "
                "a peer declares itself again until timeout"
            )
        if self.min_group_size < 2:
            raise ConfigError(f"min_group_size must be at least 2, not {self.min_group_size}")
        if self.group_size < self.min_group_size:
            raise ConfigError(f"group_size {self.group_size} is below min_group_size {self.min_group_size}")
        if set(self.group_bits) - {"0", "1"}:
            raise ConfigError(f"group_bits must be zeros and ones, not {self.group_bits!r}")
        if len(self.group_bits) > MAX_GROUP_BITS:
            raise ConfigError(f"group_bits may have {MAX_GROUP_BITS} digits, not {len(self.group_bits)}")
        if self.bandwidth is not None and not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ConfigError(f"bandwidth must be finite and above 0 bytes/s, not {self.bandwidth!r}")
        parse_aggregation(self.aggregation)
        if not 1 <= self.verify_donors <= 16:
            raise ConfigError(f"verify_donors must be from 1 to 16, not {self.verify_donors}")
        if not 1024 <= self.part_size_bytes <= 1 << 28:
            raise ConfigError(f"part_size_bytes must be from 1 KiB to 256 MiB, not {self.part_size_bytes}")
        check_tls_files(self.tls_ca, self.tls_cert, self.tls_key)

    def _check_types(self) -> None:
        """What comes from a file or the environment is text: `insecure="no"` must not mean that it is."""
        for name, (kinds, told) in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, kinds):
                raise ConfigError(f"{name} must be {told}, not {value!r:.200}")
        if isinstance(self.join, str):
            raise ConfigError(f"join must be a list of addresses, not the text {self.join!r}")
        if not all(isinstance(seed, str) for seed in self.join):
            raise ConfigError(f"join must be a list of addresses, each a text HOST:PORT, not {self.join!r:.200}")

    def _read_names(self) -> None:
        """A name is not the member it means: `"refuse"` is equal to `NonFinite.REFUSE`, but it is another object."""
        read = {
            "mode": one_of(Mode, self.mode, "mode"),
            "compression": parse_compression(self.compression),
            "reply": one_of(ReplyForm, self.reply, "reply"),
            "non_finite": one_of(NonFinite, self.non_finite, "non_finite"),
            "inspection": one_of(Inspection, self.inspection, "inspection"),
        }
        for name, value in read.items():
            object.__setattr__(self, name, value)

    @property
    def is_closed(self) -> bool:
        """Whether only those take part in the run who have a certificate or a token."""
        return self.tls_cert is not None or self.token_file is not None


_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("run_id", "listen", "group_bits", "aggregation"), ((str,), "a text")),
    "advertise": ((str, type(None)), "a text or None"),
    "join": ((Collection,), "a list of addresses"),
    **dict.fromkeys(
        ("join_timeout", "matchmaking_time", "timeout", "part_timeout", "min_part_timeout"),
        ((Real,), "a finite number of seconds above 0"),
    ),
    "bandwidth": ((Real, type(None)), "a number of bytes/s or None"),
    **dict.fromkeys(
        ("group_size", "min_group_size", "part_size_bytes", "verify_donors"), ((Integral,), "a whole number")
    ),
    **dict.fromkeys(("share_state", "in_place", "insecure"), ((bool,), "True or False")),
    **dict.fromkeys(
        ("receipts", "tls_ca", "tls_cert", "tls_key", "token_file"), ((str, os.PathLike, type(None)), "a path or None")
    ),
}


def option_names() -> frozenset[str]:
    """Every option but the run id, which is asked for by name everywhere."""
    return frozenset(field.name for field in fields(PeerConfig)) - {"run_id"}


def check_tls_files(ca: FilePath | None, cert: FilePath | None, key: FilePath | None) -> None:
    """Whether all files that TLS needs are given, or none of them.

    Raises:
        ConfigError: some are and some are not.
    """
    missing = [name for name, file in (("tls_ca", ca), ("tls_cert", cert), ("tls_key", key)) if file is None]
    if 0 < len(missing) < 3:
        raise ConfigError(f"TLS needs tls_ca, tls_cert and tls_key together; give {' and '.join(missing)} as well")

"""The options of a peer: what they mean, whether they can work together, and where they are read from."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, Self, TypeAlias, TypedDict, TypeVar

from averaging.common import (
    Setting,
    merge,
    one_of,
    parse_address,
    read_arguments,
    read_environment,
    read_toml,
    unknown_option,
    with_sources,
)
from averaging.errors import ConfigError
from averaging.protocol import CompressionType, Mode, parse_aggregation, parse_compression
from averaging.tensors import ReplyForm

DEFAULT_PART_SIZE_BYTES = 1 << 20
"""Smaller parts cost more per byte; larger ones gain nothing (docs/design/performance.md)."""

AUTO = "auto"
"""Value of `direct_listen`: any free port on the host of `listen`."""

FilePath: TypeAlias = "str | os.PathLike[str]"

MAX_RUN_ID_BYTES, MAX_GROUP_BITS = 128, 64
"""Both are in the keys of discovery, which have at most 256 bytes."""

MAX_GROUP_WAIT = 3000.0
"""Longest time of one declaration in seconds; discovery keeps no record longer than an hour."""


C = TypeVar("C", bound="PeerConfig")


class NonFinite(StrEnum):
    """What happens to NaN and infinity in tensors."""

    REFUSE = "refuse"
    """A peer starts no round with such tensors, and reducers drop a sender whose part contains them."""
    ALLOW = "allow"
    """They are averaged like other numbers, and spread to all members."""


class OnDrift(StrEnum):
    """What a training peer does when it differs from most members of its group although it should not."""

    WARN = "warn"
    """It logs a warning, as all peers do that see it."""
    ADOPT = "adopt"
    """It also takes over the state and the hyperparameters of most members."""
    RAISE = "raise"
    """`step` raises a DriftError."""


class Inspection(StrEnum):
    """The callers that may inspect a peer: reflection, channelz, its status, and the records of discovery."""

    ON = "on"
    """All callers, also without a token."""
    TOKEN = "token"  # noqa: S105 - no password
    """Callers with the run's token; all callers if the run has none."""
    OFF = "off"
    """No caller."""


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """The three files that a peer needs for TLS; `averaging ca` makes them.

    Attributes:
        ca: certificates of the authorities whose peers are trusted.
        cert: this peer's certificate, valid for the host at which other peers reach it.
        key: the certificate's private key.
    """

    ca: FilePath
    cert: FilePath
    key: FilePath


class PeerOptions(TypedDict, total=False):
    """The keyword arguments of `Peer`, `BlockingPeer` and `DecentralizedAverager`. `PeerConfig` explains them.

    An option with a fixed set of values may be given by name, such as `mode="client"`.
    """

    join: Sequence[str]
    listen: str
    advertise: str | None
    group_size: int
    mode: Mode | str
    tls: TLSFiles | None
    tls_ca: FilePath | None
    tls_cert: FilePath | None
    tls_key: FilePath | None
    token_file: FilePath | None
    compression: CompressionType | str
    min_group_size: int
    group_bits: str
    group_wait: float
    join_timeout: float
    round_timeout: float
    stall_timeout: float
    min_stall_timeout: float
    aggregation: str
    reply_form: ReplyForm | str
    non_finite: NonFinite | str
    part_size_bytes: int
    bandwidth: float | None
    direct_listen: str | None
    direct_advertise: int | None
    share_state: bool
    verify_donors: int
    on_drift: OnDrift | str
    insecure: bool
    inspection: Inspection | str
    receipts: FilePath | None
    in_place: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """The options of a peer. The basic ones come first; the others have defaults that suit most runs.

    An option with a fixed set of values may be given by name, in upper or lower case.

    Attributes:
        run_id: Peers with the same run id average together. It has no dots and at most 128 bytes of UTF-8.
        join: `host:port` of some peers of the run. An empty list starts a run of its own. Give several if you can: a
            newcomer that joins through a single peer may lose contact if that peer dies in the next moments.
        listen: `host:port` to listen on; port 0 takes a free one. Not used in client mode.
        advertise: `host:port` at which other peers reach this one, if it differs from `listen`. Port 0 means the port
            of `listen`.
        group_size: A group starts as soon as it has this many members.
        mode: `node`, `client` (accepts no connections) or `auxiliary` (reduces, contributes no tensors).
        tls: The files for TLS as one object; `tls_ca`, `tls_cert` and `tls_key` are the same files one by one.
        tls_ca: File with the certificates of the authorities whose peers are trusted, see `averaging ca`.
        tls_cert: File with this peer's certificate, valid for the host at which other peers reach it.
        tls_key: File with the certificate's private key. With these three files all connections use TLS.
        token_file: File with the run's tokens, one per line: the first is sent, all are accepted. It is read once.
        compression: How tensors are encoded on the wire. The strategies have an option of the same name, which wins.

        min_group_size: Smallest group that this peer takes part in. The leader starts with this many members when
            `group_wait` is over. Set it to the same value at all peers.
        group_bits: First group key, zeros and ones; an empty key puts all peers of the run under one key. To mix many
            peers by small groups, use log2(group_size) bits for each round after the first and spread them evenly. Of
            64 peers in groups of 4 the n-th has `f"{n % 16:04b}"`, and all have the mean after 3 rounds.
        group_wait: Seconds that a peer waits for a full group before it starts with the members that are there.

        join_timeout: Seconds within which one of the peers in `join` must answer.
        round_timeout: Seconds to find a group, and as many again for the all-reduce. The time that the bytes take at
            10 Mbit/s is added.
        stall_timeout: Upper bound in seconds of the learned timeout after which a member without progress is dropped
            from a round. One part in each direction for every other member must pass the link within it. See
            docs/operate/reliability.md.
        min_stall_timeout: Lower bound of the learned timeout in seconds. `stall_timeout` wins if it is smaller.

        aggregation: How contributions become one: `mean`, or `median`, `trimmed:F` or `clip:TAU`, which bound what a
            minority of false contributions can do (docs/operate/robust.md). The same at all peers.
        reply_form: Whether reducers answer with the average, or with the difference to what was sent (`delta`). The
            same at all peers.
        non_finite: What happens to NaN and infinity in contributions and in a downloaded state. Set it to the same
            value at all peers, since a peer that refuses them drops the peers that send them.
        part_size_bytes: Size of a part on the wire. The same at all peers.
        bandwidth: Bandwidth of this peer's link in bytes/s, so that its shard has a size to match. Set it on every peer
            or on none: an unset peer counts as the median of the others.
        direct_listen: `host:port` for direct connections, over which parts travel beside gRPC. `auto` takes any free
            port on the host of `listen`; with None or `off` all parts travel over gRPC.
        direct_advertise: Port at which other peers reach `direct_listen` on the host of this peer's endpoint, if it
            differs.

        share_state: Whether newcomers may download this peer's state. Clients never share it.
        verify_donors: A state is downloaded only if this many donors offer the same version with the same digests of
            the averaged tensors. Donors with one certificate, or without certificates on one host, count as one. 1
            trusts a single donor.
        on_drift: What a training peer does when its parameters or hyperparameters differ from those of most members of
            its group although they should not: `warn`, `adopt` theirs, or `raise`. See docs/operate/reliability.md.

        insecure: Whether other machines may connect although there is no TLS.
        inspection: The callers that may inspect this peer.
        receipts: File to which the receipt of every round is appended, one line of JSON each. See
            docs/operate/receipts.md.

    Raises:
        ConfigError: A value is invalid. The message names the option and the reason.
    """

    run_id: str
    join: Sequence[str] = ()
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    group_size: int = 8
    mode: Mode = Mode.NODE
    tls: TLSFiles | None = None
    tls_ca: FilePath | None = None
    tls_cert: FilePath | None = None
    tls_key: FilePath | None = None
    token_file: FilePath | None = None
    compression: CompressionType = CompressionType.NONE

    min_group_size: int = 2
    group_bits: str = ""
    group_wait: float = 5.0

    join_timeout: float = 10.0
    round_timeout: float = 60.0
    stall_timeout: float = 30.0
    min_stall_timeout: float = 1.0

    aggregation: str = "mean"
    reply_form: ReplyForm = ReplyForm.AVERAGE
    non_finite: NonFinite = NonFinite.REFUSE
    part_size_bytes: int = DEFAULT_PART_SIZE_BYTES
    bandwidth: float | None = None
    direct_listen: str | None = AUTO
    direct_advertise: int | None = None

    share_state: bool = True
    verify_donors: int = 1
    on_drift: OnDrift = OnDrift.WARN

    insecure: bool = False
    inspection: Inspection = Inspection.TOKEN
    receipts: FilePath | None = None

    in_place: bool = False
    """For benchmarks: averages are written as they arrive. A round that fails leaves the tensors partly averaged."""

    @classmethod
    def from_toml(cls, path: FilePath, *, environ: Mapping[str, str] | None = None, **arguments: Any) -> Self:
        """Reads options from a TOML file, then from the environment, then from `arguments`; later ones win.

        ```toml
        run_id = "gpt"
        join = ["a.example:4222"]
        group_size = 4

        [tls]
        ca = "ca.pem"
        cert = "b.pem"
        key = "b.key"
        ```

        Args:
            path: The file. Relative paths inside it are relative to its directory.
            environ: See `from_environment`.
            arguments: Options by name. None and empty tuples count as not given.

        Raises:
            ConfigError: The file cannot be read, or an option is invalid. The message says where it was set.
        """
        return _merged(cls, [*read_toml(path, _PATHS), *_environment(environ), *read_arguments(arguments)])

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None, **arguments: Any) -> Self:
        """Reads options from variables such as `AVERAGING_RUN_ID`, then from `arguments`, which win.

        Lists are separated by commas, truth values are `true` or `false`. An empty variable counts as not set.

        Args:
            environ: `os.environ` if None.
            arguments: Options by name. None and empty tuples count as not given.

        Raises:
            ConfigError: An option is invalid. The message says where it was set.
        """
        return _merged(cls, [*_environment(environ), *read_arguments(arguments)])

    def __post_init__(self) -> None:
        self._check_types()
        self._read_names()
        self._read_tls()
        if not self.run_id or "." in self.run_id or not self.run_id.isprintable():
            raise ConfigError(f"run_id {self.run_id!r} must be printable, not empty, and without a dot", "run_id")
        if (size := len(self.run_id.encode())) > MAX_RUN_ID_BYTES:
            raise ConfigError(
                f"run_id {self.run_id[:20]!r}… has {size} bytes of UTF-8; it may have {MAX_RUN_ID_BYTES}", "run_id"
            )
        _port("listen", self.listen)
        if self.advertise is not None:
            _port("advertise", self.advertise)
        for seed in self.join:
            if _port("join", seed) == 0:
                raise ConfigError(f"join: {seed!r} has port 0; give the port on which that peer listens", "join")
        for name in _SECONDS:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a finite number of seconds above 0, not {value!r}", name)
        if self.group_wait > MAX_GROUP_WAIT:
            raise ConfigError(
                f"group_wait must be at most {MAX_GROUP_WAIT:g} s, not {self.group_wait:g}; "
                "a peer declares itself again until round_timeout",
                "group_wait",
                "round_timeout",
            )
        if self.min_group_size < 2:
            raise ConfigError(f"min_group_size must be at least 2, not {self.min_group_size}", "min_group_size")
        if self.group_size < self.min_group_size:
            raise ConfigError(
                f"group_size {self.group_size} is below min_group_size {self.min_group_size}",
                "group_size",
                "min_group_size",
            )
        if set(self.group_bits) - {"0", "1"}:
            raise ConfigError(f"group_bits must be zeros and ones, not {self.group_bits!r}", "group_bits")
        if len(self.group_bits) > MAX_GROUP_BITS:
            raise ConfigError(f"group_bits may have {MAX_GROUP_BITS} digits, not {len(self.group_bits)}", "group_bits")
        if self.bandwidth is not None and not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ConfigError(f"bandwidth must be finite and above 0 bytes/s, not {self.bandwidth!r}", "bandwidth")
        try:
            parse_aggregation(self.aggregation)
        except ConfigError as error:
            raise ConfigError(f"aggregation: {error}", "aggregation") from None
        if not 1 <= self.verify_donors <= 16:
            raise ConfigError(f"verify_donors must be from 1 to 16, not {self.verify_donors}", "verify_donors")
        if self.direct_listen == "off":
            object.__setattr__(self, "direct_listen", None)
        if self.direct_listen not in (None, AUTO):
            _port("direct_listen", str(self.direct_listen))
        if self.direct_advertise is not None and not 0 < self.direct_advertise < 1 << 16:
            raise ConfigError(
                f"direct_advertise must be a port from 1 to 65535, not {self.direct_advertise}", "direct_advertise"
            )
        if not 1024 <= self.part_size_bytes <= 1 << 28:
            raise ConfigError(
                f"part_size_bytes must be from 1 KiB to 256 MiB, not {self.part_size_bytes}", "part_size_bytes"
            )

    def _check_types(self) -> None:
        """Checks types, since a file or a variable gives text: `insecure="no"` must not switch it on."""
        for name, (kinds, expected) in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, kinds):
                raise ConfigError(f"{name} must be {expected}, not {value!r:.200}", name)
        if isinstance(self.join, str):
            raise ConfigError(f"join must be a list of addresses, not the text {self.join!r}", "join")
        if not all(isinstance(seed, str) for seed in self.join):
            raise ConfigError(
                f"join must be a list of addresses, each a text HOST:PORT, not {self.join!r:.200}", "join"
            )

    def _read_tls(self) -> None:
        """Makes `tls` and the three files say the same."""
        files = (self.tls_ca, self.tls_cert, self.tls_key)
        if self.tls is None:
            check_tls_files(*files)
        elif any(file not in (None, given) for file, given in zip(files, _files_of(self.tls), strict=True)):
            raise ConfigError(
                "tls was given together with another tls_ca, tls_cert or tls_key; give one or the other",
                "tls",
                *_TLS_NAMES,
            )
        if self.tls is not None:
            for name, file in zip(_TLS_NAMES, _files_of(self.tls), strict=True):
                object.__setattr__(self, name, file)
        elif self.tls_ca is not None and self.tls_cert is not None and self.tls_key is not None:
            object.__setattr__(self, "tls", TLSFiles(self.tls_ca, self.tls_cert, self.tls_key))

    def _read_names(self) -> None:
        """Replaces names by enum members: `"refuse"` equals `NonFinite.REFUSE`, but it is another object."""
        try:
            compression = parse_compression(self.compression)
        except ConfigError as error:
            raise ConfigError(f"compression: {error}", "compression") from None
        read = {
            "mode": one_of(Mode, self.mode, "mode"),
            "compression": compression,
            "reply_form": one_of(ReplyForm, self.reply_form, "reply_form"),
            "non_finite": one_of(NonFinite, self.non_finite, "non_finite"),
            "on_drift": one_of(OnDrift, self.on_drift, "on_drift"),
            "inspection": one_of(Inspection, self.inspection, "inspection"),
        }
        for name, value in read.items():
            object.__setattr__(self, name, value)

    @property
    def is_closed(self) -> bool:
        """Whether only peers with a certificate or a token take part in the run."""
        return self.tls_cert is not None or self.token_file is not None


_TLS_NAMES = ("tls_ca", "tls_cert", "tls_key")
_PATHS = (*_TLS_NAMES, "token_file", "receipts")
_SECONDS = ("group_wait", "join_timeout", "round_timeout", "stall_timeout", "min_stall_timeout")
_COUNTS = ("group_size", "min_group_size", "part_size_bytes", "verify_donors")
_SWITCHES = ("share_state", "insecure", "in_place")

_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("run_id", "listen", "group_bits", "aggregation"), ((str,), "a text")),
    **dict.fromkeys(("advertise", "direct_listen"), ((str, type(None)), "a text or None")),
    "direct_advertise": ((Integral, type(None)), "a port or None"),
    "join": ((Collection,), "a list of addresses"),
    **dict.fromkeys(_SECONDS, ((Real,), "a finite number of seconds above 0")),
    "bandwidth": ((Real, type(None)), "a number of bytes/s or None"),
    **dict.fromkeys(_COUNTS, ((Integral,), "a whole number")),
    **dict.fromkeys(_SWITCHES, ((bool,), "True or False")),
    "tls": ((TLSFiles, type(None)), "TLSFiles(ca, cert, key) or None"),
    **dict.fromkeys(_PATHS, ((str, os.PathLike, type(None)), "a path or None")),
}

_FORMER_NAMES = {
    "initial_peers": "join",
    "host_maddrs": "listen",
    "announce_maddrs": "advertise",
    "prefix": "run_id",
    "target_group_size": "group_size",
    "client_mode": "mode",
    "auxiliary": "mode",
    "matchmaking_time": "group_wait",
    "timeout": "round_timeout",
    "averaging_timeout": "round_timeout",
    "part_timeout": "stall_timeout",
    "reply": "reply_form",
}
"""The names of these options in hivemind and in earlier versions."""


def option_names() -> frozenset[str]:
    """All options of a peer except the run id, which is a named argument of all commands and classes."""
    return frozenset(field.name for field in fields(PeerConfig)) - {"run_id"}


def configure(config: PeerConfig | None, run_id: str | None, options: Mapping[str, Any]) -> PeerConfig:
    """The options of a peer that was given a config, single options, or both; single options win.

    Raises:
        ConfigError: An option is invalid, or there is neither a config nor a run id.
        TypeError: An option is unknown.
    """
    for name in options:
        if name not in option_names():
            raise TypeError(unknown_option(name, "in the arguments", option_names(), _FORMER_NAMES))
    if config is None:
        if run_id is None:
            raise ConfigError("run_id is missing; give run_id, or a config")
        return PeerConfig(run_id=run_id, **options)
    if not isinstance(config, PeerConfig):
        raise ConfigError(f"config must be a PeerConfig, not {config!r:.200}")
    return replace(config, **{**options, **({} if run_id is None else {"run_id": run_id})})


def check_tls_files(ca: FilePath | None, cert: FilePath | None, key: FilePath | None) -> None:
    """Checks that all files that TLS needs are given, or none of them.

    Raises:
        ConfigError: Some are given and some are not.
    """
    missing = [name for name, file in zip(_TLS_NAMES, (ca, cert, key), strict=True) if file is None]
    if 0 < len(missing) < 3:
        raise ConfigError(
            f"TLS needs tls_ca, tls_cert and tls_key together; give {' and '.join(missing)} as well", *_TLS_NAMES
        )


def _merged(kind: type[C], settings: Iterable[Setting]) -> C:
    given = merge(settings, option_names() | {"run_id"}, _FORMER_NAMES)
    if "run_id" not in given:
        raise ConfigError("run_id is missing; set it in the file, as AVERAGING_RUN_ID, or as an argument")
    try:
        return kind(**{name: setting.value for name, setting in given.items()})
    except ConfigError as error:
        raise with_sources(error, given) from None


def _environment(environ: Mapping[str, str] | None) -> list[Setting]:
    return read_environment(os.environ if environ is None else environ, _from_text)


def _from_text(name: str, text: str) -> Any:
    """The value of a variable. Text that does not fit is returned as it is, and `PeerConfig` refuses it."""
    if name == "join":
        return [address.strip() for address in text.split(",") if address.strip()]
    if name in _SWITCHES:
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower(), text)
    if name in _COUNTS or name in _SECONDS or name in ("bandwidth", "direct_advertise"):
        try:
            return int(text) if name in _COUNTS or name == "direct_advertise" else float(text)
        except ValueError:
            return text
    return text


def _files_of(tls: TLSFiles) -> tuple[FilePath, FilePath, FilePath]:
    return tls.ca, tls.cert, tls.key


def _port(name: str, address: str) -> int:
    try:
        return parse_address(address)[1]
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}", name) from None

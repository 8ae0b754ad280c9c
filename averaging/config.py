"""The options of a peer: declared once, with their meaning and range, and where they are read from.

The command line, the environment, TOML files and docs/reference/options.md follow from the declarations. To add an
option, add a field to `PeerConfig`; one that may differ between ranks stands in `training.site.OF_ONE_RANK` as well.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

from averaging.common import (
    ADDRESS,
    ADDRESSES_TO_DIAL,
    GOSSIP,
    PATH,
    SECONDS,
    SWITCH,
    Option,
    Setting,
    check_options,
    choice,
    is_loopback,
    merge,
    number,
    option,
    options_of,
    parse_address,
    parse_discovery,
    read_arguments,
    read_environment,
    read_toml,
    required,
    spelled,
    spelled_as_set,
    text,
    texts,
    unknown_option,
    whole,
)
from averaging.errors import ConfigError
from averaging.protocol import TENSOR_COMPRESSION, CompressionType, Mode, ReplyForm, parse_aggregation

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


DEPARTURE_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""The signals on which a peer can leave its run."""


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


# The kinds of values that only a peer has.


def _check_run_id(run_id: str) -> None:
    if not run_id or "." in run_id or not run_id.isprintable():
        raise ConfigError(f"{run_id!r} must be printable, not empty, and without a dot")
    if (size := len(run_id.encode())) > MAX_RUN_ID_BYTES:
        raise ConfigError(f"{run_id[:20]!r}… has {size} bytes of UTF-8; it may have {MAX_RUN_ID_BYTES} bytes")


def _check_group_bits(bits: str) -> None:
    if set(bits) - {"0", "1"}:
        raise ConfigError(f"{bits!r} must be zeros and ones")
    if len(bits) > MAX_GROUP_BITS:
        raise ConfigError(f"it may have {MAX_GROUP_BITS} digits, not {len(bits)}")


def _check_signals(names: Collection[str]) -> tuple[str, ...]:
    for name in names:
        if name not in DEPARTURE_SIGNALS:
            raise ConfigError(f"{name[:40]!r} is not one of {', '.join(DEPARTURE_SIGNALS)}")
    return tuple(dict.fromkeys(names))


def _check_direct_listen(listen: str) -> None:
    if listen not in (AUTO, "off"):
        parse_address(listen)


RUN_ID = text("ID", _check_run_id)
_GROUP_SIZE = whole(2)
_SIGNALS = texts("SIGNAL,…", "a list of names of signals", _check_signals)

BASIC = "Basic options"
_basic = partial(option, section=BASIC)
_groups = partial(option, section="Advanced: groups")
_timeouts = partial(option, section="Advanced: timeouts")
_averages = partial(option, section="Advanced: averages")
_direct = partial(option, section="Advanced: direct connections")
_state = partial(option, section="Advanced: state")
_access = partial(option, section="Advanced: access and records")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """The options of a peer. The basic ones come first; the others have defaults that suit most runs.

    An option with a fixed set of values may be given by name, in upper or lower case. docs/reference/options.md lists
    the options.

    Raises:
        ConfigError: A value is invalid. The message names the option and the reason.
    """

    run_id: str = field(
        metadata=required(
            RUN_ID,
            "Peers with the same run id average together. It has no dots and at most 128 bytes of UTF-8.",
            section=BASIC,
        )
    )
    join: Sequence[str] = _basic(
        (),
        ADDRESSES_TO_DIAL,
        "Some peers of the run. Without any this peer starts a run of its own. Give several if you can: a newcomer "
        "that joins through a single peer may lose contact if that peer dies in the next moments. Instead of HOST:PORT "
        "also a source in which peers are looked up, again while this peer is alone: dns:NAME:PORT (all addresses of a "
        "name), file:PATH (a line each), slurm:PORT (the nodes of the job) or etcd://HOST:PORT,…/KEY. See "
        "docs/how-to/seeds.md.",
    )
    listen: str = _basic(
        "127.0.0.1:0",
        ADDRESS,
        "Address to listen on; port 0 takes a free one. Only this machine can reach the default. Not used in client "
        "mode.",
    )
    advertise: str | None = _basic(
        None,
        ADDRESS,
        "Address at which other peers reach this one, if it differs from {listen}. Port 0 means the port of {listen}.",
    )
    discovery: str = _basic(
        GOSSIP,
        text("gossip|etcd://HOST:PORT,…", parse_discovery),
        "How peers find each other: `gossip` between them, or `etcd://HOST:PORT,…`, a cluster of etcd 3 that all peers "
        "reach, for more than about 1,000 peers. The same at all peers. With etcd there is no {join}. See "
        "docs/how-to/many-peers.md.",
        shared=True,
        alike=True,
    )
    group_size: int = _basic(8, _GROUP_SIZE, "A group starts as soon as it has this many members.", shared=True)
    mode: Mode = _basic(
        Mode.NODE,
        choice(Mode),
        "A client accepts no connections, for a peer behind a firewall. An auxiliary reduces for other peers and "
        "contributes nothing; its tensors give the shapes only.",
    )
    tls_ca: FilePath | None = _basic(
        None,
        PATH,
        "Certificates of the authorities whose peers are trusted, see `averaging ca`. With all three TLS files all "
        "connections use TLS.",
        shared=True,
    )
    tls_cert: FilePath | None = _basic(
        None,
        PATH,
        "This peer's certificate, from `averaging ca issue`, valid for the host at which other peers reach it.",
        shared=True,
    )
    tls_key: FilePath | None = _basic(None, PATH, "Private key of the certificate.", shared=True)
    token_file: FilePath | None = _basic(
        None,
        PATH,
        "The run's tokens, one per line: the first is sent, all are accepted. Read once, at the start.",
        shared=True,
    )
    compression: CompressionType = _basic(
        CompressionType.NONE,
        TENSOR_COMPRESSION,
        "How tensors are encoded on the wire; the same at all peers. The strategies have an option of the same "
        "name, which wins.",
        shared=True,
        alike=True,
    )

    min_group_size: int = _groups(
        2,
        _GROUP_SIZE,
        "Smallest group that this peer takes part in. The leader starts with this many members when {group_wait} is "
        "over. The same at all peers.",
        shared=True,
        alike=True,
    )
    group_bits: str = _groups(
        "",
        text("BITS", _check_group_bits),
        "First group key, zeros and ones; an empty key puts all peers of the run under one key. To mix many peers "
        "by small groups, use log2({group_size}) bits for each round after the first and spread them evenly. Of 64 "
        "peers in groups of 4 one sixteenth each has 0000 to 1111, and all have the mean after 3 rounds.",
        shared=True,
    )
    group_wait: float = _groups(
        5.0, SECONDS, "Seconds that a peer waits for a full group before it starts with the members that are there."
    )

    join_timeout: float = _timeouts(10.0, SECONDS, "Seconds within which one of the peers in {join} must answer.")
    round_timeout: float = _timeouts(
        60.0,
        SECONDS,
        "Seconds to find a group, and as many again for the all-reduce. The time that the bytes take at 10 Mbit/s "
        "is added.",
    )
    stall_timeout: float = _timeouts(
        30.0,
        SECONDS,
        "Upper bound in seconds of the learned timeout after which a member without progress is dropped from a "
        "round. One part in each direction for every other member must pass the link within it. See "
        "docs/operate/reliability.md.",
    )
    aggregation: str = _averages(
        "mean",
        text("RULE", parse_aggregation),
        "How contributions become one: `mean`, or `median`, `trimmed:F` or `clip:TAU`, which bound what a minority "
        "of false contributions can do (docs/operate/robust.md). The same at all peers.",
        shared=True,
        alike=True,
    )
    reply_form: ReplyForm = _averages(
        ReplyForm.AVERAGE,
        choice(ReplyForm),
        "Whether reducers answer with the average, or with the difference to what was sent; `delta` suits lossy "
        "compression of parameters. The same at all peers.",
        shared=True,
        alike=True,
    )
    non_finite: NonFinite = _averages(
        NonFinite.REFUSE,
        choice(NonFinite),
        "What happens to NaN and infinity in contributions and in a downloaded state. The same at all peers, since "
        "a peer that refuses them drops the peers that send them.",
        shared=True,
        alike=True,
    )
    bandwidth: float | None = _averages(
        None,
        number("bytes/s", above=0, metavar="BYTES/S"),
        "Bandwidth of this peer's link in bytes/s, so that its shard has a size to match: 12.5e6 for 100 Mbit/s. "
        "Set it on every peer or on none: an unset peer counts as the median of the others.",
    )

    direct_listen: str | None = _direct(
        AUTO,
        text("HOST:PORT|auto|off", _check_direct_listen),
        "Address for direct connections, over which parts travel beside gRPC. `auto` takes any free port on the "
        "host of {listen}; with `off` all parts travel over gRPC.",
        optional=True,
    )
    direct_advertise: int | None = _direct(
        None,
        whole(1, 65535, "PORT"),
        "Port at which other peers reach {direct_listen} on the host of this peer's endpoint, if it differs.",
    )

    share_state: bool = _state(
        True, SWITCH, "Whether newcomers may download this peer's state. Clients never share it."
    )
    insecure: bool = _access(
        False,
        SWITCH,
        "Whether other machines may connect although there is no TLS: each of them can change the tensors.",
    )
    receipts: FilePath | None = _access(
        None,
        PATH,
        "File to which the receipt of every round is appended, one line of JSON each; `averaging explain` reads "
        "them. See docs/operate/receipts.md.",
    )
    metrics_listen: str | None = _access(
        None,
        ADDRESS,
        "Address for /metrics (Prometheus), /healthz and /readyz; port 0 takes a free one. Off by default. Everyone "
        "who can connect may read them: HTTP without TLS or authentication. See docs/operate/prometheus.md.",
    )
    leave_on: Sequence[str] = _access(
        ("SIGTERM",),
        _SIGNALS,
        "Signals on which this peer leaves its run in order before the process ends: SIGTERM, SIGINT, SIGHUP, SIGUSR1 "
        "(the warning of Slurm) or SIGUSR2. `averaging peer` leaves on SIGTERM, SIGINT and SIGHUP anyway. See "
        "docs/how-to/end-a-run.md.",
    )

    # What no run has to set; tests do, in a class derived from this one.

    # size of a part on the wire, the same at all peers; smaller ones cost more per byte, larger ones gain nothing
    part_size_bytes: ClassVar[int] = 1 << 20
    min_stall_timeout: ClassVar[float] = 1.0  # lower bound of the learned timeout; a smaller `stall_timeout` wins

    @classmethod
    def from_toml(cls, path: FilePath, *, environ: Mapping[str, str] | None = None, **arguments: Any) -> Self:
        """Reads options from a TOML file, then from the environment, then from `arguments`; later ones win.

        Args:
            path: The file. Relative paths inside it are relative to its directory.
            environ: See `from_environment`.
            arguments: Options by name. None and empty tuples count as not given.

        Raises:
            ConfigError: The file cannot be read, or an option is invalid. The message says where it was set.
        """
        return _merged(cls, [*read_toml(path, OPTIONS), *_environment(environ), *read_arguments(arguments)])

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
        check_options(self)
        tls_files(self.tls_ca, self.tls_cert, self.tls_key)
        if self.direct_listen == "off":
            object.__setattr__(self, "direct_listen", None)
        if self.group_wait > MAX_GROUP_WAIT:
            raise ConfigError(
                f"{spelled('group_wait')} must be at most {MAX_GROUP_WAIT:g} s, not {self.group_wait:g}; "
                f"a peer declares itself again until {spelled('round_timeout')}",
                "group_wait",
            )
        self._check_discovery()
        if self.group_size < self.min_group_size:
            group_size = spelled("group_size", self.group_size)
            raise ConfigError(f"{group_size} is below {spelled('min_group_size', self.min_group_size)}", "group_size")

    @property
    def etcd(self) -> tuple[str, ...]:
        """The members of the etcd cluster in which peers find each other; empty if they gossip."""
        return parse_discovery(self.discovery)

    def _check_discovery(self) -> None:
        if not self.etcd:
            return
        if self.join:
            raise ConfigError(
                f"{spelled('join')} cannot be given with {spelled('discovery', self.discovery)}: the peers of a run "
                "meet either in etcd or by gossip, never in both. Leave one of the two out, alike at all peers",
                "join",
            )
        near = all(is_loopback(parse_address(member)[0]) for member in self.etcd)
        if self.tls_cert is None and not self.insecure and not near:
            raise ConfigError(
                f"{spelled('discovery', self.discovery)} is reached over the network without TLS, where others could "
                f"read and change it; give TLS files of the run that etcd takes, or {spelled('insecure')} if every "
                "machine in the network is trusted",
                "discovery",
            )


OPTIONS: dict[str, Option] = options_of(PeerConfig)
"""The declarations of all options of a peer, in the order of the documentation."""

PeerConfig.__doc__ = f"{PeerConfig.__doc__}\n    Attributes:\n" + "".join(
    f"        {name}: {declared.help_as(str)}\n" for name, declared in OPTIONS.items() if declared.section
)

_TLS_NAMES = ("tls_ca", "tls_cert", "tls_key")

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
    return frozenset(OPTIONS) - {"run_id"}


def configure(config: PeerConfig | None, run_id: str | None, options: Mapping[str, Any]) -> PeerConfig:
    """The options of a peer that was given a config, single options, or both; single options win.

    Raises:
        ConfigError: An option is invalid, or there is neither a config nor a run id.
        TypeError: An option is unknown.
    """
    for name in options:
        if name not in option_names():
            raise TypeError(unknown_option(name, name, option_names(), _FORMER_NAMES))
    if config is None:
        if run_id is None:
            raise ConfigError("run_id is missing; give run_id, or a config", "run_id")
        return PeerConfig(run_id=run_id, **options)
    if not isinstance(config, PeerConfig):
        raise ConfigError(f"config must be a PeerConfig, not {config!r:.200}")
    return replace(config, **{**options, **({} if run_id is None else {"run_id": run_id})})


def tls_files(
    ca: FilePath | None, cert: FilePath | None, key: FilePath | None, tls: TLSFiles | None = None
) -> TLSFiles | None:
    """The files for TLS, which may be given one by one, or as one object; None if none is given.

    Raises:
        ConfigError: Some are given and some are not, or the object names others.
    """
    files = (ca, cert, key)
    if tls is not None:
        if any(file not in (None, known) for file, known in zip(files, (tls.ca, tls.cert, tls.key), strict=True)):
            raise ConfigError(
                f"tls was given together with another {_names_of_files('or')}; give one or the other", "tls"
            )
        return tls
    if ca is None or cert is None or key is None:
        missing = [name for name, file in zip(_TLS_NAMES, files, strict=True) if file is None]
        if len(missing) < 3:
            raise ConfigError(
                f"TLS needs {_names_of_files('and')} together; give {' and '.join(map(spelled, missing))} as well",
                missing[0],
            )
        return None
    return TLSFiles(ca, cert, key)


def _names_of_files(word: str) -> str:
    *first, last = map(spelled, _TLS_NAMES)
    return f"{', '.join(first)} {word} {last}"


def _merged(kind: type[C], settings: Iterable[Setting]) -> C:
    given = merge(settings, OPTIONS, _FORMER_NAMES)
    if "run_id" not in given:
        raise ConfigError(f"{spelled('run_id')} is missing; set it, also in the file, or as AVERAGING_RUN_ID", "run_id")
    with spelled_as_set(given):
        return kind(**{name: setting.value for name, setting in given.items()})


def _environment(environ: Mapping[str, str] | None) -> list[Setting]:
    return read_environment(os.environ if environ is None else environ, OPTIONS)

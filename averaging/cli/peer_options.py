"""The options of `averaging peer`: those of `PeerConfig`, basic ones first, and how they are read.

An option comes from --config FILE.toml, from the environment or from the command line; later ones win.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from averaging.cli.option_types import (
    FILE,
    PathToLookAt,
    address,
    address_or_word,
    address_to_dial,
    aggregation,
    finite,
    group_bits,
    run_id,
)
from averaging.protocol import COMPRESSIONS

if TYPE_CHECKING:
    from averaging.config import PeerConfig

Command = TypeVar("Command", bound=Callable[..., Any])

SHARED = (
    "group_size",
    "compression",
    "min_group_size",
    "group_bits",
    "aggregation",
    "reply_form",
    "non_finite",
    "part_size_bytes",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "token_file",
)
"""Options that the printed command for another peer repeats, since the peers of a run should agree on them."""

SECONDS = finite(above=0)
COUNT = click.IntRange(min=2)

SECTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "Basic options": {
        "run_id": {"type": run_id, "help": "Peers with the same run id average together."},
        "join": {
            "type": address_to_dial,
            "multiple": True,
            "metavar": "HOST:PORT",
            "help": "A peer of the run; may be given several times. Without it this peer starts a run of its own.",
        },
        "listen": {
            "default_text": "127.0.0.1:0, for this machine only",
            "type": address,
            "metavar": "HOST:PORT",
            "help": "Address to listen on; port 0 takes a free one.",
        },
        "advertise": {
            "type": address,
            "metavar": "HOST:PORT",
            "help": "Address at which other peers reach this one, if it differs from --listen; port 0 means its port.",
        },
        "group_size": {
            "default_text": "8",
            "type": COUNT,
            "metavar": "N",
            "help": "A group starts with this many members.",
        },
        "mode": {
            "default_text": "node",
            "type": click.Choice(["node", "client", "auxiliary"], case_sensitive=False),
            "help": "A client accepts no connections, for a peer behind a firewall. An auxiliary reduces for other "
            "peers and contributes nothing; FILE gives the shapes only.",
        },
        "tls_ca": {
            "type": FILE,
            "metavar": "FILE.pem",
            "help": "Certificate of the run's authority, from `averaging ca init`; give all three --tls- options.",
        },
        "tls_cert": {
            "type": FILE,
            "metavar": "FILE.pem",
            "help": "Certificate of this peer, from `averaging ca issue`.",
        },
        "tls_key": {"type": FILE, "metavar": "FILE.key", "help": "Private key of the certificate."},
        "token_file": {
            "type": FILE,
            "metavar": "FILE",
            "help": "The run's tokens, one per line: the first is sent, all are accepted. Read once, at the start.",
        },
        "compression": {
            "default_text": "none",
            "type": click.Choice(list(COMPRESSIONS), case_sensitive=False),
            "help": "How tensors are encoded on the wire; the same at all peers.",
        },
    },
    "Advanced: groups": {
        "min_group_size": {
            "default_text": "2",
            "type": COUNT,
            "metavar": "M",
            "help": "Smallest group this peer takes part in; a leader starts with it when --group-wait is over.",
        },
        "group_bits": {
            "type": group_bits,
            "metavar": "BITS",
            "help": "First group key, zeros and ones, to spread many peers. Of 64 peers in groups of 4 one sixteenth "
            "each has 0000 to 1111, and all have the mean after 3 rounds.",
        },
        "group_wait": {
            "default_text": "5",
            "type": SECONDS,
            "metavar": "SECONDS",
            "help": "How long a leader waits for a full group.",
        },
    },
    "Advanced: timeouts": {
        "join_timeout": {
            "default_text": "10",
            "type": SECONDS,
            "metavar": "SECONDS",
            "help": "For one of --join to answer.",
        },
        "round_timeout": {
            "default_text": "60",
            "type": SECONDS,
            "metavar": "SECONDS",
            "help": "To find a group, and again for the all-reduce. The time of the bytes at 10 Mbit/s is added.",
        },
        "stall_timeout": {
            "default_text": "30",
            "type": SECONDS,
            "metavar": "SECONDS",
            "help": "Upper bound of the learned timeout after which a member without progress is dropped.",
        },
        "min_stall_timeout": {
            "default_text": "1",
            "type": SECONDS,
            "metavar": "SECONDS",
            "help": "Lower bound of the same timeout.",
        },
    },
    "Advanced: averages": {
        "aggregation": {
            "default_text": "mean",
            "type": aggregation,
            "metavar": "RULE",
            "help": "mean, median, trimmed:F or clip:TAU; the same at all peers.",
        },
        "reply_form": {
            "default_text": "average",
            "type": click.Choice(["average", "delta"]),
            "help": "What reducers send back; delta suits lossy compression of parameters. The same at all peers.",
        },
        "non_finite": {
            "default_text": "refuse",
            "type": click.Choice(["refuse", "allow"]),
            "help": "Whether NaN and infinity are refused, or averaged and spread; the same at all peers.",
        },
        "part_size_bytes": {
            "default_text": "1048576",
            "type": click.IntRange(1024, 1 << 28),
            "metavar": "BYTES",
            "help": "Size of a part on the wire; the same at all peers.",
        },
        "bandwidth": {
            "type": finite(above=0),
            "metavar": "BYTES/S",
            "help": "Bandwidth of this peer's link, so that its shard has a size to match: 12.5e6 for 100 Mbit/s. "
            "Set it on every peer or on none.",
        },
    },
    "Advanced: direct connections": {
        "direct_listen": {
            "default_text": "auto, any free port on the host of --listen",
            "type": address_or_word,
            "metavar": "HOST:PORT|auto|off",
            "help": "Address for connections over which parts travel beside gRPC; off sends all over gRPC.",
        },
        "direct_advertise": {
            "type": click.IntRange(1, 65535),
            "metavar": "PORT",
            "help": "Port at which other peers reach --direct-listen, if it differs.",
        },
    },
    "Advanced: state": {
        "share_state": {
            "default_text": "--share-state",
            "is_flag": True,
            "help": "Whether newcomers may download the tensors from this peer.",
        },
        "verify_donors": {
            "default_text": "1",
            "type": click.IntRange(1, 16),
            "metavar": "N",
            "help": "A state is downloaded only if this many donors offer the same.",
        },
    },
    "Advanced: access and records": {
        "insecure": {
            "default_text": "--no-insecure",
            "is_flag": True,
            "help": "Let other machines connect without TLS: each of them can change the tensors.",
        },
        "inspection": {
            "default_text": "token",
            "type": click.Choice(["on", "token", "off"]),
            "help": "Callers that may inspect this peer (status, reflection, channelz, records): all, those with "
            "a token, or none.",
        },
        "receipts": {
            "type": PathToLookAt(dir_okay=False),
            "metavar": "FILE.jsonl",
            "help": "Append a receipt of every round, one line of JSON each; `averaging explain` reads them.",
        },
    },
}


class PeerCommand(click.Command):
    """A command whose --help shows the basic options first, then its own, then the advanced ones."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes one section of --help after the other."""
        sections = {title: list(options) for title, options in SECTIONS.items()}
        peers = {name for options in sections.values() for name in options}
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        own = [str(option.name) for option in options if option.name not in peers]
        basic, *advanced = sections.items()
        records = {str(option.name): option.get_help_record(ctx) for option in options}
        for title, names in (basic, ("This command", own), *advanced):
            with formatter.section(title):
                formatter.write_dl([record for name in names if (record := records[name])])


def peer_options(command: Command) -> Command:
    """Adds --config and all options of `PeerConfig`, which are None if the command line does not give them."""
    for decorate in reversed(list(_options())):
        command = decorate(command)
    return command


def _options() -> Iterator[Callable[[Command], Command]]:
    yield click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="AVERAGING_CONFIG",
        metavar="FILE.toml",
        help="File with options, such as `group_size = 4`. Variables such as AVERAGING_GROUP_SIZE win over it, and the "
        "command line wins over both.",
    )
    for options in SECTIONS.values():
        for name, settings in options.items():
            option = f"--{name.replace('_', '-')}"
            switch = f"{option}/--no-{name.replace('_', '-')}" if settings.get("is_flag") else option
            default = settings.get("default_text")
            text = f"{settings['help']}  [default: {default}]" if default else settings["help"]
            shown = {"default": None, "show_default": False, "help": text}
            yield click.option(switch, name, **{k: v for k, v in settings.items() if k != "default_text"} | shown)


def read_config(file: Path, output: Path | None, given: dict[str, Any]) -> PeerConfig:
    """The options from the file, the environment and the command line, checked together.

    Raises:
        click.UsageError: They contradict each other.
        ConfigError: An option is invalid.
    """
    from averaging.config import PeerConfig
    from averaging.protocol import Mode

    arguments = {name: given[name] for options in SECTIONS.values() for name in options}
    if given["config"] is None:
        config = PeerConfig.from_environment(**arguments)
    else:
        config = PeerConfig.from_toml(given["config"], **arguments)
    if config.mode is Mode.CLIENT:
        for option in ("listen", "advertise"):
            if given[option]:
                raise click.UsageError(f"--mode client accepts no connections; leave --{option} out.")
        if not config.join:
            raise click.UsageError("--mode client needs --join: no peer could ever reach this one otherwise.")
    if config.mode is Mode.AUXILIARY and output:
        raise click.UsageError("--mode auxiliary gets no result, so there is nothing to write; leave --output out.")
    if given["overwrite"] and not output:
        raise click.UsageError("--overwrite is for --output; add --output FILE.")
    if config.receipts is not None:
        _check_receipts(Path(config.receipts))
    if output and not given["overwrite"] and output.exists() and file.exists() and output.samefile(file):
        raise click.UsageError("--output is FILE itself; give --overwrite to replace it, or another name.")
    return config


def _check_receipts(path: Path) -> None:
    """Refuses a name that cannot be meant. Whether the file can be written shows later, and stops no round.

    Raises:
        click.UsageError: There is no such directory, or the file contains something else.
    """
    if path.is_dir():  # click accepts an empty name, which is the current directory
        raise click.UsageError(f"--receipts: {path} is a directory; give the name of a file.")
    if not path.parent.is_dir():
        raise click.UsageError(f"--receipts: there is no directory {path.parent}; make it first.")
    try:
        if not path.is_file():
            return
        with path.open("rb") as file:
            beginning = file.read(1)
    except OSError:
        return
    if beginning not in (b"", b"{"):
        raise click.UsageError(f"--receipts: {path} holds something other than receipts; give another name.")


def join_command(file: Path, config: PeerConfig) -> list[str]:
    """The command that starts another peer of the run, up to the value of `--join`."""
    from averaging.config import PeerConfig

    defaults = PeerConfig(run_id=config.run_id)
    command = ["averaging", "peer", str(file), "--run-id", config.run_id]
    for name in SHARED:
        value = getattr(config, name)
        if value != getattr(defaults, name):
            text = value.name if name == "compression" else value
            command += [f"--{name.replace('_', '-')}", str(text).lower() if name == "compression" else str(text)]
    return command

"""The arguments of `averaging peer`: which contradict each other, what they tell this peer and those who join it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from averaging.cli.security_options import SECURITY_OPTIONS

if TYPE_CHECKING:
    from averaging.config import PeerOptions

SHARED_OPTIONS = frozenset(
    {
        "group_size",
        "min_group_size",
        "group_bits",
        "compression",
        "reply",
        "aggregation",
        "part_size",
        "allow_non_finite",
    }
)
"""What peers of a run must or should have in common."""


def check(file: Path, output: Path | None, given: dict[str, Any]) -> None:
    """Refuses options that contradict each other.

    Raises:
        click.UsageError: they do.
    """
    if given["client_mode"] and given["auxiliary"]:
        raise click.UsageError("--client-mode reduces nothing and --auxiliary does nothing else; give one of them.")
    if given["client_mode"]:
        for option in ("listen", "advertise"):
            if given[option]:
                raise click.UsageError(f"--client-mode accepts no connection; leave --{option} out.")
        if not given["join"]:
            raise click.UsageError("--client-mode needs --join: nobody could ever reach this peer otherwise.")
    if given["auxiliary"] and output:
        raise click.UsageError("--auxiliary takes no result, so there is nothing to write; leave --output out.")
    if given["overwrite"] and not output:
        raise click.UsageError("--overwrite is about --output, and nothing is to be written; add --output FILE.")
    if given["min_group_size"] > given["group_size"]:
        raise click.UsageError(
            f"--min-group-size {given['min_group_size']} is above --group-size {given['group_size']}: "
            "no group could begin."
        )
    if given["receipts"] is not None:
        _check_receipts(given["receipts"])
    if output and not given["overwrite"] and output.exists() and file.exists() and output.samefile(file):
        raise click.UsageError("--output is FILE itself; give --overwrite to replace it, or another name.")


def _check_receipts(path: Path) -> None:
    """Refuses what cannot be meant; whether the file can be written shows later, and stops nobody.

    Raises:
        click.UsageError: there is no such directory, or the file is of another kind.
    """
    if path.is_dir():  # click lets an empty name pass, which is the directory that the command runs in
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


def peer_options(given: dict[str, Any]) -> PeerOptions:
    """What the peer of this command is told."""
    options: PeerOptions = {
        "advertise": given["advertise"],
        "join": given["join"],
        "join_timeout": given["join_timeout"],
        "mode": "client" if given["client_mode"] else "auxiliary" if given["auxiliary"] else "node",
        "group_size": given["group_size"],
        "min_group_size": given["min_group_size"],
        "group_bits": given["group_bits"],
        "matchmaking_time": given["matchmaking_time"],
        "timeout": given["timeout"],
        "part_timeout": given["part_timeout"],
        "min_part_timeout": given["min_part_timeout"],
        "bandwidth": given["bandwidth"],
        "compression": given["compression"],
        "reply": given["reply"],
        "aggregation": given["aggregation"],
        "part_size_bytes": given["part_size"],
        "non_finite": "allow" if given["allow_non_finite"] else "refuse",
        "share_state": not given["no_share_state"],
        "in_place": given["in_place"],
        "receipts": given["receipts"],
        "tls_ca": given["tls_ca"],
        "tls_cert": given["tls_cert"],
        "tls_key": given["tls_key"],
        "token_file": given["token_file"],
        "insecure": given["insecure"],
        "inspection": given["inspection"],
    }
    if given["listen"]:
        options["listen"] = given["listen"]
    return options


def join_command(command: click.Command, file: Path, given: dict[str, Any]) -> list[str]:
    """What to type elsewhere, up to `--join`: all members must agree on some options, so those are repeated."""
    words = ["averaging", "peer", str(file), "--run-id", given["run_id"]]
    for parameter in command.params:
        name = str(parameter.name)
        shared = name in SHARED_OPTIONS and given[name] not in (parameter.default, False)
        if shared or (name in SECURITY_OPTIONS and given[name] is not None):
            words.append(parameter.opts[0])
            if given[name] is not True:  # a flag has no value
                words.append(str(given[name]))
    return words

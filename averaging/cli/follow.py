"""`averaging follow`: keeps a file at the newest published version of a model's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from averaging.cli.exits import CHECK_ADDRESS, CommandError, Stop, Stopped, failure_of, run, stopped
from averaging.cli.options import (
    DIALLED,
    DURATION,
    PathToLookAt,
    credentials_of,
    flag,
    insecure_option,
    output_options,
    security_options,
)

if TYPE_CHECKING:
    from pathlib import Path

    from averaging.cli.output import CommandOutput


@click.command("follow")
@click.argument("addresses", type=DIALLED, nargs=-1, required=True, metavar="HOST:PORT...")
@click.option("--output", type=PathToLookAt(), required=True, metavar="FILE.safetensors", help="The file to keep.")
@click.option("--overwrite", is_flag=True, help="Replace --output if it exists and this command did not write it.")
@click.option(
    "--exec",
    "command",
    metavar="COMMAND",
    help="Run this shell command after each version. It finds the version in AVERAGING_VERSION and the file in "
    "AVERAGING_FILE. With --json its output goes to stderr.",
)
@click.option(
    "--exec-timeout",
    default=300.0,
    type=DURATION,
    metavar="SECONDS",
    help="End the command of --exec, and its children, after this time. The next one gets the newest version.",
)
@flag("run_id", help="Follow only the weights of this run.")
@click.option("--once", is_flag=True, help="Write one version and end.")
@click.option("--min-version", default=0, type=click.IntRange(min=0), metavar="N", help="Write no version below this.")
@click.option(
    "--wait",
    type=DURATION,
    metavar="SECONDS",
    help="With --once: fail if there is no version in this time. By default, it waits without limit.",
)
@click.option(
    "--timeout",
    default=10.0,
    type=DURATION,
    metavar="SECONDS",
    help="Give up at the start if no publisher answers in this time, and later leave a source that is silent so long.",
)
@click.option(
    "--max-bytes",
    default=16 << 30,
    type=click.IntRange(min=1),
    metavar="BYTES",
    help="Refuse larger weights, because two to three copies are kept in memory.",
)
@click.option(
    "--hand-on/--no-hand-on", default=True, help="Whether to hand on versions to other followers. See --listen."
)
@flag(
    "listen",
    default="127.0.0.1:0",
    help="Address at which it hands on versions; port 0 takes a free one. On loopback, only followers of this machine "
    "can use it, and only if HOST:PORT is on loopback too.",
)
@flag("advertise")
@security_options
@insecure_option
@output_options
def follow_command(addresses: tuple[str, ...], output: Path, *, as_json: bool, verbose: int, **given: Any) -> None:
    r"""Keeps --output at the newest version of the weights that the peer at HOST:PORT publishes.

    The peer must publish weights: its averager has services=[WeightPublisher(model)]. If ranks of fully_shard publish
    their parts, give the address of rank 0; the file has the whole tensors. With several addresses, the next one is
    followed if one is lost. Each version is verified, and replaces the file in one step, so that a reader finds
    the old version or the new one. If the disk is full, the old file stays.

    Only what changed since the last version is received, also if this command is started again. Versions that come
    faster than they are written are left out, never the newest. While the command of --exec runs, the file stays as it
    is; Ctrl+C ends the command and its children too. The version never goes back. The file's metadata has
    the version ("averaging.version") and the digest of the weights ("averaging.digest").

    \b
    Have a server load each version:
      averaging follow a.example:4222 --output now.safetensors --exec 'curl -fsS -X POST localhost:8000/reload'

    \b
    Download one version, at least the 500th:
      averaging follow a.example:4222 --output now.safetensors --once --min-version 500 --wait 600

    Exit codes: 0 done, or stopped by Ctrl+C or SIGTERM; 1 no publisher answered, or --once found no version in time or
    could not write it; 2 wrong usage. With --once, 130 and 143 if a signal stops it.

    \b
    Events of --json, each with "event":
      ready       publishers, endpoint
      written     version, digest, bytes, received, output
      unwritten   version, output, message
      executed    version, exit_code, seconds; after --exec-timeout exit_code is null, and there is a message
      waiting     version, executing, message: a newer version waits for the command
      error       message
    """
    if given["wait"] is not None and not given["once"]:
        raise click.UsageError("--wait needs --once.")
    from averaging.cli.output import CommandOutput

    report = CommandOutput(as_json=as_json)
    with report.logging(verbose), report.failures():
        _run(list(dict.fromkeys(addresses)), output, given, report)


def _run(addresses: list[str], path: Path, given: dict[str, Any], report: CommandOutput) -> None:
    from averaging.cli.follow_session import FollowSession, open_output
    from averaging.errors import AveragingError, PeerUnreachableError
    from averaging.weights import FollowerOptions

    try:
        options = FollowerOptions(
            join=addresses,
            run_id=given["run_id"] or "",
            credentials=credentials_of(given),
            listen=given["listen"] if given["hand_on"] else None,
            advertise=given["advertise"],
            join_timeout=given["timeout"],
            stall_timeout=given["timeout"],
            max_bytes=given["max_bytes"],
            min_version=given["min_version"],
        )
        session = FollowSession(options, open_output(path, overwrite=given["overwrite"]), given, report)

        async def follow(_: Stop) -> None:
            await session.run()

        run(follow)
    except Stopped as signal:
        if given["once"]:
            raise stopped(signal.number, "; nothing was written") from None
    except AveragingError as error:
        failure = failure_of(error)
        unreached = isinstance(error, PeerUnreachableError) and error.unconnected
        remedy = f"; {CHECK_ADDRESS}" if unreached else ""
        raise CommandError(failure.message + remedy, failure.exit_code) from None

"""`averaging peer`: a process that averages the tensors of a file with the other peers of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from averaging.cli.error_reporting import WRONG_USAGE, CommandError, Stopped, failure_of, stopped
from averaging.cli.options import (
    NOT_NEGATIVE,
    PathToLookAt,
    PeerCommand,
    join_command,
    json_value,
    output_options,
    peer_options,
    read_config,
)

if TYPE_CHECKING:
    from pathlib import Path

    from averaging.cli.console import CommandOutput
    from averaging.cli.peer_session import CommandSession
    from averaging.cli.tensor_files import Document, Output
    from averaging.config import PeerConfig
    from averaging.discovery.gossip import Waiting


@click.command("peer", cls=PeerCommand)
@click.argument("file", type=PathToLookAt(), metavar="FILE.safetensors")
@peer_options
@click.option(
    "--rounds", type=click.IntRange(min=1), metavar="K", help="Rounds to do.  [default: 1, or no limit with --serve]"
)
@click.option(
    "--serve", is_flag=True, help="Continue after the rounds: average and share the state until Ctrl+C or SIGTERM."
)
@click.option(
    "--output",
    type=PathToLookAt(),
    metavar="OUT.safetensors",
    help="File for the average, written after all rounds; with --serve after each of them.",
)
@click.option("--overwrite", is_flag=True, help="Let --output replace a file that exists, FILE included.")
@click.option(
    "--only",
    multiple=True,
    metavar="PATTERN",
    help="Average only tensors with such names, for example '*.lora_*', and keep the others as they are; may be given "
    "several times.",
)
@click.option(
    "--exclude", multiple=True, metavar="PATTERN", help="Keep tensors with such names as they are; may be repeated."
)
@click.option("--weight", default=1.0, type=NOT_NEGATIVE, metavar="W", help="Weight of FILE in the average.")
@click.option("--gather", type=json_value, metavar="JSON", help="A value that is sent to the members of each round.")
@click.option(
    "--retries", default=2, type=click.IntRange(min=0), metavar="N", help="Retries after failed rounds in a row."
)
@click.option("--interval", default=0.0, type=NOT_NEGATIVE, metavar="SECONDS", help="Pause after each round.")
@output_options
def peer_command(
    file: Path,
    output: Path | None,
    *,
    as_json: bool,
    verbose: int,
    **given: Any,
) -> None:
    r"""Averages the tensors of FILE.safetensors with the other peers of a run.

    Every peer brings a file with the same tensors. They are sorted by name, because the format keeps no order; names,
    dtypes and shapes must be the same everywhere, apart from the prefixes of wrappers (module., _orig_mod.). After the
    rounds every member holds the weighted mean, which is written with the names, dtypes and metadata of the own file.
    Tensors of integers, such as counters, stay as they are, and those that --only or --exclude leaves out.

    \b
    Two peers; the first prints the exact command that joins it:
      averaging peer a.safetensors --run-id demo --listen 127.0.0.1:4222 --output a-mean.safetensors
      averaging peer b.safetensors --run-id demo --join 127.0.0.1:4222 --output b-mean.safetensors

    \b
    Reachable from other machines, behind a router that forwards port 4222; `averaging ca` makes the certificates:
      averaging peer a.safetensors --run-id demo --listen 0.0.0.0:4222 --advertise example.org:4222 --serve \
        --tls-ca ca.pem --tls-cert a.pem --tls-key a.key

    \b
    Behind a firewall, with twice the weight, for a program that reads events:
      averaging peer b.safetensors --run-id demo --join example.org:4222 --mode client --weight 2 --json \
        --tls-ca ca.pem --tls-cert b.pem --tls-key b.key

    \b
    With a receipt of every round, to find out later which peer was slow or lost, and why:
      averaging peer b.safetensors --run-id demo --join example.org:4222 --rounds 9 --receipts b.jsonl
      averaging explain b.jsonl

    A round needs a group of peers that look for one at the same time. A peer that finds none within --round-timeout
    exits with code 1 and says which peers were there and what they answered. A round that fails is tried again
    --retries times. With --serve the peer continues after such failures.

    Ctrl+C or SIGTERM lets a round in progress end, a second one does not. With --serve the exit code is 0 then; without
    it 130 or 143, and nothing is written, unless all rounds were done.

    \b
    Exit codes: 0 done; 1 a round failed, no peer of --join answered, or the port is taken;
    2 wrong usage, unreadable input, or all of --join have another run, token or certificate authority;
    130, 143 stopped by a signal before the rounds were done.

    \b
    Events of --json, each with "event":
      joining  seconds, timeout, waiting_for (why each of --join has not answered): after 1 s, then less and less often
      ready    endpoint, join (for --join of other peers; null for a client), run_id, mode, schema_hash, tensors, bytes,
               kept (names of the tensors that are not averaged)
      round    round (from 1), group_id, members, dropped, dropped_reasons, gathered (both by endpoint), seconds,
               allreduce_seconds, bytes_sent, bytes_received, kept_local (elements), state_version
      retry    round, outcome (no_group or failed), message, members, dropped, dropped_reasons, seconds
      unwritten  round, output, message: for example a full disk; --serve tries again after the next round
      serving  rounds, output (null if nothing was written): --rounds are done, --serve continues
      done     rounds, output
      error    message
    """
    from averaging.cli.console import CommandOutput
    from averaging.errors import ConfigError

    try:
        config = read_config(file, output, given)
    except ConfigError as error:
        raise failure_of(error) from None
    report = CommandOutput(as_json=as_json)
    with report.logging(verbose), report.failures():
        _run(file, output, config, given, report)


def _run(file: Path, output: Path | None, config: PeerConfig, given: dict[str, Any], report: CommandOutput) -> None:
    """Reads, averages, writes.

    Raises:
        Failure: the round failed.
    """
    from averaging.cli import console as console_text
    from averaging.cli import json_events, signals
    from averaging.cli.tensor_files import Output, check_can_be_averaged, read
    from averaging.common import keep_freed_memory
    from averaging.config import NonFinite
    from averaging.protocol import Mode

    keep_freed_memory()
    destination = Output(output, overwrite=given["overwrite"]) if output else None
    document = read(file).divided(file, given["only"], given["exclude"])
    # An auxiliary contributes no numbers.
    lenient = config.non_finite is NonFinite.ALLOW or config.mode is Mode.AUXILIARY
    check_can_be_averaged(file, document.tensors, allow_non_finite=lenient)
    session = _session(file, document, destination, config, given, report)
    try:
        signals.run(session.run)
    except Stopped as signal:
        if not given["serve"]:
            rounds = f"{session.rounds} of {console_text.counted(given['rounds'] or 1, 'round')}"
            written = f"wrote {session.output}" if session.output else "nothing was written"
            raise stopped(signal.number, f" after {rounds}; {written}") from None
    if session.unwritten:
        raise CommandError(session.unwritten)
    why_not = "no --output was given" if destination is None else "no round was done"
    report.emit(
        json_events.done(session.rounds, session.output), console_text.finished(session.rounds, session.output, why_not)
    )


def _patterns(option: str, given: dict[str, Any]) -> list[str]:
    """What another peer of the run must give as well."""
    return [word for pattern in given[option.removeprefix("--")] for word in (option, pattern)]


def _session(
    file: Path,
    document: Document,
    destination: Output | None,
    config: PeerConfig,
    given: dict[str, Any],
    report: CommandOutput,
) -> CommandSession:
    from averaging.cli import console as console_text
    from averaging.cli import json_events
    from averaging.cli.peer_session import CommandSession, RoundPlan
    from averaging.elastic import RegisterService
    from averaging.errors import AveragingError
    from averaging.peer import Peer
    from averaging.protocol import Mode, pack_gather

    plan = RoundPlan(
        rounds=given["rounds"] or (None if given["serve"] else 1),
        serve=given["serve"],
        retries=given["retries"],
        interval=given["interval"],
        weight=given["weight"],
        gather=given["gather"],
        join_command=[*join_command(file, config), *_patterns("--only", given), *_patterns("--exclude", given)],
    )

    def tell_joining(waiting: Waiting) -> None:
        report.note(json_events.joining(waiting), console_text.joining(waiting))

    try:
        # Elastic torchrun jobs of the run may meet here.
        hosts = given["serve"] and config.mode is not Mode.CLIENT
        services = [RegisterService()] if hosts else []
        peer = Peer(document.tensors, config=config, on_joining=tell_joining, services=services)
        pack_gather(given["weight"], config.bandwidth, config.mode, given["gather"])
    except AveragingError as error:
        raise failure_of(error) from None
    except ValueError as error:
        raise CommandError(f"--gather: {error}", WRONG_USAGE) from None
    return CommandSession(plan, peer, document, destination, report)

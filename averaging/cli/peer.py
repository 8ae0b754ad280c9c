"""`averaging peer`: a process that averages the tensors of a file with whoever is there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from averaging.cli.error_reporting import WRONG_USAGE, CommandError, Stopped, failure_of, starting, stopped
from averaging.cli.option_types import (
    PathToLookAt,
    address,
    address_to_dial,
    aggregation,
    finite,
    group_bits,
    json_value,
    run_id,
)
from averaging.cli.peer_options import check, join_command, peer_options
from averaging.cli.security_options import security_options
from averaging.protocol.messages import COMPRESSIONS

if TYPE_CHECKING:
    from averaging.cli.console import CommandOutput
    from averaging.cli.peer_session import Session
    from averaging.cli.tensor_files import Document, Output
    from averaging.discovery.gossip.bootstrap import Waiting

SECONDS = finite(above=0)


@click.command("peer")
@click.argument("file", type=PathToLookAt(), metavar="FILE.safetensors")
@click.option("--run-id", type=run_id, required=True, help="Peers with the same run average together; no dots.")
@click.option(
    "--join",
    type=address_to_dial,
    multiple=True,
    metavar="HOST:PORT",
    help="A peer of the run, any of them; may be given several times. Without it this peer starts a run of its own.",
)
@click.option(
    "--listen",
    type=address,
    metavar="HOST:PORT",
    help="Where to listen; port 0 takes a free one.  [default: 127.0.0.1:0, for this machine only]",
)
@click.option(
    "--advertise",
    type=address,
    metavar="HOST:PORT",
    help="Where others reach this peer, if that differs from --listen; port 0 means the one listened on.",
)
@click.option(
    "--rounds", type=click.IntRange(min=1), metavar="K", help="Rounds to do.  [default: 1, or without end with --serve]"
)
@click.option(
    "--serve",
    is_flag=True,
    help="Go on after the rounds, averaging and handing out the state, until Ctrl+C or SIGTERM.",
)
@click.option(
    "--output",
    type=PathToLookAt(),
    metavar="OUT.safetensors",
    help="Where to write the average once all rounds are done; with --serve after each of them.",
)
@click.option("--overwrite", is_flag=True, help="Let --output replace a file that exists, FILE included.")
@click.option(
    "--group-size", default=8, type=click.IntRange(min=2), metavar="N", help="A group begins with so many members."
)
@click.option(
    "--min-group-size",
    default=2,
    type=click.IntRange(min=2),
    metavar="M",
    help="It begins with so many when --group-wait is over.",
)
@click.option(
    "--group-bits",
    default="",
    show_default="none",
    type=group_bits,
    metavar="BITS",
    help="First group key, zeros and ones, to spread many peers: of 64 in groups of 4 one sixteenth each has 0000 to "
    "1111, and all have the mean after 3 rounds.",
)
@click.option(
    "--group-wait", default=5.0, type=SECONDS, metavar="SECONDS", help="How long a leader waits for a full group."
)
@click.option(
    "--round-timeout",
    default=60.0,
    type=SECONDS,
    metavar="SECONDS",
    help="For finding a group, and again for averaging, besides what that takes at 10 Mbit/s.",
)
@click.option(
    "--stall-timeout",
    default=30.0,
    type=SECONDS,
    metavar="SECONDS",
    help="Without progress a member of the round is given up, at the latest; sooner once more is known of it.",
)
@click.option(
    "--min-stall-timeout",
    default=1.0,
    type=SECONDS,
    metavar="SECONDS",
    help="But not before that.",
)
@click.option("--join-timeout", default=10.0, type=SECONDS, metavar="SECONDS", help="For one of --join to answer.")
@click.option(
    "--retries", default=2, type=click.IntRange(min=0), metavar="N", help="Failed rounds in a row to try again."
)
@click.option("--interval", default=0.0, type=finite(at_least=0), metavar="SECONDS", help="Pause after each round.")
@click.option("--weight", default=1.0, type=finite(at_least=0), metavar="W", help="Of this file in the average.")
@click.option(
    "--client-mode", is_flag=True, help="Listen nowhere (behind a firewall, say): contribute, reduce nothing."
)
@click.option("--auxiliary", is_flag=True, help="Reduce for others, contribute nothing; FILE tells the shapes only.")
@click.option(
    "--bandwidth",
    type=finite(above=0),
    metavar="BYTES/S",
    help="Of this peer's link, so that it gets a share to match: 12.5e6 for 100 Mbit/s. To be told at every peer: one "
    "that is unknown counts as the median of the others.  [default: unknown]",
)
@click.option(
    "--compression",
    default="none",
    type=click.Choice(list(COMPRESSIONS), case_sensitive=False),
    help="On the wire; the same at all peers.",
)
@click.option(
    "--reply-form",
    default="average",
    type=click.Choice(["average", "delta"]),
    help="What reducers answer; delta suits lossy compression of parameters. The same at all peers.",
)
@click.option(
    "--aggregation",
    default="mean",
    type=aggregation,
    metavar="RULE",
    help="How contributions become one: mean, median, trimmed:F or clip:TAU. The same at all peers.",
)
@click.option(
    "--part-size",
    default=1 << 20,
    type=click.IntRange(1024, 1 << 28),
    metavar="BYTES",
    help="Size of a part on the wire; the same at all peers.",
)
@click.option("--gather", type=json_value, metavar="JSON", help="Anything to tell the members of each round.")
@click.option(
    "--allow-non-finite",
    is_flag=True,
    help="Average NaN and infinity too; they spread to all members. The same at all peers: one without it drops who "
    "sends them.",
)
@security_options
@click.option(
    "--insecure",
    is_flag=True,
    help="Let other machines connect without TLS: whoever can reach this peer, or a line between, reads and writes.",
)
@click.option(
    "--inspection",
    default="token",
    type=click.Choice(["on", "token", "off"]),
    help="Who may look into this peer (status, reflection, channelz, records): everybody, token holders, nobody.",
)
@click.option("--no-share-state", is_flag=True, help="Do not let others download the tensors.")
@click.option(
    "--in-place",
    is_flag=True,
    help="Write averages as they arrive: less memory and time. As a rule with --no-share-state, else the last state is "
    "kept whole for newcomers until the round is over.",
)
@click.option(
    "--receipts",
    type=PathToLookAt(dir_okay=False),
    metavar="FILE.jsonl",
    help="Append the receipt of every attempt, one line of JSON each; `averaging explain` tells them in words.",
)
@click.option("--json", "as_json", is_flag=True, help="Tell every event as one JSON object a line.")
@click.option(
    "-v", "--verbose", count=True, show_default=False, help="Log to stderr what happens; -vv logs everything."
)
def peer_command(
    file: Path,
    output: Path | None,
    *,
    as_json: bool,
    verbose: int,
    **given: Any,
) -> None:
    r"""Averages the tensors of FILE.safetensors with the other peers of a run.

    Every peer brings a file with the same tensors. They are sorted by name, because the format keeps no order; dtypes
    and shapes must be the same everywhere, names need not. After the rounds every member holds the weighted mean, which
    is written with the names, dtypes and metadata of the own file.

    \b
    Two peers; the first prints the exact command that joins it:
      averaging peer a.safetensors --run-id demo --listen 127.0.0.1:4222 --output a-mean.safetensors
      averaging peer b.safetensors --run-id demo --join 127.0.0.1:4222 --output b-mean.safetensors

    \b
    Reachable from other machines, behind a router that forwards port 4222; `averaging ca` makes the certificates:
      averaging peer a.safetensors --run-id demo --listen 0.0.0.0:4222 --advertise example.org:4222 --serve \
        --tls-ca ca.pem --tls-cert a.pem --tls-key a.key

    \b
    Behind a firewall, for a program that reads events, twice as heavy as others:
      averaging peer b.safetensors --run-id demo --join example.org:4222 --client-mode --weight 2 --json \
        --tls-ca ca.pem --tls-cert b.pem --tls-key b.key

    \b
    With a receipt of every attempt, to see later who was slow or lost, and why:
      averaging peer b.safetensors --run-id demo --join example.org:4222 --rounds 9 --receipts b.jsonl
      averaging explain b.jsonl

    A round needs a group of peers that look for one at the same time. A peer that finds none within --round-timeout
    exits with code 1 and says which peers were there and what they answered. A round that fails is tried again
    --retries times. With --serve the peer goes on after such failures.

    Ctrl+C or SIGTERM lets a round in progress end, a second one does not. With --serve the exit code is 0 then; without
    it 130 or 143, and nothing is written, unless all rounds were done.

    \b
    Exit codes: 0 done; 1 a round could not be done, nobody of --join answered, or the port is taken;
    2 wrong usage, unreadable input, or all of --join have another run, token or certificate authority;
    130, 143 stopped by a signal before the rounds were done.

    \b
    Events of --json, each with "event":
      joining  seconds, timeout, waiting_for (why each of --join has not answered): after 1 s, then more and more seldom
      ready    endpoint, join (what others give to --join; null for a client), run_id, mode, schema_hash, tensors, bytes
      round    round (from 1), group_id, members, dropped, dropped_reasons, gathered (both by endpoint), seconds,
               allreduce_seconds, bytes_sent, bytes_received, kept_local (elements), state_version
      retry    round, outcome (no_group or failed), message, members, dropped, dropped_reasons, seconds
      unwritten  round, output, message: the disk is full, say; --serve goes on and tries again after the next round
      serving  rounds, output (null if nothing was written): --rounds are done, --serve goes on
      done     rounds, output
      error    message
    """
    check(file, output, given)
    with starting():
        from averaging.cli.console import CommandOutput

        report = CommandOutput(as_json=as_json)
        with report.logging(verbose), report.failures():
            _run(file, output, given, report)


def _run(file: Path, output: Path | None, given: dict[str, Any], report: CommandOutput) -> None:
    """Reads, averages, writes.

    Raises:
        Failure: it could not be done.
    """
    from averaging.cli import console_text, json_events, signals
    from averaging.cli.tensor_files import Output, check_can_be_averaged, read
    from averaging.common.malloc import keep_freed_memory

    keep_freed_memory()
    destination = Output(output, overwrite=given["overwrite"]) if output else None
    document = read(file)
    # An auxiliary peer contributes no numbers.
    lenient = given["allow_non_finite"] or given["auxiliary"]
    check_can_be_averaged(file, document.tensors, allow_non_finite=lenient)
    session = _session(file, document, destination, given, report)
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


def _session(
    file: Path, document: Document, destination: Output | None, given: dict[str, Any], report: CommandOutput
) -> Session:
    from averaging.cli import console_text, json_events
    from averaging.cli.peer_session import Plan, Session
    from averaging.errors import AveragingError
    from averaging.peer.peer import Peer
    from averaging.protocol.group import pack_gather

    plan = Plan(
        rounds=given["rounds"] or (None if given["serve"] else 1),
        serve=given["serve"],
        retries=given["retries"],
        interval=given["interval"],
        weight=given["weight"],
        gather=given["gather"],
        join_command=join_command(peer_command, file, given),
    )

    def tell_joining(waiting: Waiting) -> None:
        report.note(json_events.joining(waiting), console_text.joining(waiting))

    try:
        peer = Peer(document.tensors, run_id=given["run_id"], on_joining=tell_joining, **peer_options(given))
        pack_gather(given["weight"], given["bandwidth"], peer.config.mode, given["gather"])
    except AveragingError as error:
        raise failure_of(error) from None
    except ValueError as error:
        raise CommandError(f"--gather: {error}", WRONG_USAGE) from None
    return Session(plan, peer, document, destination, report)

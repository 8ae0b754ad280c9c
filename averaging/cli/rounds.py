"""`averaging watch` and `averaging explain`: the receipts of rounds, as they come from a peer and from files."""

from __future__ import annotations

import sys
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from averaging.cli.options import DIALLED, count, credentials_of, security_options, switch
from averaging.cli.running import InputError, Stopped, run
from averaging.common import counted, duration
from averaging.errors import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from averaging.receipts import Recorded, TrainingProgress, Watched
    from averaging.security import Credentials

MAX_MESSAGE_BYTES = 16 << 20
MAX_BAD_LINES = 5  # of a file that are printed; further ones are counted


@click.command("watch")
@click.argument("address", type=DIALLED, metavar="HOST:PORT")
@count("--last", "Begin with the last N rounds; a peer keeps 64.", 0, least=0)
@count("--rounds", "End after K receipts.  [default: never]", metavar="K")
@switch("--json", "Print receipts as one JSON object per line.", name="as_json")
@security_options
def watch_command(address: str, last: int, rounds: int | None, as_json: bool, **given: Any) -> None:
    r"""Prints the outcome of every round of the peer at HOST:PORT, until the peer leaves or Ctrl+C.

    \b
    Print text, and write a file for `averaging explain`:
      averaging watch 192.0.2.7:4222 --last 10
      averaging watch 192.0.2.7:4222 --json >> receipts.jsonl

    A line of --json is a receipt, see docs/operate/receipts.md, without the data that the applications gathered.
    """
    credentials = credentials_of(given)
    with suppress(Stopped):
        run(lambda _: _watch(address, credentials, last, rounds, as_json))


async def _watch(address: str, credentials: Credentials, last: int, rounds: int | None, as_json: bool) -> None:
    from averaging.transport.grpc import GrpcTransport

    if not as_json:
        click.echo(f"watching {address}: one line per round; Ctrl+C ends this", err=True)
    transport = GrpcTransport(None, max_message_bytes=MAX_MESSAGE_BYTES, credentials=credentials, given=[address])
    await transport.bind()
    seen = 0
    try:
        if not as_json and (terms := _terms((await transport.get_status(address)).training)):
            click.echo(terms, err=True)
        async with aclosing(transport.watch_rounds(address, last)) as receipts:
            async for watched in receipts:
                _print(watched, as_json)
                seen += 1
                if seen == rounds:
                    break
    finally:
        await transport.close()


def _terms(training: TrainingProgress | None) -> str:
    """A line that says when this peer's rounds begin, and whether it is late for one."""
    if training is None or not (training.terms or training.lateness):
        return ""
    grace = "" if training.grace is None else f", grace now {duration(training.grace)}"
    lateness = f"; {training.lateness}, joins a later one" if training.lateness else ""
    return f"{printable(training.strategy)}: {printable(training.terms)}{grace}{lateness}"


def _print(watched: Watched, as_json: bool) -> None:
    from averaging.receipts import Round, describe, dumps

    if watched.skipped:
        click.echo(f"{counted(watched.skipped, 'receipt')} missing before the next one: output is too slow", err=True)
    click.echo(dumps(watched.receipt) if as_json else describe(Round((watched.receipt,))))


@click.command("explain")
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(path_type=Path, allow_dash=True), metavar="RECEIPTS.jsonl..."
)
@switch("--summary", "Print only the summary, not a line for each round.")
def explain_command(files: Sequence[Path], summary: bool) -> None:
    r"""Explains receipts: the outcome of each round, which peers were dropped and why, and which peers were slow.

    Receipts are written by `averaging peer --receipts FILE`, by `Peer(receipts=FILE)` and `DecentralizedAverager`, and
    by `averaging watch --json`; - reads them from stdin. Files of several peers of a run are merged: there is one line
    per round, which also says whether all peers got the same averages.

    \b
    Explain the receipts of one peer, and of three peers together:
      averaging explain a.jsonl
      averaging explain a.jsonl b.jsonl c.jsonl

    docs/operate/receipts.md says what the parts of a line mean. The last line of a file may be incomplete, if its peer
    was killed; it is ignored. Other lines that cannot be read are reported with their numbers on stderr, the rest is
    explained, and the exit code is 2.
    """
    from averaging.receipts import explain

    contents = [(file, read_receipts(file)) for file in files]
    for line in explain([receipt for _, recorded in contents for receipt in recorded.receipts], summary_only=summary):
        click.echo(line)
    bad = sum([_report_bad_lines(file, recorded) for file, recorded in contents])
    if bad:
        what = "1 line that cannot be read is" if bad == 1 else f"{bad} lines that cannot be read are"
        raise InputError(f"{what} missing above")


def read_receipts(path: Path) -> Recorded:
    from averaging.receipts import read

    if str(path) == "-" and sys.stdin is None:
        raise InputError("stdin is closed; pipe receipts into this command, or give a file of them")
    try:
        if str(path) == "-":
            recorded = read(sys.stdin.buffer)
        else:
            with path.open("rb") as file:
                recorded = read(file)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); give a file of receipts") from None
    if recorded.bad and not recorded.receipts:
        number, why = next(iter(recorded.bad.items()))
        text = f"{path} is not a file of receipts: line {number}: {why}. Give one written by --receipts"
        raise InputError(text)
    return recorded


def _report_bad_lines(path: Path, recorded: Recorded) -> int:
    """Prints the lines that cannot be read. Returns their number, without an incomplete last line."""
    for number, why in list(recorded.bad.items())[:MAX_BAD_LINES]:
        click.echo(f"{path}: line {number}: {printable(why)}", err=True)
    if len(recorded.bad) > MAX_BAD_LINES:
        click.echo(f"{path}: and {len(recorded.bad) - MAX_BAD_LINES} more lines", err=True)
    if recorded.cut_off:
        click.echo(f"{path}: the last line is incomplete; its peer was killed, or the disk is full", err=True)
    return len(recorded.bad)

"""`averaging watch`: prints the rounds of a peer as they end."""

from __future__ import annotations

from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import click

from averaging.cli.exits import Stop, run
from averaging.cli.failure import Stopped
from averaging.cli.options import DIALLED, credentials_of, security_options

if TYPE_CHECKING:
    from averaging.receipts import TrainingProgress, Watched
    from averaging.security import Credentials

MAX_MESSAGE_BYTES = 16 << 20


@click.command("watch")
@click.argument("address", type=DIALLED, metavar="HOST:PORT")
@click.option(
    "--last",
    default=0,
    type=click.IntRange(0, 2**32 - 1),
    metavar="N",
    help="Begin with the last N rounds; a peer keeps 64.",
)
@click.option("--rounds", type=click.IntRange(min=1), metavar="K", help="End after K receipts.  [default: never]")
@click.option("--json", "as_json", is_flag=True, help="Print receipts as one JSON object per line.")
@security_options
def watch_command(address: str, last: int, rounds: int | None, as_json: bool, **given: Any) -> None:
    r"""Prints the outcome of every round of the peer at HOST:PORT, until the peer leaves or Ctrl+C.

    \b
    Print text, and write a file for `averaging explain`:
      averaging watch 192.0.2.7:4222 --last 10
      averaging watch 192.0.2.7:4222 --json >> receipts.jsonl

    A line of --json is a receipt, see docs/operate/receipts.md, without the data that the applications gathered.

    Exit codes: 0 the peer has left, --rounds are done, or Ctrl+C; 1 the peer could not be reached, or the connection
    was lost; 2 wrong usage.
    """
    credentials = credentials_of(given)

    async def watch(_: Stop) -> None:
        await _watch(address, credentials, last, rounds, as_json)

    with suppress(Stopped):
        run(watch)


async def _watch(address: str, credentials: Credentials, last: int, rounds: int | None, as_json: bool) -> None:
    from averaging.transport.grpc import GrpcTransport

    if not as_json:
        click.echo(f"watching {address}: one line per round; Ctrl+C ends this", err=True)
    transport = GrpcTransport(None, max_message_bytes=MAX_MESSAGE_BYTES, credentials=credentials, given=[address])
    await transport.bind()
    count = 0
    try:
        if not as_json and (terms := _terms((await transport.get_status(address)).training)):
            click.echo(terms, err=True)
        async with aclosing(transport.watch_rounds(address, last)) as receipts:
            async for watched in receipts:
                _print(watched, as_json)
                count += 1
                if count == rounds:
                    break
    finally:
        await transport.close()


def _terms(training: TrainingProgress | None) -> str:
    """A line that says when this peer's rounds begin, and whether it is late for one."""
    from averaging.common import duration
    from averaging.errors import printable

    if training is None or not (training.terms or training.lateness):
        return ""
    grace = "" if training.grace is None else f", grace now {duration(training.grace)}"
    lateness = f"; {training.lateness}, joins a later one" if training.lateness else ""
    return f"{printable(training.strategy)}: {printable(training.terms)}{grace}{lateness}"


def _print(watched: Watched, as_json: bool) -> None:
    """Prints one receipt. While the output is slow, the peer skips receipts."""
    from averaging.common import counted
    from averaging.receipts import Round, describe, dumps

    if watched.skipped:
        click.echo(f"{counted(watched.skipped, 'receipt')} missing before the next one: output is too slow", err=True)
    click.echo(dumps(watched.receipt) if as_json else describe(Round((watched.receipt,))))

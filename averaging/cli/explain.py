"""`averaging explain`: explains receipts as text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from averaging.cli.failure import WRONG_USAGE, CommandError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from averaging.receipts import Recorded

MAX_BAD_LINES = 5
"""Number of bad lines per file that are printed. Further ones are counted."""


@click.command("explain")
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(path_type=Path, allow_dash=True), metavar="RECEIPTS.jsonl..."
)
@click.option("--summary", is_flag=True, help="Print only the summary, not a line for each round.")
def explain_command(files: Sequence[Path], summary: bool) -> None:
    r"""Explains receipts: the outcome of each round, which peers were dropped and why, and which peers were slow.

    Receipts are written by `averaging peer --receipts FILE`, by `Peer(receipts=FILE)` and `DecentralizedAverager`, and
    by `averaging watch --json`; - reads them from stdin. Files of several peers of a run are merged: there is one line
    per round, which also says whether all peers got the same averages.

    \b
    Explain the receipts of one peer, and of three peers together:
      averaging explain a.jsonl
      averaging explain a.jsonl b.jsonl c.jsonl

    \b
    Of a line
      round 17: 3 of 4 in 4.92 s (all-reduce 4.21 s); 10.0.0.7:5001 dropped, sent nothing for 4.1 s, deadline 4.0 s ...
    the parts mean:
      round 17     the number of the round, from 1; 3/17 if the peers count differently; "of" what, if not the model
      3 of 4       members that were not dropped
      dropped      why, with figures; "by" which members, if not by all with receipts
      arrived      the member for which the group waited before the all-reduce began
      steps late   rounds that a member with a quorum has missed, and what its weight was multiplied by for that
      waited       how long the other members waited for one member alone in the all-reduce
      kept         elements without an average, because their reducer was dropped
      all 3 agree  the members with receipts got the same averages; else DIFFERENT AVERAGES

    The last line of a file may be incomplete, if its peer was killed; it is ignored. Other lines that cannot be read
    are reported with their numbers on stderr, the rest is explained, and the exit code is 2.

    Exit codes: 0 done; 1 stdout cannot be written; 2 wrong usage, or a file or a line that cannot be read.
    """
    from averaging.receipts import explain

    contents = [(file, read_receipts(file)) for file in files]
    for line in explain([receipt for _, recorded in contents for receipt in recorded.receipts], summary_only=summary):
        click.echo(line)
    bad = sum([_report_bad_lines(file, recorded) for file, recorded in contents])
    if bad:
        what = "1 line that cannot be read is" if bad == 1 else f"{bad} lines that cannot be read are"
        raise CommandError(f"{what} missing above", WRONG_USAGE)


def read_receipts(path: Path) -> Recorded:
    """Reads a file.

    Raises:
        CommandError: exit code 2: the file cannot be read or contains no receipts.
    """
    from averaging.receipts import read

    if str(path) == "-" and sys.stdin is None:
        raise CommandError("stdin is closed; pipe receipts into this command, or give a file of them", WRONG_USAGE)
    try:
        if str(path) == "-":
            recorded = read(sys.stdin.buffer)
        else:
            with path.open("rb") as file:
                recorded = read(file)
    except OSError as error:
        raise CommandError(f"{path} cannot be read ({error.strerror}); give a file of receipts", WRONG_USAGE) from None
    if recorded.bad and not recorded.receipts:
        number, why = next(iter(recorded.bad.items()))
        raise CommandError(
            f"{path} is not a file of receipts: line {number}: {why}. Give one written by --receipts",
            WRONG_USAGE,
        )
    return recorded


def _report_bad_lines(path: Path, recorded: Recorded) -> int:
    """Prints the lines that cannot be read. Returns their number, without an incomplete last line."""
    from averaging.errors import printable

    for number, why in list(recorded.bad.items())[:MAX_BAD_LINES]:
        click.echo(f"{path}: line {number}: {printable(why)}", err=True)
    if len(recorded.bad) > MAX_BAD_LINES:
        click.echo(f"{path}: and {len(recorded.bad) - MAX_BAD_LINES} more lines", err=True)
    if recorded.cut_off:
        click.echo(f"{path}: the last line is incomplete; its peer was killed, or the disk is full", err=True)
    return len(recorded.bad)

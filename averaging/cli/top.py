"""`averaging top`: shows a run, as its peers describe it, in a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from averaging.cli.options import SECURITY, credentials_of, security_options, switch
from averaging.cli.running import CommandError, Stop, Stopped, check_address, run

if TYPE_CHECKING:
    from averaging.monitor import Collector


async def collector_of(join: Sequence[str], given: dict[str, Any], *, receipts: int) -> Collector:
    """Returns what collects the run of the peers at `join`, with the credentials of `security_options`."""
    from averaging.monitor import Collector
    from averaging.seeds import look_up

    credentials = credentials_of({name: given[name] for name in SECURITY})
    return Collector(await look_up(join, credentials), credentials, receipts=receipts)


@click.command("top")
@click.argument("addresses", nargs=-1, required=True, metavar="HOST:PORT...")
@switch("--json", "Print one snapshot as a JSON object, and end.", name="as_json")
@switch("--once", "Print one table, and end; so it does too where no terminal is.")
@security_options
def top_command(addresses: tuple[str, ...], *, as_json: bool, once: bool, **given: Any) -> None:
    r"""Shows the run of the peer at HOST:PORT: its peers, steps, rounds, bytes, and who waits for whom.

    Any peer of the run will do; it names the others, and each is asked for its status at most once in 2 seconds. A peer
    that does not answer is shown with the reason. With several addresses, one that answers is enough.

    \b
    Watch a run, until q; and for a mail, a script, a cron job:
      averaging top 192.0.2.7:4222
      averaging top 192.0.2.7:4222 --once
      averaging top 192.0.2.7:4222 --json | jq '.peers[] | {endpoint, error, waits_for}'

    docs/operate/top.md explains the columns and the fields of --json.
    """
    if as_json and once:
        raise click.UsageError("--json and --once each print one snapshot; give one of them.")
    shows = not (as_json or once) and _is_terminal()
    try:
        _top(addresses, given, shows=shows, as_json=as_json)
    except (KeyboardInterrupt, Stopped):  # the first while torch is being imported
        if not shows:
            raise


def _top(addresses: tuple[str, ...], given: dict[str, Any], *, shows: bool, as_json: bool) -> None:
    from averaging.monitor import TopApp, as_text, snapshot_json

    async def ask(_: Stop) -> None:
        async with await collector_of(addresses, given, receipts=16) as collector:
            snapshot = await collector.collect()
            if snapshot.silence:
                raise CommandError(f"{snapshot.silence}; {check_address()}")
            if shows:
                await TopApp(collector).run_async(mouse=False)
            elif as_json:
                click.echo(json.dumps(snapshot_json(snapshot), allow_nan=False))
            else:
                click.echo("\n".join(as_text(snapshot)))

    run(ask)


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"

"""`averaging feed`: a server that forms batches of scored rollouts for a trainer."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from averaging.cli.exits import serve
from averaging.cli.failure import WRONG_USAGE, CommandError
from averaging.cli.options import DURATION, flag, hosts_option, insecure_option, output_options, security_options
from averaging.errors import printable

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from averaging.cli.output import CommandOutput


@click.command("feed")
@flag("listen", default="127.0.0.1:8000", help="Address to listen on; port 0 takes a free one.")
@click.option(
    "--store",
    default="feed.sqlite",
    metavar="FILE",
    help="File with the run, so that a restart loses nothing; ':memory:' keeps nothing.",
)
@click.option("--fsync", is_flag=True, help="Wait for the disk before each answer, to survive a power failure too.")
@security_options
@insecure_option
@hosts_option
@click.option(
    "--queue-bytes",
    default=4 << 30,
    type=click.IntRange(min=1 << 10),
    metavar="BYTES",
    help="Maximum size of the waiting groups; then status 503. The batches that are kept until the trainer saves a "
    "checkpoint may have as much again; the oldest are dropped first.",
)
@click.option(
    "--env-timeout",
    default=300.0,
    type=DURATION,
    metavar="SECONDS",
    help="Time without posts after which an environment that all wait for gives up its part of each batch.",
)
@click.option(
    "--max-staleness",
    type=click.IntRange(min=0),
    metavar="N",
    help="Versions of the weights that a group may be behind the trainer's newest; 0 means only the newest. Older ones "
    "are dropped. Without it, any.",
)
@output_options
def feed_command(store: str, *, as_json: bool, verbose: int, **given: Any) -> None:
    r"""Serves batches of scored rollouts: environments post groups, a trainer fetches batches.

    Existing environments and trainers of the Atropos API work unchanged. FeedEnvironment and BatchFeed of
    averaging.rl.feed lose and repeat nothing when the server or the trainer is restarted. See docs/how-to/feed.md.

    \b
    On this machine:
      averaging feed --listen 127.0.0.1:8000

    \b
    For other machines, with TLS and a token; `averaging ca` creates the certificates:
      averaging feed --listen 0.0.0.0:8000 --token-file token \
        --tls-ca ca/ca.pem --tls-cert ca/feed.pem --tls-key ca/feed.key

    \b
    For a trainer that reports its version of the weights, such as BatchFeed(..., weights=publisher):
      averaging feed --max-staleness 2

    With a token, clients need no certificate. Without one, they must show a certificate of --tls-ca.

    The first Ctrl+C or SIGTERM lets requests in progress finish. Everything acknowledged is in --store; start the same
    command again to continue.

    \b
    Exit codes: 0 stopped by Ctrl+C or SIGTERM; 1 the port is taken, or the server failed;
    2 wrong usage, or --store cannot be used; 130, 143 stopped by a signal during the start.

    \b
    Events of --json, each with "event":
      ready        url, store
      registered   batch_size, starting_step, num_steps
      trainer      registration
      environment  env_id, name
      silent       env_id, name
      returned     env_id, name
      stale        env_id, name, groups, reason (old, foreign, unknown), newest_version
      batch        step, groups, sequences
      reset
      done
      error        message
    """
    from averaging.cli.output import reporting

    with reporting(verbose, as_json=as_json) as report:
        _run(store, given, report)


def _run(store: str, given: dict[str, Any], report: CommandOutput) -> None:
    try:
        from averaging.rl.feed import FeedServer
    except ModuleNotFoundError as error:
        raise CommandError(f"{error.name} is not installed; run: pip install 'averaging[rl]'", WRONG_USAGE) from None

    async def start(stack: AsyncExitStack) -> FeedServer:
        # Clients choose some of the texts in events.
        server = FeedServer(store, on_event=lambda event: report.emit(event.as_json(), printable(str(event))), **given)
        await stack.enter_async_context(server)
        report.emit(
            {"event": "ready", "url": server.url, "store": store},
            f"serving at {server.url}, keeping the run in {shlex.quote(store)}; Ctrl+C ends this",
        )
        return server

    serve(report, start)

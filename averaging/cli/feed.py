"""`averaging feed`: a server that forms batches of scored rollouts for a trainer."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from averaging.cli import options
from averaging.cli.running import CommandOutput, reporting, serve
from averaging.errors import printable

if TYPE_CHECKING:
    from contextlib import AsyncExitStack


@click.command("feed")
@options.flag("listen", default="127.0.0.1:8000", help="Address to listen on; port 0 takes a free one.")
@options.option(
    "--store", "File with the run, kept over a restart; ':memory:' keeps nothing.", "FILE", default="feed.sqlite"
)
@options.switch("--fsync", "Wait for the disk before each answer, to survive a power failure too.")
@options.security_options
@options.insecure_option
@options.hosts_option
@options.count("--queue-bytes", "Limit of waiting groups; then status 503.", 4 << 30, least=1 << 10, metavar="BYTES")
@options.seconds("--env-timeout", "Time without posts after which an environment is not waited for.", 300.0)
@options.count("--max-staleness", "Versions that groups may be behind the trainer's newest.  [default: any]", least=0)
@options.output_options
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

    With a token, clients need no certificate. Without one, they must show a certificate of --tls-ca.

    The first Ctrl+C or SIGTERM lets requests in progress finish. Everything acknowledged is in --store; start the same
    command again to continue.

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
    """
    with reporting(verbose, as_json=as_json) as report:
        _run(store, given, report)


def _run(store: str, given: dict[str, Any], report: CommandOutput) -> None:
    from averaging.rl.feed import FeedServer

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

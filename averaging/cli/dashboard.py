"""`averaging dashboard`: a run as a web page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from averaging.cli.exits import serve
from averaging.cli.failure import WRONG_USAGE, CommandError
from averaging.cli.options import (
    JOINED,
    flag,
    insecure_option,
    output_options,
    security_options,
)
from averaging.cli.top import collector_of

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from averaging.cli.output import CommandOutput

PAGE_OPTIONS = ("hosts", "password_file", "https_cert", "https_key", "insecure")
"""The options of the page that `DashboardServer` takes."""


@click.command("dashboard")
@click.option(
    "--join",
    "given",
    multiple=True,
    required=True,
    type=JOINED,
    metavar="HOST:PORT",
    help="A peer of the run, or a source of addresses such as dns:NAME:PORT; repeatable.",
)
@flag("listen", default="127.0.0.1:8080", help="Address of the page; port 0 takes a free one.")
@security_options
@click.option(
    "--password-file", metavar="FILE", help="Passwords, one per line; the browser asks for one, with any user name."
)
@click.option("--https-cert", metavar="FILE", help="Certificate in PEM with which the page is served.")
@click.option("--https-key", metavar="FILE", help="Key of --https-cert.")
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="DNS name under which browsers reach this page; repeatable.",
)
@insecure_option
@output_options
def dashboard_command(given: tuple[str, ...], listen: str, *, as_json: bool, verbose: int, **more: Any) -> None:
    r"""Serves a page of the run of a peer: peers, rounds, rates, receipts, and who reduces for whom.

    Open the address that is printed. The page only reads, and loads nothing from other hosts. Each peer is asked once
    in 2 s, however many pages are open.

    \b
    On this machine:
      averaging dashboard --join 192.0.2.7:4222

    \b
    A run with TLS and a token:
      averaging dashboard --join peer-1.example.org:4222 --token-file token \
        --tls-ca ca.pem --tls-cert me.pem --tls-key me.key

    \b
    From another machine, through ssh; then open http://127.0.0.1:8080/:
      ssh -L 8080:127.0.0.1:8080 monitor.example.org

    \b
    For other machines without ssh:
      averaging dashboard --join 192.0.2.7:4222 --listen 0.0.0.0:8443 \
        --password-file password --https-cert page.pem --https-key page.key

    On a loopback address every user of this machine can read the page, unless --password-file is given. Other machines
    can read it only with a password and TLS, or with --insecure.

    \b
    Exit codes: 0 stopped by Ctrl+C or SIGTERM; 1 the port is taken, or the server failed;
    2 wrong usage, or a file cannot be used; 130, 143 stopped by a signal during the start.

    \b
    Events of --json, each with "event":
      ready   url, readers
      done
      error   message
    """
    from averaging.cli.output import reporting

    with reporting(verbose, as_json=as_json) as report:
        _run(given, listen, more, report)


def _run(given: tuple[str, ...], listen: str, more: dict[str, Any], report: CommandOutput) -> None:
    try:
        from averaging.dashboard import RECEIPTS, DashboardServer, views_of
    except ModuleNotFoundError as error:
        text = f"{error.name} is not installed; run: pip install 'averaging[dashboard]'"
        raise CommandError(text, WRONG_USAGE) from None

    async def start(stack: AsyncExitStack) -> DashboardServer:
        page = {name: more[name] for name in PAGE_OPTIONS}
        collector = await collector_of(given, more, receipts=RECEIPTS)
        server = DashboardServer(views_of(collector), listen=listen, **page)
        await stack.enter_async_context(collector)
        await stack.enter_async_context(server)
        text = f"serving the page at {server.url} ({server.readers}); Ctrl+C ends this"
        report.emit({"event": "ready", "url": server.url, "readers": server.readers}, text)
        return server

    serve(report, start)

"""`averaging dashboard`: a run as a web page."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from averaging.cli.options import JOINED, flag, hosts_option, insecure_option, option, output_options, security_options
from averaging.cli.running import CommandOutput, check_address, reporting, serve
from averaging.cli.top import collector_of

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

PAGE_OPTIONS = ("hosts", "password_file", "https_cert", "https_key", "insecure")  # those of `DashboardServer`


@click.command("dashboard")
@option(
    "--join",
    "A peer of the run, or a source of addresses such as dns:NAME:PORT; repeatable.",
    "HOST:PORT",
    name="given",
    multiple=True,
    required=True,
    type=JOINED,
)
@flag("listen", default="127.0.0.1:8080", help="Address of the page; port 0 takes a free one.")
@security_options
@option("--password-file", "Passwords, one per line; the browser asks for one, with any user name.", "FILE")
@option("--https-cert", "Certificate in PEM with which the page is served.", "FILE")
@option("--https-key", "Key of --https-cert.", "FILE")
@hosts_option
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
    For other machines:
      averaging dashboard --join 192.0.2.7:4222 --listen 0.0.0.0:8443 \
        --password-file password --https-cert page.pem --https-key page.key

    On a loopback address every user of this machine can read the page, unless --password-file is given. Other machines
    can read it only with a password and TLS, or with --insecure.

    \b
    Events of --json, each with "event":
      ready   url, readers
      silent  reason (no peer has answered yet)
      done
    """
    with reporting(verbose, as_json=as_json) as report:
        _run(given, listen, more, report)


def _run(given: tuple[str, ...], listen: str, more: dict[str, Any], report: CommandOutput) -> None:
    from averaging.dashboard import RECEIPTS, DashboardServer, views_of

    async def start(stack: AsyncExitStack) -> DashboardServer:
        page = {name: more[name] for name in PAGE_OPTIONS}
        collector = await collector_of(given, more, receipts=RECEIPTS)
        server = DashboardServer(views_of(collector), listen=listen, **page)
        await stack.enter_async_context(collector)
        await stack.enter_async_context(server)
        text = f"serving the page at {server.url} ({server.readers}); Ctrl+C ends this"
        report.emit({"event": "ready", "url": server.url, "readers": server.readers}, text)

        async def tell() -> None:
            if silence := (await collector.collect()).silence:
                report.note({"event": "silent", "reason": silence}, f"{silence}; it is asked again; {check_address()}")

        stack.callback(asyncio.create_task(tell()).cancel)
        return server

    serve(report, start)

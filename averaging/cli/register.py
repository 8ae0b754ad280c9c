"""`averaging register`: a process that only serves the register of elastic torchrun jobs."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from averaging.cli.options import credentials_of, flag, insecure_option, output_options, security_options
from averaging.cli.running import CommandOutput, Stopped, reporting, run, with_metrics

if TYPE_CHECKING:
    from averaging.rpc import Credentials


@click.command("register")
@flag("listen", default="127.0.0.1:29400", help="Address to listen on; port 0 takes a free one.")
@flag("advertise")
@flag("metrics_listen")
@security_options
@insecure_option
@output_options
def register_command(listen: str, advertise: str | None, as_json: bool, verbose: int, **given: Any) -> None:
    r"""Serves the register for the rendezvous of elastic torchrun jobs, until Ctrl+C or SIGTERM.

    Without this command, the node with the address in --rdzv-endpoint hosts the register, as does every `averaging peer
    --serve`. One register serves any number of jobs, each with its --rdzv-id. It keeps nothing on disk: when it is back
    at its address, the nodes restore their state. See docs/how-to/sites.md.

    Whoever can write to the register can end a job or take part in it. So other machines may connect only with TLS, or
    with --insecure if all of them are trusted.

    \b
    On one machine, in three terminals:
      averaging register --listen 127.0.0.1:29400
      torchrun --nnodes=1:2 --nproc-per-node=2 --max-restarts=10 --rdzv-backend=averaging \
        --rdzv-endpoint=127.0.0.1:29400 --rdzv-id=job train.py
      (the same command again)

    \b
    Events of --json, each with "event":
      ready    endpoint, with --metrics-listen also metrics (its address)
    """
    with reporting(verbose, as_json=as_json) as report, suppress(Stopped):
        credentials = credentials_of(given)
        run(lambda _: _serve(listen, advertise, credentials, given["metrics_listen"], report))


async def _serve(
    listen: str, advertise: str | None, credentials: Credentials, metrics_listen: str | None, report: CommandOutput
) -> None:
    from averaging.elastic import REGISTER_METRICS, RegisterService
    from averaging.metrics import MetricsListener, Samples, certificate_samples
    from averaging.rpc import RpcServer

    service = RegisterService()
    server = RpcServer(listen, [service], advertise=advertise, credentials=credentials)

    def sample() -> Samples:
        return {**service.samples(), **certificate_samples(credentials)}

    async with MetricsListener(metrics_listen, "the register", REGISTER_METRICS, sample) as metrics, server:
        command = f"--rdzv-backend=averaging --rdzv-endpoint={server.endpoint}"
        ready = {"event": "ready", "endpoint": server.endpoint}, f"the register is at torchrun {command}"
        report.emit(*with_metrics(ready, metrics.endpoint))
        await asyncio.Event().wait()

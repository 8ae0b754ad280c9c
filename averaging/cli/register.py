"""`averaging register`: a process that only serves the register of elastic torchrun jobs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from averaging.cli import events
from averaging.cli.exits import Stop, Stopped, failure_of, run
from averaging.cli.options import credentials_of, flag, insecure_option, output_options, security_options

if TYPE_CHECKING:
    from averaging.cli.output import CommandOutput
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
    --serve`. One register serves any number of jobs.

    \b
    On one machine, in three terminals:
      averaging register --listen 127.0.0.1:29400
      torchrun --nnodes=1:2 --nproc-per-node=2 --max-restarts=10 --rdzv-backend=averaging \
        --rdzv-endpoint=127.0.0.1:29400 --rdzv-id=job train.py
      (the same command again)

    \b
    Between machines; `averaging ca` creates the certificates:
      averaging register --listen 0.0.0.0:29400 --advertise a.example:29400 --token-file tokens \
        --tls-ca ca.pem --tls-cert a.pem --tls-key a.key
      torchrun --nnodes=1:2 --nproc-per-node=2 --max-restarts=10 --rdzv-backend=averaging \
        --rdzv-endpoint=a.example:29400 --rdzv-id=job \
        --rdzv-conf=token_file=tokens,tls_ca=ca.pem,tls_cert=b.pem,tls_key=b.key train.py

    torchrun's --max-restarts is 0 by default: one killed worker then ends the job. The number is a budget of each node
    and never refills; restarts after the loss of another node are not counted. A job without --rdzv-id is refused here,
    since all of them would be one; it can have one node with a register of its own (--rdzv-endpoint=localhost:0).

    Whoever can write to the register can end a job or take part in it. So other machines may connect only with TLS, or
    with --insecure if all of them are trusted. With a token, the nodes also refuse values from outside the run, and
    earlier ones of their own.

    The register keeps nothing on disk. If it dies, training continues and new nodes wait. When it is back at its
    address, the nodes restore their state. It keeps 1024 entries, two for each job, until 3 minutes after their last
    write, and says so when it is full.

    Exit codes: 0 stopped by Ctrl+C or SIGTERM; 1 the port is taken; 2 wrong usage, or unreadable files.

    \b
    Events of --json, each with "event":
      ready    endpoint, with --metrics-listen also metrics (its address)
      error    message
    """
    from averaging.cli.output import CommandOutput
    from averaging.errors import AveragingError

    report = CommandOutput(as_json=as_json)
    with report.logging(verbose), report.failures():
        try:
            credentials = credentials_of(given)
        except AveragingError as error:
            raise failure_of(error) from None

        async def serve(_: Stop) -> None:
            await _serve(listen, advertise, credentials, given["metrics_listen"], report)

        try:
            run(serve)
        except Stopped:
            return


async def _serve(
    listen: str, advertise: str | None, credentials: Credentials, metrics_listen: str | None, report: CommandOutput
) -> None:
    from averaging.elastic import REGISTER_METRICS, RegisterService
    from averaging.errors import AveragingError
    from averaging.metrics import MetricsListener, Samples, certificate_samples
    from averaging.rpc import RpcServer

    service = RegisterService()
    server = RpcServer(listen, [service], advertise=advertise, credentials=credentials)

    def sample() -> Samples:
        return {**service.samples(), **certificate_samples(credentials)}

    try:
        async with MetricsListener(metrics_listen, "the register", REGISTER_METRICS, sample) as metrics, server:
            command = f"--rdzv-backend=averaging --rdzv-endpoint={server.endpoint}"
            ready = {"event": "ready", "endpoint": server.endpoint}, f"the register is at torchrun {command}"
            report.emit(*events.with_metrics(ready, metrics.endpoint))
            await asyncio.Event().wait()
    except AveragingError as error:
        raise failure_of(error) from None

"""`averaging leave`: ends a peer in order, and waits until it has left."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import click

from averaging.cli.exits import Stop, run
from averaging.cli.failure import CommandError, Stopped, check_address
from averaging.cli.options import DIALLED, credentials_of, output_options, seconds, security_options

if TYPE_CHECKING:
    from averaging.cli.output import CommandOutput
    from averaging.control import LeaveStep
    from averaging.rpc import Credentials


@click.command("leave")
@click.argument("address", type=DIALLED, metavar="HOST:PORT")
@seconds("--timeout", "Give up waiting after this time. The peer leaves all the same.", 120.0)
@security_options
@output_options
def leave_command(address: str, timeout: float, as_json: bool, verbose: int, **given: Any) -> None:
    r"""Ends the peer at HOST:PORT in order, and waits until it has left its run.

    The peer begins no further group, ends its round, and lets newcomers that download its state end (for at most 20 s);
    then it withdraws its records, and its process ends as with SIGTERM, also a training process and the torchrun that
    has started it. The other peers lose nothing. See docs/how-to/end-a-run.md.

    It is for the owner of the peer: its user, or root, on its machine; with TLS also the holder of a certificate for
    the host of HOST:PORT. In a run with a token or TLS, the options for them are needed in each case.

    \b
    On the peer's machine, for example before a reboot, and from elsewhere:
      averaging leave 127.0.0.1:4222
      averaging leave a.example.org:4222 --tls-ca ca.pem --tls-cert a.pem --tls-key a.key

    \b
    Events of --json, each with "event":
      leaving  endpoint, run_id, step: round, downloads or closing
      left     endpoint, run_id
      error    message

    Exit codes: 0 it has left; 1 it could not be reached, refused, or has not left after --timeout; 2 wrong usage;
    130, 143 stopped by a signal: a peer that was asked leaves all the same.
    """
    from averaging.cli.output import reporting

    asked: list[LeaveStep] = []

    async def leave(_: Stop) -> None:
        try:
            async with asyncio.timeout(timeout):
                await _leave(address, credentials_of(given), report, asked)
        except TimeoutError:
            raise _not_yet(address, timeout, asked) from None

    with reporting(verbose, as_json=as_json) as report:
        try:
            run(leave)
        except Stopped as stop:
            raise Stopped(stop.number, f"; {address} was asked and leaves all the same" if asked else "") from None


def _not_yet(address: str, timeout: float, asked: list[LeaveStep]) -> CommandError:
    if not asked:
        return CommandError(f"{address} has not answered within {timeout:g} s (--timeout); {check_address()}")
    doing = DOING[asked[-1].name]
    return CommandError(f"{address} has not left after {timeout:g} s (--timeout): {doing}. It leaves when that is over")


DOING = {
    "ROUND": "it ends its round",
    "DOWNLOADS": "newcomers download its state",
    "CLOSING": "it withdraws its records",
}


async def _leave(address: str, credentials: Credentials, report: CommandOutput, asked: list[LeaveStep]) -> None:
    from averaging.control import LEAVE, LEAVE_REQUEST, LeaveStep, step_of
    from averaging.errors import AveragingError, PeerUnreachableError, RefusalCause, printable, refusal_cause
    from averaging.rpc import RpcChannel

    try:
        async with (
            RpcChannel(address, credentials=credentials) as channel,
            aclosing(channel.stream(LEAVE, LEAVE_REQUEST)) as replies,
        ):
            async for reply in replies:
                step = step_of(reply)
                if step not in asked:
                    asked.append(step)
                    _tell(step, printable(reply.endpoint, 256), printable(reply.run_id, 128), report)
                if step is LeaveStep.LEFT:
                    return
    except PeerUnreachableError as error:
        if asked:
            raise _lost(address, asked, str(error)) from None
        raise
    except AveragingError as error:
        if refusal_cause(error) is RefusalCause.NOT_SERVED:
            text = "it does not leave on request: its program, or its release, does not serve that; send it SIGTERM"
            raise CommandError(f"{address}: {text}") from None
        raise
    raise _lost(address, asked, "it ended the call")


def _lost(address: str, asked: list[LeaveStep], why: str) -> CommandError:
    last = f"the last it said was: {DOING[asked[-1].name]}" if asked else "it said nothing"
    return CommandError(f"{address} was lost before it had left ({why}); {last}")


def _tell(step: LeaveStep, endpoint: str, run_id: str, report: CommandOutput) -> None:
    name, run = step.name.lower(), f" run {run_id}" if run_id else ""
    peer = {"endpoint": endpoint, "run_id": run_id}
    if name == "left":
        report.emit({"event": "left", **peer}, f"{endpoint} has left{run}")
    else:
        report.note({"event": "leaving", "step": name, **peer}, f"{endpoint} leaves{run}: {DOING[step.name]}")

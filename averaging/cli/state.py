"""`averaging state`: downloads the state of a peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from averaging.cli.exits import CHECK_ADDRESS, CommandError, Stop, Stopped, failure_of, run, stopped
from averaging.cli.options import (
    JOINED,
    CheckedPath,
    credentials_of,
    output_options,
    security_options,
    state_download_options,
)
from averaging.common import VERSION_KEY, member_of

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from averaging.cli.output import CommandOutput
    from averaging.security import Credentials
    from averaging.seeds import Seeds
    from averaging.state import State, StateAssembler

MAX_MESSAGE_BYTES = 64 << 20
"""Chunks of a state have at most 1 MiB, and its metadata at most 16 MiB."""

USER_KEY, PACKED_USER_KEY = "averaging.user", "averaging.user.msgpack"
"""Keys in the file's metadata: the user dict as JSON, or else as msgpack in base64."""


@click.command("state")
@click.argument("addresses", type=JOINED, nargs=-1, required=True, metavar="HOST:PORT...")
@click.option("--output", type=CheckedPath(), required=True, metavar="FILE.safetensors", help="Where to write it.")
@click.option("--overwrite", is_flag=True, help="Replace --output if it exists.")
@state_download_options
@click.option(
    "--verify-donors",
    default=1,
    type=click.IntRange(1, 16),
    metavar="K",
    help="Number of different hosts among the addresses that must announce the same version and digests.",
)
@security_options
@output_options
def state_command(addresses: tuple[str, ...], output: Path, *, as_json: bool, verbose: int, **given: Any) -> None:
    r"""Downloads the state of the peer at HOST:PORT and writes it to a safetensors file.

    The state is what the peer committed last: its averaged tensors, and what its application adds. Every tensor is
    compared with its digest; an incomplete download writes nothing. The file's metadata has the state's version
    ("averaging.version") and the application's own values ("averaging.user" as JSON, or "averaging.user.msgpack" in
    base64 if JSON cannot represent them).

    An address may also be a source of addresses, as of --join of `averaging peer`: dns:NAME:PORT, file:PATH and others.
    If a peer fails, the next one is asked; tensors already received are kept if it has the same ones.

    \b
    Download the state of a peer, then continue from it:
      averaging state 192.0.2.7:4222 --output now.safetensors
      averaging peer now.safetensors --run-id demo --join 192.0.2.7:4222 --output mean.safetensors

    Exit codes: 0 done; 1 the download failed; 2 wrong usage; 130, 143 stopped by a signal.

    \b
    Events of --json, each with "event":
      started  version, tensors, bytes
      done     version, tensors, bytes, user, output
      error    message
    """
    from averaging.cli.output import CommandOutput

    report = CommandOutput(as_json=as_json)
    with report.logging(verbose), report.failures():
        _run(list(dict.fromkeys(addresses)), output, given, report)


def _check_hosts(addresses: Collection[str], donors: int) -> None:
    if donors > len(set(_hosts(addresses).values())):
        raise click.UsageError(
            f"--verify-donors {donors} needs addresses of as many different hosts; all loopback addresses are one host."
        )


def _hosts(addresses: Collection[str]) -> dict[str, str]:
    """The host of each address, as which a donor counts: one host may have many endpoints."""
    return {address: member_of(address, "") for address in addresses}


def _run(addresses: list[str], path: Path, given: dict[str, Any], report: CommandOutput) -> None:
    from averaging.cli import events
    from averaging.cli.files import Output
    from averaging.errors import AveragingError
    from averaging.seeds import Seeds

    try:
        credentials = credentials_of(given)
    except AveragingError as error:
        raise failure_of(error) from None
    seeds = Seeds(addresses, credentials)
    if not seeds.sources:
        _check_hosts(seeds.addresses, given["verify_donors"])
    output = Output(path, overwrite=given["overwrite"])

    async def fetch(_: Stop) -> State:
        state = await fetch_state(seeds, credentials, given, report)
        output.write(state.tensors, _metadata(state))
        return state

    try:
        state = run(fetch)
    except Stopped as signal:
        raise stopped(signal.number, "; nothing was written") from None
    nbytes = sum(tensor.nbytes for tensor in state.tensors.values())
    report.emit(*events.downloaded(state.version, len(state.tensors), nbytes, state.user, str(path)))


async def fetch_state(seeds: Seeds, credentials: Credentials, given: dict[str, Any], report: CommandOutput) -> State:
    """Looks the addresses up, and downloads the state of one of them.

    Args:
        seeds: the addresses.
        credentials: proofs of this command.
        given: its options `timeout`, `max_bytes` and `verify_donors`.
        report: where events and progress go.

    Raises:
        CommandError: there is no address, or none of the peers delivered a state.
    """
    from averaging.errors import AveragingError

    try:
        await seeds.look_up()
    except AveragingError as error:
        raise failure_of(error) from None
    finally:
        await seeds.close()
    if not seeds.addresses:
        raise CommandError(f"no peer to ask: {seeds.findings}")
    _check_hosts(seeds.addresses, given["verify_donors"])
    return await _download(seeds, credentials, given, report)


async def _download(seeds: Seeds, credentials: Credentials, given: dict[str, Any], report: CommandOutput) -> State:
    from averaging.cli import events
    from averaging.errors import AveragingError, StateError
    from averaging.state import download
    from averaging.transport.grpc import GrpcTransport

    addresses = seeds.addresses
    announced, address = False, addresses[0] if len(addresses) == 1 else f"one of {', '.join(addresses)}"
    with report.transfer(f"downloading the state of {address}") as advance:

        def on_progress(reader: StateAssembler) -> None:
            nonlocal announced
            if not announced:
                announced = True
                report.emit(*events.started(address, reader.version, reader.count, reader.nbytes))
            advance(reader.received, reader.nbytes)

        transport = GrpcTransport(
            None, max_message_bytes=MAX_MESSAGE_BYTES, credentials=credentials, given=seeds.named, names=seeds.names
        )
        await transport.bind()
        try:
            state, _ = await download(
                transport,
                addresses,
                None,
                silence=given["timeout"],
                max_bytes=given["max_bytes"],
                verify_donors=given["verify_donors"],
                members=_hosts(addresses),
                on_progress=on_progress,
            )
        except AveragingError as error:
            failure = failure_of(error)
            unreached = isinstance(error, StateError) and error.unconnected
            remedy = f"; {CHECK_ADDRESS}" if unreached else ""
            raise CommandError(failure.message + remedy, failure.exit_code) from None
        finally:
            await transport.close()
    return state


def _metadata(state: State) -> dict[str, str]:
    """Returns the metadata of the file, with the user dict as JSON unless that would change it."""
    import base64
    import json

    from averaging.common import pack

    user = dict(state.user)
    version = {VERSION_KEY: str(state.version)}
    try:
        text = json.dumps(user, allow_nan=False)
        if json.loads(text) == user:
            return {**version, USER_KEY: text}
    except (TypeError, ValueError, RecursionError):
        pass
    return {**version, PACKED_USER_KEY: base64.b64encode(pack(user)).decode()}

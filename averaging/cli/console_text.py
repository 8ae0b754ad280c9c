"""The texts that commands print. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from averaging.common.addresses import CLIENT_PREFIX, is_loopback, parse_address
from averaging.common.sanitize import counted as counted
from averaging.common.sanitize import duration, listed
from averaging.common.sanitize import size as size
from averaging.discovery.gossip.bootstrap import Waiting
from averaging.errors import printable as printable
from averaging.observe.receipts import Outcome, Receipt
from averaging.protocol.schema import Schema


def round_name(number: int, rounds: int | None) -> str:
    """Returns for example `round 1 of 3`; `number` counts from 1."""
    return f"round {number}" + (f" of {rounds}" if rounds and number <= rounds else "")


def joining(waiting: Waiting) -> str:
    """The peer still waits for an answer from one of --join."""
    return f"joining: {printable(str(waiting))}; --join-timeout limits this"


def ready(endpoint: str, run_id: str, schema: Schema, join_command: Sequence[str], kept: Sequence[str] = ()) -> str:
    """The peer is up; how other peers join it."""
    first = (
        f"{endpoint} is up in run {printable(run_id)}: "
        f"{counted(len(schema.tensors), 'tensor')}, {size(schema.nbytes)}, schema {schema.hash.hex()[:8]}"
    )
    if kept:
        first += f"\nnot averaged, but kept as they are: {listed(kept)}"
    if endpoint.startswith(CLIENT_PREFIX):
        return f"{first}\nother peers cannot join through it: it is a client"
    if is_loopback(parse_address(endpoint)[0]):
        where = "in another terminal of this machine (for other machines, --listen on an address that they can reach)"
    else:
        where = "with --listen on an address that other peers can reach, or with --mode client"
    return f"{first}\njoin it {where}:\n  {shlex.join(join_command)}"


def looking(name: str, known: int) -> str:
    """The peer looks for a group; `known` is the number of other peers in discovery."""
    return f"{name}: looking for a group, {known} other {'peer' if known == 1 else 'peers'} seen"


def averaged(name: str, endpoint: str, receipt: Receipt, gathered: Mapping[str, object]) -> str:
    """A round averaged."""
    others = listed([printable(member) for member in receipt.members if member != endpoint])
    lines = [
        f"{name}: averaged with {others} in {duration(receipt.seconds)} "
        f"(all-reduce {duration(receipt.allreduce_seconds)}, {size(receipt.bytes_sent)} sent, "
        f"{size(receipt.bytes_received)} received)"
    ]
    lines += [f"  {printable(who)} sent {printable(str(data))}" for who, data in gathered.items() if data is not None]
    lines += [f"  lost {printable(dropped.endpoint)}: {printable(dropped.reason)}" for dropped in receipt.dropped]
    if receipt.kept_local:
        lines.append(f"  {counted(receipt.kept_local, 'element')} kept the local value, because their reducer was lost")
    return "\n".join(lines)


def not_averaged(name: str, receipt: Receipt) -> str:
    """A round did not average."""
    reason = printable(receipt.reason)
    if receipt.outcome is Outcome.NO_GROUP:
        return f"{name}: no group within {receipt.seconds:.1f} s: {reason}"
    return f"{name}: failed after {receipt.seconds:.1f} s: {reason}"


def finished(rounds: int, output: str | None, why_not: str) -> str:
    """The last line of the output."""
    return f"done: {counted(rounds, 'round')}, " + (f"wrote {output}" if output else f"nothing written: {why_not}")

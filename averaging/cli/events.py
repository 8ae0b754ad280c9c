"""What commands print: each function returns an event for --json, and the same as text for people. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from averaging.common import CLIENT_PREFIX, counted, duration, is_loopback, listed, parse_address, plain, size
from averaging.errors import printable
from averaging.receipts import Outcome, Receipt

if TYPE_CHECKING:
    from averaging.discovery.gossip import Waiting
    from averaging.seeds import FoundSeeds
    from averaging.tensors import Schema

Item: TypeAlias = tuple[Mapping[str, Any], str]
"""An event, which becomes one JSON object, and its text."""


def joining(waiting: Waiting) -> Item:
    """The peer still waits for an answer from one of --join."""
    event = {
        "event": "joining",
        "seconds": round(waiting.seconds, 3),
        "timeout": waiting.timeout,
        "waiting_for": dict(waiting.reasons),
    }
    return event, f"joining: {printable(str(waiting))}; --join-timeout limits this"


def found_seeds(found: FoundSeeds) -> Item:
    """A source in --join has answered, or failed, otherwise than before."""
    event = {
        "event": "seeds",
        "source": found.source,
        "addresses": list(found.addresses),
        "own": list(found.own),
        "failure": found.failure or None,
    }
    return event, printable(str(found), 1000)


def ready(
    endpoint: str,
    run_id: str,
    mode: str,
    schema: Schema,
    join_command: Sequence[str],
    kept: Sequence[str] = (),
    *,
    in_etcd: bool = False,
) -> Item:
    """The peer serves and is part of its run; how other peers join it, or the run if that meets in etcd."""
    is_client = endpoint.startswith(CLIENT_PREFIX)
    event = {
        "event": "ready",
        "endpoint": endpoint,
        "join": None if is_client or in_etcd else endpoint,
        "run_id": run_id,
        "mode": mode,
        "schema_hash": schema.hash.hex(),
        "tensors": len(schema.tensors),
        "bytes": schema.nbytes,
        "kept": list(kept),
    }
    text = (
        f"{endpoint} is up in run {printable(run_id)}: "
        f"{counted(len(schema.tensors), 'tensor')}, {size(schema.nbytes)}, schema {schema.hash.hex()[:8]}"
    )
    if kept:
        text += f"\nnot averaged, but kept as they are: {listed(kept)}"
    if is_client and not in_etcd:
        return event, f"{text}\nother peers cannot join through it: it is a client"
    if not is_client and is_loopback(parse_address(endpoint)[0]):
        where = "in another terminal of this machine (for other machines, --listen on an address that they can reach)"
    else:
        where = "with --listen on an address that other peers can reach, or with --mode client"
    return event, f"{text}\njoin {'its run' if in_etcd else 'it'} {where}:\n  {shlex.join(join_command)}"


def with_metrics(item: Item, endpoint: str) -> Item:
    event, text = item
    return ({**event, "metrics": endpoint}, f"{text}\nmetrics: http://{endpoint}/metrics") if endpoint else item


def averaged(name: str, number: int, endpoint: str, receipt: Receipt) -> Item:
    """Round `number`, counted from 1, averaged; `endpoint` is that of this peer."""
    gathered = {member: plain(value) for member, value in receipt.gathered.items()}
    event = {
        "event": "round",
        "round": number,
        "group_id": receipt.group_id.hex(),
        **_members(receipt),
        "gathered": gathered,
        "seconds": round(receipt.seconds, 6),
        "allreduce_seconds": round(receipt.allreduce_seconds, 6),
        "bytes_sent": receipt.bytes_sent,
        "bytes_received": receipt.bytes_received,
        "part_bytes_sent": receipt.part_bytes_sent,
        "part_bytes_received": receipt.part_bytes_received,
        "kept_local": receipt.kept_local,
        "clamped": receipt.clamped,
        "state_version": receipt.state_version,
    }
    others = listed([printable(member) for member in receipt.members if member != endpoint])
    lines = [
        f"{name}: averaged with {others} in {duration(receipt.seconds)} "
        f"(all-reduce {duration(receipt.allreduce_seconds)}, {size(receipt.bytes_sent)} sent, "
        f"{size(receipt.bytes_received)} received)"
    ]
    lines += [
        f"  {printable(member)} sent {printable(str(data))}" for member, data in gathered.items() if data is not None
    ]
    lines += [f"  lost {printable(dropped.endpoint)}: {printable(dropped.reason)}" for dropped in receipt.dropped]
    if receipt.kept_local:
        lines.append(f"  {counted(receipt.kept_local, 'element')} kept the local value, because their reducer was lost")
    if receipt.clamped:
        lines.append(f"  {receipt.clamped_text}")
    return event, "\n".join(lines)


def retry(name: str, number: int, receipt: Receipt) -> Item:
    event = {
        "event": "retry",
        "round": number,
        "outcome": receipt.outcome.value,
        "message": receipt.reason,
        **_members(receipt),
        "seconds": round(receipt.seconds, 6),
    }
    return event, not_averaged(name, receipt)


def unwritten(number: int, output: str, message: str) -> Item:
    event = {"event": "unwritten", "round": number, "output": output, "message": message}
    return event, f"{message}; averaging continues, and the file is tried again after the next round"


def serving(rounds: int, output: str | None) -> Item:
    event = {"event": "serving", "rounds": rounds, "output": output}
    return event, f"{counted(rounds, 'round')} done, continuing until Ctrl+C"


def done(rounds: int, output: str | None, why_not: str) -> Item:
    text = f"wrote {output}" if output else f"nothing written: {why_not}"
    return {"event": "done", "rounds": rounds, "output": output}, f"done: {counted(rounds, 'round')}, {text}"


def started(source: str, version: int, tensors: int, nbytes: int) -> Item:
    event = {"event": "started", "version": version, "tensors": tensors, "bytes": nbytes}
    return event, f"{source} has version {version}: {counted(tensors, 'tensor')}, {size(nbytes)}"


def downloaded(version: int, tensors: int, nbytes: int, user: Mapping[str, Any], output: str) -> Item:
    event = {"event": "done", "version": version, "tensors": tensors, "bytes": nbytes}
    text = f"done: version {version}, {counted(tensors, 'tensor')}, {size(nbytes)}, wrote {output}"
    return {**event, "user": plain(user), "output": output}, text


# Texts without an event.


def round_name(number: int, rounds: int | None) -> str:
    return f"round {number}" + (f" of {rounds}" if rounds and number <= rounds else "")


def looking(name: str, known: int) -> str:
    return f"{name}: looking for a group, {known} other {'peer' if known == 1 else 'peers'} seen"


def not_averaged(name: str, receipt: Receipt) -> str:
    reason = printable(receipt.reason)
    if receipt.outcome is Outcome.NO_GROUP:
        return f"{name}: no group within {receipt.seconds:.1f} s: {reason}"
    return f"{name}: failed after {receipt.seconds:.1f} s: {reason}"


def _members(receipt: Receipt) -> dict[str, Any]:
    return {
        "members": list(receipt.members),
        "dropped": [dropped.endpoint for dropped in receipt.dropped],
        "dropped_reasons": {dropped.endpoint: dropped.reason for dropped in receipt.dropped},
    }

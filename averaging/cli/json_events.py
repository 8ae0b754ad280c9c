"""The events of --json: one JSON object per event. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from averaging.common import CLIENT_PREFIX
from averaging.common import plain as plain

if TYPE_CHECKING:
    from averaging.discovery.gossip import Waiting
    from averaging.receipts import Receipt
    from averaging.tensors import Schema

Event = Mapping[str, Any]


def dumps(event: Event) -> str:
    """Returns one line of ASCII."""
    return json.dumps(event, allow_nan=False)


def joining(waiting: Waiting) -> Event:
    """The peer still waits for an answer from one of --join."""
    return {
        "event": "joining",
        "seconds": round(waiting.seconds, 3),
        "timeout": waiting.timeout,
        "waiting_for": dict(waiting.reasons),
    }


def ready(endpoint: str, run_id: str, mode: str, schema: Schema, kept: Sequence[str] = ()) -> Event:
    """The peer serves and is part of its run."""
    return {
        "event": "ready",
        "endpoint": endpoint,
        "join": None if endpoint.startswith(CLIENT_PREFIX) else endpoint,
        "run_id": run_id,
        "mode": mode,
        "schema_hash": schema.hash.hex(),
        "tensors": len(schema.tensors),
        "bytes": schema.nbytes,
        "kept": list(kept),
    }


def averaged(number: int, receipt: Receipt) -> Event:
    """Round `number`, counted from 1, averaged."""
    return {
        "event": "round",
        "round": number,
        "group_id": receipt.group_id.hex(),
        **_who(receipt),
        "gathered": {endpoint: plain(value) for endpoint, value in receipt.gathered.items()},
        "seconds": round(receipt.seconds, 6),
        "allreduce_seconds": round(receipt.allreduce_seconds, 6),
        "bytes_sent": receipt.bytes_sent,
        "bytes_received": receipt.bytes_received,
        "kept_local": receipt.kept_local,
        "state_version": receipt.state_version,
    }


def retry(number: int, receipt: Receipt) -> Event:
    """Round `number` did not average and is tried again."""
    return {
        "event": "retry",
        "round": number,
        "outcome": receipt.outcome.value,
        "message": receipt.reason,
        **_who(receipt),
        "seconds": round(receipt.seconds, 6),
    }


def unwritten(number: int, output: str, message: str) -> Event:
    """The result of round `number` could not be written. The peer continues."""
    return {"event": "unwritten", "round": number, "output": output, "message": message}


def serving(rounds: int, output: str | None) -> Event:
    """All requested rounds are done. The peer keeps serving."""
    return {"event": "serving", "rounds": rounds, "output": output}


def done(rounds: int, output: str | None) -> Event:
    """The command succeeds."""
    return {"event": "done", "rounds": rounds, "output": output}


def started(version: int, tensors: int, nbytes: int) -> Event:
    """A download has begun; the fields are as announced."""
    return {"event": "started", "version": version, "tensors": tensors, "bytes": nbytes}


def downloaded(version: int, tensors: int, nbytes: int, user: Mapping[str, Any], output: str) -> Event:
    """A download was verified and written."""
    fields = {"version": version, "tensors": tensors, "bytes": nbytes, "user": plain(user), "output": output}
    return {"event": "done", **fields}


def error(message: str) -> Event:
    """The command fails."""
    return {"event": "error", "message": message}


def _who(receipt: Receipt) -> Event:
    return {
        "members": list(receipt.members),
        "dropped": [dropped.endpoint for dropped in receipt.dropped],
        "dropped_reasons": {dropped.endpoint: dropped.reason for dropped in receipt.dropped},
    }

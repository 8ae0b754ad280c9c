"""The state of a rendezvous, as it stands in a register. Pure.

torch keeps this state as a pickle, with which whoever can write it executes code at every node. So the register holds
msgpack instead: each node encodes torch's object, and builds the object anew from checked values.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from averaging.common import pack, unpack
from averaging.errors import ProtocolViolationError

MAX_ADDRESS = 256
"""Maximum length of a node's address, in characters; the name of a host has at most 253."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_MAX_NUMBER = 1 << 53


class _Row(NamedTuple):
    """One node.

    Attributes:
        addr: see torch's `_NodeDesc`.
        pid: see torch's `_NodeDesc`.
        local_id: see torch's `_NodeDesc`.
        rank: None if it takes no part in this round.
        waiting: whether it is in the wait list.
        spare: whether it is in the redundancy list.
        heartbeat: the last one, in microseconds since the epoch; None if there is none.
    """

    addr: str
    pid: int
    local_id: int
    rank: int | None
    waiting: bool
    spare: bool
    heartbeat: int | None


def encode_state(state: _RendezvousState) -> bytes:
    """Encodes a state; equal states have equal bytes."""
    nodes = {*state.participants, *state.wait_list, *state.redundancy_list, *state.last_heartbeats}
    rows = [
        _Row(
            *(node.addr, node.pid, node.local_id, state.participants.get(node)),
            node in state.wait_list,
            node in state.redundancy_list,
            _microseconds(state.last_heartbeats.get(node)),
        )
        for node in sorted(nodes)
    ]
    encoded: bytes = pack(
        [state.round, state.complete, state.closed, _microseconds(state.deadline), [list(row) for row in rows]]
    )
    return encoded


def decode_state(payload: bytes) -> _RendezvousState:
    """Builds a state from untrusted bytes.

    Raises:
        ProtocolViolationError: they are not the state of a rendezvous.
    """
    try:
        fields = unpack(payload)
    except ValueError:
        fields = None
    if not _fits(fields, (int, bool, bool, int | None, list)):
        raise ProtocolViolationError(
            "the register holds bytes that are not the state of a rendezvous; update all nodes"
        )
    state = _RendezvousState()
    state.round, state.complete, state.closed, deadline, rows = fields
    state.deadline = _time(deadline)
    for row in map(_row, rows):
        node = _NodeDesc(row.addr, row.pid, row.local_id)
        if row.rank is not None:
            state.participants[node] = row.rank
        if row.waiting:
            state.wait_list.add(node)
        if row.spare:
            state.redundancy_list.add(node)
        if (heartbeat := _time(row.heartbeat)) is not None:
            state.last_heartbeats[node] = heartbeat
    return state


def decode_place(payload: bytes) -> tuple[bytes, str, int] | None:
    """Returns what the first node of a round announces: round, address and port of its store; None for other bytes."""
    try:
        fields = unpack(payload)
    except ValueError:
        return None
    if not _fits(fields, (bytes, str, int)) or not 0 < fields[2] < 1 << 16 or not _is_address(fields[1]):
        return None
    return fields[0], fields[1], fields[2]


def _row(fields: Any) -> _Row:
    if not _fits(fields, (str, int, int, int | None, bool, bool, int | None)) or not _is_address(fields[0]):
        raise ProtocolViolationError("the register holds a rendezvous with something that is not a node")
    return _Row(*fields)


def _fits(fields: Any, types: Sequence[Any]) -> bool:
    """Whether `fields` is a list with values of these types, whose numbers are in range."""
    if not isinstance(fields, list) or len(fields) != len(types):
        return False
    return all(
        isinstance(value, wanted)
        and (type(value) is not int or 0 <= value < _MAX_NUMBER)
        and not (isinstance(value, bool) and wanted is not bool)
        for value, wanted in zip(fields, types, strict=True)
    )


def _is_address(addr: str) -> bool:
    return 0 < len(addr) <= MAX_ADDRESS and addr.isprintable()


def _microseconds(moment: datetime | None) -> int | None:
    return None if moment is None else (moment - _EPOCH) // _MICROSECOND


def _time(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else _EPOCH + microseconds * _MICROSECOND

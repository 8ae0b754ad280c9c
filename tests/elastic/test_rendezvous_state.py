"""The state of a rendezvous in a register: torch's object comes back as it was, and nothing else is taken for one."""

import pickle
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec import msgpack
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from averaging.elastic.rendezvous_state import decode_place, decode_state, encode_state
from averaging.errors import ProtocolViolationError

MOMENT = datetime(2026, 11, 26, 12, 0, 0, 123456, tzinfo=UTC)


def some_state(rng: random.Random) -> _RendezvousState:
    state = _RendezvousState()
    state.round, state.complete, state.closed = rng.randrange(99), rng.random() < 0.5, rng.random() < 0.5
    state.deadline = MOMENT + timedelta(seconds=rng.random()) if rng.random() < 0.5 else None
    for number in range(rng.randrange(6)):
        node = _NodeDesc(f"host{rng.randrange(3)}", rng.randrange(1 << 22), number)
        match rng.randrange(3):
            case 0:
                state.participants[node] = rng.randrange(5)
            case 1:
                state.wait_list.add(node)
            case _:
                state.redundancy_list.add(node)
        state.last_heartbeats[node] = MOMENT - timedelta(microseconds=rng.randrange(10**9))
    return state


def test_torch_keeps_nothing_else_in_a_state() -> None:
    assert set(vars(_RendezvousState())) == {
        *("round", "complete", "deadline", "closed"),
        *("participants", "wait_list", "redundancy_list", "last_heartbeats"),
    }


@given(st.integers(0, 1 << 32))
def test_a_state_comes_back_as_it_was(seed: int) -> None:
    state = some_state(random.Random(seed))
    payload = encode_state(state)
    assert vars(decode_state(payload)) == vars(state)
    assert encode_state(decode_state(payload)) == payload


class Bomb:
    """Executes code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('executed')",)


NODE = ["a", 1, 0, None, False, False, None]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        pickle.dumps(Bomb()),
        pickle.dumps(_RendezvousState()),
        *map(
            msgpack.encode,
            [
                [],
                [True, True, False, None, []],
                [1 << 60, True, False, None, []],
                [1, True, False, 1 << 60, []],
                [1, True, False, None, [[]]],
                [1, True, False, None, [["", *NODE[1:]]]],
                [1, True, False, None, [["a" * 300, *NODE[1:]]]],
                [1, True, False, None, [[*NODE[:3], "0", *NODE[4:]]]],
                [1, True, False, None, [NODE], None],
            ],
        ),
    ],
)
def test_nothing_else_is_a_state(payload: bytes) -> None:
    with pytest.raises(ProtocolViolationError):
        decode_state(payload)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_a_state(payload: bytes) -> None:
    try:
        state = decode_state(payload)
    except ProtocolViolationError:
        return
    assert isinstance(state, _RendezvousState)


@pytest.mark.parametrize(
    "fields", [None, [b"p", "a"], ["p", "a", 1], [b"p", 1, 1], [b"p", "a", 0], [b"p", "a", 1 << 16], [b"p", "a\x1b", 1]]
)
def test_nothing_else_is_the_place_of_a_store(fields: Any) -> None:
    assert decode_place(msgpack.encode([b"p", "a", 1])) == (b"p", "a", 1)
    assert decode_place(msgpack.encode(fields)) is None
    assert decode_place(b"\xc1") is None

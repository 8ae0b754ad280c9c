"""Reading the state of a peer of which nothing is known: whatever it announces, within a bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from averaging.errors import StateError
from averaging.protocol.messages import DownloadData
from averaging.state.assembler import StateAssembler, StateLimits
from averaging.state.manifest import CHUNK_BYTES, State, pack, seal

TENSORS = {
    "w": torch.arange(CHUNK_BYTES // 2, dtype=torch.float32),
    "steps": torch.tensor(3),
    "mask": torch.tensor([True, False]),
    "none": torch.empty(0, 2, dtype=torch.float16),
}
NBYTES = sum(tensor.nbytes for tensor in TENSORS.values())
MESSAGES = list(pack(seal(State(5, TENSORS, {"epoch": 2}))))


def test_a_reader_without_a_schema_takes_any_tensors() -> None:
    reader = StateAssembler(None, StateLimits(NBYTES))
    assert (reader.count, reader.nbytes, reader.received) == (0, 0, 0)
    received = []
    for message in MESSAGES:
        reader.feed(message)
        received.append(reader.received)
    assert received[:3] == [CHUNK_BYTES, 2 * CHUNK_BYTES, 2 * CHUNK_BYTES + 8]
    assert (reader.version, reader.count, reader.nbytes, reader.received) == (5, 4, NBYTES, NBYTES)
    state = reader.finish()
    assert (state.version, state.user, list(state.tensors)) == (5, {"epoch": 2}, list(TENSORS))
    for name, tensor in TENSORS.items():
        assert state.tensors[name].dtype == tensor.dtype
        assert torch.equal(state.tensors[name], tensor)


def test_more_than_the_bound_is_refused_before_anything_is_taken() -> None:
    reader = StateAssembler(None, StateLimits(NBYTES - 1))
    with pytest.raises(StateError, match=f"{NBYTES} bytes, more than the {NBYTES - 1} of max_bytes"):
        reader.feed(MESSAGES[0])
    assert reader.received == 0


def test_digests_are_checked_all_the_same() -> None:
    reader = StateAssembler(None, StateLimits(NBYTES))
    first = MESSAGES[0]
    assert first.tensor_part is not None
    spoilt = DownloadData(first.metadata, replace(first.tensor_part, buffer=bytes(CHUNK_BYTES)))
    reader.feed(spoilt)
    with pytest.raises(StateError, match="'w' does not match its digest"):
        reader.feed(MESSAGES[1])

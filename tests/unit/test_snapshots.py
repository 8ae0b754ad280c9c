"""The digests of a state that many ask for, some of whom lose patience."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from averaging.schema import describe
from averaging.state import snapshots
from averaging.state.packing import Snapshot, State, seal
from averaging.state.snapshots import Snapshots
from averaging.tensors import SharedTensors


@pytest.mark.asyncio
async def test_what_was_begun_for_one_who_lost_patience_serves_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, sealed = threading.Event(), threading.Event(), list[int]()

    def slowly(state: State) -> Snapshot:
        sealed.append(state.version)
        begun.set()
        assert go_on.wait(60.0)
        return seal(state)

    monkeypatch.setattr(snapshots, "INLINE_BYTES", 0)
    monkeypatch.setattr(snapshots, "seal", slowly)
    tensors = SharedTensors([torch.arange(5.0)])
    state = Snapshots(tensors, None, describe(tensors.names, tensors.tensors, part_size_bytes=1024), shared=True)
    state.commit(1)
    first = asyncio.create_task(state.latest(60.0))
    assert await asyncio.to_thread(begun.wait, 60.0)
    first.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await state.latest(60.0)).state.version == 1
    assert sealed == [1]
    state.commit(2)
    assert (await state.latest(60.0)).state.version == 2
    assert sealed == [1, 2]


@pytest.mark.asyncio
async def test_who_loses_patience_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those who ask again, state after state, would take all threads."""
    begun, go_on = threading.Event(), threading.Event()

    def slowly(state: State) -> Snapshot:
        begun.set()
        assert go_on.wait(60.0)
        return seal(state)

    monkeypatch.setattr(snapshots, "INLINE_BYTES", 0)
    monkeypatch.setattr(snapshots, "seal", slowly)
    tensors = SharedTensors([torch.arange(5.0)])
    state = Snapshots(tensors, None, describe(tensors.names, tensors.tensors, part_size_bytes=1024), shared=True)
    state.commit(1)
    asking = asyncio.create_task(state.latest(60.0))
    assert await asyncio.to_thread(begun.wait, 60.0)
    asking.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not asking.done()
    state.commit(2)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await state.latest(60.0)).state.version == 2

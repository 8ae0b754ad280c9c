"""The digests of a state that many ask for, some of whom lose patience."""

import asyncio
import threading

import pytest
import torch

from averaging.state import manifest
from averaging.state.manifest import Snapshot, Snapshots, State, seal
from averaging.tensors.shared_tensors import SharedTensors


class Slow:
    """A state whose digests are taken in a thread, and not before they may be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.sealed: list[int] = []  # versions
        monkeypatch.setattr(manifest, "INLINE_BYTES", 0)
        monkeypatch.setattr(manifest, "seal", self._seal)
        tensors = SharedTensors([torch.arange(5.0)])
        self.state = Snapshots(tensors, None, shared=True)
        self.state.commit(1)

    def _seal(self, state: State) -> Snapshot:
        self.sealed.append(state.version)
        self.begun.set()
        assert self.go_on.wait(60.0)
        return seal(state)

    async def asked_in_vain(self) -> asyncio.Task[Snapshot]:
        """A call that was cancelled while the digests are taken."""
        asking = asyncio.create_task(self.state.latest(60.0))
        assert await asyncio.to_thread(self.begun.wait, 60.0)
        asking.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        return asking


async def test_what_was_begun_for_a_peer_that_lost_patience_serves_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    asking = await slow.asked_in_vain()
    slow.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await slow.state.latest(60.0)).state.version == 1
    assert slow.sealed == [1]
    slow.state.commit(2)
    assert (await slow.state.latest(60.0)).state.version == 2
    assert slow.sealed == [1, 2]


async def test_who_loses_patience_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those who ask again, state after state, would take all threads."""
    slow = Slow(monkeypatch)
    asking = await slow.asked_in_vain()
    assert not asking.done()
    slow.state.commit(2)
    slow.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await slow.state.latest(60.0)).state.version == 2

"""Writing to tensors that the application may hold."""

import asyncio
import threading

import pytest
import torch

from averaging.errors import RoundError
from averaging.tensors.shared_tensors import SharedTensors, Write


async def test_the_action_needs_the_lock_and_releases_it() -> None:
    shared, done = SharedTensors([torch.zeros(2)]), []
    with shared.locked():
        with pytest.raises(RoundError, match="held the tensors' lock"):
            await shared.while_locked(lambda: done.append("without"), 0.01)
        waiting = asyncio.create_task(shared.while_locked(lambda: done.append("later"), 60.0))
        await asyncio.sleep(0)
    await waiting
    for _ in range(2):
        await shared.while_locked(lambda: done.append("at once"), 0.01)
    assert done == ["later", "at once", "at once"]


async def test_an_action_that_is_cancelled_while_it_waits_for_the_lock_is_not_run() -> None:
    shared, done = SharedTensors([torch.zeros(2)]), []
    with shared.locked():
        waiting = asyncio.create_task(shared.while_locked(lambda: done.append("late"), 600.0))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        # The thread ends although the lock is never released: an interrupted application may hold it while it closes.
        await asyncio.get_running_loop().shutdown_default_executor()
    assert done == []


async def test_a_cancellation_waits_for_an_action_that_has_started() -> None:
    """Otherwise the tensors would be written while the application uses them again."""
    shared, begun, go_on = SharedTensors([torch.zeros(2)]), threading.Event(), threading.Event()
    done: list[bool] = []

    def action() -> None:
        begun.set()
        done.append(go_on.wait(60.0))

    with shared.locked():
        waiting = asyncio.create_task(shared.while_locked(action, 60.0))
        await asyncio.sleep(0)
    assert await asyncio.to_thread(begun.wait, 60.0)
    try:
        for _ in range(2):
            waiting.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not waiting.done()
    finally:
        go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert done == [True]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Write.REPLACE, [7.0, 8.0, 9.0, 3.0]),
        (Write.ADD, [7.0, 9.0, 11.0, 3.0]),
        (Write.DIFFERENCE, [7.0, 7.0, 7.0, 0.0]),
        (Write.ONLY, [7.0, 8.0, 9.0, 0.0]),
    ],
)
def test_tied_tensors_are_written_once(how: Write, expected: list[float]) -> None:
    tensor = torch.arange(4.0)
    values = torch.tensor([7.0, 8.0, 9.0])
    SharedTensors([tensor, torch.zeros(2), tensor.view(2, 2)]).write([(0, 0, values), (2, 0, values)], how)
    assert tensor.tolist() == expected


def test_writes_to_different_pieces_of_tied_tensors_are_all_kept() -> None:
    tensor = torch.arange(4.0)
    SharedTensors([tensor, tensor]).write([(0, 0, torch.ones(2)), (1, 2, torch.ones(2))], Write.ADD)
    assert tensor.tolist() == [1.0, 2.0, 3.0, 4.0]

"""Writing to tensors that the application may hold."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable

import pytest
import torch

from averaging.allreduce.part_forms import Part, Slice, forms_of
from averaging.errors import RoundError
from averaging.tensors.schema import describe
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


def collections(action: Callable[[], object]) -> int:
    """How often the garbage collector looks for young objects while `action` runs."""
    begun = 0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal begun
        begun += phase == "start"

    gc.collect()
    gc.callbacks.append(note)
    try:
        action()
    finally:
        gc.callbacks.remove(note)
    return begun


def test_the_collector_does_not_run_because_there_are_many_small_tensors() -> None:
    """It walks all objects of the process if it runs often."""
    tensors = SharedTensors([torch.zeros(3) for _ in range(5_000)])
    part, values = Part(tuple(Slice(number, 0, 3) for number in range(5_000))), torch.arange(15_000.0)
    form = forms_of(describe(tensors.names[:1], tensors.tensors[:1], part_size_bytes=1 << 20))[0]
    changes = ((piece.tensor, piece.start, elements) for piece, elements in part.divide(values))
    assert collections(lambda: tensors.write(changes)) <= 2
    assert torch.equal(torch.cat(tensors.tensors), values)
    assert collections(tensors.check_finite) <= 2
    flat = tensors.flat()
    assert collections(lambda: form.own(flat, part)) <= 2
    own = form.own(flat, part)
    assert isinstance(own, torch.Tensor)
    assert torch.equal(own, values)

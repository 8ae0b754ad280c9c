"""Writing to tensors that the application may hold."""

from __future__ import annotations

import pytest
import torch

from averaging.tensors import SharedTensors, Write


@pytest.mark.parametrize(
    ("how", "expected"), [(Write.REPLACE, [0.0, 7.0, 8.0, 3.0]), (Write.ADD, [0.0, 8.0, 10.0, 3.0])]
)
def test_a_part_is_written_at_once(how: Write, expected: list[float]) -> None:
    tensor = torch.arange(4.0)
    assert SharedTensors([torch.zeros(2), tensor]).write_now(1, 1, torch.tensor([7.0, 8.0]), how)
    assert tensor.tolist() == expected


def test_nothing_is_written_while_the_application_holds_the_lock() -> None:
    tensor = torch.zeros(2)
    shared = SharedTensors([tensor])
    with shared.locked():
        assert not shared.write_now(0, 0, torch.ones(2), Write.REPLACE)
        assert tensor.tolist() == [0.0, 0.0]
    assert shared.write_now(0, 0, torch.ones(2), Write.REPLACE)


def test_a_tensor_with_gaps_waits_for_the_whole_result() -> None:
    tensor = torch.zeros(4, 4)[:, ::2]
    assert not SharedTensors([tensor]).write_now(0, 0, torch.ones(2), Write.REPLACE)
    assert not tensor.any()


def test_what_may_not_be_written_yet_is_not() -> None:
    tensor = torch.zeros(2)
    shared = SharedTensors([tensor])
    assert not shared.write_now(0, 0, torch.ones(2), Write.REPLACE, lambda: False)
    assert tensor.tolist() == [0.0, 0.0]
    assert shared.write_now(0, 0, torch.ones(2), Write.REPLACE)  # and the lock is free again

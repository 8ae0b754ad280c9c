"""The effect of a global step on the model."""

import math
from typing import Any, cast

import pytest
import torch

from averaging.strategies.fragments import Fragment


def fragment(parameter: torch.Tensor, anchor: list[float], change: list[float]) -> Fragment:
    anchors = {"w": torch.nn.Parameter(torch.tensor(anchor))}
    outer = torch.optim.SGD(anchors.values(), lr=0.5)
    return Fragment(0, {"w": parameter}, anchors, {"w": torch.tensor(change)}, cast(Any, None), outer)


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, [3.0, 6.0]), (0.25, [3.25, 5.5]), (1.0, [4.0, 4.0])])
def test_the_model_is_mixed_with_the_result(alpha: float, expected: list[float]) -> None:
    parameter = torch.tensor([4.0, 4.0])
    fragment(parameter, anchor=[4.0, 4.0], change=[2.0, -4.0]).step(alpha)
    assert parameter.tolist() == expected


def test_a_model_that_went_astray_meanwhile_is_back_at_the_result_where_nothing_is_mixed() -> None:
    parameter = torch.tensor([math.nan, math.inf])
    fragment(parameter, anchor=[4.0, 4.0], change=[2.0, -4.0]).step(0.0)
    assert parameter.tolist() == [3.0, 6.0]


def test_parameters_that_share_their_memory_are_mixed_once() -> None:
    memory = torch.tensor([4.0, 4.0])
    anchors = {name: torch.nn.Parameter(memory.clone()) for name in "ab"}
    changes = {name: torch.tensor([2.0, -4.0]) for name in "ab"}
    outer = torch.optim.SGD(anchors.values(), lr=0.5)
    Fragment(0, {"a": memory, "b": memory.view(2)}, anchors, changes, cast(Any, None), outer).step(0.25)
    assert memory.tolist() == [3.25, 5.5]

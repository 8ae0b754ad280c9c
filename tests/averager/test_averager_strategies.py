"""What is averaged, and when."""

from __future__ import annotations

import pytest
import torch

from averaging.errors import TensorError
from averaging.training.named_tensors import named_buffers, named_parameters


def test_parameters_keep_the_names_the_optimizer_was_given() -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.param_groups[0]["param_names"] = ["weight", "bias"]  # as torch does since 2.6
    assert list(named_parameters(optimizer)) == ["weight", "bias"]


def test_a_parameter_given_twice_is_averaged_once() -> None:
    a, b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([a, b])
    optimizer.param_groups.append(optimizer.param_groups[0] | {"params": [b]})
    assert list(named_parameters(optimizer)) == ["group0.param0", "group0.param1"]


def test_what_cannot_be_averaged_is_named() -> None:
    good, frozen = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1), requires_grad=False)
    with pytest.raises(TensorError, match=r"'group0.param1' does not require a gradient"):
        named_parameters(torch.optim.SGD([good, frozen]))
    whole = torch.ones(1, dtype=torch.int64)
    with pytest.raises(TensorError, match=r"'group0.param1' is torch.int64"):
        named_parameters(torch.optim.SGD([good, whole]))
    optimizer = torch.optim.SGD([good, torch.nn.Parameter(torch.ones(1))])
    optimizer.param_groups[0]["param_names"] = ["w", "w"]
    with pytest.raises(TensorError, match="two parameters of the optimizer are named 'w'"):
        named_parameters(optimizer)


def made_in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(3, device="meta"), "is on the meta device and has no values"),
        (made_in_inference_mode(), "was made in inference mode"),
        (torch.ones(1).expand(3), "share memory"),
    ],
    ids=["meta", "inference", "expanded"],
)
def test_what_cannot_be_written_to_is_refused_before_anybody_tries(tensor: torch.Tensor, message: str) -> None:
    with torch.inference_mode(tensor.is_inference()):
        parameter = torch.nn.Parameter(tensor)
    with pytest.raises(TensorError, match="parameter 'group0.param0' ") as of_parameter:
        named_parameters(torch.optim.SGD([parameter]))
    with pytest.raises(TensorError, match="buffer 'b' ") as of_buffer:
        named_buffers({"b": tensor})
    assert message in str(of_parameter.value)
    assert message in str(of_buffer.value)


def test_a_buffer_expanded_by_nothing_is_like_any_other() -> None:
    """Language models keep positions in such buffers."""
    assert named_buffers({"position_ids": torch.arange(4).expand(1, -1)}).shared

"""What the averager knows of the model: names, buffers, and whether the tensors are still the same."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from averaging.errors import ConfigError, TensorError
from averaging.training.named_tensors import TrainedModel, digest_of, named_buffers, named_parameters


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def test_parameters_get_the_names_of_the_model() -> None:
    model = network()
    groups = [{"params": [model[1].weight, model[1].bias]}, {"params": [model[0].weight, model[0].bias]}]
    named = named_parameters(torch.optim.SGD(groups), TrainedModel(model))
    assert list(named) == ["1.weight", "1.bias", "0.weight", "0.bias"]
    assert named["0.weight"] is model[0].weight


def test_a_parameter_that_the_model_lacks_is_an_error() -> None:
    model, other = network(), nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*model.parameters(), other.weight])
    with pytest.raises(ConfigError, match=r"does not have \(number 4 of group 0, of shape \[1, 3\]\)"):
        named_parameters(optimizer, TrainedModel(model))
    assert named_parameters(optimizer, TrainedModel(nn.ModuleList([model, other])))
    with pytest.raises(ConfigError, match="model must be the torch.nn.Module that the optimizer trains, not list"):
        TrainedModel([model, other])


def test_buffers_are_averaged_or_shared_by_their_kind() -> None:
    model = network()
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    model.register_buffer("mask", torch.full((2,), -torch.inf))
    model.register_buffer("seen", torch.zeros(2, dtype=torch.bool))
    model.register_buffer("shared_memory", torch.zeros(1).expand(2))
    buffers = named_buffers(None, TrainedModel(model))
    assert list(buffers.averaged) == ["buffer/1.running_mean", "buffer/1.running_var"]
    assert list(buffers.shared) == ["buffer/seen", "buffer/1.num_batches_tracked"]


def test_given_buffers_are_the_only_ones_and_get_the_names_of_the_model() -> None:
    model = network()
    wrapped = nn.DataParallel(model)
    given = {"module.1.running_mean": model[1].running_mean}
    assert list(named_buffers(given, TrainedModel(wrapped)).averaged) == ["buffer/1.running_mean"]
    assert named_buffers({}, TrainedModel(model)).averaged == {}


def assign(model: nn.Sequential) -> None:
    model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)


def add(model: nn.Sequential) -> None:
    model[0].register_parameter("extra", nn.Parameter(torch.zeros(1)))


def remove(model: nn.Sequential) -> None:
    model[0].register_parameter("bias", None)


def replace_buffer(model: nn.Sequential) -> None:
    model[1].running_mean = torch.zeros(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (assign, "parameter '0.weight' of the model has been replaced"),
        (add, "parameter '0.extra' of the model is new"),
        (remove, "parameter '0.bias' of the model is gone"),
        (replace_buffer, "buffer '1.running_mean' of the model has been replaced.*leave the buffer out"),
    ],
)
def test_what_is_no_longer_the_same_is_named(change: Callable[[nn.Sequential], None], message: str) -> None:
    model = network()
    trained = TrainedModel(model)
    trained.check(trained.buffers)
    change(model)
    with pytest.raises(TensorError, match=message):
        trained.check(trained.buffers)


def test_writes_in_place_and_buffers_that_are_left_out_are_no_change() -> None:
    model = network()
    trained = TrainedModel(model)
    model.load_state_dict({name: one + 1 for name, one in model.state_dict().items()})
    model(torch.ones(4, 2))
    trained.check(trained.buffers)
    replace_buffer(model)
    trained.check({"1.running_var"})


KINDS = {
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j, 3 + 4j]).conj(),
    "float8": torch.ones(2).to(torch.float8_e4m3fn),
    "bfloat16": torch.ones(2, dtype=torch.bfloat16),
    "sparse": torch.eye(3).to_sparse(),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(3),
    "meta": torch.empty(3, device="meta"),
}


@pytest.mark.parametrize("tensor", KINDS.values(), ids=KINDS)
def test_tensors_of_every_kind_have_a_digest(tensor: torch.Tensor) -> None:
    assert digest_of({"a": tensor}) == digest_of({"a": tensor.clone()})
    assert digest_of({"a": tensor}) != digest_of({"b": tensor})
    if tensor.numel() and not tensor.is_meta:
        assert digest_of({"a": tensor}) != digest_of({"a": torch.zeros_like(tensor)})


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

"""Copies of parameters in an optimizer get what rounds write to the parameters, if they are named or known."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from averaging.errors import ConfigError
from averaging.training.parameter_copies import ParameterCopies

Parameters = list[torch.nn.Parameter]


class Masters(torch.optim.Optimizer):
    """Steps copies and overwrites the parameters with them, as apex and others do; subclasses keep them elsewhere."""

    def __init__(self, params: Any, lr: float = 0.5, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(params, {"lr": lr})
        self.keep([parameter.detach().to(dtype, copy=True) for parameter in self.all()])

    def all(self) -> Parameters:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def keep(self, copies: list[torch.Tensor]) -> None:
        self.shadow = dict(zip(self.all(), copies, strict=True))

    def kept(self) -> list[torch.Tensor]:
        return list(self.shadow.values())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for parameter, master in zip(self.all(), self.kept(), strict=True):
            if parameter.grad is not None:
                master.sub_(parameter.grad.to(master.dtype), alpha=self.param_groups[0]["lr"])
                parameter.copy_(master)


class InState(Masters):
    def keep(self, copies: list[torch.Tensor]) -> None:
        for parameter, master in zip(self.all(), copies, strict=True):
            self.state[parameter]["master_param"] = master

    def kept(self) -> list[torch.Tensor]:
        return [self.state[parameter]["master_param"] for parameter in self.all()]


def parameters(dtype: torch.dtype = torch.bfloat16) -> Parameters:
    torch.manual_seed(0)
    weights = [torch.randn(3, 2), torch.zeros(2), torch.ones(3)]
    return [torch.nn.Parameter(weight.to(dtype)) for weight in weights]


def named(params: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"weight{number}": parameter for number, parameter in enumerate(params)}


def step(optimizer: torch.optim.Optimizer, params: Parameters, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def write(params: Parameters, copies: ParameterCopies, change: float = 7.0) -> list[torch.Tensor]:
    """What a round does; returns the values that it wrote."""
    with copies.following(), torch.no_grad():
        for parameter in params:
            parameter.add_(change)
    return [parameter.detach().clone() for parameter in params]


def without_lr(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.0


def copies_of(optimizer: Masters) -> ParameterCopies:
    """Those in the optimizer's state are known; others are named."""
    masters = None if isinstance(optimizer, InState) else optimizer.kept
    return ParameterCopies(optimizer, named(optimizer.all()), masters)


@pytest.mark.parametrize("kind", [Masters, InState])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("before", [0, 1, 4])
def test_copies_get_what_a_round_writes(
    kind: type[Masters], dtype: torch.dtype, before: int, caplog: pytest.LogCaptureFixture
) -> None:
    params = parameters(dtype)
    optimizer = kind(params)
    copies = copies_of(optimizer)
    for seed in range(before):
        step(optimizer, params, seed)
    written = write(params, copies)
    for _ in range(2):
        without_lr(optimizer)
        step(optimizer, params)
        assert all(map(torch.equal, params, written))
    assert caplog.records == []


def test_elements_that_a_round_leaves_alone_keep_the_precision_of_the_copy() -> None:
    params = [torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))]
    optimizer = InState(params, lr=1.0)
    copies = copies_of(optimizer)
    params[0].grad = torch.full_like(params[0], 2.0**-10)
    optimizer.step()
    assert optimizer.kept()[0].tolist() == [1 - 2.0**-10, 2 - 2.0**-10]
    with copies.following(), torch.no_grad():
        params[0][1] = 5.0
    assert optimizer.kept()[0].tolist() == [1 - 2.0**-10, 5.0]


def test_the_models_lower_copies_of_float32_parameters_get_it_too() -> None:
    masters = parameters(torch.float32)
    halves = [master.detach().half() for master in masters]
    write(masters, ParameterCopies(torch.optim.SGD(masters, lr=0.1), named(masters), lambda: halves))
    assert all(torch.equal(half, master.half()) for half, master in zip(halves, masters, strict=True))


def test_an_unknown_optimizer_of_parameters_in_low_precision_gets_one_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = parameters()
    optimizer = Masters(params)
    copies = ParameterCopies(optimizer, named(params))
    write(params, copies)  # a newcomer's first download: nothing can be said before a step
    assert caplog.records == []
    step(optimizer, params)
    for _ in range(2):
        write(params, copies)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "Masters is not known here" in record.getMessage()
    assert "named with masters=" in record.getMessage()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
def test_an_optimizer_that_is_known_to_step_the_parameters_gets_none(
    kind: Callable[[Parameters], torch.optim.Optimizer], caplog: pytest.LogCaptureFixture
) -> None:
    params = parameters()
    optimizer = kind(params)
    copies = ParameterCopies(optimizer, named(params))
    for seed in range(2):
        step(optimizer, params, seed)
        write(params, copies)
    assert caplog.records == []


def test_masters_of_other_shapes_are_refused_and_none_yet_are_not() -> None:
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    write(params, ParameterCopies(optimizer, named(params), list))
    with pytest.raises(ConfigError, match="masters= returns 1 tensors"):
        write(params, ParameterCopies(optimizer, named(params), lambda: [torch.zeros(3)]))

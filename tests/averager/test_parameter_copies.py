"""Copies of parameters in an optimizer get what rounds write to the parameters, or are noticed and named."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from averaging.training.parameter_copies import ParameterCopies
from tests.schedule_free import ScheduleFreeSGD

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


class LikeApex(Masters):
    def keep(self, copies: list[torch.Tensor]) -> None:
        self.param_groups_master = [{"params": copies}]

    def kept(self) -> list[torch.Tensor]:
        return self.param_groups_master[0]["params"]


class InAnObject(Masters):
    def keep(self, copies: list[torch.Tensor]) -> None:
        self._stash = type("Stash", (), {})()
        self._stash.fp32_from_fp16_groups = [copies]

    def kept(self) -> list[torch.Tensor]:
        groups: list[list[torch.Tensor]] = self._stash.fp32_from_fp16_groups
        return groups[0]


class Flat(Masters):
    """As with ZeRO: all copies in one tensor."""

    def keep(self, copies: list[torch.Tensor]) -> None:
        self.flat = torch.cat([master.reshape(-1) for master in copies])

    def kept(self) -> list[torch.Tensor]:
        sizes = [parameter.numel() for parameter in self.all()]
        return [one.view_as(p) for one, p in zip(torch.split(self.flat, sizes), self.all(), strict=True)]


def parameters(dtype: torch.dtype = torch.bfloat16) -> Parameters:
    torch.manual_seed(0)
    weights = [torch.randn(3, 2), torch.zeros(2), torch.ones(3)]
    return [torch.nn.Parameter(weight.to(dtype)) for weight in weights]


def named(params: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"weight{number}": parameter for number, parameter in enumerate(params)}


def step(optimizer: torch.optim.Optimizer, params: Parameters, copies: ParameterCopies | None, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()
    if copies is not None:
        copies.stepped()


def write(params: Parameters, copies: ParameterCopies, change: float = 7.0) -> list[torch.Tensor]:
    """What a round does; returns the values that it wrote."""
    with copies.following(), torch.no_grad():
        for parameter in params:
            parameter.add_(change)
    return [parameter.detach().clone() for parameter in params]


def without_lr(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.0


@pytest.mark.parametrize("kind", [Masters, InState, LikeApex, InAnObject])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("before", [0, 1, 4])
def test_copies_get_what_a_round_writes(
    kind: type[Masters], dtype: torch.dtype, before: int, caplog: pytest.LogCaptureFixture
) -> None:
    params = parameters(dtype)
    optimizer = kind(params)
    copies = ParameterCopies(optimizer, named(params))
    for seed in range(before):
        step(optimizer, params, copies, seed)
    written = write(params, copies)
    for _ in range(2):
        without_lr(optimizer)
        step(optimizer, params, copies)
        assert all(map(torch.equal, params, written))
    assert caplog.records == []


def test_elements_that_a_round_leaves_alone_keep_the_precision_of_the_copy() -> None:
    params = [torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))]
    optimizer = InState(params, lr=1.0)
    copies = ParameterCopies(optimizer, named(params))
    params[0].grad = torch.full_like(params[0], 2.0**-10)
    optimizer.step()
    assert optimizer.kept()[0].tolist() == [1 - 2.0**-10, 2 - 2.0**-10]
    with copies.following(), torch.no_grad():
        params[0][1] = 5.0
    assert optimizer.kept()[0].tolist() == [1 - 2.0**-10, 5.0]


def test_the_models_lower_copies_of_float32_parameters_get_it_too() -> None:
    masters = parameters(torch.float32)
    optimizer = torch.optim.SGD(masters, lr=0.1)
    optimizer._amp_stash = type("Stash", (), {})()  # type: ignore[attr-defined]
    halves = [master.detach().half() for master in masters]
    optimizer._amp_stash.fp16_groups = [halves]  # type: ignore[attr-defined]
    write(masters, ParameterCopies(optimizer, named(masters)))
    assert all(torch.equal(half, master.half()) for half, master in zip(halves, masters, strict=True))


def test_copies_in_the_dtype_and_without_a_telling_name_are_known_once_they_have_followed() -> None:
    params = parameters(torch.float32)
    optimizer = Masters(params)
    copies = ParameterCopies(optimizer, named(params))
    with copies.following():
        pass  # the start of a run, in which nothing changed
    step(optimizer, params, copies)
    written = write(params, copies)
    without_lr(optimizer)
    step(optimizer, params, copies)
    assert all(map(torch.equal, params, written))


def test_copies_that_are_known_too_late_are_named_once_and_kept_from_then_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = parameters(torch.float32)
    optimizer = Masters(params)
    copies = ParameterCopies(optimizer, named(params))
    step(optimizer, params, copies)
    write(params, copies)
    step(optimizer, params, copies, 1)
    (record,) = caplog.records
    assert "Masters has undone what the last round wrote" in record.getMessage()
    assert "in shadow.*, and from now on" in record.getMessage()
    for _ in range(2):
        written = write(params, copies)
        without_lr(optimizer)
        step(optimizer, params, copies)
        assert all(map(torch.equal, params, written))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("lr", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copies_that_cannot_be_found_are_named_with_the_remedy(
    lr: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    params = parameters(dtype)
    twins = [torch.nn.Parameter(parameter.detach().clone()) for parameter in params]
    optimizer, twin = Flat(params, lr), Flat(twins, lr)
    copies = ParameterCopies(optimizer, named(params))
    for seed in range(3):
        step(optimizer, params, copies, seed)
        step(twin, twins, None, seed)
        write(params, copies)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "Flat has undone what the last round wrote to the parameters" in record.getMessage()
    assert "let the optimizer train the parameters themselves, in float32" in record.getMessage()
    step(optimizer, params, copies, 3)
    step(twin, twins, None, 3)
    assert all(map(torch.equal, params, twins))  # the probe has changed nothing


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD with a tensor as lr": lambda params: torch.optim.SGD(params, lr=torch.tensor(0.1)),
    "AdamW": partial(torch.optim.AdamW, lr=0.1),
    "Adam, amsgrad": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": partial(torch.optim.Adafactor, lr=0.1),
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9),
    "Rprop": torch.optim.Rprop,
    "ScheduleFreeSGD": ScheduleFreeSGD,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_leads_back_by_chance_is_no_alarm_and_the_probe_leaves_no_trace(
    make: Callable[[Parameters], torch.optim.Optimizer], dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Each write is chosen so that the next step leads back exactly to the parameters of before."""
    params = parameters(dtype)
    optimizer = make(params)
    optimizer.train() if isinstance(optimizer, ScheduleFreeSGD) else None
    copies = ParameterCopies(optimizer, named(params))
    for seed in range(5):
        step(optimizer, params, copies, seed)
        ahead, after = copy.deepcopy((optimizer, params))
        after = ahead.param_groups[0]["params"]
        step(ahead, after, None, seed + 1)
        with copies.following(), torch.no_grad():
            for parameter, later in zip(params, after, strict=True):
                parameter.sub_(later - parameter)
        twin = copy.deepcopy(optimizer)
        twins = twin.param_groups[0]["params"]
        step(optimizer, params, copies, seed + 1)
        step(twin, twins, None, seed + 1)
        assert all(map(torch.equal, params, twins))
        assert str(optimizer.state_dict()) == str(twin.state_dict())
        assert str([parameter.grad for parameter in params]) == str([parameter.grad for parameter in twins])
    assert caplog.records == []


def test_statistics_that_equal_the_parameters_by_chance_are_no_copies() -> None:
    """All zeros, while another peer has trained them, as with the second matrix of LoRA."""
    params = [torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))]
    optimizer = torch.optim.AdamW(params)
    optimizer.state[params[0]]["exp_avg"] = torch.zeros(2, 2)
    write(params, ParameterCopies(optimizer, named(params)))
    assert optimizer.state[params[0]]["exp_avg"].tolist() == [[0.0, 0.0]] * 2


def test_an_optimizer_that_needs_a_closure_is_not_probed(caplog: pytest.LogCaptureFixture) -> None:
    params = parameters(torch.float32)
    optimizer = torch.optim.LBFGS(params, lr=0.1)
    copies = ParameterCopies(optimizer, named(params))

    def closure() -> float:
        optimizer.zero_grad()
        loss = sum(((p - 1) ** 2).sum() for p in params)
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    for _ in range(3):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
        copies.stepped()
        write(params, copies)
    assert caplog.records == []

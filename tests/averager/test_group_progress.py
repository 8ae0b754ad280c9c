"""What an optimizer changes in its parameter groups travels with its state; hyperparameters do not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec import msgpack
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from averaging.errors import StateError
from averaging.training.optimizer_state import GroupProgress, load_optimizer, pack_optimizer


class Decaying(torch.optim.Optimizer):
    """Counts in its groups; `decay` is a hyperparameter, and `count` an argument that its steps change."""

    def __init__(self, params: Any, lr: float = 0.1, decay: float = 0.9, count: int = 0) -> None:
        own = {"scale": 1.0, "trace": torch.zeros(()), "last": (0, 0.0)}
        super().__init__(params, {"lr": lr, "decay": decay, "count": count, **own})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            group["scale"] *= group["decay"]
            group["trace"].add_(1)
            group["last"] = group["count"], group["scale"]
            group["late"] = "stepped"
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * group["scale"])


def decaying(lr: float = 0.1, **options: Any) -> Decaying:
    return Decaying([torch.nn.Parameter(torch.ones(3))], lr, **options)


def stepped(optimizer: torch.optim.Optimizer, times: int) -> GroupProgress:
    progress = GroupProgress(optimizer)
    for _ in range(times):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        with progress.observed():
            optimizer.step()
    return progress


def travel(optimizer: torch.optim.Optimizer, progress: GroupProgress) -> tuple[dict[str, torch.Tensor], Any]:
    tensors, packed = pack_optimizer(optimizer, progress)
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return copies, msgpack.decode(msgpack.encode(packed))


def of_group(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}


def test_what_the_steps_change_travels_and_hyperparameters_stay() -> None:
    donor, newcomer = decaying(), decaying(lr=0.5, decay=0.8)
    known = GroupProgress(newcomer)
    load_optimizer(newcomer, *travel(donor, stepped(donor, 3)), known)
    assert of_group(newcomer) == of_group(donor) | {"lr": 0.5, "decay": 0.8}
    assert newcomer.param_groups[0]["trace"] is not donor.param_groups[0]["trace"]
    assert known.keys == {"count", "scale", "trace", "last", "late"}


@pytest.mark.parametrize(
    "make", [lambda o: StepLR(o, 1), lambda o: OneCycleLR(o, 1.0, total_steps=20)], ids=["StepLR", "OneCycleLR"]
)
def test_what_schedulers_change_is_no_progress_of_the_optimizer(make: Callable[[Any], Any]) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
    scheduler = make(optimizer)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())  # within the step
    progress = stepped(optimizer, 3)
    assert optimizer.param_groups[0]["lr"] != 1e-3
    assert progress.values() == [{}]
    assert GroupProgress(optimizer).values() == [{}]


TRACE = {"tensor": "optimizer/group0/trace"}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (5, "which is invalid"),
        ([{"dict": [["count", 3]]}, {"dict": []}], "has 2 parameter groups, but this peer's has 1"),
        ([{"dict": [["count", "many"]]}], "'count' .* is 'many', which does not fit this peer's 0"),
        ([{"dict": [["scale", float("nan")]]}], "'scale' .* is nan"),
        ([{"dict": [["trace", TRACE]]}], "'trace' .* which does not fit"),
        ([{"dict": [["new", {"list": [1]}]]}], r"'new' .* is \[1\]"),
    ],
)
def test_progress_that_does_not_fit_is_refused_and_nothing_changes(groups: object, message: str) -> None:
    newcomer = decaying()
    before = of_group(newcomer)
    packed = {"class": "Decaying", "state": {"dict": []}, "progress": groups}
    with pytest.raises(StateError, match=message):
        load_optimizer(newcomer, {"optimizer/group0/trace": torch.ones(2)}, packed)
    assert of_group(newcomer) == before

"""An optimizer's state, packed, through msgpack, and loaded into another optimizer of the same kind."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from msgspec import msgpack

from averaging.errors import StateError
from averaging.training.optimizer_state import load_optimizer, pack_optimizer
from averaging.training.training_state import set_initial_lr

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW with a tensor as lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "two groups": lambda p: torch.optim.NAdam([{"params": p[:1], "lr": 0.2}, {"params": p[1:], "lr": 0.1}], lr=0.1),
}


@pytest.fixture(params=list(OPTIMIZERS))
def make(request: pytest.FixtureRequest) -> Make:
    return OPTIMIZERS[request.param]


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(5)
    return [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(3))]


def step(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], times: int) -> None:
    for number in range(times):
        target = float(number + 1)

        def closure(target: float = target) -> float:
            optimizer.zero_grad()
            loss = sum(((p - target) ** 2).sum() for p in params)
            assert isinstance(loss, torch.Tensor)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.item()

        optimizer.step(closure)


def travel(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], Any]:
    tensors, packed = pack_optimizer(optimizer)
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return copies, msgpack.decode(msgpack.encode(packed))


def test_the_copy_goes_on_exactly_as_the_original(make: Make) -> None:
    params, others = parameters(), parameters()
    optimizer, copy = make(params), make(others)
    step(optimizer, params, 3)
    for param, other in zip(params, others, strict=True):
        other.data.copy_(param.data)
    load_optimizer(copy, *travel(optimizer))
    assert str(copy.state_dict()) == str(optimizer.state_dict())
    step(optimizer, params, 3)
    step(copy, others, 3)
    assert all(torch.equal(param, other) for param, other in zip(params, others, strict=True))


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.ASGD])
def test_what_is_kept_more_exactly_than_the_parameters_comes_as_it_is(make: Make) -> None:
    weights = torch.arange(6.0, dtype=torch.bfloat16)
    params, others = [torch.nn.Parameter(weights.clone())], [torch.nn.Parameter(weights.clone())]
    optimizer, copy = make(params), make(others)
    step(optimizer, params, 3)
    others[0].data.copy_(params[0].data)
    load_optimizer(copy, *travel(optimizer))
    assert str(copy.state_dict()) == str(optimizer.state_dict())
    step(optimizer, params, 20)
    step(copy, others, 20)
    assert torch.equal(params[0], others[0])
    assert str(copy.state_dict()) == str(optimizer.state_dict())


@pytest.mark.parametrize(
    "make",
    [partial(torch.optim.AdamW, fused=True), partial(torch.optim.SGD, momentum=0.9, fused=True)],
    ids=["AdamW", "SGD"],
)
def test_a_fused_optimizer_goes_on_too_where_the_memory_is_not_contiguous(make: Make) -> None:
    weights = torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last)
    params, others = [torch.nn.Parameter(weights.clone())], [torch.nn.Parameter(weights.clone())]
    optimizer, copy = make(params), make(others)
    step(optimizer, params, 3)
    others[0].data.copy_(params[0].data)
    tensors, packed = travel(optimizer)
    load_optimizer(copy, {name: tensor.contiguous() for name, tensor in tensors.items()}, packed)  # as a state comes
    step(optimizer, params, 3)
    step(copy, others, 3)
    assert torch.equal(params[0], others[0])


@pytest.mark.parametrize(
    "value", [print, object(), {1.5: 2}, [torch.ones(1), {"deep": print}], torch.eye(2).to_sparse()]
)
def test_what_cannot_travel_is_named(value: object) -> None:
    optimizer = torch.optim.SGD(parameters())
    optimizer.state[optimizer.param_groups[0]["params"][1]]["odd"] = value
    with pytest.raises(StateError, match=r"optimizer/1/odd.* newcomers cannot download.*share_state=False"):
        pack_optimizer(optimizer)


GOOD = {"tensor": "optimizer/0/exp_avg"}


@pytest.mark.parametrize(
    "packed",
    [
        None,
        {"class": "AdamW"},
        {"class": 5, "state": {"dict": []}},
        {"class": "AdamW", "state": {"list": []}},
        {"class": "AdamW", "state": {"dict": [[0]]}},
        {"class": "AdamW", "state": {"dict": [[None, 1]]}},
        {"class": "AdamW", "state": {"dict": [[0, {"other": 1}]]}},
        {"class": "AdamW", "state": {"dict": [[0, 1]]}},
        {"class": "AdamW", "state": {"dict": [[2, {"dict": [["exp_avg", GOOD]]}]]}},
        {"class": "AdamW", "state": {"dict": [[0, {"dict": [["exp_avg", {"tensor": "lost"}]]}]]}},
        {"class": "AdamW", "state": {"dict": [[0, {"dict": [["exp_avg", {"tensor": "weight"}]]}]]}},
        {"class": "AdamW", "state": {"dict": [[0, {"dict": [["exp_avg", msgpack.Ext(1, b"")]]}]]}},
    ],
)
def test_malformed_states_change_nothing(packed: object) -> None:
    params = parameters()
    optimizer = torch.optim.AdamW(params)
    step(optimizer, params, 1)
    before = str(optimizer.state_dict())
    tensors = {"optimizer/0/exp_avg": torch.ones(4, 3), "weight": torch.ones(4, 3)}
    with pytest.raises(StateError):
        load_optimizer(optimizer, tensors, packed)
    assert str(optimizer.state_dict()) == before


RMSPROP: Make = partial(torch.optim.RMSprop, lr=0.1)


@pytest.mark.parametrize(
    ("make", "option", "value", "entry"),
    [
        (torch.optim.Adam, "amsgrad", True, "max_exp_avg_sq"),
        (torch.optim.AdamW, "amsgrad", True, "max_exp_avg_sq"),
        (RMSPROP, "centered", True, "grad_avg"),
        (RMSPROP, "momentum", 0.9, "momentum_buffer"),
    ],
)
def test_the_state_of_other_options_is_refused_by_their_name(
    make: Callable[..., torch.optim.Optimizer], option: str, value: object, entry: str
) -> None:
    params, others = parameters(), parameters()
    plain, special = make(params), make(others, **{option: value})
    load_optimizer(special, *travel(plain))  # neither has made a step
    load_optimizer(plain, *travel(special))
    step(plain, params, 1)
    step(special, others, 1)
    before = str(plain.state_dict()), str(special.state_dict())
    with pytest.raises(StateError, match=f"lacks '{entry}', but .* has {option}={value}; use the same {option}"):
        load_optimizer(special, *travel(plain))
    with pytest.raises(StateError, match=f"has '{entry}', but .* has {option}=(False|0); use the same {option}"):
        load_optimizer(plain, *travel(special))
    assert before == (str(plain.state_dict()), str(special.state_dict()))


def test_initial_lr_is_there_for_schedulers_and_not_the_same_tensor() -> None:
    optimizer = OPTIMIZERS["AdamW with a tensor as lr"](parameters())
    set_initial_lr(optimizer)
    optimizer.param_groups[0]["lr"].fill_(7.0)
    set_initial_lr(optimizer)
    assert optimizer.param_groups[0]["initial_lr"].item() == pytest.approx(0.1)

"""The effect of a delayed average on second moments."""

import torch
from hypothesis import given, strategies as st

from averaging.strategies.local_sgd import DelayedUpdate, _add_to_moment


@given(
    before=st.floats(0, 1e6, width=32),
    other=st.floats(0, 1e6, width=32),
    gradients=st.lists(st.floats(-1e3, 1e3, width=32), max_size=8),
    decay=st.floats(0, 1),
)
def test_a_second_moment_is_at_least_0_and_at_most_what_the_whole_change_makes_of_it(
    before: float, other: float, gradients: list[float], decay: float
) -> None:
    sent = torch.tensor([before])
    moment = sent.clone()
    for gradient in gradients:
        moment = decay * moment + (1 - decay) * gradient**2
    change = (sent + other) / 2 - sent
    result = moment.clone()
    _add_to_moment(result, change, sent)
    assert result >= 0
    assert min(moment, moment + change) <= result + 1e-3
    assert result <= max(moment, moment + change) + 1e-3


def test_the_change_is_added_to_what_was_trained_meanwhile() -> None:
    weight = torch.tensor([1.0, 2.0])
    tensors = {
        "weight": weight,
        "tied": weight[:1],
        "momentum": torch.tensor([-1.0, 3.0]),
        "square": torch.tensor([9.0, 9.0]),
        "reset": torch.tensor([1.0, 4.0]),
    }
    late = DelayedUpdate(tensors, {name: [name] for name in ("momentum", "square", "reset")})
    tensors["square"].copy_(torch.tensor([4.0, 0.0]))
    late.copy()
    sent = {name: tensor.tolist() for name, tensor in tensors.items()}
    weight.add_(1.0)
    tensors["momentum"].zero_()
    tensors["square"].mul_(0.25)
    tensors["reset"].copy_(torch.tensor([-1.0, 1.0]))  # no second moment any more, so it gets the whole change
    assert {name: copy.tolist() for name, copy in late.copies.items()} == sent
    for name, change in (
        ("weight", [10.0, -10.0]), ("tied", [10.0]), ("momentum", [-2.0, 2.0]), ("square", [-3.0, 0.0]),
        ("reset", [1.0, 1.0]),
    ):  # fmt: skip
        late.copies[name].copy_(torch.tensor(change))
    late.add()
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "weight": [12.0, -7.0],
        "tied": [12.0],
        "momentum": [-2.0, 2.0],
        "square": [0.25, 0.0],
        "reset": [0.0, 2.0],
    }

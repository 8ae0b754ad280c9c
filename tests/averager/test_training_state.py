"""A newcomer refuses invalid states and changes nothing then."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from averaging.config import NonFinite
from averaging.errors import StateError
from averaging.state.manifest import State
from averaging.strategies import LocalSGD
from averaging.training.context import StrategyContext
from averaging.training.optimizer_state import GroupProgress, pack_optimizer
from averaging.training.parameter_copies import WeightModes
from averaging.training.training_state import TrainingState

SOUND = {"weight": torch.ones(2), "buffer/seen": torch.ones(2, dtype=torch.int64)}


class Newcomer:
    """The state of a training that has made three steps, with a buffer."""

    def __init__(self) -> None:
        weight = torch.nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([weight], lr=0.1)
        self.training = SimpleNamespace(
            optimizer=self.optimizer,
            progress=GroupProgress(self.optimizer),
            modes=WeightModes(self.optimizer, nullcontext),
            local_step=3,
            tensors={"weight": weight},
            shared_buffers={"buffer/seen": torch.zeros(2, dtype=torch.int64)},
            donates=True,
            drift=SimpleNamespace(since=0),
            peer=SimpleNamespace(config=SimpleNamespace(non_finite=NonFinite.REFUSE)),
        )
        self.buffer = self.training.shared_buffers["buffer/seen"]
        self.strategy = LocalSGD(5)
        self.state = TrainingState(cast(StrategyContext, self.training), self.strategy, None)

    def take_over(self, version: int = 1, tensors: dict[str, torch.Tensor] | None = None, **user: Any) -> None:
        packed = pack_optimizer(self.optimizer)[1]
        state = {"local_step": 7, "optimizer": packed, "strategy": {"kind": "LocalSGD", "since": 2}} | user
        known = SOUND if tensors is None else tensors
        self.state.take_over(State(version, known, {name: value for name, value in state.items() if value != "none"}))


def test_a_sound_state_is_taken_over() -> None:
    newcomer = Newcomer()
    newcomer.take_over()
    assert (newcomer.training.local_step, newcomer.buffer.tolist()) == (7, [1, 1])
    assert newcomer.strategy.state().user == {"since": 2}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": 0}, "belongs to no run"),
        ({"local_step": -1}, "step counter is -1"),
        ({"local_step": 2**64 - 1}, "step counter is 18446744073709551615"),  # the next could not be packed
        ({"strategy": {"history": 5}}, "'5' is not the history of a run"),
        ({"strategy": [5]}, r"its strategy is \[5\]"),
        ({"strategy": {"since": float("nan")}}, "a number in it is NaN or infinite"),
        ({"optimizer": {"class": "SGD", "state": {"dict": [[0, float("inf")]]}}}, "a number in it is NaN or infinite"),
        ({"strategy": {"kind": "DiLoCo"}}, "its strategy is DiLoCo, but this peer's is LocalSGD"),
        ({"strategy": {"since": "2"}}, "'2' under 'since', not a number of steps"),
        ({"strategy": {"since": 2**64 - 1}}, "18446744073709551615 under 'since', not a number of steps"),
        ({"optimizer": 5}, "the state of its optimizer is unreadable"),
        ({"tensors": {}}, "the state lacks 'buffer/seen'"),
        ({"tensors": {"buffer/seen": torch.ones(3)}}, r"is torch.float32 \[3\] in the state, but torch.int64 \[2\]"),
        ({"tensors": SOUND | {"bias": torch.ones(2)}}, r"it averages 2 tensors, this peer 1 \('bias' only there\)"),
        ({"tensors": SOUND | {"buffer/mean": torch.ones(2)}}, r"2 tensors, this peer 1 \('buffer/mean' only there\)"),
    ],
)
def test_an_unsound_state_changes_nothing(changed: dict[str, Any], message: str) -> None:
    newcomer = Newcomer()
    with pytest.raises(StateError, match=message):
        newcomer.take_over(**changed)
    assert (newcomer.training.local_step, newcomer.buffer.tolist()) == (3, [0, 0])
    assert newcomer.strategy.state().user == {"since": 0}


def test_of_a_state_without_a_training_only_the_parameters_are_for_a_newcomer(caplog: pytest.LogCaptureFixture) -> None:
    newcomer = Newcomer()
    newcomer.take_over(optimizer="none")
    assert newcomer.training.local_step == 3
    assert "only the parameters are taken over" in caplog.text

"""The modes of a schedule-free optimizer at an averager that is alone."""

import pytest
import torch

from averaging import ConfigError, DecentralizedAverager
from tests.schedule_free import BETA, ScheduleFreeSGD
from tests.support.alone import Make, linear, train


def evaluated(opt: DecentralizedAverager) -> list[torch.Tensor]:
    """The evaluation weights by their definition."""
    groups = opt.param_groups
    weights = [parameter for group in groups for parameter in group["params"]]
    return [(weight - (1 - BETA) * opt.state[weight]["z"]).detach() / BETA for weight in weights]


@pytest.fixture
def model() -> torch.nn.Linear:
    return linear()


@pytest.fixture
def opt(model: torch.nn.Linear, make: Make) -> DecentralizedAverager:
    averager = make(ScheduleFreeSGD(model.parameters()), sync_every=2)
    averager.train()
    train(model, averager, 5)
    return averager


def bits(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_an_evaluation_changes_no_bit_of_the_training_weights(
    model: torch.nn.Linear, opt: DecentralizedAverager
) -> None:
    trained, expected = bits(model), evaluated(opt)
    for _ in range(3):
        opt.eval()
        opt.eval()
        assert all(map(torch.allclose, bits(model), expected))
        opt.train()
        opt.train()
        assert same(bits(model), trained)
    with opt.evaluation_weights():
        assert all(map(torch.allclose, bits(model), expected))
    assert same(bits(model), trained)


def test_a_step_with_the_evaluation_weights_is_refused_at_once(
    model: torch.nn.Linear, opt: DecentralizedAverager
) -> None:
    opt.eval()
    with pytest.raises(ConfigError, match=r"ScheduleFreeSGD is in evaluation mode; call opt.train\(\)"):
        opt.step()
    opt.train()
    opt.step()


def test_a_loaded_checkpoint_has_the_mode_in_which_it_was_saved(
    model: torch.nn.Linear, opt: DecentralizedAverager
) -> None:
    opt.eval()
    saved, weights = opt.state_dict(), bits(model)
    opt.train()
    train(model, opt, 1)
    model.load_state_dict(dict(zip(("weight", "bias"), weights, strict=True)))
    opt.load_state_dict(saved)
    assert same(bits(model), weights)
    with pytest.raises(ConfigError, match="evaluation mode"):
        opt.step()


def test_evaluation_weights_that_are_not_averaged_are_named(
    model: torch.nn.Linear, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    class Hidden(ScheduleFreeSGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            return

    averager = make(Hidden(model.parameters()), sync_every=1)
    averager.train()
    train(model, averager, 3)
    told = [record.getMessage() for record in caplog.records if "evaluation weights" in record.getMessage()]
    assert len(told) == 1
    assert "Hidden has training and evaluation weights" in told[0]

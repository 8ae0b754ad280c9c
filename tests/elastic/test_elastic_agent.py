"""What the agent of torchrun counts and shows: the loss of another node costs no restart, a refusal is one line."""

from __future__ import annotations

import sys
import types

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

from averaging.elastic import handler as elastic_agent
from averaging.elastic.handler import RestartBudget, report_in_one_line


class Agent(LocalElasticAgent):
    """An agent without workers."""

    def __init__(self, restarts: int) -> None:
        self._remaining_restarts = restarts
        self.budget = RestartBudget()

    def meets(self, *, failed: bool, lost: bool) -> int:
        """As torch's agent after a failure of its workers, or after a change of the nodes."""
        self._remaining_restarts -= failed
        self._calls_the_handler(lost)
        return self._remaining_restarts

    def _calls_the_handler(self, lost: bool) -> None:
        self.budget.settle(lost)


def test_the_loss_of_another_node_costs_no_restart() -> None:
    agent = Agent(1)
    assert agent.meets(failed=False, lost=False) == 1
    assert agent.budget.left == 1
    for _ in range(5):
        assert agent.meets(failed=True, lost=True) == 1
    assert agent.meets(failed=False, lost=True) == 1
    assert agent.meets(failed=True, lost=False) == 0  # its own failure does


def test_own_failures_before_and_after_a_loss_count() -> None:
    agent = Agent(3)
    agent.meets(failed=False, lost=False)
    assert agent.meets(failed=True, lost=False) == 2
    assert agent.meets(failed=True, lost=True) == 2
    assert agent.meets(failed=True, lost=False) == 1


def test_without_an_agent_nothing_is_given_back() -> None:
    assert not RestartBudget().settle(lost=True)


def fails(error: Exception, name: str) -> types.FunctionType:
    """A function in another file, that raises `error` as the rendezvous does."""
    code = compile("def run():\n  with told():\n    raise error", name, "exec")
    names = {"told": report_in_one_line, "error": error}
    exec(code, names)
    function = names["run"]
    assert isinstance(function, types.FunctionType)
    return function


@pytest.mark.parametrize("own", [True, False], ids=["torchrun", "another program"])
def test_torchrun_shows_a_refusal_in_one_line(
    own: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    error = RendezvousClosedError("the job has ended")
    with pytest.raises(RendezvousClosedError) as raised:
        fails(error, str(elastic_agent.TORCHRUN) if own else "mine.py")()
    sys.excepthook(type(error), error, raised.tb)
    told = capsys.readouterr().err
    assert (told == "torchrun: the job has ended\n") is own
    assert ("Traceback" in told) is not own
    other = ValueError("something else")
    sys.excepthook(ValueError, other, None)
    assert "ValueError: something else" in capsys.readouterr().err

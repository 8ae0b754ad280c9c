"""Peers of unequal speed in processes of their own: nobody waits for the slow one, and none of its steps is lost."""

import pytest

from benchmarks.unequal import Machine, measure, summary

STEP = 0.02


@pytest.mark.long  # tests/strategies/test_quorum_simulated.py has it in simulation
def test_processes_of_unequal_speed_lose_no_step_with_a_quorum() -> None:
    """The share of the time that is spent in training depends on what else runs here; `benchmarks.unequal` has it."""
    machines = [Machine("fast", STEP), Machine("fast", STEP), Machine("slow", 10 * STEP)]
    figures = summary(measure(machines, 2, 40, 6.0), {})
    assert figures["failed"] == ""
    assert figures["rounds"] >= 3
    assert figures["steps_averaged"] == figures["steps_made"]
    assert figures["latest"] >= 1
    slow, fast = figures["steps"]["2 slow"], figures["steps"]["0 fast"]
    assert fast > 3 * slow  # which it could not if it waited for 40 steps of the slow one

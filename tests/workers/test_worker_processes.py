"""Model workers in processes of their own: killed, stopped and started again; masters killed and started twice."""

import json
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from averaging.errors import WorkerError
from averaging.rl.workers import MasterWorker, StepResult
from tests.support.processes import JsonProcess
from tests.workers.model_worker import plan_of

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


class Site:
    """Two actors and a reward."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.processes: dict[str, JsonProcess] = {}
        self._all: list[JsonProcess] = []
        self.endpoints: dict[str, str] = {}

    def launch(self, **options: Any) -> JsonProcess:
        command = ("python", "-m", "tests.workers.model_worker", json.dumps(options))
        self._all.append(self._stack.enter_context(JsonProcess(*command)))
        return self._all[-1]

    def start(self, name: str, **options: Any) -> None:
        """Starts a worker, at its earlier address if it has had one."""
        listen = self.endpoints.get(name, "127.0.0.1:0")
        model = "actor" if name.startswith("a") else "reward"
        self.processes[name] = self.launch(name=name, model=model, listen=listen, **options)

    def start_all(self, **options: dict[str, Any]) -> None:
        for name in ("a0", "a1", "r0"):
            self.start(name, **options.get(name, {}))
        self.await_ready(*self.processes)

    def await_ready(self, *names: str) -> None:
        for name in names:
            self.endpoints[name] = self.processes[name].expect("ready")["endpoint"]

    def trained(self) -> set[str]:
        """The samples that were trained."""
        for process in self._all:
            process.drain()
        events = [event for process in self._all for event in process.events("train_step")]
        return {sample for event in events for sample in event["samples"]}


@pytest.fixture
def site() -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(stack)


def step_of(master: MasterWorker) -> StepResult:
    """The next step, as soon as no worker is lost."""
    while True:
        try:
            return master.step()
        except WorkerError as error:
            if not error.lost:
                raise
            time.sleep(0.05)


def test_a_worker_is_killed_and_comes_back(site: Site) -> None:
    site.start_all(a1={"hang_at": 2})
    with MasterWorker(plan_of(site.endpoints), attach_timeout=20.0) as master:
        master.initialize()
        master.step()
        victim = site.processes["a1"]
        assert victim.expect("generate")["step"] == 1

        def kill() -> None:
            assert victim.expect("generate")["step"] == 2
            victim.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(WorkerError, match="a1 at .* is lost") as error:
            master.step()
        killer.join()
        assert error.value.lost
        assert "silent" not in master.lost["a1"]  # the death of a process ends its connections at once
        site.start("a1")
        site.await_ready("a1")
        result = step_of(master)
        assert (result.step, len(result.samples)) == (2, 8)
        # The new process has the weight of the other rank, which has made two steps.
        assert result.stats["actor_train"]["weight"] == 2.0
        site.processes["a1"].expect("train_step")
        site.processes["a0"].expect("train_step")


def test_a_master_is_killed_and_another_one_goes_on(site: Site) -> None:
    site.start_all()
    first = site.launch(endpoints=site.endpoints, steps=1000)
    first.expect("attached")
    first.expect("step")
    second = site.launch(endpoints=site.endpoints, steps=1000)
    assert "serves another master" in second.expect("refused")["error"]
    first.expect("step")
    first.kill()
    first.wait()
    steps = [event["step"] for event in first.events("step")]
    assert steps == list(range(1, len(steps) + 1))
    third = site.launch(endpoints=site.endpoints, steps=steps[-1] + 5)
    third.expect("attached")
    assert third.wait() == 0
    later = [event["step"] for event in third.events("step")]
    # The killed master may have completed steps whose lines were not read.
    assert later[0] in range(steps[-1] + 1, steps[-1] + 20)
    assert later == list(range(later[0], steps[-1] + 6))
    samples = {sample for event in [*first.events("step"), *third.events("step")] for sample in event["samples"]}
    assert samples <= site.trained()


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_any_moment(site: Site, seed: int) -> None:
    """Until 60 steps are complete, an actor is killed or stopped again and again, and each step trains its samples."""
    rng = random.Random(seed)
    site.start_all()
    with MasterWorker(plan_of(site.endpoints), stall_timeout=2.0) as master:
        master.initialize()
        complete: list[StepResult] = []
        while len(complete) < 60:
            if rng.random() < 0.3:
                victim = site.processes[rng.choice(["a0", "a1"])]
                if rng.random() < 0.7:
                    victim.kill()
                    victim.wait()
                    site.start(next(name for name, process in site.processes.items() if process is victim))
                else:
                    victim.signal(signal.SIGSTOP)
                    with suppress(WorkerError):
                        complete.append(master.step())
                    victim.signal(signal.SIGCONT)
            complete.append(step_of(master))
        assert [result.step for result in complete] == list(range(1, len(complete) + 1))
        assert all(len(result.samples) == 8 for result in complete)
    trained = site.trained()
    assert all(set(result.samples) <= trained for result in complete)

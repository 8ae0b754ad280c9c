"""The batch scripts of deploy/slurm on a real Slurm: sites train, leave when they are warned, and go on later."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.slurm.conftest import NODES, Cluster, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

PATIENCE = 180.0
"""Seconds for a site to start, with torch in several processes on a busy machine."""


class SlurmJob:
    """A job of one of the scripts, and what it has printed."""

    def __init__(self, cluster: Cluster, script: str, *options: str) -> None:
        self._cluster = cluster
        here = Path(__file__).parents[2]
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(here),
            "PROCESSES_PER_NODE": "1",
            "LISTEN_AT_NODE": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        cluster.environment.update(environment)
        self.id = re.findall(r"\d+", cluster.run("sbatch", *options, script))[0]

    @property
    def output(self) -> str:
        path = self._cluster.jobs / f"averaging-{self.id}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def printed(self, pattern: str, times: int = 1, seconds: float = PATIENCE) -> list[str]:
        """Waits for so many lines that match, and returns what their groups hold."""
        found: list[str] = []

        def is_there() -> bool:
            found[:] = re.findall(pattern, self.output, re.MULTILINE)
            return len(found) >= times

        until(is_there, seconds, lambda: f"{times} of {pattern!r} in\n{self.output[-6000:]}\n{self._cluster.log()}")
        return found

    def warn(self) -> None:
        """What Slurm does before the time limit."""
        self._cluster.run("scancel", "--signal=USR1", "--batch", self.id)

    def start_again(self, components: int = 1) -> None:
        """Waits for the requeue, and has the job begin in two seconds and not after two minutes.

        Not in the second in which the job was ended: slurmd refuses a credential of it ("Job already killed").
        """
        until(lambda: "Restarts=1" in self.shown() and "JobState=PENDING" in self.shown(), PATIENCE, self.shown)
        for component in [self.id, *(f"{self.id}+{number}" for number in range(1, components))]:
            self._cluster.run("scontrol", "update", f"JobId={component}", "StartTime=now+2")

    def shown(self) -> str:
        return self._cluster.run("scontrol", "show", "job", self.id, check=False)


def test_sites_of_one_job_average_leave_when_they_are_warned_and_go_on_after_a_requeue(cluster: Cluster) -> None:
    """A heterogeneous job: the first site has two nodes, the second one."""
    job = SlurmJob(cluster, "sites.sbatch")
    ports = [endpoint.partition(":")[2] for endpoint in job.printed(r"^(\S+) trains from step 0$", 2)]
    assert ports == ["4222"] * 2
    job.printed(r"^step \d+: loss [\d.]+, 1 other sites$", 2)
    job.warn()
    job.printed(r"^the averager of run 'slurm' has left$", 3)  # at each rank
    (first, second) = map(int, job.printed(r"^ends at step (\d+), warned$", 2))
    assert (cluster.jobs / f"checkpoint-{job.id}").is_dir()
    job.start_again(2)
    steps = {int(step) for step in job.printed(r"^\S+ trains from step ([1-9]\d*)$", 2)}
    assert len(steps) == 1  # both have the checkpoint of the first site
    assert steps <= {first, second}
    assert job.output.count("trains from step 0") == 2


def test_a_site_is_warned_by_slurm_itself_before_its_time_limit(cluster: Cluster) -> None:
    job = SlurmJob(cluster, "site.sbatch", "--time=60", "--signal=B:USR1@120")
    (endpoint,) = job.printed(r"^(\S+) trains from step 0$")
    assert endpoint in {f"{node}:4222" for node in NODES[:2]}
    assert not job.printed(r"^warned at", 0)
    cluster.run("scontrol", "update", f"JobId={job.id}", "EndTime=now+150")
    job.printed(r"^warned at")
    (step,) = job.printed(r"^ends at step (\d+), warned$")
    job.start_again()
    assert job.printed(r"^\S+ trains from step ([1-9]\d*)$") == [step]

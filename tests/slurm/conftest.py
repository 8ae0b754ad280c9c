"""A cluster of Slurm on this machine, which `make test-slurm` runs as root: munged, slurmctld and four slurmds."""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.certificates import write
from tests.support.ports import free_port

NODES = [f"127.0.0.{number}" for number in range(11, 15)]
"""The names of the nodes are addresses of this machine, so that each can listen on the ports of the scripts."""

SCRIPTS = Path(__file__).parents[2] / "deploy" / "slurm"


def until(condition: Callable[[], bool], seconds: float, why: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s\n{why()}"
        time.sleep(0.5)


class Cluster:
    """Four nodes, and a directory from which jobs are submitted."""

    def __init__(self, directory: Path, jobs: Path) -> None:
        self._directory, self.jobs = directory, jobs
        self.environment = os.environ | {"SLURM_CONF": str(directory / "slurm.conf")}

    def configure(self) -> None:
        host, directory = socket.gethostname().partition(".")[0], self._directory
        for name in ("state", "spool"):
            (directory / name).mkdir()
        key = directory / "munge.key"
        key.touch(0o400)
        key.write_bytes(secrets.token_bytes(1024))
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=16 State=UNKNOWN"
            for node in NODES
        ]
        lines = [
            "ClusterName=averaging",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={free_port()}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={directory}/munge.socket",
            f"SlurmctldPidFile={directory}/slurmctld.pid",
            f"SlurmdPidFile={directory}/slurmd-%n.pid",
            f"SlurmdSpoolDir={directory}/spool/%n",
            f"StateSaveLocation={directory}/state",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "MpiDefault=none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "SlurmdParameters=config_overrides",  # this machine has fewer processors
            "SchedulerParameters=sched_interval=1,bf_interval=1",
            "PlugStackConfig=/dev/null",
            *nodes,
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        ]
        (directory / "slurm.conf").write_text("\n".join(lines) + "\n")

    def start(self, stack: ExitStack) -> None:
        directory, conf = self._directory, str(self._directory / "slurm.conf")
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid"}
        files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        self._daemon(
            stack, "munged", "-F", "--force", *(f"--{name}={directory / file}" for name, file in files.items())
        )
        until((directory / "munge.socket").exists, 30, self.log)
        self._daemon(stack, "slurmctld", "-D", "-f", conf)
        for node in NODES:
            self._daemon(stack, "slurmd", "-D", "-N", node, "-f", conf)
        until(lambda: self.run("sinfo", "-h", "-o", "%D %t", check=False).split() == ["4", "idle"], 60, self.log)
        stack.callback(self._cancel_all)

    def _daemon(self, stack: ExitStack, *command: str) -> None:
        with (self._directory / "log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)

    def _cancel_all(self) -> None:
        self.run("scancel", "--me", check=False)
        until(lambda: not self.run("squeue", "-h"), 90, self.log)

    def run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(command, cwd=self.jobs, env=self.environment, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def log(self) -> str:
        return (self._directory / "log").read_text(errors="replace")[-5000:]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster of its own for each test, whose directory of jobs has the scripts as they are delivered."""
    with ExitStack() as stack:
        # Short, because the daemons make sockets with long names in it.
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        jobs = directory / "jobs"
        shutil.copytree(SCRIPTS, jobs)
        files = write(jobs / "credentials", *NODES)
        for option, name in (("tls_ca", "ca.pem"), ("tls_cert", "site.pem"), ("tls_key", "site.key")):
            files[option].rename(jobs / "credentials" / name)
        cluster = Cluster(directory, jobs)
        cluster.configure()
        cluster.start(stack)
        yield cluster

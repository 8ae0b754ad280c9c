"""A peer in a worker of torchrun that leaves: torchrun ends with it, and starts nothing again."""

from __future__ import annotations

import json
import signal

import pytest

from tests.elastic.jobs import PATIENCE
from tests.support.processes import JsonProcess, averaging_command

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def job() -> JsonProcess:
    trains = {"strategy": "local", "way": "until ended", "every": 2, "peers": 1, "patient": True}
    options = json.dumps({**trains, "options": {"leave_on": ["SIGTERM", "SIGUSR1"]}})
    torchrun = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=3")
    return JsonProcess(*torchrun, SIGNALS, "-m", "tests.support.trainer", options)


def test_a_worker_that_is_asked_to_leave_is_not_started_again() -> None:
    with job() as process:
        endpoint = process.expect("ready", PATIENCE)["endpoint"]
        told = averaging_command("leave", endpoint)
        assert told.returncode == 0, told.stderr
        assert process.wait(PATIENCE) != 0
        assert len(process.events("ready")) == 1
        assert "the averager of run 'run' has left" in process.stderr


def test_a_worker_leaves_on_a_signal_that_torchrun_hands_on() -> None:
    with job() as process:
        process.expect("ready", PATIENCE)
        process.signal(signal.SIGUSR1)
        assert process.wait(PATIENCE) != 0
        assert len(process.events("ready")) == 1
        assert "the averager of run 'run' has left" in process.stderr

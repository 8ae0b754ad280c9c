"""Random sequences of calls at the original `Synchronizer` and at ours: the same answers but for its faults.

`make test-synchronizer` creates the environment of the original, and sets SYNCHRONIZER_PYTHON to its Python.

The faults, after which a test sets the original right: a time-out leaves an explorer in REQUIRE_SYNC; the version goes
back; a transfer that fails has raised the version. A refused change of a status also leaves a count below zero. Three
others, which the sequences avoid: before a trainer has come, it says that the trainer has stopped; it names the folder
of a checkpoint that does not exist; and it ignores a checkpoint of an earlier step.
"""

import asyncio
import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from averaging.rl.synchronizer import RunningStatus, Synchronizer, SynchronizerConfig
from tests.interop.manual_time import ManualTimeLoop, decoded, encoded

pytestmark = pytest.mark.interop

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("SYNCHRONIZER_PYTHON", str(ROOT / ".venv-synchronizer" / "bin" / "python"))

RUNNING, REQUIRE_SYNC, STOPPED = RunningStatus
TIMEOUT = 10.0
SEQUENCES, CALLS = 100, 60


class Original:
    """The original in its process."""

    def __init__(self) -> None:
        program = str(Path(__file__).with_name("original_synchronizer.py"))
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [PYTHON, program], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )

    def do(self, name: str, *arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        with self._process as process:
            process.kill()


@pytest.fixture(scope="module")
def original() -> Iterator[Original]:
    process = Original()
    yield process
    process.close()


class Module:
    """A module of ours that notes its calls, without the rank, which the original does not have."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.alive = True
        self._name, self._log = name, log

    def is_alive(self) -> bool:
        return self.alive

    def _note(self, method: str, *arguments: Any) -> None:
        if not self.alive:
            raise ConnectionError(self._name)
        self._log.append([self._name, method, list(arguments)])

    def setup_weight_sync_group(self, address: str, port: int, size: int, name: str, timeout: float, _: int) -> None:
        self._note("setup_weight_sync_group", address, port, size, name, timeout)

    def teardown_weight_sync_group(self) -> None:
        self._note("teardown_weight_sync_group")


class Trainer(Module):
    def get_weight_sync_info(self) -> Any:
        self._note("get_weight_sync_info")
        return "10.0.0.1", 1234, [["w", "float32", [2]]]


class Explorer(Module):
    def set_state_dict_meta(self, meta: Any) -> None:
        self._note("set_state_dict_meta", meta)


class Ours:
    """Our synchronizer with the same commands as the program of the original."""

    def __init__(self, folder: Path, method: str) -> None:
        self.loop = ManualTimeLoop()
        self.log: list[Any] = []
        self.modules = {"trainer": Trainer("trainer", self.log), "explorer": Explorer("explorer", self.log)}
        config = SynchronizerConfig(
            sync_method=method, sync_timeout=TIMEOUT, checkpoint_dir=folder, group_name="group", namespace=str(folder)
        )

        async def create() -> Synchronizer:
            return Synchronizer.get_actor(config, module=self.modules["trainer"], member="the trainer's module")

        self.synchronizer = self.loop.run_until_complete(create())
        self.loop.settle()
        self.pending: dict[str, asyncio.Task[Any]] = {}

    def do(self, name: str, *arguments: Any) -> dict[str, Any]:
        match name:
            case "advance":
                self.loop.now += arguments[0]
            case "die":
                self.modules[arguments[0]].alive = False
            case "add_module":
                module = self.modules[arguments[0]]
                self.loop.start(self.synchronizer.add_module(module, member=f"the {arguments[0]}'s module"))
            case _:
                number, method, given = arguments
                waiting = len(self.synchronizer._state.waits)
                self.pending[number] = task = self.loop.start(self._call(method, given))
                # Until the version is on the disk.
                while not task.done() and len(self.synchronizer._state.waits) == waiting:
                    self.loop.run_until_complete(_a_moment())
        self.loop.settle()
        return {"ended": self._ended(), "state": self.state()}

    async def _call(self, method: str, given: list[Any]) -> Any:
        result = getattr(self.synchronizer, method)(*(decoded(argument, RunningStatus) for argument in given))
        result = await result if asyncio.iscoroutine(result) else result
        return None if method == "set_model_state_dict" else encoded(result)  # ours returns the version

    def _ended(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, task in list(self.pending.items()):
            if task.done():
                del self.pending[number]
                error = task.exception()
                found[number] = {"error": error} if error else {"result": task.result()}
        return found

    def state(self) -> dict[str, Any]:
        synchronizer = self.synchronizer
        return {
            "version": synchronizer.model_version,
            "trainer": synchronizer.trainer_status.value,
            "counts": list(synchronizer.explorer_status_counts.values()),
            "modules": synchronizer.module_count,
            "calls": self.log,
        }

    def close(self) -> None:
        self.loop.run_until_complete(self.synchronizer.close())
        for task in self.pending.values():
            task.cancel()
        self.loop.settle()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


async def _a_moment() -> None:
    await asyncio.get_running_loop().run_in_executor(None, lambda: None)


class Pair:
    """Both synchronizers, compared after each call."""

    def __init__(self, original: Original, folder: Path, method: str) -> None:
        self.original, self.ours = original, Ours(folder, method)
        self.original.do("new", str(folder), method, TIMEOUT)
        self.faults: list[str] = []
        self._numbers = 0
        self.waits: dict[str, str] = {}
        self._steps: dict[str, int] = {}

    @property
    def state(self) -> dict[str, Any]:
        return self.ours.state()

    def call(self, method: str, *arguments: Any, wait: str = "") -> None:
        """Calls both; `wait` says who waits, if the call may wait."""
        self._numbers += 1
        number = str(self._numbers)
        if wait:
            self.waits[number] = wait
            if wait == "trainer":
                self._steps[number] = arguments[1]
        before = self.state["version"]
        step = arguments[1] if method == "set_model_state_dict" else None
        self.do("call", number, method, list(arguments), before=before, step=step)

    def do(self, name: str, *arguments: Any, before: int = 0, step: int | None = None) -> None:
        theirs, ours = self.original.do(name, *arguments), self.ours.do(name, *arguments)
        context = f"{name} {arguments}\noriginal: {theirs}\nours: {ours}"
        faults: list[str] = []
        if step is not None and step < before:
            assert ours["state"]["version"] == before + 1, context
            assert theirs["state"]["version"] == step, context
            faults.append("the version goes back")
        assert theirs["ended"].keys() == ours["ended"].keys(), context
        for number, result in ours["ended"].items():
            wait, given = self.waits.pop(number, ""), self._steps.pop(number, 0)
            faults += self._compare(wait, given, theirs, ours, theirs["ended"][number], result, context)
        if faults:
            state, trainer = ours["state"], theirs["state"]["trainer"]
            self.original.do("repair", state["version"], trainer, state["counts"])
            theirs["state"] |= {"version": state["version"], "counts": state["counts"]}
            self.faults += faults
        if "trainer" in self.waits.values():  # the original has raised the version already
            theirs["state"]["version"] = ours["state"]["version"]
        assert theirs["state"] == ours["state"], context

    def _compare(
        self, wait: str, step: int, theirs: Any, ours: Any, other: dict[str, Any], result: dict[str, Any], context: str
    ) -> list[str]:
        """Compares one result; returns the fault by which they differ."""
        assert other.keys() == result.keys(), context
        version, own_version = theirs["state"]["version"], ours["state"]["version"]
        if "error" in result:
            assert (other["error"] == "TimeoutError") == isinstance(result["error"], TimeoutError), context
            if other["error"] == "TimeoutError":
                assert theirs["state"]["counts"][1] > ours["state"]["counts"][1], context
                return ["a time-out leaves a count"]
            refused = theirs["state"]["counts"] != ours["state"]["counts"]
            assert not refused or other["error"] == "AssertionError", context
            return ["a refusal leaves a count"] if refused else []
        if wait == "trainer" and result["result"] is None and version != own_version:
            assert other["result"] is None, context
            assert version == step, context
            return ["a failed transfer raises the version"]
        if other != result:
            assert wait, context
            assert other["result"] == version < own_version == result["result"], context
            return ["the version goes back"]
        return []

    def close(self) -> None:
        self.ours.close()


def status(rng: random.Random) -> dict[str, str]:
    return {"status": rng.choice(list(RunningStatus)).value}


def look(pair: Pair, rng: random.Random) -> None:
    """A call that changes nothing."""
    name = rng.choice(
        [
            "trainer_requires_weight_sync",
            "explorer_requires_sync",
            "get_model_state_dict",
            "get_model_state_dict_iterator",
            "get_state_dict_meta",
            "get_latest_model_version",
            "get_latest_model_path",
        ]
    )
    pair.call(name, *([rng.choice([True, False])] if name.endswith("path") else []))


@pytest.mark.parametrize("seed", range(SEQUENCES))
def test_states_and_waits_for_new_ones(original: Original, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(original, tmp_path, "memory")
    try:
        pair.call("set_trainer_status", status(rng))
        for _ in range(CALLS):
            version = pair.state["version"]
            match rng.randrange(10):
                case 0:
                    pair.call("set_trainer_status", status(rng))
                case 1 | 2:
                    old = rng.choice([None, None, status(rng)])
                    waiting = len(pair.waits)
                    # An explorer that waits does nothing else.
                    if old == {"status": "require_sync"} and pair.state["counts"][1] <= waiting:
                        continue
                    pair.call("set_explorer_status", status(rng), old)
                case 3 | 4:
                    tensors = {"w": [rng.random(), 2.0], "b": rng.randrange(9)}
                    step = max(0, version + rng.choice([-2, 0, 1, 1, 3]))
                    folder = tmp_path / f"global_step_{step}" / "actor"
                    (folder / "huggingface").mkdir(parents=True, exist_ok=True)
                    given = rng.choice([{"tensors": tensors}, {"tensors": tensors}, None, str(folder)])
                    pair.call("set_model_state_dict", given, step)
                case 5 | 6:
                    current = max(0, version + rng.choice([-1, 0, 0, 0, 1]))
                    pair.call("wait_new_model_state_dict", current, wait="new")
                case 7:
                    pair.call("notify_no_new_model_state_dict")
                case 8:
                    pair.do("advance", rng.choice([0.5, 3.0, TIMEOUT]))
                case _:
                    look(pair, rng)
    finally:
        pair.close()


@pytest.mark.parametrize("seed", range(SEQUENCES))
def test_transfers(original: Original, tmp_path: Path, seed: int) -> None:
    """With one explorer, as the original requires."""
    rng = random.Random(seed)
    pair = Pair(original, tmp_path, "nccl")
    try:
        pair.call("set_trainer_status", status(rng))
        pair.call("set_explorer_status", {"status": "running"})
        for _ in range(CALLS):
            version, counts = pair.state["version"], pair.state["counts"]
            trainer, explorer = ("trainer" in pair.waits.values(), "explorer" in pair.waits.values())
            match rng.randrange(8):
                case 0 if not trainer:
                    pair.call("set_trainer_status", status(rng))
                case 1 if not explorer:
                    now = RUNNING if counts[0] else REQUIRE_SYNC if counts[1] else STOPPED
                    pair.call("set_explorer_status", status(rng), {"status": now.value})
                case 2 | 3 if not trainer:
                    step = max(0, version + rng.choice([-2, 0, 1, 1, 3]))
                    pair.call("ready_to_nccl_sync", "trainer", step, wait="trainer")
                case 4 | 5 if not explorer:
                    pair.call("ready_to_nccl_sync", "explorer", version, wait="explorer")
                case 6:
                    pair.do("advance", rng.choice([0.5, 3.0, TIMEOUT]))
                case 7 if not trainer:
                    look(pair, rng)
    finally:
        pair.close()


@pytest.mark.parametrize("seed", range(20))
def test_modules_and_groups(original: Original, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(original, tmp_path, "memory")
    try:
        pair.do("add_module", "explorer")
        alive = {"trainer", "explorer"}
        while alive:
            match rng.randrange(4):
                case 0:
                    pair.do("advance", 1.0)
                case 1 if len(alive) == 2:
                    pair.call("coordinate_weight_sync_setup", *rng.choice([[], [5]]))
                case 2:
                    pair.call("coordinate_weight_sync_teardown")
                case 3 if rng.random() < 0.4:
                    dead = rng.choice(sorted(alive))
                    alive.discard(dead)
                    pair.do("die", dead)
        assert not pair.ours.synchronizer.ended
        pair.do("advance", 1.0)
        pair.do("advance", 1.0)
        assert pair.state["modules"] == 0
        assert pair.ours.synchronizer.ended
    finally:
        pair.close()


def test_an_explorer_that_comes_first(original: Original, tmp_path: Path) -> None:
    folder = str(tmp_path)
    ours = Ours(tmp_path, "memory")
    try:
        original.do("new", folder, "memory", TIMEOUT)
        method = "trainer_requires_weight_sync"
        assert original.do("call", "1", method, [])["ended"] == {"1": {"result": None}}, "as after the end of training"
        assert ours.do("call", "1", method, [])["ended"] == {"1": {"result": False}}
    finally:
        ours.close()


def test_the_three_faults_were_seen(original: Original, tmp_path: Path) -> None:
    """Otherwise the sequences would compare less than they say."""
    pair = Pair(original, tmp_path, "nccl")
    try:
        for new in ("running",):
            pair.call("set_trainer_status", {"status": new})
            pair.call("set_explorer_status", {"status": new})
        pair.call("wait_new_model_state_dict", 0, wait="new")
        pair.do("advance", TIMEOUT)
        pair.call("set_model_state_dict", None, 9)
        pair.call("set_model_state_dict", None, 5)
        pair.call("ready_to_nccl_sync", "trainer", 20, wait="trainer")
        pair.do("advance", TIMEOUT)
        assert pair.faults == [
            "a time-out leaves a count",
            "the version goes back",
            "a failed transfer raises the version",
        ]
    finally:
        pair.close()


def test_checkpoints(original: Original, tmp_path: Path) -> None:
    pair = Pair(original, tmp_path, "checkpoint")
    try:
        latest = tmp_path / "latest_state_dict_iteration.txt"
        for text in ("3", "7"):  # with anything but a number, the original never yields again
            (tmp_path / f"global_step_{text}" / "actor" / "huggingface").mkdir(parents=True)
            latest.write_text(text)
            for _ in range(3):
                pair.original.do("advance", 1.0)
            while pair.state["version"] != int(text):  # the file is read in a thread
                pair.ours.do("advance", 1.0)
                pair.ours.loop.run_until_complete(_a_moment())
            pair.call("get_latest_model_version")
            pair.call("get_latest_model_path", True)
            pair.call("get_model_state_dict")
        assert pair.state["version"] == 7
    finally:
        pair.close()

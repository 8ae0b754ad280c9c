"""A trainer and four explorers in processes of their own: a policy learns to balance a pole from scored episodes.

    python -m examples.explorers

The explorers follow the trainer's weights with a `Synchronizer`, play episodes with the newest version that they have,
and send them back. One explorer is killed on the way, and started again later. At the end there is a plot of the reward
and of each explorer's staleness: how many versions older than the newest one its episodes were.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load, save

from averaging import AveragingError
from averaging.rl.synchronizer import RunningStatus, Synchronizer
from averaging.rl.synchronizer.remote import RemoteSynchronizer
from averaging.rpc import RpcServer
from examples.cart_pole import Episodes, explore, learn, policy_of
from examples.children import ending_children
from examples.command_line import in_order, positive
from examples.outputs import write_plot

EXPLORERS, EPISODES = 4, 8
"""Explorers, and the episodes that each plays at the same time."""

BATCH = 4
"""Messages of explorers in a step of the trainer."""

PLAYED = struct.Struct("<QI")
"""Before the episodes of a message: their version and their size in bytes."""


@dataclass
class Record:
    """What is plotted.

    Attributes:
        rewards: (version, mean reward) of each step.
        staleness: (version, versions behind) of each message, by explorer.
        events: (version, explorer, text).
    """

    rewards: list[tuple[int, float]] = field(default_factory=list)
    staleness: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    events: list[tuple[int, int, str]] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains as configured on the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.explorers", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=positive, default=60, help="steps of training (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the policy (0)")
    parser.add_argument("--plot", type=Path, default=Path("runs/explorers.png"), help="file of the plot (%(default)s)")
    parser.add_argument("--explore", metavar="HOST:PORT", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=positive, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.explore:
        with in_order(parser):
            asyncio.run(be_an_explorer(options.explore, options.number))
        return
    with ending_children(), in_order(parser):
        record = asyncio.run(train(options.steps, options.seed))
    from examples.explorers.plot import draw

    options.plot.parent.mkdir(parents=True, exist_ok=True)
    write_plot(options.plot, lambda file: draw(record, file))
    first, last = (sum(reward for _, reward in part) / len(part) for part in (record.rewards[:5], record.rewards[-5:]))
    print(f"The mean reward rose from {first:.0f} to {last:.0f}; the plot is in {options.plot}.")


# The trainer


async def train(steps: int, seed: int) -> Record:
    """Trains the policy, and returns what is plotted."""
    policy = policy_of(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    record = Record()
    async with (
        Synchronizer(state_dict=policy.state_dict()) as synchronizer,
        RpcServer("127.0.0.1:0", [synchronizer]) as server,
    ):
        await synchronizer.set_trainer_status(RunningStatus.RUNNING)
        team = Team(server.endpoint)
        try:
            for number in range(1, EXPLORERS + 1):
                await team.start(number)
            print(f"{EXPLORERS} explorers follow the trainer at {server.endpoint}", flush=True)
            for step in range(1, steps + 1):
                batch = await team.episodes(BATCH, record, newest=step - 1)
                learn(policy, optimizer, batch)
                await synchronizer.set_model_state_dict(policy.state_dict(), step)
                record.rewards.append((step, sum(episodes.reward for episodes in batch) / BATCH))
                if step == steps // 3:
                    team.kill(3)
                    record.events.append((step, 3, "killed"))
                    print("explorer 3 is killed", flush=True)
                if step == 2 * steps // 3:
                    await team.start(3)
                    record.events.append((step, 3, "started"))
                    print("explorer 3 is started again", flush=True)
                if step % max(1, steps // 10) == 0:
                    following = synchronizer.explorer_status_counts[RunningStatus.RUNNING]
                    print(f"step {step:3}: reward {record.rewards[-1][1]:5.1f}, {following} explorers", flush=True)
        finally:
            await synchronizer.set_trainer_status(RunningStatus.STOPPED)  # also after Ctrl+C, so that explorers end
            await team.end()
    return record


class Team:
    """The processes of the explorers."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._played: asyncio.Queue[tuple[int, int, Episodes] | int] = asyncio.Queue(maxsize=BATCH)

    async def start(self, number: int) -> None:
        """Starts an explorer."""
        command = [sys.executable, "-m", "examples.explorers", "--explore", self._endpoint, "--number", str(number)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        self._processes[number] = process
        reader = asyncio.create_task(self._read(number, process))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)

    def kill(self, number: int) -> None:
        """Kills an explorer, as the out-of-memory killer does."""
        self._processes.pop(number).kill()

    async def episodes(self, count: int, record: Record, newest: int) -> list[Episodes]:
        """Returns the next messages of explorers, and records how stale they are.

        Raises:
            AveragingError: All explorers have ended.
        """
        found: list[Episodes] = []
        while len(found) < count:
            played = await self._played.get()
            if isinstance(played, int):
                if played in self._processes:
                    raise AveragingError(f"explorer {played} has ended; its message is above")
                continue
            number, version, episodes = played
            record.staleness.setdefault(number, []).append((newest, newest - version))
            found.append(episodes)
        return found

    async def end(self) -> None:
        """Ends all processes: those that do not end by themselves in a few seconds are killed."""
        for reader in list(self._readers):
            reader.cancel()
        processes = self._processes.values()
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.gather(*(process.communicate() for process in processes))
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.communicate()  # `wait` would not return while something is left in the pipe

    async def _read(self, number: int, process: asyncio.subprocess.Process) -> None:
        """Reads the messages of an explorer. While the trainer is busy, the explorer waits."""
        assert process.stdout is not None
        with suppress(asyncio.IncompleteReadError):
            while True:
                version, size = PLAYED.unpack(await process.stdout.readexactly(PLAYED.size))
                tensors = load(await process.stdout.readexactly(size))
                await self._played.put((number, version, Episodes(**tensors)))
        await process.wait()
        if self._processes.get(number) is process:
            await self._played.put(number)


# An explorer


async def be_an_explorer(endpoint: str, number: int) -> None:
    """Plays episodes with the newest weights until the trainer has stopped."""
    torch.manual_seed(number)
    policy = policy_of(number)
    async with Synchronizer.connect(endpoint, name=f"explorer {number}") as synchronizer:
        await synchronizer.set_explorer_status(RunningStatus.RUNNING)
        version = await newest_weights(synchronizer, policy)
        while await synchronizer.trainer_requires_weight_sync() is not None:
            if await synchronizer.get_latest_model_version() > version:
                version = await newest_weights(synchronizer, policy)
            played = save(explore(policy, EPISODES).tensors())
            await asyncio.to_thread(send, PLAYED.pack(version, len(played)) + played)


async def newest_weights(synchronizer: RemoteSynchronizer, policy: torch.nn.Module) -> int:
    """Loads the newest weights into the policy, and returns their version."""
    state, version = await synchronizer.get_model_state_dict()
    assert isinstance(state, dict)
    policy.load_state_dict(state)
    return version


def send(message: bytes) -> None:
    """Gives a message to the trainer. It blocks while the trainer reads others."""
    sys.stdout.buffer.write(message)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

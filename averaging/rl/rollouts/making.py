"""Makes groups: rollouts of an environment's tasks, so many at one time, and again if they fail."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from averaging.errors import RolloutError
from averaging.rl.feed import CommandEvent, retry_pauses
from averaging.rl.rollouts.engine import EngineGateway
from averaging.rl.rollouts.environment import VerifiersEnvironment
from averaging.rl.rollouts.posting import GroupPoster
from averaging.rl.rollouts.samples import RolloutOptions, SampledGroup, ScoredSequence, TruncatedMode, is_too_old
from averaging.rl.rollouts.tally import RolloutTally

if TYPE_CHECKING:
    from verifiers.v1 import ModelContext, Task

ATTEMPTS = 3  # how often a rollout that fails is made, before its group is dropped
VERSION_POLL = 1.0  # seconds between two questions for the engine's version while its weights are too old
WAITING_GROUPS = 64  # complete groups that wait for the feed; then no further rollouts are made


class GroupMaker:
    """Makes groups and hands them to `poster`."""

    def __init__(
        self,
        options: RolloutOptions,
        environment: VerifiersEnvironment,
        gateway: EngineGateway,
        poster: GroupPoster,
        tally: RolloutTally,
        emit: Callable[[CommandEvent], None],
    ) -> None:
        self._options, self._environment, self._gateway = options, environment, gateway
        self._poster, self._tally, self._emit = poster, tally, emit
        self._slots = asyncio.Semaphore(options.concurrency)
        # A group takes from both when it is begun. The first gets it back when the group has ended, the second only if
        # it was not posted.
        self._open = asyncio.Semaphore(WAITING_GROUPS + -(-options.concurrency // options.group_size))
        self._left = asyncio.Semaphore(options.max_groups or sys.maxsize)
        poster.on_end = self._end

    async def run(self, context: ModelContext) -> None:
        """Begins one group after the other, until too many are dropped in a row."""
        tasks, number = self._environment.tasks(), 0
        async with asyncio.TaskGroup() as members:
            while True:
                await self._left.acquire()
                await self._open.acquire()
                task = await asyncio.to_thread(next, tasks)
                rollouts = []
                for _ in range(self._options.group_size):
                    await self._until_fresh()
                    await self._slots.acquire()
                    rollouts.append(members.create_task(self._roll_out(number, task, context)))
                members.create_task(self._finish(number, rollouts))
                number += 1

    async def _finish(self, number: int, rollouts: list[asyncio.Task[list[ScoredSequence]]]) -> None:
        made = [await rollout for rollout in rollouts]
        if all(made):
            self._tally.note_complete()
            sequences = [sequence for rollout in made for sequence in rollout]
            self._poster.add(SampledGroup(number, uuid.uuid4().hex, len(made), sequences))
        else:
            self._tally.note_incomplete(number)
            self._end(False)

    def _end(self, posted: bool) -> None:
        self._open.release()
        if not posted:
            self._left.release()

    async def _roll_out(self, group: int, task: Task, context: ModelContext) -> list[ScoredSequence]:
        """Makes one rollout of a group, again if it fails. Returns its sequences; none if it failed each time.

        While the environment fails every rollout, attempts are not counted: its grader is away.
        """
        pauses, attempt = retry_pauses(), 1
        try:
            while attempt <= ATTEMPTS:
                try:
                    sequences = await self._environment.roll_out(task, context, self._gateway)
                    self._check(sequences)
                except RolloutError as error:
                    if self._tally.note_failed(group, error, attempt):
                        self._tally.note_away("environment", self._options.environment, str(error))
                        await asyncio.sleep(pauses.next_delay())
                    else:
                        attempt += 1
                else:
                    self._tally.note_scored()
                    self._tally.note_away("environment", self._options.environment, "")
                    return sequences
            return []
        finally:
            self._slots.release()

    def _check(self, sequences: list[ScoredSequence]) -> None:
        wanted, longest = self._options.sequences, self._poster.longest
        if len(sequences) != wanted:
            raise RolloutError(
                "sequences",
                f"the rollout has {len(sequences)} sequences to train, and not {wanted}; if all have as many, give "
                f"--sequences {len(sequences)}. A chat template that writes earlier turns in another way, such as "
                "without their thoughts, makes a sequence of each turn: choose a template that keeps them (--renderer)",
            )
        for sequence in sequences:
            if longest and len(sequence.tokens) >= longest:
                raise RolloutError(
                    "long", f"the sequence has {len(sequence.tokens)} tokens; the trainer takes less than {longest}"
                )
            if sequence.truncated and self._options.truncated is TruncatedMode.DROP:
                raise RolloutError("truncated", "a limit has cut it off; see --truncated and --max-tokens")

    async def _until_fresh(self) -> None:
        """Waits while the engine's weights are too old for the trainer, or unknown although they can be asked for."""
        answer, engine = self._poster.answer, self._gateway.engine
        if answer is None or not is_too_old(engine.version, answer) or not engine.has_route:
            return
        version, newest = engine.version, answer.newest_version
        text = f"paused: the engine serves version {version}, too old for the trainer, which is at {newest}"
        if version is None:
            text = "paused: the engine's weights have no version, and the feed has a limit; have them follow the run"
        self._emit(CommandEvent("paused", text, {"version": version, "newest_version": newest}))
        while True:
            await asyncio.sleep(VERSION_POLL)
            if not is_too_old(await engine.ask_version(), answer):
                break
        self._emit(CommandEvent("resumed", f"goes on with version {engine.version}", {"version": engine.version}))

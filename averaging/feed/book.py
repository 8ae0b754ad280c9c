"""The state of a run: who is registered, which groups wait, and which batches have been handed out. Pure.

A method either refuses and has changed nothing, or changes the state and returns what has changed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from averaging.errors import FeedBusyError, FeedRefusedError
from averaging.feed.messages import RegisterEnv, Registration
from averaging.feed.packing import exact, pack, shares

MIN_ENV_WEIGHT = 0.01
"""No environment starves, however small its weight."""

MAX_ENVS, MAX_BUFFERED = 1 << 16, 1024
"""Environments of a run, and groups of one environment that wait for others to fill up its group size."""

NO_TRAINER = "Trainer not registered. Call /register first."


@dataclass(frozen=True, slots=True)
class Group:
    """A group that waits or has been handed out; its content is elsewhere.

    Attributes:
        number: groups are numbered in the order in which they came.
        size: its sequences.
        nbytes: the length of its content.
    """

    number: int
    env: int | None
    size: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Added:
    """What came of groups that were taken in.

    Attributes:
        first: the number of the first one; the others follow.
        entered: what has entered the queue, in its order: groups that came, and groups that have waited for them.
        buffered: for each group whose size is not its environment's, how many sequences wait with it or after it.
    """

    first: int
    entered: list[Group]
    buffered: list[int]


@dataclass(slots=True)
class Env:
    """An environment; it is known by its index in the list of all."""

    told: RegisterEnv
    name: str
    connected: bool = True


@dataclass(kw_only=True)
class Book:
    """The state.

    Attributes:
        started: whether a batch has been asked for; environments may register from then on.
        step: the step of the newest batch.
        saved: batches up to this step are forgotten.
        queue: groups for the next batches, oldest first.
        buffers: smaller groups of an environment that wait until some add up to its group size.
        batches: those that have been handed out and may be asked for again, by step.
        nbytes, count: of the groups that wait, in the queue and in the buffers.
        sequences, sizes: sequences in the queue by environment, and groups in the queue by size.
        max_bytes, max_groups: of the groups that wait.
        max_replay_bytes: of the batches that may be asked for again.
    """

    max_bytes: int = 4 << 30
    max_groups: int = 50_000
    max_replay_bytes: int = 4 << 30
    registration: Registration | None = None
    started: bool = False
    step: int = 0
    saved: int = 0
    envs: list[Env] = field(default_factory=list)
    queue: list[Group] = field(default_factory=list)
    buffers: dict[int, list[Group]] = field(default_factory=dict)
    batches: dict[int, list[Group]] = field(default_factory=dict)
    nbytes: int = 0
    count: int = 0
    next_number: int = 0
    sequences: Counter[int | None] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)
    _next: list[int] | None = None
    _looked: bool = False

    def restore(self, group: Group, *, queued: bool, step: int | None) -> None:
        """Puts a group back where it was: into the batch of `step`, the queue, or a buffer; in their order."""
        self.next_number = max(self.next_number, group.number + 1)
        if step is not None:
            self.batches.setdefault(step, []).append(group)
            return
        self.nbytes += group.nbytes
        self.count += 1
        if queued or group.env is None:
            self.queue.append(group)
            self._count([group], 1)
        else:
            self.buffers.setdefault(group.env, []).append(group)

    def register(self, registration: Registration) -> bool:
        """Begins a run; False if there is one, of which nothing is changed.

        Raises:
            FeedRefusedError: groups came before, and one does not fit into a batch.
        """
        if self.registration is not None:
            return False
        largest = max((group.size for group in self.queue), default=0)
        if largest > registration.batch_size:
            raise FeedRefusedError(
                409,
                f"a group that waits here has {largest} sequences, more than batch_size {registration.batch_size}; "
                "register a larger batch_size, or drop all groups with GET /reset_data",
            )
        self.registration, self._looked = registration, False
        self.step = self.saved = registration.starting_step
        return True

    def register_env(self, told: RegisterEnv) -> int:
        """Takes an environment in; its id, or -1 as long as no trainer has asked for a batch.

        Raises:
            FeedRefusedError: its groups would not fit into a batch, or there are too many environments.
        """
        if self.registration is None or not self.started:
            return -1
        if told.group_size > self.registration.batch_size:
            size = self.registration.batch_size
            raise FeedRefusedError(422, f"group_size {told.group_size} is above the run's batch_size {size}")
        if len(self.envs) >= MAX_ENVS:
            raise FeedRefusedError(409, f"{MAX_ENVS} environments have registered; begin another run")
        before = sum(env.told.desired_name == told.desired_name for env in self.envs)
        self.envs.append(Env(told, f"{told.desired_name}_{before}"))
        self._looked = False
        return len(self.envs) - 1

    def disconnect(self, env_id: int) -> None:
        """Nothing is reserved for that environment any more.

        Raises:
            FeedRefusedError: there is no such environment.
        """
        self.env(env_id).connected = False
        self._looked = False

    def env(self, env_id: int) -> Env:
        """That environment.

        Raises:
            FeedRefusedError: there is no such environment.
        """
        if not 0 <= env_id < len(self.envs):
            raise FeedRefusedError(404, f"there is no environment with env_id {env_id}; register it with /register-env")
        return self.envs[env_id]

    def add(self, groups: Sequence[tuple[int | None, int, int]]) -> Added:
        """Takes groups in, given as (environment, sequences, bytes): all of them or none.

        Raises:
            FeedRefusedError: a group can never be part of a batch.
            FeedBusyError: there is no room.
        """
        for env, size, _ in groups:
            self._check_size(env, size)
        self._check_room()
        added = Added(self.next_number, [], [])
        for env, size, nbytes in groups:
            self._enter(Group(self.next_number, env, size, nbytes), added)
            self.next_number += 1
            self.nbytes += nbytes
        self.count += len(groups)
        self.queue += added.entered
        self._count(added.entered, 1)
        self._looked = False
        return added

    def take(self) -> tuple[int, list[Group]] | None:
        """The next batch and its step; None if the queue holds none yet.

        Raises:
            FeedRefusedError: there is no run.
        """
        if self.registration is None:
            raise FeedRefusedError(409, NO_TRAINER)
        indices = self._look()
        if indices is None:
            return None
        batch, chosen = [self.queue[index] for index in indices], set(indices)
        self.queue = [group for index, group in enumerate(self.queue) if index not in chosen]
        self._count(batch, -1)
        self.nbytes -= sum(group.nbytes for group in batch)
        self.count -= len(batch)
        self._looked = False
        self.step += 1
        self.batches[self.step] = batch
        return self.step, batch

    def again(self, step: int) -> bool:
        """Whether the batch of that step has been handed out and is kept; if not, it is the next one.

        Raises:
            FeedRefusedError: it is neither.
        """
        if self.registration is None:
            raise FeedRefusedError(409, NO_TRAINER)
        if step <= self.saved:
            raise FeedRefusedError(
                410,
                f"the batch of step {step} is forgotten: batches up to step {self.saved} were saved by the trainer, "
                "or were too many to keep. Resume from a later checkpoint, or begin another run with GET /reset_data",
            )
        if step > self.step + 1:
            raise FeedRefusedError(
                409,
                f"step {step} was asked for, and the next batch is that of step {self.step + 1}: this store belongs to "
                "another run. Give the server its own store, or begin another run with GET /reset_data",
            )
        return step <= self.step

    def forget(self, saved: int) -> int:
        """Forgets the batches up to step `saved`, and older ones than there is room for; the last one forgotten."""
        kept = 0
        for step in sorted(self.batches, reverse=True):
            kept += sum(group.nbytes for group in self.batches[step])
            if kept > self.max_replay_bytes and step < self.step:
                saved = max(saved, step)
                break
        self.saved = max(self.saved, min(saved, self.step))
        for step in [step for step in self.batches if step <= self.saved]:
            del self.batches[step]
        return self.saved

    def status_env(self, env_id: int) -> dict[str, Any]:
        """What an environment needs to know of the queue, computed as atroposlib does.

        Raises:
            FeedRefusedError: there is no such environment.
        """
        env = self.env(env_id)
        connected = [other for other in self.envs if other.connected]
        total = sum(other.told.max_token_length * max(0.0, other.told.weight) for other in connected)
        weight = env.told.max_token_length * env.told.weight / total if total else 0.0
        allocated = sum(other.told.min_batch_allocation or 0.0 for other in connected)
        largest = max((size for size, count in self.sizes.items() if count), default=1)
        own, available = self.sequences[env_id], self.sequences[env_id]
        if largest > 1 and self.registration is not None:
            for other, sequences in self.sequences.items():
                if other != env_id and sequences:
                    reserved = 0.0
                    if other is not None and self.envs[other].connected:
                        reserved = self.envs[other].told.min_batch_allocation or 0.0
                    packed = math.ceil(sequences / largest) * largest
                    available += max(0, packed - int(self.registration.batch_size * reserved))
        return {
            "current_step": self.step,
            "queue_size": available // env.told.group_size,
            "unallocated_fraction": 1.0 - min(allocated, 1.0),
            "self_queue_size": own // env.told.group_size,
            "max_group_size": largest,
            "env_weight": max(MIN_ENV_WEIGHT, weight),
        }

    def _count(self, groups: Iterable[Group], sign: int) -> None:
        for group in groups:
            self.sequences[group.env] += sign * group.size
            self.sizes[group.size] += sign

    def _check_size(self, env: int | None, size: int) -> None:
        most, of_what = math.inf, ""
        if self.registration is not None:
            most, of_what = self.registration.batch_size, "the run's batch_size"
        if env is not None:
            most, of_what = self.env(env).told.group_size, f"the group_size of environment {env}"
            if size < most and len(self.buffers.get(env, ())) >= MAX_BUFFERED:
                raise FeedRefusedError(
                    422, f"{MAX_BUFFERED} groups of environment {env} wait and do not add up to its group_size {most}"
                )
        if size > most:
            raise FeedRefusedError(422, f"a group has {size} sequences, more than {of_what}, {most}")

    def _check_room(self) -> None:
        """A full queue refuses groups, unless it holds no batch: it would stay full then."""
        over = max(self.nbytes / self.max_bytes, self.count / self.max_groups)
        if over >= 2 or (over >= 1 and (self.registration is None or self._look() is not None)):
            what = f"{self.count} groups and {self.nbytes} bytes wait"
            raise FeedBusyError(503, f"{what}; post the same again once the trainer has taken a batch", 1.0)

    def _enter(self, group: Group, added: Added) -> None:
        if group.env is None or group.size == self.envs[group.env].told.group_size:
            added.entered.append(group)
            return
        buffer = [*self.buffers.get(group.env, ()), group]
        found = exact([each.size for each in buffer], self.envs[group.env].told.group_size) or []
        added.entered.extend(buffer[index] for index in found)
        self.buffers[group.env] = [each for index, each in enumerate(buffer) if index not in found]
        added.buffered.append(sum(each.size for each in self.buffers[group.env]))

    def _look(self) -> list[int] | None:
        """The next batch's indices in the queue."""
        if not self._looked and self.registration is not None:
            size, self._next, self._looked = self.registration.batch_size, None, True
            if self.sequences.total() >= size:
                wanted = {i: env.told.min_batch_allocation or 0.0 for i, env in enumerate(self.envs) if env.connected}
                sizes, envs = [group.size for group in self.queue], [group.env for group in self.queue]
                self._next = pack(sizes, envs, size, shares(size, wanted))
        return self._next

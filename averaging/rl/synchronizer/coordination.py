"""The options, and the decisions: who is in which status, which version is the newest, and who waits for what. Pure.

Trainers and explorers are *members*, each with a name. A member that waits is in REQUIRE_SYNC. What ends its wait:

    wait             answered with a version                              answered with None
    NEW_STATE        a newer one is there or published; the present one   never
                     if an explorer stops, the last trainer stops or
                     leaves, or `no_new_state` says so
    TRAINER_READY    its group is ready: the one of its step              no explorer is left *
    EXPLORER_READY   its group is ready: the newest one                   the last trainer has stopped or left *
    * also if the group is broken, or others have a group and this member has none

A group is ready when all its trainers and explorers are in REQUIRE_SYNC, and none of them because of a NEW_STATE.
Every wait also ends at its deadline (TIMED_OUT), and when its member leaves or is no longer interested (LEFT). A member
whose wait has ended is RUNNING again, so that nobody who is late or dead stays counted in REQUIRE_SYNC.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from averaging.common import one_of
from averaging.config import FilePath
from averaging.errors import ConfigError

MAX_NAMESPACE = 128  # characters
MAX_STEP = 1 << 62  # of a trainer
MAX_VERSION = (1 << 63) - 1  # above `MAX_STEP`, because a lower step gets the present version plus one


class SyncMethod(StrEnum):
    """How weights come from a trainer to explorers."""

    NCCL = "nccl"
    """With a collective of torch.distributed; see `WeightSender` and `WeightReceiver`."""
    CHECKPOINT = "checkpoint"
    """By a path to files that both sides reach."""
    MEMORY = "memory"
    """From the memory of the synchronizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronizerConfig:
    """The options of a `Synchronizer`. Invalid ones are a ConfigError.

    Attributes:
        sync_method: Transport of the weights. With `checkpoint`, the synchronizer looks each second for a new
            checkpoint in `checkpoint_dir`.
        checkpoint_dir: Folder of the trainer's checkpoints, `global_step_N/actor`. The version is kept there too, so
            that it does not go back when the synchronizer restarts.
    """

    namespace: str = ""  # if there are several in a process or on a peer
    sync_method: SyncMethod | str = SyncMethod.MEMORY
    sync_timeout: float = 3600.0  # seconds after which every wait ends
    checkpoint_dir: FilePath | None = None
    group_name: str = "rollout_weight_sync"
    max_state_bytes: int = 64 << 30  # of a state that another process sends
    silence_timeout: float = 30.0  # seconds after which a silent session or upload of another process ends

    def __post_init__(self) -> None:
        object.__setattr__(self, "sync_method", one_of(SyncMethod, self.sync_method, "sync_method"))
        for name in ("sync_timeout", "silence_timeout", "max_state_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a number above 0, not {value!r}")
        if self.sync_method is SyncMethod.CHECKPOINT and self.checkpoint_dir is None:
            raise ConfigError("sync_method 'checkpoint' needs checkpoint_dir, the folder with global_step_N")
        if len(self.namespace) > MAX_NAMESPACE:
            raise ConfigError(f"a namespace of {len(self.namespace)} characters; at most {MAX_NAMESPACE} are allowed")
        if not self.group_name:
            raise ConfigError("group_name must not be empty")


class RunningStatus(Enum):
    """What a trainer or an explorer does."""

    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"
    """It waits for weights, or is ready to send them."""
    STOPPED = "stopped"


RUNNING, REQUIRE_SYNC, STOPPED = RunningStatus


class Purpose(Enum):
    NEW_STATE = auto()
    TRAINER_READY = auto()
    EXPLORER_READY = auto()


class End(Enum):
    ANSWERED = auto()
    TIMED_OUT = auto()
    LEFT = auto()


@dataclass(eq=False, slots=True)
class Wait:
    member: str
    purpose: Purpose
    deadline: float
    step: int = 0  # of a trainer that is ready
    counted: bool = True  # whether the member is in REQUIRE_SYNC; a caller without a status may wait too
    end: End | None = None
    version: int | None = None  # the answer
    on_end: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class SyncGroup:
    trainers: frozenset[str]
    explorers: frozenset[str]

    def __contains__(self, member: str) -> bool:
        return member in self.trainers or member in self.explorers


class Coordination:
    """The statuses, the version and the waits of one synchronizer. A restarted one begins with the version it had."""

    def __init__(self, version: int = 0) -> None:
        self.version = version  # never decreases
        self.step: int | None = None  # of the trainer that set the state
        self.trainer_came = False
        self.waits: list[Wait] = []
        self._publisher: str | None = None
        self._trainers: dict[str, RunningStatus] = {}
        self._explorers: dict[str, Counter[RunningStatus]] = {}
        self._received: dict[str, int] = {}  # newest version that an explorer of each member has
        self._groups: list[SyncGroup] | None = None  # None: all members transfer weights together
        self._groups_complete = True
        self._ended = False

    @property
    def trainer_status(self) -> RunningStatus:
        """REQUIRE_SYNC if a trainer is ready to send, else RUNNING if a trainer runs, else STOPPED."""
        return next((status for status in (REQUIRE_SYNC, RUNNING) if status in self._trainers.values()), STOPPED)

    @property
    def trainers_stopped(self) -> bool:
        return self.trainer_came and self.trainer_status is STOPPED

    @property
    def explorer_status_counts(self) -> dict[RunningStatus, int]:
        return {status: sum(counts[status] for counts in self._explorers.values()) for status in RunningStatus}

    @property
    def explorers(self) -> list[tuple[str, RunningStatus, int | None]]:
        """Each member with explorers: its name, the first status that one has, and their newest version, if known."""
        order = REQUIRE_SYNC, RUNNING, STOPPED
        return [
            (member, next(each for each in order if counts[each]), self._received.get(member))
            for member, counts in self._explorers.items()
            if counts.total()
        ]

    def note_received(self, member: str, version: int) -> None:
        if member in self._explorers:
            self._received[member] = max(version, self._received.get(member, 0))

    def set_trainer_status(self, status: RunningStatus, member: str) -> None:
        self._trainers[member], self.trainer_came = status, True
        if status is STOPPED:
            self._settle()

    def set_explorer_status(self, status: RunningStatus, old: RunningStatus | None, member: str) -> None:
        """Counts an explorer in `status`, and no longer in `old`."""
        counts = self._explorers.get(member, Counter())
        if old is status:
            raise ConfigError(f"an explorer cannot change from {old.value} to {status.value}; the two must differ")
        if old is not None:
            if not counts[old]:
                lacks = f"no explorer of {_named(member)} is {old.value}, so none can become {status.value}"
                raise ConfigError(f"{lacks}; give the status that it has, or None for a new explorer")
            counts[old] -= 1
        counts[status] += 1
        self._explorers[member] = counts
        if status is STOPPED:
            self.no_new_state()
            self._settle()

    def leave(self, member: str) -> None:
        """Forgets a member that is gone. Its waits end, and those of others no longer count on it."""
        for book in (self._explorers, self._received, self._trainers):
            book.pop(member, None)
        for wait in [wait for wait in self.waits if wait.member == member]:
            self._finish(wait, End.LEFT)
        self._settle()

    def end(self) -> None:
        """Ends all waits, also those that begin later."""
        self._ended = True
        for wait in list(self.waits):
            self._finish(wait, End.LEFT)

    def next_version(self, step: int, member: str) -> int:
        """Returns the version that weights of this step of this trainer get. A repetition keeps the version."""
        if not 0 <= step <= MAX_STEP:
            raise ConfigError(f"the step of a trainer must be from 0 to {MAX_STEP}, not {step}")
        repeated = step == self.version and self._publisher in (None, member)
        return step if step > self.version or repeated else self.version + 1

    def publish(self, step: int, member: str) -> int:
        """Gives weights of `step` their version, and those who wait for a new state that version."""
        self.step = step
        self._raise_version(step, member)
        self.no_new_state()
        self._settle()
        return self.version

    def _raise_version(self, step: int, member: str) -> None:
        self.version = self.next_version(step, member)
        self._publisher = member

    def wait_new_state(self, current: int, member: str, deadline: float, *, counted: bool = True) -> Wait:
        """Waits for a version above `current`, which the explorer has."""
        if current > self.version:
            known = f"{_named(member)} has version {current}, but the newest one here is {self.version}"
            raise ConfigError(f"{known}; ask the synchronizer from which it got that version")
        if counted:
            self.set_explorer_status(REQUIRE_SYNC, RUNNING, member)
        if current:
            self.note_received(member, current)
        wait = self._begin(Wait(member, Purpose.NEW_STATE, deadline, counted=counted))
        if wait.end is None and (current < self.version or self.trainers_stopped):
            self._finish(wait, End.ANSWERED, self.version)
        return wait

    def trainer_ready(self, step: int, member: str, deadline: float) -> Wait:
        self.next_version(step, member)
        self._trainers[member], self.trainer_came = REQUIRE_SYNC, True
        wait = self._begin(Wait(member, Purpose.TRAINER_READY, deadline, step))
        self._settle()
        return wait

    def explorer_ready(self, member: str, deadline: float) -> Wait:
        self.set_explorer_status(REQUIRE_SYNC, RUNNING, member)
        wait = self._begin(Wait(member, Purpose.EXPLORER_READY, deadline))
        self._settle()
        return wait

    def no_new_state(self) -> None:
        """Gives all who wait for a new state the present version."""
        for wait in self._of(Purpose.NEW_STATE):
            self._finish(wait, End.ANSWERED, self.version)

    def cancel(self, wait: Wait) -> None:
        if wait.end is None:
            self._finish(wait, End.LEFT)
            self._settle()

    def expire(self, now: float) -> None:
        for wait in [wait for wait in self.waits if wait.deadline <= now]:
            self._finish(wait, End.TIMED_OUT)

    def _begin(self, wait: Wait) -> Wait:
        self.waits.append(wait)
        if self._ended:
            self._finish(wait, End.LEFT)
        return wait

    def _finish(self, wait: Wait, end: End, version: int | None = None, *, runs: bool = True) -> None:
        """Ends a wait. With `runs` its member goes from REQUIRE_SYNC to RUNNING."""
        wait.end, wait.version = end, version
        self.waits.remove(wait)
        if wait.on_end is not None:
            wait.on_end()
        if not runs or not wait.counted:
            return
        if wait.purpose is Purpose.TRAINER_READY:
            if self._trainers.get(wait.member) is REQUIRE_SYNC:
                self._trainers[wait.member] = RUNNING
        elif (counts := self._explorers.get(wait.member, Counter()))[REQUIRE_SYNC]:
            counts[REQUIRE_SYNC] -= 1
            counts[RUNNING] += 1

    def _of(self, purpose: Purpose, members: Collection[str] | None = None) -> list[Wait]:
        waits = (wait for wait in self.waits if wait.purpose is purpose)
        return [wait for wait in waits if members is None or wait.member in members]

    def set_groups(self, groups: Collection[SyncGroup] | None, *, complete: bool = True) -> None:
        """Divides the members into groups, each of which transfers weights on its own; None undoes it.

        A group that loses a member, or in which an explorer stops, is never ready again: set the groups anew. Until
        they are `complete`, the members outside the groups wait for theirs.
        """
        self._groups = None if groups is None else list(groups)
        self._groups_complete = complete
        self._settle()

    def intact_groups(self) -> list[SyncGroup]:
        return [group for group in self._groups or () if not self._is_broken(group)]

    def _is_broken(self, group: SyncGroup) -> bool:
        explorers = [self._explorers.get(member) for member in group.explorers]
        trainers = [self._trainers.get(member, STOPPED) for member in group.trainers]
        return STOPPED in trainers or any(counts is None or counts[STOPPED] for counts in explorers)

    def _settle(self) -> None:
        """Ends all waits whose answer is known after a change."""
        if self.trainers_stopped:
            self.no_new_state()
        if self._groups is None:
            self._settle_group(SyncGroup(frozenset(self._trainers), frozenset(self._explorers)), broken=False)
            return
        for group in self._groups:
            self._settle_group(group, broken=self._is_broken(group))
        if self._groups_complete:
            for wait in [*self._of(Purpose.TRAINER_READY), *self._of(Purpose.EXPLORER_READY)]:
                if not any(wait.member in group for group in self._groups):
                    self._finish(wait, End.ANSWERED)

    def _settle_group(self, group: SyncGroup, *, broken: bool) -> None:
        sending = self._of(Purpose.TRAINER_READY, group.trainers)
        receiving = self._of(Purpose.EXPLORER_READY, group.explorers)
        explorers = [self._explorers[member] for member in group.explorers & self._explorers.keys()]
        trainers = {self._trainers[member] for member in group.trainers & self._trainers.keys()} - {STOPPED}
        # Those that wait for a new state are in REQUIRE_SYNC too, and not ready.
        waiting = sum(wait.counted for wait in self._of(Purpose.NEW_STATE, group.explorers))
        ready = sum(counts[REQUIRE_SYNC] for counts in explorers) - waiting
        running = sum(counts[RUNNING] for counts in explorers) + waiting
        if broken or not ready + running:
            for wait in sending:
                self._finish(wait, End.ANSWERED)
        if broken or (not trainers and self.trainer_came):
            for wait in receiving:
                self._finish(wait, End.ANSWERED)
        elif ready and not running and trainers == {REQUIRE_SYNC}:
            self._transfer(group, sending, receiving)

    def _transfer(self, group: SyncGroup, sending: list[Wait], receiving: list[Wait]) -> None:
        """Answers the members of a group that are all ready."""
        # Each side that has called sets the other one back to RUNNING. A member that has set its status and not called
        # yet finds the other side in REQUIRE_SYNC, so its call is answered at once.
        if sending:
            newest = max(sending, key=lambda wait: wait.step)
            self._raise_version(newest.step, newest.member)
            for member in group.explorers & self._explorers.keys():
                counts = self._explorers[member]
                counts[RUNNING] += counts.pop(REQUIRE_SYNC, 0)
        if receiving:
            for member in group.trainers & self._trainers.keys():
                self._trainers[member] = RUNNING
        for wait in (*sending, *receiving):
            self._finish(wait, End.ANSWERED, self.version, runs=False)
        for wait in receiving:
            self.note_received(wait.member, self.version)
        if sending:
            self.no_new_state()


def _named(member: str) -> str:
    return f"{member!r}" if member else "this process"

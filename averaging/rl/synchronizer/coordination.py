"""The options, and the decisions: who is in which status, which version is the newest, and who waits for what.

Trainers and explorers are *members*, each with a name. A member's statuses and waits end when it leaves, so that a dead
process is not counted. Every wait has a deadline.

Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from averaging.common import one_of
from averaging.config import FilePath
from averaging.errors import ConfigError

MAX_NAMESPACE = 128
"""Maximum length of a namespace in characters."""


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
    """The options of a `Synchronizer`.

    Attributes:
        namespace: Name of the synchronizer, if there are several in a process or on a peer.
        sync_method: Transport of the weights. With `checkpoint`, the synchronizer looks each second for a new
            checkpoint in `checkpoint_dir`.
        sync_timeout: Seconds after which every wait ends.
        checkpoint_dir: Folder of the trainer's checkpoints, `global_step_N/actor`. The version is kept there too, so
            that it does not go back when the synchronizer restarts.
        group_name: Name of the weight sync group.
        max_state_bytes: Maximum size of a state that another process sends.
        silence_timeout: Seconds after which a silent session of another process ends.

    Raises:
        ConfigError: An option is invalid.
    """

    namespace: str = ""
    sync_method: SyncMethod | str = SyncMethod.MEMORY
    sync_timeout: float = 3600.0
    checkpoint_dir: FilePath | None = None
    group_name: str = "rollout_weight_sync"
    max_state_bytes: int = 64 << 30
    silence_timeout: float = 30.0

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


MAX_STEP = 1 << 62
"""Highest step of a trainer."""

MAX_VERSION = (1 << 63) - 1
"""Highest version. It is above `MAX_STEP`, because a lower step gets the present version plus one."""


class RunningStatus(Enum):
    """What a trainer or an explorer does."""

    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"
    """It waits for weights, or is ready to send them."""
    STOPPED = "stopped"


class Purpose(Enum):
    """What a wait is for."""

    NEW_STATE = auto()
    TRAINER_READY = auto()
    EXPLORER_READY = auto()


class End(Enum):
    """How a wait has ended."""

    ANSWERED = auto()
    TIMED_OUT = auto()
    LEFT = auto()
    """The member has left, or the synchronizer has ended."""


@dataclass(eq=False, slots=True)
class Wait:
    """A wait of one member.

    Attributes:
        member: Name of the member.
        purpose: The event that ends it.
        deadline: Time at which the wait ends without a result.
        step: The step of a trainer that is ready.
        counted: Whether the explorer is in REQUIRE_SYNC because of it.
        end: Kind of its end; None while it goes on.
        version: The answer. None if the members were not ready together.
    """

    member: str
    purpose: Purpose
    deadline: float
    step: int = 0
    counted: bool = True
    end: End | None = None
    version: int | None = None


@dataclass(frozen=True, slots=True)
class SyncGroup:
    """Members that were set up to transfer weights together."""

    trainers: frozenset[str]
    explorers: frozenset[str]

    def __contains__(self, member: str) -> bool:
        return member in self.trainers or member in self.explorers


class Coordination:
    """The statuses, the version and the waits of one synchronizer.

    Args:
        version: The first version; a restarted synchronizer gives the version that it had.

    Attributes:
        version: The newest version. It never decreases.
        step: The step of the trainer that set the state; None if none has.
        trainer_came: Whether there was a trainer.
    """

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.step: int | None = None
        self._publisher: str | None = None
        self.trainer_came = False
        self._trainers: dict[str, RunningStatus] = {}
        self._explorers: dict[str, Counter[RunningStatus]] = {}
        self._received: dict[str, int] = {}  # newest version that an explorer of each member has
        self._waits: list[Wait] = []
        self._groups: list[SyncGroup] | None = None  # None: all members transfer weights together
        self._groups_complete = True
        self._ended = False

    # Statuses

    @property
    def trainer_status(self) -> RunningStatus:
        """REQUIRE_SYNC if a trainer is ready to send, else RUNNING if a trainer runs, else STOPPED."""
        statuses = self._trainers.values()
        for status in (RunningStatus.REQUIRE_SYNC, RunningStatus.RUNNING):
            if status in statuses:
                return status
        return RunningStatus.STOPPED

    @property
    def trainers_stopped(self) -> bool:
        return self.trainer_came and self.trainer_status is RunningStatus.STOPPED

    @property
    def explorer_status_counts(self) -> dict[RunningStatus, int]:
        return {status: sum(counts[status] for counts in self._explorers.values()) for status in RunningStatus}

    def note_received(self, member: str, version: int) -> None:
        if member in self._explorers:
            self._received[member] = max(version, self._received.get(member, 0))

    @property
    def explorers(self) -> list[tuple[str, RunningStatus, int | None]]:
        """Each member with explorers: its name, their status, and the newest version that they have, if it is known.

        If it has several, the status is that of an explorer that waits, else of one that runs.
        """
        order = (RunningStatus.REQUIRE_SYNC, RunningStatus.RUNNING, RunningStatus.STOPPED)
        return [
            (member, next(status for status in order if counts[status] > 0), self._received.get(member))
            for member, counts in self._explorers.items()
            if counts.total() > 0
        ]

    def set_trainer_status(self, status: RunningStatus, member: str) -> None:
        """Sets the status of a trainer. If none is left that runs, waits for a new state end with the present one."""
        self._trainers[member], self.trainer_came = status, True
        if status is RunningStatus.STOPPED:
            self._trainer_stopped()

    def set_explorer_status(self, status: RunningStatus, old: RunningStatus | None, member: str) -> None:
        """Counts an explorer in `status`, and no longer in `old`.

        Raises:
            ConfigError: No explorer of this member is in `old`, or both are the same.
        """
        counts = self._explorers.get(member, Counter())
        if old is status:
            raise ConfigError(f"an explorer cannot change from {old.value} to {status.value}; the two must differ")
        if old is not None and not counts[old]:
            raise ConfigError(
                f"no explorer of {_named(member)} is {old.value}, so none can become {status.value}; "
                "give the status that it has, or None for a new explorer"
            )
        if old is not None:
            counts[old] -= 1
        counts[status] += 1
        self._explorers[member] = counts
        if status is RunningStatus.STOPPED:
            self._answer_new_state()
            self._settle()

    def leave(self, member: str) -> None:
        """Forgets a member that is gone. Its waits end, and those of others no longer count on it."""
        self._explorers.pop(member, None)
        self._received.pop(member, None)
        self._trainers.pop(member, None)
        for wait in self._of(member=member):
            self._finish(wait, End.LEFT)
        self._trainer_stopped()

    def end(self) -> None:
        self._ended = True
        for wait in list(self._waits):
            self._withdraw(wait, End.LEFT)

    # Versions

    def next_version(self, step: int, member: str) -> int:
        """Returns the version that weights of this step of this trainer get.

        It is the step, if that is above the present version. After a restart from an earlier checkpoint, and if several
        trainers publish, it is the present version plus one. A repetition by the same trainer keeps the version.

        Raises:
            ConfigError: The step is out of range.
        """
        if not 0 <= step <= MAX_STEP:
            raise ConfigError(f"the step of a trainer must be from 0 to {MAX_STEP}, not {step}")
        repeated = step == self.version and self._publisher in (None, member)
        return step if step > self.version or repeated else self.version + 1

    def publish(self, step: int, member: str) -> int:
        """Gives weights of `step` their version, which ends waits for a new state; returns the version."""
        self.step = step
        self._raise_version(step, member)
        self._answer_new_state()
        self._settle()
        return self.version

    def no_new_state(self) -> None:
        self._answer_new_state()

    # Waits

    def wait_new_state(self, current: int, member: str, deadline: float, *, counted: bool = True) -> Wait:
        """Waits for a version above `current`; the explorer is in REQUIRE_SYNC meanwhile.

        Args:
            current: The version that the explorer has.
            member: Name of the explorer.
            deadline: Time at which the wait ends.
            counted: Whether the explorer has a status. A caller without a status may wait too.

        Raises:
            ConfigError: `current` is above the version here, or no explorer of this member is RUNNING.
        """
        if current > self.version:
            raise ConfigError(
                f"{_named(member)} has version {current}, but the newest one here is {self.version}; "
                "ask the synchronizer from which it got that version"
            )
        if counted:
            self.set_explorer_status(RunningStatus.REQUIRE_SYNC, RunningStatus.RUNNING, member)
        if current:
            self.note_received(member, current)
        wait = self._begin(Wait(member, Purpose.NEW_STATE, deadline, counted=counted))
        if wait.end is None and (current < self.version or self.trainers_stopped):
            self._answer(wait, self.version)
        return wait

    def trainer_ready(self, step: int, member: str, deadline: float) -> Wait:
        """Says that a trainer is ready to send the weights of `step`, and waits until all its explorers are ready.

        The trainer is in REQUIRE_SYNC meanwhile. The answer is the new version, or None if the explorers are not ready
        in time, or none is left. Without success the version stays.

        Raises:
            ConfigError: The step is out of range.
        """
        self.next_version(step, member)
        self._trainers[member], self.trainer_came = RunningStatus.REQUIRE_SYNC, True
        wait = self._begin(Wait(member, Purpose.TRAINER_READY, deadline, step))
        self._settle()
        return wait

    def explorer_ready(self, member: str, deadline: float) -> Wait:
        """Says that an explorer is ready to receive, and waits until its trainer and the other explorers are ready.

        The explorer is in REQUIRE_SYNC meanwhile. The answer is as for `trainer_ready`. Before the first trainer has
        come it waits for one.

        Raises:
            ConfigError: No explorer of this member is RUNNING.
        """
        self.set_explorer_status(RunningStatus.REQUIRE_SYNC, RunningStatus.RUNNING, member)
        wait = self._begin(Wait(member, Purpose.EXPLORER_READY, deadline))
        self._settle()
        return wait

    def cancel(self, wait: Wait) -> None:
        if wait.end is None:
            self._withdraw(wait, End.LEFT)
            self._settle()

    def expire(self, now: float) -> None:
        for wait in [wait for wait in self._waits if wait.deadline <= now]:
            self._withdraw(wait, End.TIMED_OUT)

    # Groups

    def set_groups(self, groups: Collection[SyncGroup] | None, *, complete: bool = True) -> None:
        """Divides the members into groups, each of which transfers weights on its own; None undoes it.

        A group that loses a member, or in which an explorer stops, is never ready again: set the groups anew.

        Args:
            groups: The groups.
            complete: Whether the members outside the groups get no group. Otherwise they wait for it.
        """
        self._groups = None if groups is None else list(groups)
        self._groups_complete = complete
        self._settle()

    def intact_groups(self) -> list[SyncGroup]:
        return [group for group in self._groups or () if not self._is_broken(group)]

    def _settle(self) -> None:
        """Answers the members of each group in which all are ready, or cannot become ready."""
        if self._groups is None:
            self._settle_group(SyncGroup(frozenset(self._trainers), frozenset(self._explorers)), fixed=False)
            return
        for group in self._groups:
            self._settle_group(group, fixed=True)
        for wait in [*self._of(Purpose.TRAINER_READY), *self._of(Purpose.EXPLORER_READY)]:
            if self._groups_complete and not any(wait.member in group for group in self._groups):
                self._answer(wait, None)

    def _settle_group(self, group: SyncGroup, *, fixed: bool) -> None:
        ready = self._count(group, RunningStatus.REQUIRE_SYNC)
        running = self._count(group, RunningStatus.RUNNING)
        # In REQUIRE_SYNC too, but for another reason.
        waiting = sum(wait.counted and wait.member in group.explorers for wait in self._of(Purpose.NEW_STATE))
        ready, running = ready - waiting, running + waiting
        trainers = [status for status in self._statuses(group) if status is not RunningStatus.STOPPED]
        broken = fixed and self._is_broken(group)
        sending = [wait for wait in self._of(Purpose.TRAINER_READY) if wait.member in group.trainers]
        receiving = [wait for wait in self._of(Purpose.EXPLORER_READY) if wait.member in group.explorers]
        if broken or not ready + running:
            for wait in sending:
                self._answer(wait, None)
        if broken or (not trainers and (fixed or self.trainer_came)):
            for wait in receiving:
                self._answer(wait, None)
        elif trainers and ready and not running and all(status is RunningStatus.REQUIRE_SYNC for status in trainers):
            self._transfer(group, sending, receiving)

    def _count(self, group: SyncGroup, status: RunningStatus) -> int:
        return sum(self._explorers[member][status] for member in group.explorers & self._explorers.keys())

    def _statuses(self, group: SyncGroup) -> list[RunningStatus]:
        return [self._trainers.get(member, RunningStatus.STOPPED) for member in group.trainers]

    def _is_broken(self, group: SyncGroup) -> bool:
        gone = not group.explorers <= self._explorers.keys() or RunningStatus.STOPPED in self._statuses(group)
        return gone or self._count(group, RunningStatus.STOPPED) > 0

    def _transfer(self, group: SyncGroup, sending: list[Wait], receiving: list[Wait]) -> None:
        """Answers the members of a group that are all ready.

        A side that has set its status and not called yet stays in REQUIRE_SYNC: its call comes later, and is answered
        at once.
        """
        if sending:
            newest = max(sending, key=lambda wait: wait.step)
            self._raise_version(newest.step, newest.member)
            for member in group.explorers & self._explorers.keys():
                counts = self._explorers[member]
                counts[RunningStatus.RUNNING] += counts.pop(RunningStatus.REQUIRE_SYNC, 0)
        if receiving:
            for member in group.trainers & self._trainers.keys():
                self._trainers[member] = RunningStatus.RUNNING
        for wait in (*sending, *receiving):
            self._finish(wait, End.ANSWERED, self.version)
        if sending:
            self._answer_new_state()

    # Ends of waits

    def _begin(self, wait: Wait) -> Wait:
        self._waits.append(wait)
        if self._ended:
            self._withdraw(wait, End.LEFT)
        return wait

    def _of(self, purpose: Purpose | None = None, member: str | None = None) -> list[Wait]:
        return [wait for wait in self._waits if purpose in (None, wait.purpose) and member in (None, wait.member)]

    def _trainer_stopped(self) -> None:
        if self.trainers_stopped:
            self._answer_new_state()
        self._settle()

    def _answer_new_state(self) -> None:
        for wait in self._of(Purpose.NEW_STATE):
            self._answer(wait, self.version)

    def _answer(self, wait: Wait, version: int | None) -> None:
        self._withdraw(wait, End.ANSWERED)
        wait.version = version

    def _withdraw(self, wait: Wait, end: End) -> None:
        self._finish(wait, end)
        if wait.purpose is Purpose.TRAINER_READY:
            if self._trainers.get(wait.member) is RunningStatus.REQUIRE_SYNC:
                self._trainers[wait.member] = RunningStatus.RUNNING
        elif wait.counted and (counts := self._explorers.get(wait.member, Counter()))[RunningStatus.REQUIRE_SYNC]:
            counts[RunningStatus.REQUIRE_SYNC] -= 1
            counts[RunningStatus.RUNNING] += 1

    def _finish(self, wait: Wait, end: End, version: int | None = None) -> None:
        wait.end, wait.version = end, version
        if wait.purpose is Purpose.EXPLORER_READY and version is not None:
            self.note_received(wait.member, version)
        self._waits.remove(wait)

    def _raise_version(self, step: int, member: str) -> None:
        self.version = self.next_version(step, member)
        self._publisher = member


def _named(member: str) -> str:
    return f"{member!r}" if member else "this process"

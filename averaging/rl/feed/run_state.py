"""The state of a run: the registrations, the groups that wait, and the batches that were delivered. Pure.

A method that raises has changed nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from averaging.common import listed
from averaging.errors import FeedError
from averaging.rl.feed.batch_formation import can_fill, exact_sum, form_batch, reachable, reservations
from averaging.rl.feed.messages import RegisterEnv, Registration
from averaging.rl.feed.versions import UNKNOWN, Fit, StaleMode, TrainerVersion

MIN_ENV_WEIGHT = 0.01
"""Lower bound of `env_weight`, so that no environment starves."""

MAX_ENVS, MAX_BUFFERED = 1 << 16, 1024
"""Environments of a run, and groups in the buffer of one environment."""

MAX_TRAINER = 1 << 31
"""Largest number that a server without its earlier store takes over from a trainer that registers again."""

MOST_STALE = 8
"""Environments whose stale groups the status names."""

KEYED = b"key "
"""Prefix of an owner that is known by a secret key."""


class NoTrainerError(FeedError):
    """A batch was requested before a trainer has registered."""

    def __init__(self) -> None:
        super().__init__("Trainer not registered. Call /register first.", 409)


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """A group without its content, which the database holds.

    Attributes:
        number: position of the group in the order of arrival.
        env: id of its environment; None if it was posted without one.
        size: number of sequences.
        nbytes: length of the content.
        version: see `oldest_version`.
        arrived: `TrainerVersion.reports` when it arrived.
    """

    number: int
    env: int | None
    size: int
    nbytes: int
    version: int | None = None
    arrived: int = field(default=0, compare=False)


class Move(Enum):
    """What has become of a stored group because of its version, and must be written to the store."""

    QUEUED = auto()
    BUFFERED = auto()
    ASIDE = auto()
    DROPPED = auto()


@dataclass(frozen=True, slots=True)
class Added:
    """The effect of `RunState.add`.

    Attributes:
        first: number of the first added group; the others follow.
        queued: the groups that entered the queue, in its order: added groups, and buffered ones that they completed.
            Those that are ahead of the trainer wait in `RunState.early`.
        buffered: sequences in the buffer after each added group whose size is not its environment's.
    """

    first: int
    queued: list[SampleGroup]
    buffered: list[int]


@dataclass(slots=True)
class Env:
    """An environment. Its id is its index in `RunState.envs`.

    Attributes:
        owner: identifies who registered it; empty if that is unknown.
        heard: time of its last request.
        posted: whether it has posted since its registration.
        waited: time since which the run waits for its groups: that of its last post, or of a batch with its groups.
        silent: whether it has given up its reservation, because the run waited for longer than `RunState.env_timeout`.
        stale: its groups that did not fit the trainer's version, since the server has started.
        unfit: whether its last group had no known version, or one that did not fit the trainer's.
    """

    config: RegisterEnv
    name: str
    connected: bool = True
    owner: bytes = b""
    heard: float = field(default=0.0, compare=False)
    posted: bool = field(default=False, compare=False)
    waited: float = field(default=0.0, compare=False)
    silent: bool = field(default=False, compare=False)
    stale: int = field(default=0, compare=False)
    unfit: bool = field(default=False, compare=False)


@dataclass(kw_only=True)
class RunState:
    """The state of a run.

    Attributes:
        max_bytes, max_groups: limits of the groups that wait.
        max_replay_bytes: limit of the batches in `batches`.
        env_timeout: seconds after which an environment without a post gives up its reservation, or without any request
            its place.
        max_staleness: how many versions a group may be behind the trainer's newest one; None for any.
        stale_mode: whether groups that are older are dropped or set aside.
        trainer: number of the latest registration of a trainer; earlier trainers are refused.
        started: whether a trainer has asked for a batch. Environments can register from then on.
        step: step of the newest batch.
        saved: the batches up to this step are forgotten.
        queue: groups for the next batches, oldest first.
        version: the trainer's newest version.
        early: groups that belong into the queue, but are ahead of the trainer's last report.
        aside: groups that do not fit the trainer's version, oldest first, by their number.
        aside_bytes: their total.
        moves: what must be written to the store, until the database takes it out.
        stale: groups that turned out not to fit, by reason and environment, until the server takes them out.
        stale_groups: how many they were since the server has started.
        buffers: groups by environment that are smaller than its group size, and wait until some add up to it.
        batches: delivered batches by step that a trainer can ask for again.
        waiting_bytes, waiting_groups: totals of `queue`, `early` and `buffers`.
        notices: events of environments, as a name and an `env_id`, until the server takes them out.
        sequences, sizes: sequences in the queue by environment, and groups in the queue by size.
    """

    max_bytes: int = 4 << 30
    max_groups: int = 50_000
    max_replay_bytes: int = 4 << 30
    env_timeout: float = 300.0
    max_staleness: int | None = None
    stale_mode: StaleMode = StaleMode.DROP
    trainer: int = 0
    registration: Registration | None = None
    started: bool = False
    step: int = 0
    saved: int = 0
    envs: list[Env] = field(default_factory=list)
    queue: list[SampleGroup] = field(default_factory=list)
    version: TrainerVersion = field(default_factory=TrainerVersion)
    early: list[SampleGroup] = field(default_factory=list)
    aside: dict[int, SampleGroup] = field(default_factory=dict)
    aside_bytes: int = 0
    moves: list[tuple[SampleGroup, Move]] = field(default_factory=list)
    stale: Counter[tuple[Fit, int | None]] = field(default_factory=Counter)
    stale_groups: int = 0
    buffers: dict[int, list[SampleGroup]] = field(default_factory=dict)
    batches: dict[int, list[SampleGroup]] = field(default_factory=dict)
    waiting_bytes: int = 0
    waiting_groups: int = 0
    next_number: int = 0
    sequences: Counter[int | None] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)
    notices: list[tuple[str, int]] = field(default_factory=list)
    _candidate: list[int] | None = None
    _candidate_is_current: bool = False

    def restore(self, group: SampleGroup, *, queued: bool, step: int | None, aside: bool = False) -> None:
        """Puts a stored group back into the batch of `step`, the queue, a buffer, or aside. Call it in their order.

        After the last one, `sort_out` applies the limit of this server.
        """
        self.next_number = max(self.next_number, group.number + 1)
        if step is not None:
            self.batches.setdefault(step, []).append(group)
            return
        if aside:
            self.aside[group.number] = group
            self.aside_bytes += group.nbytes
            return
        self.waiting_bytes += group.nbytes
        self.waiting_groups += 1
        if queued or group.env is None:
            self.queue.append(group)
            self._count([group], 1)
        else:
            self.buffers.setdefault(group.env, []).append(group)

    def register(self, registration: Registration, trainer: int = 0) -> bool:
        """Gives a trainer the next number, and begins a run. Returns False if a run has begun already.

        Args:
            registration: the run's registration; ignored if a run has begun already.
            trainer: the number of the trainer, if it registers again.

        Raises:
            FeedError: a group that was posted earlier does not fit into a batch, or another trainer has
                registered since this trainer.
        """
        if 0 < trainer < self.trainer:
            raise self._superseded(trainer)
        if self.registration is not None:
            self.trainer = max(self.trainer, min(trainer, MAX_TRAINER)) + 1
            return False
        largest = max((group.size for group in self.queue), default=0)
        if largest > registration.batch_size:
            raise FeedError(
                f"a group in the queue has {largest} sequences, more than batch_size {registration.batch_size}; "
                "register a larger batch_size, or drop all groups with GET /reset_data",
                409,
            )
        self.trainer = max(self.trainer, min(trainer, MAX_TRAINER)) + 1
        self.registration, self._candidate_is_current = registration, False
        self.step = self.saved = registration.starting_step
        return True

    def resume_warning(self, start: int) -> str:
        """Names a new trainer that begins at step `start` of a run; empty if all of the run is saved up to there."""
        if self.registration is None or start == self.step == self.saved:
            return ""
        again = f"; the batches up to step {self.step} come again" if self.saved <= start < self.step else ""
        saved = "" if start == self.saved else f", and not at step {self.saved}, up to which batches were saved"
        return (
            f"a trainer resumes at step {start}{saved}{again}. If its model is of another step, groups are left out or "
            "trained twice: give the step of the model's checkpoint as starting_step, and call saved() with it"
        )

    def check_trainer(self, trainer: int) -> None:
        """Refuses a trainer if another trainer has registered since.

        Raises:
            FeedError: `trainer` is not the number of the latest registration.
        """
        if self.registration is not None and trainer != self.trainer:
            raise self._superseded(trainer)

    def _superseded(self, trainer: int) -> FeedError:
        return FeedError(
            f"this trainer has registration {trainer}, but another trainer has registered since, as number "
            f"{self.trainer}, and gets the batches now. End this one. If it should continue instead, end the other one "
            "and start this one again",
            409,
        )

    def register_env(self, config: RegisterEnv, owner: bytes, now: float) -> int:
        """Adds an environment, or gives it its old place. Returns its id; -1 if no trainer has started.

        An environment gets its old place if it has the key of an earlier environment, or the configuration of an
        environment that has disconnected or has sent no request for `env_timeout`.

        Args:
            config: the environment's configuration.
            owner: identifies who registers it; begins with `KEYED` if it is from a secret key.
            now: the present time in seconds.

        Raises:
            FeedError: its groups would not fit into a batch, or there are too many environments.
        """
        if self.registration is None or not self.started:
            return -1
        if config.group_size > self.registration.batch_size:
            size = self.registration.batch_size
            raise FeedError(f"group_size {config.group_size} is above the run's batch_size {size}", 422)
        namesakes = [i for i, each in enumerate(self.envs) if each.config.desired_name == config.desired_name]
        env_id = next((i for i in namesakes if self._has_left(self.envs[i], config, owner, now)), len(self.envs))
        if env_id == MAX_ENVS:
            raise FeedError(f"{MAX_ENVS} environments have registered; begin another run", 409)
        if env_id == len(self.envs):
            self.envs.append(Env(config, f"{config.desired_name}_{len(namesakes)}", posted=True))
        env = self.envs[env_id]
        if env.posted:
            # Environments that register again and again without a post, under whatever name, have one time together.
            idle = [each.waited for each in self.envs if each.connected and not each.posted]
            env.waited = min([now, *idle])
        env.connected, env.owner, env.heard, env.posted = True, owner, now, False
        self._candidate_is_current = False
        return env_id

    def _has_left(self, env: Env, config: RegisterEnv, owner: bytes, now: float) -> bool:
        if env.config != config:
            return False
        same_key = owner.startswith(KEYED) and owner == env.owner
        return same_key or not env.connected or now - env.heard >= self.env_timeout

    def disconnect(self, env_id: int, owners: Collection[bytes]) -> None:
        """Ends the reservation of an environment.

        Args:
            env_id: id of the environment.
            owners: everything that may identify the caller.

        Raises:
            FeedError: the id is unknown, or someone else has registered it.
        """
        env = self.env(env_id)
        if env.owner and env.owner not in owners:
            raise FeedError(
                f"only who registered environment {env_id} may disconnect it: the request must come from the same "
                "address, or have the same Environment-Key",
                403,
            )
        env.connected = env.silent = False
        self._candidate_is_current = False

    def env(self, env_id: int) -> Env:
        """Returns an environment by its id.

        Raises:
            FeedError: the id is unknown.
        """
        if not 0 <= env_id < len(self.envs):
            raise FeedError(f"there is no environment with env_id {env_id}; register it with /register-env", 404)
        return self.envs[env_id]

    def report(self, version: int, trainer: int | None) -> None:
        """Takes the trainer's newest version, and sorts out the groups that do not fit it.

        Args:
            version: the version.
            trainer: number of the trainer's registration; None if the trainer knows of none.
        """
        changed = self.version.report(version, self.trainer if trainer is None else trainer)
        if self.max_staleness is not None and (changed or self.early):
            self.sort_out()

    def sort_out(self) -> None:
        """Moves all groups that wait, or were set aside, to where they belong by their version."""
        kept, self.aside, self.aside_bytes = sorted(self.aside.items()), {}, 0
        waiting, self.queue, self.early = [*self.queue, *self.early], [], []
        self.sequences.clear()
        self.sizes.clear()
        stale = self._queue(waiting)
        for env, buffer in self.buffers.items():
            stale += [group for group in buffer if self._is_stale(group)]
            self.buffers[env] = [group for group in buffer if not self._is_stale(group)]
        self.waiting_bytes -= sum(group.nbytes for group in stale)
        self.waiting_groups -= len(stale)
        for _, group in kept:
            if self._fit_of(group) is Fit.FITS:
                self._take_back(group)
            else:
                self._set_aside(group)
        for group in stale:
            self._turn_away(group)
        self._candidate_is_current = False

    def is_stale(self, version: int | None) -> bool:
        """Returns whether a group of this version would be too old now, or of unknown weights."""
        return self.version.fit_of(version, self.version.reports, self.max_staleness) in (Fit.OLD, Fit.UNKNOWN)

    def _fit_of(self, group: SampleGroup) -> Fit:
        return self.version.fit_of(group.version, group.arrived, self.max_staleness)

    def _is_stale(self, group: SampleGroup) -> bool:
        return self._fit_of(group) not in (Fit.FITS, Fit.WAITS)

    def _turn_away(self, group: SampleGroup) -> None:
        """Drops a group, or sets it aside; the oldest of those are dropped if there are too many."""
        fit = self._fit_of(group)
        self.stale[fit, group.env] += 1
        self.stale_groups += 1
        if group.env is not None:
            self.envs[group.env].stale += 1
            self.envs[group.env].unfit |= fit is not Fit.OLD  # one that was not old when it arrived says nothing of it
        self.moves.append((group, Move.ASIDE))
        self._set_aside(group)

    def _set_aside(self, group: SampleGroup) -> None:
        if self.stale_mode is StaleMode.DROP:
            self.moves.append((group, Move.DROPPED))
            return
        self.aside[group.number] = group
        self.aside_bytes += group.nbytes
        while len(self.aside) > self.max_groups or self.aside_bytes > self.max_bytes:
            oldest = self.aside.pop(next(iter(self.aside)))
            self.aside_bytes -= oldest.nbytes
            self.moves.append((oldest, Move.DROPPED))

    def _take_back(self, group: SampleGroup) -> None:
        """Lets a group that was set aside wait again."""
        self.waiting_bytes += group.nbytes
        self.waiting_groups += 1
        if group.env is not None and group.size != self.envs[group.env].config.group_size:
            self.buffers.setdefault(group.env, []).append(group)
            self.moves.append((group, Move.BUFFERED))
            return
        self.moves.append((group, Move.QUEUED))
        self._queue([group])

    def _queue(self, groups: Iterable[SampleGroup]) -> list[SampleGroup]:
        """Adds groups to the queue, or to those that are ahead of the trainer. Returns those that do not fit."""
        places: dict[Fit, list[SampleGroup]] = {fit: [] for fit in Fit}
        for group in groups:
            places[self._fit_of(group)].append(group)
        self.queue += places[Fit.FITS]
        self._count(places[Fit.FITS], 1)
        self.early += places[Fit.WAITS]
        return places[Fit.OLD] + places[Fit.FOREIGN] + places[Fit.UNKNOWN]

    def add(self, groups: Sequence[tuple[int | None, int, int, int | None]], now: float) -> Added:
        """Adds all of the groups, given as (environment, sequences, bytes, version), or none, at the time `now`.

        Those that are too old are dropped or set aside.

        Raises:
            FeedError: a group can never be part of a batch, or the queue is full.
        """
        smaller: Counter[int | None] = Counter()
        for env, size, _, _ in groups:
            self._check_size(env, size, smaller)
        self._check_room(now)
        for env in {env for env, _, _, _ in groups if env is not None}:
            self._heard_post(env, now)
        added = Added(self.next_number, [], [])
        for env, size, nbytes, version in groups:
            if env is not None:
                self.envs[env].unfit = version in (None, UNKNOWN) or self.is_stale(version)
            group = SampleGroup(self.next_number, env, size, nbytes, version, self.version.reports)
            self.next_number += 1
            if self._is_stale(group):
                self._turn_away(group)
                continue
            self._enqueue(group, added)
            self.waiting_bytes += nbytes
            self.waiting_groups += 1
        self.early += self._queue(added.queued)  # the next report decides on those that do not fit any more
        self._candidate_is_current = False
        return added

    def next_batch(self, now: float) -> tuple[int, list[SampleGroup]] | None:
        """Removes the next batch from the queue. Returns its step and groups, or None if no batch can be formed.

        Raises:
            FeedError: no trainer has registered.
        """
        if self.registration is None:
            raise NoTrainerError
        indices = self._find_batch(now)
        if indices is None:
            return None
        batch, chosen = [self.queue[index] for index in indices], set(indices)
        self.queue = [group for index, group in enumerate(self.queue) if index not in chosen]
        self._count(batch, -1)
        for env in {group.env for group in batch if group.env is not None}:
            self.envs[env].waited = now
        self.waiting_bytes -= sum(group.nbytes for group in batch)
        self.waiting_groups -= len(batch)
        self._candidate_is_current = False
        self.step += 1
        self.batches[self.step] = batch
        return self.step, batch

    def was_delivered(self, step: int) -> bool:
        """Returns True if the batch of `step` was delivered and is kept, False if it is the next one to form.

        Raises:
            FeedError: the batch is forgotten or of a later step, or no trainer has registered.
        """
        if self.registration is None:
            raise NoTrainerError
        if step <= self.saved:
            raise FeedError(
                f"the batch of step {step} is forgotten: the trainer has saved the batches up to step {self.saved}, or "
                "they exceeded the limit of kept bytes. Resume from a later checkpoint, or begin another run with GET "
                "/reset_data",
                410,
            )
        if step > self.step + 1:
            raise FeedError(
                f"step {step} was requested, but the next batch is that of step {self.step + 1}: this store belongs to "
                "another run. Give the server another store, or begin another run with GET /reset_data",
                409,
            )
        return step <= self.step

    def forget(self, saved: int) -> int:
        """Forgets the batches up to step `saved`, and the oldest above `max_replay_bytes`. Returns the last of them."""
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
        """Returns the fields of `EnvStatus`, computed as atroposlib computes them.

        Raises:
            FeedError: the id is unknown.
        """
        env = self.env(env_id)
        connected = [other for other in self.envs if other.connected]
        total = sum(other.config.max_token_length * max(0.0, other.config.weight) for other in connected)
        weight = env.config.max_token_length * env.config.weight / total if total else 0.0
        allocated = sum(other.config.min_batch_allocation or 0.0 for other in connected if not other.silent)
        largest = max((size for size, count in self.sizes.items() if count), default=1)
        queued = available = self.sequences[env_id]
        if largest > 1 and self.registration is not None:
            for other, sequences in self.sequences.items():
                if other != env_id and sequences:
                    reserved = 0.0
                    if other is not None and self.envs[other].connected and not self.envs[other].silent:
                        reserved = self.envs[other].config.min_batch_allocation or 0.0
                    packed = math.ceil(sequences / largest) * largest
                    available += max(0, packed - int(self.registration.batch_size * reserved))
        return {
            "current_step": self.step,
            "queue_size": available // env.config.group_size,
            "unallocated_fraction": 1.0 - min(allocated, 1.0),
            "self_queue_size": queued // env.config.group_size,
            "max_group_size": largest,
            "env_weight": max(MIN_ENV_WEIGHT, weight),
            **({"newest_version": newest} if (newest := self.version.newest) is not None else {}),
            **({"stale_groups": env.stale} if env.stale else {}),
        }

    def warning(self) -> str:
        """Returns why no batch is ever formed as things are, or the limit of versions does not hold; else nothing."""
        if self.registration is None:
            return ""
        unfit = [env.name for env in self.envs if env.unfit and env.connected]
        if self.max_staleness is not None and self.version.newest is not None and unfit:
            return (
                f"{listed(unfit)} posts groups without a version, or of one that does not fit the limit of "
                f"{self.max_staleness} versions; they are dropped, or from an environment that knows of no versions "
                "trained at any age. Have its engine follow the run: averaging serve --follow, or averaging follow "
                "--engine for vLLM"
            )
        if (
            self.max_staleness is not None
            and self.version.newest is None
            and self.step > self.registration.starting_step
        ):
            return (
                f"the limit of {self.max_staleness} versions has no effect, because the trainer does not report its "
                "version; give BatchFeed its publisher as `weights`, or send `version` with GET /batch"
            )
        size = self.registration.batch_size
        sizes = frozenset([*self.sizes, *(env.config.group_size for env in self.envs if env.connected)])
        if not sizes or can_fill(sizes, size):
            return ""
        named = ", ".join(map(str, sorted(sizes)[:8]))
        sums = "a multiple of the group size" if len(sizes) == 1 else "a sum of multiples of the group sizes"
        return f"no batch can be formed: batch_size {size} is not {sums} {named}; change batch_size or group_size"

    def silent_environments(self) -> list[str]:
        """Returns the names of the environments that have given up their reservation."""
        return [env.name for env in self.envs if env.silent]

    def stale_environments(self) -> dict[str, int]:
        """Returns how many groups of which environments did not fit, of the `MOST_STALE` environments with most."""
        stale = sorted((env for env in self.envs if env.stale), key=lambda env: -env.stale)[:MOST_STALE]
        return {env.name: env.stale for env in stale}

    def _count(self, groups: Iterable[SampleGroup], sign: int) -> None:
        for group in groups:
            self.sequences[group.env] += sign * group.size
            self.sizes[group.size] += sign
            if not self.sizes[group.size]:
                del self.sizes[group.size]

    def _check_size(self, env: int | None, size: int, smaller: Counter[int | None]) -> None:
        """Checks a group; `smaller` counts those of the same request that go to the buffer of their environment."""
        limit, limit_name = math.inf, ""
        if self.registration is not None:
            limit, limit_name = self.registration.batch_size, "the run's batch_size"
        if env is not None:
            limit, limit_name = self.env(env).config.group_size, f"the group_size of environment {env}"
            smaller[env] += size < limit
            if size < limit and len(self.buffers.get(env, ())) + smaller[env] > MAX_BUFFERED:
                raise FeedError(
                    f"{MAX_BUFFERED} groups of environment {env} wait and do not add up to its group_size {limit}, or "
                    "are posted at once",
                    422,
                )
        if size > limit:
            raise FeedError(f"a group has {size} sequences, more than {limit_name}, {limit}", 422)

    def _check_room(self, now: float) -> None:
        """Refuses groups if the queue is full. If a full queue holds no batch, it may grow to twice its limits."""
        usage = max(self.waiting_bytes / self.max_bytes, self.waiting_groups / self.max_groups)
        if usage >= 2 or (usage >= 1 and (self.registration is None or self._find_batch(now) is not None)):
            raise FeedError(
                f"the queue is full: {self.waiting_groups} groups and {self.waiting_bytes} bytes wait; "
                "post the same again once the trainer has fetched a batch",
                503,
                1.0,
            )

    def _heard_post(self, env_id: int, now: float) -> None:
        env = self.envs[env_id]
        env.heard, env.waited, env.posted = now, now, True
        if env.silent:
            env.silent = False
            self.notices.append(("returned", env_id))

    def _enqueue(self, group: SampleGroup, added: Added) -> None:
        if group.env is None or group.size == self.envs[group.env].config.group_size:
            added.queued.append(group)
            return
        buffer = [*self.buffers.get(group.env, ()), group]
        complete = exact_sum([each.size for each in buffer], self.envs[group.env].config.group_size) or []
        added.queued.extend(buffer[index] for index in complete)
        self.buffers[group.env] = [each for index, each in enumerate(buffer) if index not in complete]
        added.buffered.append(sum(each.size for each in self.buffers[group.env]))

    def _find_batch(self, now: float) -> list[int] | None:
        """Returns the queue indices of the next batch, from the last search if nothing has changed since."""
        if self.registration is None:
            return None
        size = self.registration.batch_size
        # Before the queue is gone through: no batch if its sizes do not add up, or an environment lacks groups.
        if self.sequences.total() < size or not reachable(self.sizes, size) >> size:
            return None
        reserved = self._keep_reservations(size, now)
        if any(self.sequences[env] < count for env, count in reserved.items()):
            return None
        if not self._candidate_is_current:
            sizes, envs = [group.size for group in self.queue], [group.env for group in self.queue]
            self._candidate, self._candidate_is_current = form_batch(sizes, envs, size, reserved), True
        return self._candidate

    def _keep_reservations(self, size: int, now: float) -> dict[int, int]:
        """Returns the reserved sequences, after environments for which the run has waited too long gave theirs up."""
        parts = {
            env_id: env.config.min_batch_allocation
            for env_id, env in enumerate(self.envs)
            if env.config.min_batch_allocation and env.connected and not env.silent
        }
        reserved = reservations(size, parts)
        late = [
            env_id
            for env_id, count in reserved.items()
            if self.sequences[env_id] < count and now - self.envs[env_id].waited >= self.env_timeout
        ]
        if not late:
            return reserved
        for env_id in late:
            self.envs[env_id].silent = True
            self.notices.append(("silent", env_id))
        self._candidate_is_current = False
        return reservations(size, {env_id: part for env_id, part in parts.items() if env_id not in late})

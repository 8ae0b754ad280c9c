"""The state of a run: the registrations, the groups that wait, and the batches that were delivered. Pure.

A method that raises has changed nothing that is stored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from averaging.common import listed
from averaging.errors import FeedError
from averaging.rl.feed.batch_formation import can_fill, exact_sum, form_batch, reservations
from averaging.rl.feed.messages import UNKNOWN, RegisterEnv, Registration

MIN_ENV_WEIGHT = 0.01  # lower bound of `env_weight`, so that no environment starves
MAX_ENVS, MAX_BUFFERED = 1 << 16, 1024  # environments of a run, and groups in the buffer of one of them
# After so many reports a group must not be ahead of the trainer. The first one may have been sent before its arrival.
REPORTS_UNTIL_KNOWN = 2


@dataclass(frozen=True, slots=True)
class CommandEvent:
    """Something that happened: its name, a line about it, and what a program may want to know of it."""

    name: str
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text

    def as_json(self) -> dict[str, Any]:
        return {"event": self.name, **self.fields}


class Fit(StrEnum):
    """Whether a group may be part of a batch. The last three are the reasons for which it is dropped."""

    FITS = "fits"
    WAITS = "waits"  # it is ahead of the trainer's last report, so the next one decides
    OLD = "old"
    FOREIGN = "foreign"  # no version of this trainer: see above
    UNKNOWN = "unknown"  # its environment knows of versions, and not which ones made it


class TrainerVersion(msgspec.Struct):
    """The newest version of the weights, as the trainer reports it with each request for a batch.

    What an environment claims never changes it. A version is published before an environment has it, and the trainer
    reports the newest one that it has published. So a group that is ahead of a report which was begun after its arrival
    was made by weights of another run, or of a history that ended in a crash.
    """

    newest: int | None = None  # None before the first report
    trainer: int = 0  # number of the registration that has reported it

    def report(self, version: int, trainer: int) -> None:
        # Another trainer may begin with an older version, because it resumes from a checkpoint. One never goes back.
        if self.newest is None or trainer != self.trainer or version > self.newest:
            self.newest, self.trainer = version, trainer

    def fit_of(self, version: int | None, reports: int, max_staleness: int | None) -> Fit:
        """Judges a group by its `oldest_version`, after so many reports since it arrived.

        One of an environment which knows of no versions always fits.
        """
        if max_staleness is None or self.newest is None or version is None:
            return Fit.FITS
        if version == UNKNOWN:
            return Fit.UNKNOWN
        if version > self.newest:
            return Fit.WAITS if reports < REPORTS_UNTIL_KNOWN else Fit.FOREIGN
        return Fit.FITS if self.newest - version <= max_staleness else Fit.OLD


class NoTrainerError(FeedError):
    def __init__(self) -> None:
        super().__init__("Trainer not registered. Call /register first.", 409)


@dataclass(frozen=True, slots=True)
class SampleGroup:  # without its content, which the database holds
    number: int  # position in the order of arrival
    env: int | None  # None if it was posted without one
    size: int  # sequences
    nbytes: int
    version: int | None = None  # see `oldest_version`
    arrived: int = field(default=0, compare=False)  # `RunState.reports` then


@dataclass(frozen=True, slots=True)
class Added:
    first: int  # number of the first added group; the others follow
    queued: list[SampleGroup]  # those that entered the queue: added groups, and buffered ones that they completed
    buffered: list[int]  # sequences in the buffer after each added group whose size is not its environment's


class Env(msgspec.Struct):  # its id is its index in `RunState.envs`
    config: RegisterEnv
    name: str
    connected: bool = True
    key: bytes = b""  # by which it is known after a restart; empty for none
    heard: float = 0.0  # time of its last request
    posted: bool = True  # whether it has posted since its registration
    waited: float = 0.0  # since when the run waits for its groups: its last post, or the last batch with some of them
    silent: bool = False  # whether it gave up its reservation, because the run waited longer than `env_timeout`

    @property
    def reserved(self) -> float:
        return (self.config.min_batch_allocation or 0.0) if self.connected and not self.silent else 0.0


class RunRecord(msgspec.Struct):
    """What the store holds of a run beside its environments and groups."""

    trainer: int = 0  # number of the latest registration of a trainer; earlier trainers are refused
    registration: Registration | None = None
    started: bool = False  # whether a trainer has asked for a batch. Environments can register from then on
    step: int = 0  # of the newest batch
    saved: int = 0  # the batches up to this step are forgotten
    version: TrainerVersion = msgspec.field(default_factory=TrainerVersion)
    unfit: list[int] = []  # environments whose last group had no known version, or one that did not fit the trainer's


@dataclass(kw_only=True)
class RunState:
    """The state of a run, and the limits of its server."""

    max_bytes: int = 4 << 30  # of the groups that wait; `batches` may have as many again
    max_groups: int = 50_000  # that wait
    env_timeout: float = 300.0  # after which a silent environment gives up its reservation, or its place
    max_staleness: int | None = None  # versions that a group may be behind the trainer's newest one; None for any
    run: RunRecord = field(default_factory=RunRecord)
    envs: list[Env] = field(default_factory=list)
    queue: list[SampleGroup] = field(default_factory=list)  # oldest first, also those ahead of the trainer's report
    # By environment: groups that are smaller than its group size, and wait until some add up to it.
    buffers: dict[int, list[SampleGroup]] = field(default_factory=dict)
    batches: dict[int, list[SampleGroup]] = field(default_factory=dict)  # by step: delivered, and can be asked again
    next_number: int = 0
    reports: int = 0  # of the trainer's version, since the server has started
    dropped: list[int] = field(default_factory=list)  # groups that do not fit, until the database takes them out
    stale: Counter[int | None] = field(default_factory=Counter)  # how many they were, by environment
    events: list[CommandEvent] = field(default_factory=list)  # until the server takes them out
    _candidate: tuple[list[SampleGroup] | None] | None = None  # the next batch, or that there is none; None if unknown

    @property
    def waiting(self) -> Iterator[SampleGroup]:
        yield from self.queue
        for buffer in self.buffers.values():
            yield from buffer

    def register(self, registration: Registration, trainer: int = 0) -> bool:
        """Gives a trainer the next number, and begins a run. Returns False if a run has begun already.

        `trainer` is its number if it registers again. It is refused if another one has registered since.
        """
        if 0 < trainer < self.run.trainer:
            raise self._superseded(trainer)
        largest = max((group.size for group in self.queue), default=0)
        if self.run.registration is None and largest > registration.batch_size:
            text = f"a group in the queue has {largest} sequences, more than batch_size {registration.batch_size}"
            raise FeedError(f"{text}; register a larger one, or drop all groups with GET /reset_data", 409)
        self.run.trainer = max(self.run.trainer, trainer) + 1
        if self.run.registration is not None:
            return False
        self.run.registration, self._candidate = registration, None
        self.run.step = self.run.saved = registration.starting_step
        return True

    def resume_warning(self, start: int) -> str:
        """Names a new trainer that begins at step `start`; empty if all of the run is saved up to there."""
        run = self.run
        if run.registration is None or start == run.step == run.saved:
            return ""
        again = f"; the batches up to step {run.step} come again" if run.saved <= start < run.step else ""
        saved = "" if start == run.saved else f", and not at step {run.saved}, up to which batches were saved"
        return (
            f"a trainer resumes at step {start}{saved}{again}. If its model is of another step, groups are left out or "
            "trained twice: give the step of the model's checkpoint as starting_step, and call saved() with it"
        )

    def check_trainer(self, trainer: int) -> None:
        if self.run.registration is not None and trainer != self.run.trainer:
            raise self._superseded(trainer)

    def _superseded(self, trainer: int) -> FeedError:
        return FeedError(
            f"this trainer has registration {trainer}, but another trainer has registered since, as number "
            f"{self.run.trainer}, and gets the batches now. End this one, or the other one and start this one again",
            409,
        )

    def report(self, version: int, trainer: int | None) -> None:
        """Takes the newest version of the trainer with this number, and drops the groups that do not fit it."""
        before = self.run.version.newest
        self.run.version.report(version, self.run.trainer if trainer is None else trainer)
        self.reports += 1
        self.drop_stale()
        if self.run.version.newest != before:
            self._candidate = None

    def register_env(self, config: RegisterEnv, key: bytes, now: float) -> int:
        """Adds an environment, or gives it its old place. Returns its id; -1 if no trainer has started.

        An environment gets its old place if it has the same configuration, and the same key, or the earlier one has
        disconnected or has sent no request for `env_timeout`.
        """
        if self.run.registration is None or not self.run.started:
            return -1
        if config.group_size > self.run.registration.batch_size:
            size = self.run.registration.batch_size
            raise FeedError(f"group_size {config.group_size} is above the run's batch_size {size}", 422)
        namesakes = [i for i, each in enumerate(self.envs) if each.config.desired_name == config.desired_name]
        env_id = next((i for i in namesakes if self._has_left(self.envs[i], config, key, now)), len(self.envs))
        if env_id == MAX_ENVS:
            raise FeedError(f"{MAX_ENVS} environments have registered; begin another run", 409)
        if env_id == len(self.envs):
            self.envs.append(Env(config, f"{config.desired_name}_{len(namesakes)}"))
        env = self.envs[env_id]
        if env.posted:
            # Environments that register again and again without a post, under whatever name, have one time together.
            idle = [each.waited for each in self.envs if each.connected and not each.posted]
            env.waited = min([now, *idle])
        env.connected, env.key, env.heard, env.posted = True, key, now, False
        self._candidate = None
        return env_id

    def _has_left(self, env: Env, config: RegisterEnv, key: bytes, now: float) -> bool:
        is_same = key != b"" and key == env.key
        return env.config == config and (is_same or not env.connected or now - env.heard >= self.env_timeout)

    def disconnect(self, env_id: int) -> None:
        env = self.env(env_id)
        env.connected = env.silent = False
        self._candidate = None

    def env(self, env_id: int) -> Env:
        if not 0 <= env_id < len(self.envs):
            raise FeedError(f"there is no environment with env_id {env_id}; register it with /register-env", 404)
        return self.envs[env_id]

    def add(self, groups: Sequence[tuple[int | None, int, int, int | None]], now: float) -> Added:
        """Adds all of the groups, given as (environment, sequences, bytes, version), or none. Old ones are dropped."""
        for env, size, _, _ in groups:
            self._check_size(env, size)
        self._check_room(now)
        added, stale = Added(self.next_number, [], []), []
        for env, size, nbytes, version in groups:
            if env is not None:
                self._note_post(env, now, unfit=version in (None, UNKNOWN) or self.is_stale(version))
            group = SampleGroup(self.next_number, env, size, nbytes, version, self.reports)
            self.next_number += 1
            if self._fit_of(group) in (Fit.FITS, Fit.WAITS):
                self._enqueue(group, added)
            else:
                stale.append(group)
        self.queue += added.queued
        self._drop(stale)
        self._candidate = None
        return added

    def is_stale(self, version: int | None) -> bool:
        return self.run.version.fit_of(version, 0, self.max_staleness) in (Fit.OLD, Fit.UNKNOWN)

    def drop_stale(self) -> None:
        """Drops the groups that wait and do not fit the trainer's version."""
        stale = [group for group in self.waiting if self._fit_of(group) not in (Fit.FITS, Fit.WAITS)]
        if not stale:
            return
        numbers = {group.number for group in stale}
        self.queue = [group for group in self.queue if group.number not in numbers]
        for env, buffer in self.buffers.items():
            self.buffers[env] = [group for group in buffer if group.number not in numbers]
        self._drop(stale)
        self._candidate = None

    def _fit_of(self, group: SampleGroup) -> Fit:
        return self.run.version.fit_of(group.version, self.reports - group.arrived, self.max_staleness)

    def _drop(self, groups: Sequence[SampleGroup]) -> None:
        self.dropped += [group.number for group in groups]
        for (fit, env), count in Counter((self._fit_of(group), group.env) for group in groups).items():
            self.stale[env] += count
            name, newest = "" if env is None else self.envs[env].name, self.run.version.newest
            fields = {"env_id": env, "name": name, "groups": count, "reason": fit.value, "newest_version": newest}
            self._tell("stale", f"{count} groups of {name} are {fit.value}: the trainer is at version {newest}", fields)
            # A group that was not old when it arrived says nothing of its environment.
            if env is not None and fit is not Fit.OLD and env not in self.run.unfit:
                self.run.unfit.append(env)

    def _note_post(self, env_id: int, now: float, *, unfit: bool) -> None:
        env = self.envs[env_id]
        env.heard, env.waited, env.posted = now, now, True
        if env.silent:
            env.silent = False
            text = f"environment {env_id} is back, and has its part of each batch again: {env.name}"
            self._tell("returned", text, {"env_id": env_id, "name": env.name})
        if unfit != (env_id in self.run.unfit):
            (self.run.unfit.append if unfit else self.run.unfit.remove)(env_id)

    def _enqueue(self, group: SampleGroup, added: Added) -> None:
        if group.env is None or group.size == self.envs[group.env].config.group_size:
            added.queued.append(group)
            return
        buffer = [*self.buffers.get(group.env, ()), group]
        complete = exact_sum([each.size for each in buffer], self.envs[group.env].config.group_size) or []
        added.queued.extend(buffer[index] for index in complete)
        self.buffers[group.env] = [each for index, each in enumerate(buffer) if index not in complete]
        added.buffered.append(sum(each.size for each in self.buffers[group.env]))

    def _check_size(self, env: int | None, size: int) -> None:
        limit, limit_name = math.inf, ""
        if self.run.registration is not None:
            limit, limit_name = self.run.registration.batch_size, "the run's batch_size"
        if env is not None:
            limit, limit_name = self.env(env).config.group_size, f"the group_size of environment {env}"
            if size < limit and len(self.buffers.get(env, ())) >= MAX_BUFFERED:
                raise FeedError(f"{MAX_BUFFERED} groups of environment {env} wait and do not add up to {limit}", 422)
        if size > limit:
            raise FeedError(f"a group has {size} sequences, more than {limit_name}, {limit}", 422)

    def _check_room(self, now: float) -> None:
        """Refuses groups if the queue is full. If a full queue holds no batch, it may grow to twice its limits."""
        sizes = [group.nbytes for group in self.waiting]
        usage = max(sum(sizes) / self.max_bytes, len(sizes) / self.max_groups)
        if usage >= 2 or (usage >= 1 and (self.run.registration is None or self._find_batch(now) is not None)):
            full = f"the queue is full: {len(sizes)} groups and {sum(sizes)} bytes wait"
            raise FeedError(f"{full}; post the same again once the trainer has fetched a batch", 503, 1.0)

    def next_batch(self, now: float) -> list[SampleGroup] | None:
        """Removes the next batch from the queue, that of the next step. Returns None if no batch can be formed."""
        if self.run.registration is None:
            raise NoTrainerError
        batch = self._find_batch(now)
        if batch is None:
            return None
        numbers = {group.number for group in batch}
        self.queue = [group for group in self.queue if group.number not in numbers]
        for env in {group.env for group in batch if group.env is not None}:
            self.envs[env].waited = now
        self._candidate = None
        self.run.step += 1
        self.batches[self.run.step] = batch
        return batch

    def was_delivered(self, step: int) -> bool:
        """Returns True if the batch of `step` was delivered and is kept, False if it is the next one to form."""
        run = self.run
        if run.registration is None:
            raise NoTrainerError
        if step <= run.saved:
            why = f"the trainer has saved those up to step {run.saved}, or they exceeded the limit of kept bytes"
            remedy = "Resume from a later checkpoint, or begin another run with GET /reset_data"
            raise FeedError(f"the batch of step {step} is forgotten: {why}. {remedy}", 410)
        if step > run.step + 1:
            why = f"the next batch is that of step {run.step + 1}: this store belongs to another run"
            remedy = "Give the server another store, or begin another run with GET /reset_data"
            raise FeedError(f"step {step} was requested, but {why}. {remedy}", 409)
        return step <= run.step

    def forget(self, saved: int) -> None:
        """Forgets the batches up to step `saved`, and the oldest above `max_bytes`, but never the newest."""
        kept = 0
        for step in sorted(self.batches, reverse=True):
            kept += sum(group.nbytes for group in self.batches[step])
            if kept > self.max_bytes and step < self.run.step:
                saved = max(saved, step)
                break
        self.run.saved = max(self.run.saved, min(saved, self.run.step))
        self.batches = {step: batch for step, batch in self.batches.items() if step > self.run.saved}

    def _find_batch(self, now: float) -> list[SampleGroup] | None:
        """Returns the next batch, from the last search if nothing has changed since."""
        if self.run.registration is None:
            return None
        reserved = self._keep_reservations(self.run.registration.batch_size, now)
        if self._candidate is None:
            fitting = [group for group in self.queue if self._fit_of(group) is Fit.FITS]
            sizes, envs = [group.size for group in fitting], [group.env for group in fitting]
            indices = form_batch(sizes, envs, self.run.registration.batch_size, reserved)
            self._candidate = (None if indices is None else [fitting[index] for index in indices],)
        return self._candidate[0]

    def _keep_reservations(self, batch_size: int, now: float) -> dict[int, int]:
        """Returns the reserved sequences, after environments for which the run has waited too long gave theirs up."""
        parts = {env_id: env.reserved for env_id, env in enumerate(self.envs) if env.reserved}
        reserved = reservations(batch_size, parts)
        sequences = self._sequences() if reserved else {}
        late = [env_id for env_id, count in reserved.items() if sequences.get(env_id, 0) < count]
        late = [env_id for env_id in late if now - self.envs[env_id].waited >= self.env_timeout]
        for env_id in late:
            env, self._candidate = self.envs[env_id], None
            env.silent = True
            text = f"environment {env_id} posts nothing; others get its part of the batches until it does: {env.name}"
            self._tell("silent", text, {"env_id": env_id, "name": env.name})
        return reservations(batch_size, {env_id: part for env_id, part in parts.items() if env_id not in late})

    def _sequences(self) -> Counter[int | None]:
        counts: Counter[int | None] = Counter()
        for group in self.queue:
            counts[group.env] += group.size
        return counts

    def _tell(self, name: str, text: str, fields: dict[str, Any]) -> None:
        self.events.append(CommandEvent(name, text, fields))

    def status_env(self, env_id: int) -> dict[str, Any]:
        """Returns the fields of `EnvStatus`, computed as atroposlib computes them."""
        env, sequences = self.env(env_id), self._sequences()
        connected = [other for other in self.envs if other.connected]
        total = sum(other.config.max_token_length * max(0.0, other.config.weight) for other in connected)
        weight = env.config.max_token_length * env.config.weight / total if total else 0.0
        largest = max((group.size for group in self.queue), default=1)
        queued = available = sequences[env_id]
        if largest > 1 and self.run.registration is not None:
            for other, count in sequences.items():
                if other != env_id:
                    reserved = 0.0 if other is None else self.envs[other].reserved
                    packed = math.ceil(count / largest) * largest
                    available += max(0, packed - int(self.run.registration.batch_size * reserved))
        status = {
            "current_step": self.run.step,
            "queue_size": available // env.config.group_size,
            "unallocated_fraction": 1.0 - min(sum(other.reserved for other in self.envs), 1.0),
            "self_queue_size": queued // env.config.group_size,
            "max_group_size": largest,
            "env_weight": max(MIN_ENV_WEIGHT, weight),
        }
        if self.run.version.newest is not None:
            status["newest_version"] = self.run.version.newest
        if self.stale[env_id]:
            status["stale_groups"] = self.stale[env_id]
        return status

    def warning(self) -> str:
        """Returns why no batch is ever formed as things are, or the limit of versions does not hold; else nothing."""
        registration, newest = self.run.registration, self.run.version.newest
        if registration is None:
            return ""
        unfit = [self.envs[env].name for env in self.run.unfit if self.envs[env].connected]
        if self.max_staleness is not None and newest is not None and unfit:
            return (
                f"{listed(unfit)} posts groups without a version, or of one that does not fit the limit of "
                f"{self.max_staleness} versions; they are dropped, or without any version trained at any age. Have its "
                "engine follow the run: averaging serve --follow, or averaging follow --engine for vLLM"
            )
        if self.max_staleness is not None and newest is None and self.run.step > registration.starting_step:
            return (
                f"the limit of {self.max_staleness} versions has no effect, because the trainer does not report its "
                "version; give BatchFeed its publisher as `weights`, or send `version` with GET /batch"
            )
        size = registration.batch_size
        queued = {group.size for group in self.queue}
        sizes = frozenset([*queued, *(env.config.group_size for env in self.envs if env.connected)])
        if not sizes or can_fill(sizes, size):
            return ""
        named = ", ".join(map(str, sorted(sizes)[:8]))
        sums = "a multiple of the group size" if len(sizes) == 1 else "a sum of multiples of the group sizes"
        return f"no batch can be formed: batch_size {size} is not {sums} {named}; change batch_size or group_size"

    def silent_environments(self) -> list[str]:
        return [env.name for env in self.envs if env.silent]

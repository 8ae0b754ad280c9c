"""`Rollouts`: makes groups of an environment's rollouts and posts them to a feed, until it is ended."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from averaging.common import Backoff
from averaging.errors import ConfigError, FeedError, RolloutError
from averaging.metrics import Samples, counter, gauge
from averaging.rl.feed import Connection, FeedEnvironment, Posted, RegisterEnv
from averaging.rl.rollouts.engine import MAX_PAUSE, MIN_PAUSE, EngineClient, EngineGateway
from averaging.rl.rollouts.environment import VerifiersEnvironment, check_tokenizer, model_context
from averaging.rl.rollouts.samples import (
    ScoredSequence,
    TruncatedMode,
    WantedVersion,
    group_of,
    mean,
    named,
    wanted_version,
)
from averaging.rl.rollouts.store import PendingGroup, RolloutStore

if TYPE_CHECKING:
    from verifiers.v1 import ModelContext, Task

Answer = TypeVar("Answer")

FEED_PATIENCE = 2.0
"""Seconds of one call of the feed's client, which runs in a thread and is not interrupted."""

FEED_TIMEOUT = 10.0
"""Seconds for the feed to connect, or for a piece of its answer."""

VERSION_POLL = 1.0
"""Seconds between two questions for the engine's version while its weights are too old."""

LAST_POSTS = 5.0
"""Seconds that complete groups have to be posted after the end was asked for."""

WAITING_GROUPS = 64
"""Complete groups that wait for the feed; then no further rollouts are made."""

UNUSABLE = frozenset({400, 413, 422})
"""Statuses with which a feed refuses a group for what is in it. Others are for whoever has started this."""

RATE_WINDOW = 60.0
"""Seconds over which the rate of rollouts is measured."""

MAX_DROPPED = 10
"""Groups that are dropped one after the other, before it is an error."""

MANY_EQUAL = 100
"""Groups in a row of which all scores are equal, after which they are named: nothing can be learnt from them."""

OWN_REASONS = frozenset({"empty", "lengths", "logprobs", "long", "score", "sequences", "truncated"})
"""Reasons of failures that lie in what was made. Others come from the environment, whose grader may be away."""

ROLLOUT_METRICS = (
    counter("rollouts_groups", "Groups by outcome.", "outcome", known=(("posted",), ("dropped",))),
    counter("rollouts_stale_groups", "Posted groups that were too old for the trainer."),
    counter("rollouts_scored", "Rollouts that were scored."),
    counter("rollouts_failed", "Rollouts that failed, or are no sample to train, by reason.", "reason"),
    gauge("rollouts_score", "Mean score of the group that was posted last."),
    gauge("rollouts_version", "The version of the weights that the engine serves; -1 if it tells none."),
    gauge("rollouts_waiting_groups", "Complete groups that wait for the feed."),
    gauge("rollouts_engine_up", "Whether the engine answers."),
    gauge("rollouts_feed_up", "Whether the feed answers."),
)
"""What `averaging rollouts` tells Prometheus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """What `Rollouts` makes, and where.

    Attributes:
        environment: its name, see `VerifiersEnvironment`.
        engine: address of the engine, see `EngineClient`.
        feed: address of the feed, see `FeedEnvironment`.
        store: file for what is scored and not posted.
        environment_args: the environment's settings.
        tokenizer: folder or name of the model whose tokenizer the engine uses; None takes what the engine tells.
        renderer: verifiers' renderer of the model's chat template; None chooses it by the tokenizer's name.
        model: the model's name at the engine; None takes the first.
        group_size: rollouts of each task, which are posted together.
        sequences: sequences of each rollout that are trained; more than 1 for environments with several agents.
        concurrency: rollouts that are made at one time.
        max_groups: groups to post; None for no limit.
        attempts: how often a rollout that fails is made.
        truncated: what happens to rollouts that a limit has cut off.
        seed: of the order of the tasks.
        sampling: parameters of the engine, for example `{"temperature": 1.0, "max_tokens": 512}`.
        name: the environment's name at the feed; None takes `environment`.
        weight: its weight at the feed.
        engine_token: the engine's token.
        engine_timeout: seconds after which a request without an answer is repeated.
        feed_options: `token_file`, `tls_ca`, `tls_cert` and `tls_key` for the feed.

    Raises:
        ConfigError: a number is out of range.
    """

    environment: str
    engine: str
    feed: str
    store: Path
    environment_args: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    renderer: str | None = None
    model: str | None = None
    group_size: int = 8
    sequences: int = 1
    concurrency: int = 32
    max_groups: int | None = None
    attempts: int = 3
    truncated: TruncatedMode = TruncatedMode.DROP
    seed: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    weight: float = 1.0
    engine_token: str | None = None
    engine_timeout: float = 600.0
    feed_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("group_size", "sequences", "concurrency", "attempts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def identity(self) -> str:
        """What two starts with one store must have in common."""
        return f"{self.environment} {self.group_size}x{self.sequences} --seed {self.seed} --truncated {self.truncated}"


@dataclass(slots=True)
class RolloutTally:
    """What was made since the start.

    Attributes:
        posted_groups, posted_rollouts, stale_groups: what the feed has acknowledged; stale ones are too old for the
            trainer.
        dropped_groups: groups that were not posted.
        failed_in_a_row: groups that were dropped since the last one that was complete.
        refused_in_a_row: groups that the feed has refused since the last one that it took.
        equal_in_a_row: posted groups of equal scores since the last one with different ones.
        failures_in_a_row: rollouts that the environment has failed since the last one that was scored.
        scored: rollouts that were scored.
        failed: rollouts that were no sample, by reason.
        score: mean score of the last group; None before the first.
        recent: times of the rollouts that were scored in the last minute.
    """

    posted_groups: int = 0
    posted_rollouts: int = 0
    stale_groups: int = 0
    dropped_groups: int = 0
    failed_in_a_row: int = 0
    refused_in_a_row: int = 0
    equal_in_a_row: int = 0
    failures_in_a_row: int = 0
    scored: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    score: float | None = None
    recent: deque[float] = field(default_factory=deque)

    def note_scored(self, now: float) -> None:
        """Notes that a rollout was scored."""
        self.scored += 1
        self.recent.append(now)

    def rate(self, now: float, began: float) -> float:
        """Returns the scored rollouts per second in the last minute."""
        while self.recent and now - self.recent[0] >= RATE_WINDOW:
            self.recent.popleft()
        return len(self.recent) / max(1e-3, min(RATE_WINDOW, now - began))


class _FeedInfo(msgspec.Struct, frozen=True):
    """What a feed tells of its trainer; both are -1 before one has registered."""

    batch_size: int = -1
    max_token_len: int = -1


class Rollouts:
    """Makes rollouts of an environment of verifiers and posts them to a feed.

    verifiers' client reads HTTP_PROXY and its like. If one is set, NO_PROXY must name 127.0.0.1; the command
    `averaging rollouts` sees to that.

    Args:
        options: what is made, and where.
        on_event: called in the event loop with each event: `{"event": …}`, see `averaging rollouts --help`.

    Attributes:
        tally: what was made since the start.
        started: whether environment and engine are ready.

    Raises:
        ConfigError: the environment cannot be loaded, the store cannot be used, or an address is wrong.
    """

    def __init__(
        self, options: RolloutOptions, on_event: Callable[[dict[str, Any]], None] = lambda event: None
    ) -> None:
        self._options, self._emit = options, on_event
        self._environment = VerifiersEnvironment(options.environment, options.environment_args)
        self._engine = EngineClient(
            options.engine,
            token=options.engine_token,
            tls_ca=options.feed_options.get("tls_ca"),
            timeout=options.engine_timeout,
            on_away=lambda reason: self._note("engine", self._engine.url, reason),
        )
        self._gateway = EngineGateway(self._engine)
        self._store = RolloutStore(options.store, options.identity)
        registration = RegisterEnv(
            max_token_length=-1,
            desired_name=options.name or options.environment,
            weight=options.weight,
            group_size=options.group_size * options.sequences,
        )
        calls = {"timeout": FEED_TIMEOUT, "retry_timeout": FEED_PATIENCE, **options.feed_options}
        try:
            self._info = Connection(options.feed, **calls)
            self._feed = FeedEnvironment(options.feed, registration, start_timeout=0.0, key=self._store.key, **calls)
        except ConfigError:
            self._store.close()
            raise
        self.tally = RolloutTally()
        self._began = time.monotonic()
        self._slots = asyncio.Semaphore(options.concurrency)
        self._complete: asyncio.Queue[PendingGroup] = asyncio.Queue(WAITING_GROUPS)
        self._posting = False
        self._kept = 0, 0  # groups and rollouts in the store
        self._open = 0  # groups that are begun, and neither posted nor dropped
        self._closed = asyncio.Event()  # set when a group is posted or dropped
        self._wanted: WantedVersion | None = None
        self._away: dict[str, str] = {}  # why the feed or the environment is away; empty if it is not
        self._last_failure = ""
        self._longest: int | None = None
        self._stopping = asyncio.Event()
        self.started = False

    @property
    def waiting_groups(self) -> int:
        """Complete groups that wait for the feed."""
        return self._complete.qsize()

    @property
    def version(self) -> int | None:
        """The newest version of the weights that the engine was seen to serve."""
        return self._engine.version

    def stop(self) -> bool:
        """Ends `run`: rollouts in progress are given up, complete groups are posted, the others stay in the store.

        Returns:
            True, as `Stop.wait` of a command wants it.
        """
        self._stopping.set()
        return True

    async def run(self) -> None:
        """Makes and posts groups until `stop` is called, or `max_groups` are posted.

        Raises:
            ConfigError: the environment has no tasks, or the tokenizer cannot be loaded.
            FeedError: the feed refuses this environment.
            RolloutError: the engine refuses requests for its models, or the store cannot be written.
        """
        async with AsyncExitStack() as stack:
            stack.callback(self._close_store)
            stack.push_async_callback(self._engine.close)
            stack.callback(self._info.close)
            stack.push_async_callback(asyncio.to_thread, self._feed.close)
            context = await self._unless_stopped(self._start(stack))
            if context is None:
                return
            making = asyncio.create_task(self._make_groups(context))
            posting = asyncio.create_task(self._post_groups())
            stopping = asyncio.create_task(self._stopping.wait())
            try:
                await asyncio.wait({making, posting, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if self._stopping.is_set():
                    await _cancelled(making)
                    await self._post_last()
            finally:
                for task in (making, posting, stopping):
                    await _cancelled(task)
            errors = [error for task in (making, posting) if (error := _error_of(task)) is not None]
            if errors:
                raise errors[0]

    def summary(self) -> dict[str, Any]:
        """Returns what was made since the start, as the event `done` has it."""
        tally = self.tally
        return {
            "groups": tally.posted_groups,
            "rollouts": tally.posted_rollouts,
            "stale": tally.stale_groups,
            "dropped": tally.dropped_groups,
            "failed": dict(tally.failed),
            "kept_groups": self._kept[0],
            "kept_rollouts": self._kept[1],
        }

    def samples(self) -> Samples:
        """Returns the values of `ROLLOUT_METRICS`."""
        tally, version = self.tally, self.version
        values: dict[str, Any] = {
            "groups_total": {("posted",): tally.posted_groups, ("dropped",): tally.dropped_groups},
            "stale_groups_total": tally.stale_groups,
            "scored_total": tally.scored,
            "failed_total": {(reason,): count for reason, count in tally.failed.items()},
            "version": -1 if version is None else version,
            "waiting_groups": self.waiting_groups,
            "engine_up": not self._engine.away,
            "feed_up": not self._away.get("feed"),
        }
        if tally.score is not None:
            values["score"] = tally.score
        return {f"averaging_rollouts_{name}": value for name, value in values.items()}

    def _close_store(self) -> None:
        self._count_kept()
        self._store.close()

    def _count_kept(self) -> list[PendingGroup]:
        kept = self._store.pending()
        self._kept = len(kept), sum(len(group.rollouts) for group in kept)
        return kept

    # Starting.

    async def _start(self, stack: AsyncExitStack) -> ModelContext:
        models = await self._engine.models()
        names = [model.id for model in models]
        if self._options.model not in (None, *names):
            raise ConfigError(f"{self._engine.url} serves {', '.join(names)}, not {self._options.model}")
        model = next((each for each in models if each.id == self._options.model), models[0])
        tokenizer = self._options.tokenizer or model.root or model.id
        await asyncio.to_thread(check_tokenizer, tokenizer, self._options.renderer)
        await self._engine.ask_version()
        await stack.enter_async_context(self._gateway)
        await stack.enter_async_context(self._environment.serving())
        return model_context(model.id, self._gateway, self._options.sampling, tokenizer, self._options.renderer)

    async def _unless_stopped(self, starting: Coroutine[Any, Any, ModelContext]) -> ModelContext | None:
        task, stopping = asyncio.create_task(starting), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            await _cancelled(stopping)
            await _cancelled(task)

    # Making groups.

    async def _make_groups(self, context: ModelContext) -> None:
        """Begins one group after the other, those of the store first."""
        kept = self._count_kept()
        self.started, self._began = True, time.monotonic()
        self._emit(
            {"event": "ready", "environment": self._options.environment, "engine": self._engine.url,
             "model": context.model, "version": self.version, "kept_groups": self._kept[0],
             "kept_rollouts": self._kept[1]}
        )  # fmt: skip
        tasks = self._environment.tasks(self._options.seed, self._store.next_number)
        async with asyncio.TaskGroup() as members:
            for group in kept:
                await self._begin(group, self._environment.task_of(group.task), context, members)
            while await self._another():
                data, task = await asyncio.to_thread(next, tasks)
                await self._begin(self._store.begin(data), task, context, members)

    async def _another(self) -> bool:
        """Waits until it is known whether another group is to be begun."""
        most = self._options.max_groups
        while most is not None:
            if self.tally.posted_groups >= most:
                return False
            if self.tally.posted_groups + self._open < most:
                return True
            self._closed.clear()
            await self._closed.wait()
        return True

    async def _begin(self, group: PendingGroup, task: Task, context: ModelContext, members: asyncio.TaskGroup) -> None:
        """Begins the rollouts of a group as slots become free, and hands it on when all are made."""
        self._open += 1
        made = []
        for member in group.missing(self._options.group_size):
            await self._until_fresh()
            await self._slots.acquire()
            made.append(members.create_task(self._fill(group, member, task, context)))
        members.create_task(self._finish(group, made))

    async def _finish(self, group: PendingGroup, made: list[asyncio.Task[bool]]) -> None:
        if all([await each for each in made]):
            self.tally.failed_in_a_row = 0
            await self._complete.put(group)
        else:
            self.tally.failed_in_a_row += 1
            self._drop(group, f"a rollout of it failed each time: {self._last_failure}")

    async def _fill(self, group: PendingGroup, member: int, task: Task, context: ModelContext) -> bool:
        """Makes one rollout of a group, again if it fails. Returns whether it is scored, and in the store.

        While the environment fails every rollout, attempts are not counted: its grader is away.
        """
        backoff, attempt = Backoff(MIN_PAUSE, MAX_PAUSE, random.Random(), jitter=(0.5, 1.0)), 1
        try:
            while attempt <= self._options.attempts:
                try:
                    sequences = await self._environment.roll_out(task, context, self._gateway)
                    self._check(sequences)
                except RolloutError as error:
                    self._note_failed(group, error, attempt)
                    if error.reason not in OWN_REASONS and self.tally.failures_in_a_row >= MAX_DROPPED:
                        self._note("environment", self._options.environment, str(error))
                        await asyncio.sleep(backoff.next_delay())
                    else:
                        attempt += 1
                else:
                    self.tally.failures_in_a_row = 0
                    self._note("environment", self._options.environment, "")
                    self._store.save(group, member, sequences)
                    self.tally.note_scored(time.monotonic())
                    return True
            return False
        finally:
            self._slots.release()

    def _check(self, sequences: list[ScoredSequence]) -> None:
        wanted = self._options.sequences
        if len(sequences) != wanted:
            raise RolloutError(
                "sequences",
                f"the rollout has {len(sequences)} sequences to train, and not {wanted}; if all have as many, give "
                f"--sequences {len(sequences)}. A chat template that writes earlier turns in another way, such as "
                "without their thoughts, makes a sequence of each turn: choose a template that keeps them (--renderer)",
            )
        for sequence in sequences:
            if self._longest and len(sequence.tokens) >= self._longest:
                raise RolloutError(
                    "long",
                    f"the sequence has {len(sequence.tokens)} tokens; the trainer takes less than {self._longest}",
                )
            if sequence.truncated and self._options.truncated is TruncatedMode.DROP:
                raise RolloutError("truncated", "a limit has cut it off; see --truncated and --max-tokens")

    def _note_failed(self, group: PendingGroup, error: RolloutError, attempt: int) -> None:
        self.tally.failed[error.reason] += 1
        self.tally.failures_in_a_row = 0 if error.reason in OWN_REASONS else self.tally.failures_in_a_row + 1
        self._last_failure = str(error)
        number = self.tally.failed[error.reason]
        self._emit(
            {"event": "failed", "group": group.number, "reason": error.reason, "message": str(error),
             "attempt": attempt, "number": number}
        )  # fmt: skip

    async def _until_fresh(self) -> None:
        """Waits while the engine's weights are too old for the trainer, or unknown although they can be asked for."""
        wanted = self._wanted
        if wanted is None or not wanted.holds(self.version) or not self._engine.has_route:
            return
        self._emit({"event": "paused", "version": self.version, "newest_version": wanted.newest})
        while True:
            await asyncio.sleep(VERSION_POLL)
            if not wanted.holds(await self._engine.ask_version()):
                break
        self._emit({"event": "resumed", "version": self.version})

    # Posting.

    async def _post_groups(self) -> None:
        """Posts complete groups, until `max_groups` are posted."""
        while self._options.max_groups is None or self.tally.posted_groups < self._options.max_groups:
            group = await self._complete.get()
            self._posting = True
            try:
                await self._post(group)
            finally:
                self._posting = False

    async def _post_last(self) -> None:
        """Waits a moment until the complete groups are posted."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_POSTS):
                while self._posting or self.waiting_groups:
                    self._closed.clear()
                    await self._closed.wait()

    async def _post(self, group: PendingGroup) -> None:
        sequences = group.sequences()
        if (longest := await self._learn_longest()) and any(len(each.tokens) >= longest for each in sequences):
            self.tally.refused_in_a_row += 1
            self._drop(group, f"a sequence has {longest} tokens or more, the trainer's limit")
            return
        data = group_of(sequences, self._options.truncated)
        try:
            posted = await self._until_answered(lambda: self._feed.post(data, key=group.key))
        except FeedError as error:
            if error.status not in UNUSABLE:
                raise
            self.tally.refused_in_a_row += 1
            self._drop(group, str(error))
            return
        self._store.forget(group)
        self._note_posted(group, sequences, posted)

    async def _learn_longest(self) -> int | None:
        """Asks for the trainer's limit of a sequence, once there is a trainer."""
        if self._longest is None:
            ask = functools.partial(self._info.request, "GET", "/info", _FeedInfo)
            info = await self._until_answered(ask)
            if info.batch_size > 0:
                self._longest = max(0, info.max_token_len)
        return self._longest

    async def _until_answered(self, call: Callable[[], Answer]) -> Answer:
        """Calls the feed until it has answered. The key of a post makes repetitions harmless.

        Raises:
            FeedError: it refuses the group or this environment.
        """
        backoff = Backoff(MIN_PAUSE, MAX_PAUSE, random.Random(), jitter=(0.5, 1.0))
        while True:
            try:
                answer = await asyncio.to_thread(call)
            except FeedError as error:
                if 400 <= error.status < 500 and error.status not in (404, 408, 429):
                    raise
                self._note("feed", self._info.url, str(error))
                await asyncio.sleep(backoff.next_delay())
            else:
                self._note("feed", self._info.url, "")
                return answer

    def _note_posted(self, group: PendingGroup, sequences: list[ScoredSequence], posted: Posted) -> None:
        tally, now = self.tally, time.monotonic()
        scores = [each.score for each in sequences]
        tally.posted_groups += 1
        tally.refused_in_a_row = 0
        tally.posted_rollouts += len(group.rollouts)
        tally.stale_groups += posted.stale
        tally.score = mean(scores)
        tally.equal_in_a_row = tally.equal_in_a_row + 1 if min(scores) == max(scores) else 0
        if tally.equal_in_a_row and tally.equal_in_a_row % MANY_EQUAL == 0:
            self._emit({"event": "equal", "groups": tally.equal_in_a_row, "score": tally.score})
        self._wanted = wanted_version(posted.newest_version, posted.max_staleness)
        self._emit(
            {"event": "posted", "group": group.number, "rollouts": len(group.rollouts), "score": tally.score,
             "lowest": min(scores), "highest": max(scores),
             "versions": sorted({version for each in sequences for version in each.versions}),
             "newest_version": posted.newest_version, "stale": posted.stale, "waiting": self.waiting_groups,
             "rate": round(tally.rate(now, self._began), 2)}
        )  # fmt: skip
        self._end_group()

    def _drop(self, group: PendingGroup, reason: str) -> None:
        self._store.forget(group)
        self.tally.dropped_groups += 1
        self._emit({"event": "dropped", "group": group.number, "message": reason})
        self._end_group()
        if max(self.tally.failed_in_a_row, self.tally.refused_in_a_row) >= MAX_DROPPED:
            failed = named(self.tally.failed) or "no rollout"
            raise RolloutError(
                "dropped", f"{MAX_DROPPED} groups were dropped one after the other ({failed} failed): {reason}"
            )

    def _end_group(self) -> None:
        self._open -= 1
        self._closed.set()

    def _note(self, what: str, url: str, reason: str) -> None:
        """Tells once that the engine, the feed or the environment is away, and once that it is back."""
        if what != "engine":
            if bool(reason) == bool(self._away.get(what)):
                return
            self._away[what] = reason
        self._emit({"event": "away" if reason else "back", "what": what, "url": url, "message": reason})


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    """Returns what a task has raised; of several errors at one time the first."""
    error = None if task.cancelled() else task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Cancels a task and waits for its end. What it raised stays in it."""
    task.cancel()
    await asyncio.wait({task})

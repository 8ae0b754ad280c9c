"""`Rollouts`: makes groups of an environment's rollouts, posts them to a feed, and counts what happens to them."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from averaging.common import adapter_versions, counted, first_error
from averaging.errors import ConfigError, FeedError, RolloutError
from averaging.metrics import Samples, counter, gauge
from averaging.rl.feed import CommandEvent, Connection, FeedEnvironment, Posted, RegisterEnv, retry_pauses
from averaging.rl.rollouts.engine import EngineClient, EngineGateway
from averaging.rl.rollouts.environment import (
    RolloutOptions,
    SampledGroup,
    ScoredSequence,
    TruncatedMode,
    VerifiersEnvironment,
    check_tokenizer,
    group_of,
    is_too_old,
    model_context,
)

if TYPE_CHECKING:
    from verifiers.v1 import ModelContext, Task

Answer = TypeVar("Answer")

ATTEMPTS = 3  # how often a rollout that fails is made, before its group is dropped
VERSION_POLL = 1.0  # seconds between two questions for the engine's version while its weights are too old
WAITING_GROUPS = 64  # complete groups that wait for the feed; then no further rollouts are made
FEED_PATIENCE = 2.0  # seconds of one call of the feed's client, which runs in a thread and is not interrupted
FEED_TIMEOUT = 10.0  # seconds for the feed to connect, or for a piece of its answer
LAST_POSTS = 5.0  # seconds that complete groups have to be posted after the end was asked for
UNUSABLE = frozenset({400, 413, 422})  # with these a feed refuses a group for what is in it
MAX_DROPPED = 10  # groups that are dropped one after the other, before it is an error
MANY_EQUAL = 100  # groups in a row of which all scores are equal, after which they are named
# Reasons of failures that lie in what was made. Others come from the environment, whose grader may be away.
OWN_REASONS = frozenset({"empty", "lengths", "logprobs", "long", "score", "sequences", "truncated"})

# What `averaging rollouts` tells Prometheus.
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


class RolloutTally:
    """What was made since the start."""

    def __init__(self, emit: Callable[[CommandEvent], None]) -> None:
        self._emit, self._began = emit, time.monotonic()
        self.posted_groups = self.posted_rollouts = self.dropped_groups = 0
        self.stale_groups = 0  # posted groups that are too old for the trainer
        self.scored = 0  # rollouts
        self.failed: Counter[str] = Counter()  # rollouts that were no sample, by reason
        self.score: float | None = None  # mean of the group that was posted last
        self.away: dict[str, str] = {}  # why the engine, the feed or the environment does not answer, by these names
        # In a row: groups with a rollout that failed each time, groups that the feed refused, posted groups of equal
        # scores, rollouts that the environment has failed.
        self._incomplete = self._refused = self._equal = self._failures = 0
        self._last_failure = ""

    def note_away(self, what: str, url: str, reason: str) -> None:
        """Tells once that something is away, and with an empty reason once that it is back."""
        if bool(reason) != (what in self.away):
            text = f"waiting for the {what} {url}: {reason}" if reason else f"the {what} {url} is back"
            self._tell("away" if reason else "back", text, what=what, url=url, message=reason)
        if reason:
            self.away[what] = reason
        else:
            self.away.pop(what, None)

    def note_scored(self) -> None:
        self.scored += 1
        self._failures = 0

    def note_failed(self, group: int, error: RolloutError, attempt: int) -> bool:
        """Notes a rollout that failed. Returns whether the environment fails all, so that its grader may be away."""
        is_own = error.reason in OWN_REASONS
        self.failed[error.reason] += 1
        self._failures = 0 if is_own else self._failures + 1
        self._last_failure = str(error)
        number = self.failed[error.reason]
        text = f"group {group}: rollout {number} that failed ({error.reason}): {error}"
        fields = {"group": group, "reason": error.reason, "message": str(error), "attempt": attempt, "number": number}
        self._tell("failed", text, **fields)
        return not is_own and self._failures >= MAX_DROPPED

    def note_complete(self) -> None:
        self._incomplete = 0

    def note_incomplete(self, group: int) -> None:
        """Notes a group that is dropped, because a rollout of it failed each time. Raises if too many were in a row."""
        self._incomplete += 1
        self._drop(group, f"a rollout of it failed each time: {self._last_failure}", self._incomplete)

    def note_refused(self, group: int, reason: str) -> None:
        """Notes a group that the feed does not take. Raises if it took none for too long."""
        self._refused += 1
        self._drop(group, reason, self._refused)

    def _drop(self, group: int, reason: str, in_a_row: int) -> None:
        self.dropped_groups += 1
        self._tell("dropped", f"group {group} is dropped: {reason}", group=group, message=reason)
        if in_a_row >= MAX_DROPPED:
            failed = ", ".join(f"{count} {name}" for name, count in self.failed.most_common()) or "no rollout"
            text = f"{MAX_DROPPED} groups were dropped one after the other ({failed} failed): {reason}"
            raise RolloutError("dropped", text)

    def note_posted(self, group: SampledGroup, answer: Posted, waiting: int) -> None:
        """Notes a group that the feed has, while `waiting` others wait for it."""
        scores = [each.score for each in group.sequences]
        lowest, highest = min(scores), max(scores)
        self.score = fmean(scores)
        self.posted_groups += 1
        self.posted_rollouts += group.rollouts
        self.stale_groups += answer.stale
        self._refused = 0
        self._equal = self._equal + 1 if lowest == highest else 0
        if self._equal and self._equal % MANY_EQUAL == 0:
            text = f"{self._equal} groups in a row have equal scores, now {self.score:.3g}: most trainers learn nothing"
            text += " from them; look at the grader and at how hard the tasks are"
            self._tell("equal", text, groups=self._equal, score=self.score)
        versions = sorted({version for each in group.sequences for version in each.versions})
        rate = self.scored / max(1e-3, time.monotonic() - self._began)
        made_by = f", version{'s' * (len(versions) > 1)} {', '.join(map(str, versions))}" if versions else ""
        stale = f", too old for the trainer, which is at {answer.newest_version}" if answer.stale else ""
        left = f", {waiting} wait" if waiting else ""
        self._tell(
            "posted",
            f"group {group.number}: {group.rollouts} rollouts, score {self.score:.3g} ({lowest:.3g} to {highest:.3g})"
            f"{made_by}{stale}; {rate:.1f} rollouts/s{left}",
            **{"group": group.number, "rollouts": group.rollouts, "versions": versions, "waiting": waiting},
            **{"score": self.score, "lowest": lowest, "highest": highest, "rate": round(rate, 2)},
            **{"newest_version": answer.newest_version, "stale": answer.stale},
        )

    def summary(self, waiting: int) -> CommandEvent:
        failed = ", ".join(f"{count} {reason}" for reason, count in self.failed.items())
        parts = [
            f"posted {counted(self.posted_groups, 'group')} of {counted(self.posted_rollouts, 'rollout')}",
            f"{self.stale_groups} too old" * bool(self.stale_groups),
            f"{self.dropped_groups} dropped" * bool(self.dropped_groups),
            f"rollouts that failed: {failed}" * bool(failed),
            f"{counted(waiting, 'complete group')} could not be posted" * bool(waiting),
        ]
        fields = {"groups": self.posted_groups, "rollouts": self.posted_rollouts, "stale": self.stale_groups}
        fields |= {"dropped": self.dropped_groups, "waiting": waiting}
        return CommandEvent("done", "; ".join(filter(None, parts)), {**fields, "failed": dict(self.failed)})

    def _tell(self, name: str, text: str, /, **fields: Any) -> None:
        self._emit(CommandEvent(name, text, fields))


class _FeedInfo(msgspec.Struct, frozen=True):
    batch_size: int = -1  # before a trainer has registered
    max_token_len: int = -1


class GroupPoster:
    """Posts complete groups, each once, for as long as the feed is away."""

    def __init__(self, options: RolloutOptions, tally: RolloutTally) -> None:
        calls = {"timeout": FEED_TIMEOUT, "retry_timeout": FEED_PATIENCE, **options.feed_options}
        size = options.group_size * options.sequences
        config = RegisterEnv(max_token_length=-1, desired_name=options.environment, weight=1.0, group_size=size)
        # After a restart the environment has its old place at the feed. Two on one machine share a place, which harms
        # neither, since they reserve nothing.
        key = f"averaging rollouts on {socket.gethostname()}"
        self._info = Connection(options.feed, **calls)
        self._feed = FeedEnvironment(options.feed, config, start_timeout=0.0, key=key, **calls)
        self._options, self._tally = options, tally
        self._groups: asyncio.Queue[SampledGroup] = asyncio.Queue()
        self.longest: int | None = None  # tokens that a sequence must be below, once a trainer has registered; 0: any
        self.answer: Posted | None = None  # the feed's last answer to a post
        self.on_end: Callable[[bool], None] = lambda posted: None  # called when a group is posted or refused

    @property
    def waiting(self) -> int:
        return self._groups.qsize()

    def add(self, group: SampledGroup) -> None:
        self._groups.put_nowait(group)

    async def run(self) -> None:
        """Posts groups until `max_groups` are posted, or the feed refuses this environment or too many in a row."""
        most = self._options.max_groups
        while most is None or self._tally.posted_groups < most:
            group = await self._groups.get()
            self.on_end(await self._post(group))
            self._groups.task_done()

    async def finish(self) -> None:
        """Waits a moment until the groups are posted by `run`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_POSTS):
                await self._groups.join()

    def close(self) -> None:
        self._info.close()
        self._feed.close()

    async def _post(self, group: SampledGroup) -> bool:
        """Posts a group. Returns False if the feed does not take it for what is in it."""
        if self.longest is None:
            info = await self._until_answered(lambda: self._info.request("GET", "/info", _FeedInfo))
            if info.batch_size > 0:
                self.longest = max(0, info.max_token_len)
        if self.longest and any(len(each.tokens) >= self.longest for each in group.sequences):
            self._tally.note_refused(group.number, f"a sequence has {self.longest} tokens or more, the trainer's limit")
            return False
        data = group_of(group.sequences, self._options.truncated)
        try:
            answer = await self._until_answered(lambda: self._feed.post(data, key=group.key))
        except FeedError as error:
            if error.status not in UNUSABLE:
                raise
            self._tally.note_refused(group.number, str(error))
            return False
        self._tally.note_posted(group, answer, self.waiting)
        self.answer = answer
        return True

    async def _until_answered(self, call: Callable[[], Answer]) -> Answer:
        """Calls the feed until it has answered. The key of a post makes repetitions harmless."""
        pauses = retry_pauses()
        while True:
            try:
                answer = await asyncio.to_thread(call)
            except FeedError as error:
                if 400 <= error.status < 500 and error.status not in (404, 408, 429):
                    raise
                self._tally.note_away("feed", self._info.url, str(error))
                await asyncio.sleep(pauses.next_delay())
            else:
                self._tally.note_away("feed", self._info.url, "")
                return answer


class GroupMaker:
    """Makes groups, so many rollouts at one time and again if they fail, and hands them to `poster`."""

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
                text = f"the sequence has {len(sequence.tokens)} tokens; the trainer takes less than {longest}"
                raise RolloutError("long", text)
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


class Rollouts:
    """Makes rollouts of an environment of verifiers and posts them to a feed.

    Nothing is kept on disk: a group that is not posted when the process ends is made again, from another task.

    verifiers' client reads HTTP_PROXY and its like. If one is set, NO_PROXY must name 127.0.0.1; the command
    `averaging rollouts` sees to that.

    Args:
        options: what is made, and where.
        on_event: called in the event loop with each event, see `averaging rollouts --help`.

    Raises:
        ConfigError: the environment cannot be loaded, or an address is wrong.
    """

    def __init__(self, options: RolloutOptions, on_event: Callable[[CommandEvent], None] = lambda event: None) -> None:
        self._options, self._emit = options, on_event
        self.tally, self.started = RolloutTally(on_event), False  # `started` once environment and engine are ready
        self._environment = VerifiersEnvironment(options.environment, options.environment_args)
        self._engine = EngineClient(
            options.engine,
            tls_ca=options.feed_options.get("tls_ca"),
            on_away=lambda reason: self.tally.note_away("engine", self._engine.url, reason),
        )
        self._poster = GroupPoster(options, self.tally)

    async def run(self) -> None:
        """Makes and posts groups until `max_groups` are posted.

        If it is cancelled, rollouts in progress are given up, and complete groups are posted for a moment.

        Raises:
            ConfigError: the environment has no tasks, or the tokenizer cannot be loaded.
            FeedError: the feed refuses this environment.
            RolloutError: the engine refuses requests for its models, or too many groups were dropped in a row.
        """
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._engine.close)
            stack.push_async_callback(asyncio.to_thread, self._poster.close)
            maker, context = await self._start(stack)
            try:
                async with asyncio.TaskGroup() as tasks:
                    making, posting = tasks.create_task(maker.run(context)), tasks.create_task(self._poster.run())
                    try:
                        await asyncio.wait({posting})
                    except asyncio.CancelledError:
                        if not (making.done() or posting.done()):  # the caller's wish, and no failure of one of both
                            making.cancel()
                            await self._poster.finish()
                        raise
                    making.cancel()
            except BaseExceptionGroup as errors:
                raise first_error(errors) from None

    def summary(self) -> CommandEvent:
        """Returns what was made since the start, as the event `done`."""
        return self.tally.summary(self._poster.waiting)

    def samples(self) -> Samples:
        """Returns the values of `ROLLOUT_METRICS`."""
        tally, version = self.tally, self._engine.version
        values: dict[str, Any] = {
            "groups_total": {("posted",): tally.posted_groups, ("dropped",): tally.dropped_groups},
            "stale_groups_total": tally.stale_groups,
            "scored_total": tally.scored,
            "failed_total": {(reason,): count for reason, count in tally.failed.items()},
            "version": -1 if version is None else version,
            "waiting_groups": self._poster.waiting,
            "engine_up": "engine" not in tally.away,
            "feed_up": "feed" not in tally.away,
        }
        if tally.score is not None:
            values["score"] = tally.score
        return {f"averaging_rollouts_{name}": value for name, value in values.items()}

    async def _start(self, stack: AsyncExitStack) -> tuple[GroupMaker, ModelContext]:
        options = self._options
        models = await self._engine.models()
        names = [model.id for model in models]
        if options.model is not None and adapter_versions(options.model, names):
            self._engine.adapter = options.model  # whose base is the first model
        elif options.model not in (None, *names):
            raise ConfigError(f"{self._engine.url} serves {', '.join(names)}, not {options.model}")
        model = next((each for each in models if each.id == options.model), models[0])
        tokenizer = options.tokenizer or model.root or model.id
        await asyncio.to_thread(check_tokenizer, tokenizer, options.renderer)
        await self._engine.ask_version()
        gateway = await stack.enter_async_context(EngineGateway(self._engine))
        await stack.enter_async_context(self._environment.serving())
        context = model_context(model.id, gateway, options.sampling, tokenizer, options.renderer)
        self.started = True
        version = self._engine.version
        at = "" if version is None else f", version {version}"
        name = self._engine.adapter or model.id
        text = f"{options.environment}: asking {name} at {self._engine.url}{at}"
        fields = {"environment": options.environment, "engine": self._engine.url, "model": name, "version": version}
        self._emit(CommandEvent("ready", text, fields))
        maker = GroupMaker(options, self._environment, gateway, self._poster, self.tally, self._emit)
        return maker, context

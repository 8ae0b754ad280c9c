"""`Rollouts`: makes groups of an environment's rollouts and posts them to a feed, until it is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from averaging.errors import ConfigError
from averaging.metrics import Samples
from averaging.rl.feed import CommandEvent
from averaging.rl.rollouts.engine import EngineClient, EngineGateway
from averaging.rl.rollouts.environment import VerifiersEnvironment, check_tokenizer, model_context
from averaging.rl.rollouts.making import GroupMaker
from averaging.rl.rollouts.posting import GroupPoster
from averaging.rl.rollouts.samples import RolloutOptions
from averaging.rl.rollouts.tally import RolloutTally

if TYPE_CHECKING:
    from verifiers.v1 import ModelContext


class Rollouts:
    """Makes rollouts of an environment of verifiers and posts them to a feed.

    Nothing is kept on disk: a group that is not posted when the process ends is made again, from another task.

    verifiers' client reads HTTP_PROXY and its like. If one is set, NO_PROXY must name 127.0.0.1; the command
    `averaging rollouts` sees to that.

    Args:
        options: what is made, and where.
        on_event: called in the event loop with each event, see `averaging rollouts --help`.

    Attributes:
        tally: what was made since the start.
        started: whether environment and engine are ready.

    Raises:
        ConfigError: the environment cannot be loaded, or an address is wrong.
    """

    def __init__(self, options: RolloutOptions, on_event: Callable[[CommandEvent], None] = lambda event: None) -> None:
        self._options, self._emit = options, on_event
        self.tally, self.started = RolloutTally(on_event), False
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
                raise _first_of(errors) from None

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
        if options.model not in (None, *names):
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
        text = f"{options.environment}: asking {model.id} at {self._engine.url}{at}"
        fields = {"environment": options.environment, "engine": self._engine.url, "model": model.id, "version": version}
        self._emit(CommandEvent("ready", text, fields))
        maker = GroupMaker(options, self._environment, gateway, self._poster, self.tally, self._emit)
        return maker, context


def _first_of(errors: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

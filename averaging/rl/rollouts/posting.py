"""Posts complete groups to a feed, each once, for as long as the feed is away."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import msgspec

from averaging.errors import FeedError
from averaging.rl.feed import Connection, FeedEnvironment, Posted, RegisterEnv, retry_pauses
from averaging.rl.rollouts.samples import RolloutOptions, SampledGroup, group_of
from averaging.rl.rollouts.tally import RolloutTally

Answer = TypeVar("Answer")

FEED_PATIENCE = 2.0  # seconds of one call of the feed's client, which runs in a thread and is not interrupted
FEED_TIMEOUT = 10.0  # seconds for the feed to connect, or for a piece of its answer
LAST_POSTS = 5.0  # seconds that complete groups have to be posted after the end was asked for
UNUSABLE = frozenset({400, 413, 422})  # with these a feed refuses a group for what is in it


class _FeedInfo(msgspec.Struct, frozen=True):
    batch_size: int = -1  # before a trainer has registered
    max_token_len: int = -1


class GroupPoster:
    """Posts groups in the order in which they are complete."""

    def __init__(self, options: RolloutOptions, tally: RolloutTally) -> None:
        calls = {"timeout": FEED_TIMEOUT, "retry_timeout": FEED_PATIENCE, **options.feed_options}
        config = RegisterEnv(
            max_token_length=-1,
            desired_name=options.environment,
            weight=1.0,
            group_size=options.group_size * options.sequences,
        )
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

"""What the peers of a run announce of the samples that they train, as the training thread reads it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from contextlib import aclosing

from averaging.common import EventLoopThread, on_loop
from averaging.peer import Peer

logger = logging.getLogger("averaging.data")


class DataRecords:
    """The records of the peers under the key `RUN.data`. Made once for each peer, in the training thread."""

    def __init__(self, peer: Peer, thread: EventLoopThread) -> None:
        self._peer, self._thread = peer, thread
        self.endpoint = peer.endpoint
        self.holders: Collection[str] = ()
        self._live: Mapping[str, bytes] = thread.run(on_loop(lambda: peer.data.announcements))
        self._last_of_gone: list[bytes] = []
        self._serial = self._read = 0
        thread.start(self._follow())

    def announce(self, record: bytes) -> None:
        """Announces this peer's record; does not wait for the peer's thread.

        Raises:
            ClosedError: the averager was closed.
        """
        self._thread.start(on_loop(lambda: self._peer.data.announce(record)))

    @property
    def is_published(self) -> bool:
        return self._thread.run(on_loop(lambda: self._peer.data.is_published))

    def is_outvoted(self, differing: Collection[str], alike: Collection[str]) -> bool:
        return self._peer.data.is_outvoted(differing, alike)

    @property
    def have_changed(self) -> bool:
        return self._serial != self._read

    def read(self) -> tuple[Mapping[str, bytes], list[bytes]]:
        """Returns the records of the other peers, and the last records of those that have gone since the last call."""
        self._read = self._serial
        gone, self._last_of_gone = self._last_of_gone, []
        return self._live, gone

    def check(self) -> None:
        """Checks that the peer runs.

        Raises:
            ClosedError: the averager was closed, or its thread has failed.
        """
        self._thread.check()

    async def _follow(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch())
                tasks.create_task(self._notice_gone())
        except Exception:
            logger.exception("this peer does not hear any more what the others train")

    async def _watch(self) -> None:
        async with aclosing(self._peer.data.watch()) as changes:
            async for records in changes:
                self._note(records)

    async def _notice_gone(self) -> None:
        async with aclosing(self._peer.mark_gone_data(lambda: self.holders)) as gone:
            async for name in gone:
                logger.info("%s refuses connections, so its samples are dealt again", name)
                self._note(self._peer.data.announcements)

    def _note(self, records: Mapping[str, bytes]) -> None:
        self._last_of_gone += [self._live[name] for name in self._live.keys() - records.keys()]
        self._live = records
        self._serial += 1

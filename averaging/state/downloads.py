"""Downloads a state: chooses donors, and continues at the next donor if one is lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from averaging.errors import AveragingError, PeerUnreachableError, StateError, TransportError
from averaging.protocol import DownloadData, Resume
from averaging.state.assembler import ReceivedState, StateAssembler, StateLimits
from averaging.state.donors import DonorDeadlines
from averaging.state.manifest import State
from averaging.tensors import Schema
from averaging.timing import Deadlines
from averaging.transport import Transport, is_alive

logger = logging.getLogger("averaging.state")

TRIES_PER_DONOR = 5
"""Maximum number of downloads from one donor that is lost repeatedly but delivers more each time. Downloads in which it
was too slow do not count: `throughput.expected_rate` bounds their number."""


SMALL = 1 << 10
"""Bytes of a message that passes in one packet everywhere: IPv6 requires 1,280 bytes with all headers."""


async def download(
    transport: Transport,
    donors: Sequence[str],
    schema: Schema | None,
    *,
    silence: float,
    deadlines: Deadlines | None = None,
    declared: Mapping[str, float] | None = None,
    limits: StateLimits | None = None,
    on_progress: Callable[[StateAssembler], object] = lambda _: None,
) -> tuple[State, str]:
    """Downloads the state from the first of `donors` that delivers it completely.

    If a donor is lost, the next one that has the same state continues where it stopped, if it supports that; see
    `averaging.state.manifest`. A lost donor is asked again after the others if it delivered new data, or as
    `DonorDeadlines` says. A donor that is much slower than the fastest one of the last hour is replaced by the next.
    No donor can hold up the download forever: `Throughput.limit` bounds each try, and the number of tries is bounded.

    Args:
        transport: this peer's transport.
        donors: endpoints, best first.
        schema: schema of this peer's tensors; None accepts any tensors.
        silence: seconds without a message after which a donor is given up.
        deadlines: learned deadlines, which replace `silence`, and rates. They are kept between downloads.
        declared: versions of the donors' states as declared in discovery. A donor that has an earlier version was
            restarted, and is asked again only after all others.
        limits: which states are refused.
        on_progress: callback after each message.

    Returns:
        The state and its donor.

    Raises:
        StateError: no donor delivered the state. The message has the reason for each donor.
    """
    if deadlines is None:
        deadlines = Deadlines(silence, silence, "timeout")
    return await _Download(transport, schema, deadlines, declared or {}, limits, on_progress).load(donors)


def of_all_members(donors: Sequence[str], members: Mapping[str, str]) -> list[str]:
    """The donors, the first one of each member before all others: one member may have more than can be asked."""
    first = {members.get(donor, donor): donor for donor in reversed(donors)}.values()
    return sorted(donors, key=lambda donor: donor not in first)


class _Download:
    def __init__(
        self,
        transport: Transport,
        schema: Schema | None,
        deadlines: Deadlines,
        declared: Mapping[str, float],
        limits: StateLimits | None,
        on_progress: Callable[[StateAssembler], object],
    ) -> None:
        self._transport, self._schema, self._limits = transport, schema, limits
        self._declared = declared
        self._donor_deadlines = DonorDeadlines(deadlines)
        self._on_progress = on_progress
        self._kept = ReceivedState()
        self._not_started: dict[str, None] = {}  # donors that timed out before their first message, in order
        self._only_small: dict[str, bool] = {}  # whether donors answer, but deliver no more than one small message

    async def load(self, donors: Sequence[str]) -> tuple[State, str]:
        """Reads from one donor after the other until one has delivered the whole state."""
        failures: dict[str, Exception] = {}
        gone: set[str] = set()
        declared = dict(self._declared)
        queue, tries = list(donors), Counter[str]()
        while queue or (queue := await self._preparing()):
            donor = queue.pop(0)
            min_version = declared.pop(donor, 0.0)
            assembler = StateAssembler(self._schema, self._limits, self._kept, min_version)
            before = self._kept.nbytes
            tries[donor] += 1
            interrupted = False
            try:
                try:
                    await self._read(donor, assembler, self._kept.resume, alone=not queue)
                except (TimeoutError, TransportError):
                    if not assembler.complete:  # else only the end of the stream is missing
                        raise
                state = assembler.finish()
            except (TimeoutError, AveragingError) as error:
                failures[donor] = error
                if isinstance(error, PeerUnreachableError) and error.refused:
                    gone.add(donor)
                interrupted = isinstance(error, TimeoutError | TransportError)
            else:
                failures.pop(donor, None)
                for other, failure in failures.items():
                    reason = self._reason(other, failure)
                    logger.warning("could not download the state from %s; downloaded it from %s", reason, donor)
                return state, donor
            # Not a warning: if all donors fail, the error has the reasons, and the caller may retry often.
            logger.info("could not download the state from %s", self._reason(donor, failures[donor]))
            if assembler.mixed_sources:  # either source may be wrong, so this donor is asked for the whole tensor
                self._kept = replace(self._kept, partial=None)
                queue.insert(0, donor)
                continue
            # If the states differ, the one with more data is kept: donors that are asked later may have either.
            self._kept = max(self._kept, assembler.kept, key=lambda state: state.nbytes)
            deadlines = self._donor_deadlines
            retry = donor not in deadlines.too_slow and (self._kept.nbytes > before or deadlines.should_retry(donor))
            max_tries = TRIES_PER_DONOR + deadlines.times_slow[donor]
            if assembler.outdated or (interrupted and retry and tries[donor] < max_tries):
                queue.append(donor)
        text = _error_text(self._reason(donor, error) for donor, error in failures.items())
        raise StateError(text, gone, unconnected=_some_unconnected(failures.values()))

    async def _preparing(self) -> list[str]:
        """Donors that sent nothing but answer calls, and did not yet get the extended deadline for that."""
        asked = list(self._not_started)
        self._not_started.clear()
        alive = await asyncio.gather(*(self._is_alive(donor) for donor in asked))
        for donor in itertools.compress(asked, alive):
            self._donor_deadlines.set_preparing(donor)
            self._only_small.setdefault(donor, True)
        preparing = [donor for donor in asked if self._donor_deadlines.should_retry(donor)]
        for donor in preparing:
            logger.warning("%s answers but has not begun to send its state; still waiting, it may be large", donor)
        return preparing

    async def _is_alive(self, donor: str) -> bool:
        try:
            async with asyncio.timeout(self._donor_deadlines.ping_timeout):
                return await is_alive(self._transport, donor)
        except TimeoutError:
            return False

    def _reason(self, donor: str, error: Exception) -> str:
        text = str(error) if getattr(error, "endpoint", None) == donor else f"{donor}: {error}"
        if isinstance(error, TimeoutError) and self._only_small.get(donor):
            text += (
                " (only small messages arrive from it, so the path may lose large packets: `averaging doctor --deep` "
            )
            text += "measures that, and a smaller MTU here or there is a remedy)"
        return text

    async def _read(
        self,
        donor: str,
        assembler: StateAssembler,
        resume: Resume,
        *,
        alone: bool,
    ) -> None:
        count = 0
        try:
            async with (
                self._donor_deadlines.watch(donor, alone=alone) as watch,
                aclosing(self._transport.download_state(donor, resume)) as messages,
            ):
                async for message in messages:
                    if not count or _has_content(message):
                        watch.message_received()
                    piece = message.tensor_part
                    is_small = not count and len(message.metadata) + (len(piece.buffer) if piece else 0) <= SMALL
                    self._only_small[donor] = self._only_small.get(donor, True) and is_small
                    assembler.feed(message)
                    watch.delivered(assembler.left)
                    self._on_progress(assembler)
                    count += 1
                if assembler.complete:
                    watch.finished()
        except TimeoutError:
            if not count:
                self._not_started[donor] = None
            raise


def _some_unconnected(answers: Iterable[object]) -> bool:
    return any(isinstance(answer, PeerUnreachableError) and answer.unconnected for answer in answers)


def _has_content(message: DownloadData) -> bool:
    """Whether a message makes progress. A donor could send empty messages forever, so they do not count as life."""
    piece = message.tensor_part
    return piece is not None and bool(piece.dtype or len(piece.buffer))


def _error_text(failures: Iterable[str]) -> str:
    reasons = "; ".join(failures) or "no peer shares its state"
    return f"no state could be downloaded ({reasons}); nothing was changed"

"""Downloads a state: chooses donors, and continues at the next donor if one is lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from averaging.common import spelled
from averaging.errors import AveragingError, PeerUnreachableError, StateError, TransportError
from averaging.protocol import DownloadData, Resume
from averaging.state.assembler import Check, ReceivedState, StateAssembler, StateFingerprint, accept_all
from averaging.state.donors import DonorDeadlines
from averaging.state.manifest import State
from averaging.tensors import Schema
from averaging.timing import Deadlines
from averaging.transport import Transport, is_alive

logger = logging.getLogger("averaging.state")

MAX_COMPARED = 16
"""Maximum number of donors whose announced states are compared."""

MAX_COMPARISONS = 3
"""Maximum number of comparisons, if the agreeing donors have another state each time it is downloaded."""

TRIES_PER_DONOR = 5
"""Maximum number of downloads from one donor that is lost repeatedly but delivers more each time. Downloads in which it
was too slow do not count: `throughput.expected_rate` bounds their number."""


SMALL = 1 << 10
"""Bytes of a message that passes in one packet everywhere: IPv6 requires 1,280 bytes with all headers."""


class _AllDonorsFailedError(StateError):
    """No donor delivered the whole state. Donors that agreed before may have another state by now."""


async def download(
    transport: Transport,
    donors: Sequence[str],
    schema: Schema | None,
    *,
    silence: float,
    deadlines: Deadlines | None = None,
    declared: Mapping[str, float] | None = None,
    max_bytes: int | None = None,
    verify_donors: int = 1,
    members: Mapping[str, str] | None = None,
    check: Check = accept_all,
    finite: bool = False,
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
        max_bytes: limit on the size of the state, see `StateAssembler`.
        verify_donors: number of donors that must announce the same version and digests of the averaged tensors (of all
            tensors, if there is no schema) before one of them is trusted.
        members: what each donor counts as, see `member_of`: several endpoints of one certificate or host are one donor.
            If None, each endpoint counts, as for addresses that the user gives.
        check: callback, see `Check`.
        finite: whether NaN and infinity are refused.
        on_progress: callback after each message.

    Returns:
        The state and its donor.

    Raises:
        StateError: no donor delivered the state, or too few agree. The message has the reason for each donor.
    """
    if deadlines is None:
        deadlines = Deadlines(silence, silence, "timeout")
    this_download = _Download(transport, schema, deadlines, declared or {}, max_bytes, check, finite, on_progress)
    if verify_donors <= 1:
        return await this_download.load(donors)
    for _ in range(MAX_COMPARISONS - 1):
        try:
            return await this_download.load(*await this_download.compare(donors, verify_donors, members))
        except _AllDonorsFailedError:
            logger.info("all agreeing donors were lost or have another state now; comparing donors again")
    return await this_download.load(*await this_download.compare(donors, verify_donors, members))


def choose(
    announced: Mapping[str, StateFingerprint], wanted: int, members: Mapping[str, str] | None = None
) -> list[str]:
    """Returns the donors of the state that most members announce; empty if fewer than `wanted` agree.

    A donor counts as what `members` says, or as itself. A tie is decided for the state of the earliest donor.
    """

    def count(donors: list[str]) -> int:
        return len({(members or {}).get(donor, donor) for donor in donors})

    by_state: dict[StateFingerprint, list[str]] = {}
    for donor, fingerprint in announced.items():
        by_state.setdefault(fingerprint, []).append(donor)
    most = max(by_state.values(), key=count, default=[])
    return most if count(most) >= wanted else []


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
        max_bytes: int | None,
        check: Check,
        finite: bool,
        on_progress: Callable[[StateAssembler], object],
    ) -> None:
        self._transport, self._schema, self._max_bytes = transport, schema, max_bytes
        self._check, self._finite = check, finite
        self._declared = declared
        self._donor_deadlines = DonorDeadlines(deadlines)
        self._on_progress = on_progress
        self._kept = ReceivedState()
        self._not_started: dict[str, None] = {}  # donors that timed out before their first message, in order
        self._only_small: dict[str, bool] = {}  # whether donors answer, but deliver no more than one small message

    async def load(self, donors: Sequence[str], expected: StateFingerprint | None = None) -> tuple[State, str]:
        """Reads from one donor after the other until one has delivered the whole state."""
        failures: dict[str, Exception] = {}
        gone: set[str] = set()
        declared = dict(self._declared)
        queue, tries = list(donors), Counter[str]()
        while queue or (queue := await self._preparing()):
            donor = queue.pop(0)
            min_version = declared.pop(donor, 0.0)
            assembler = StateAssembler(
                *(self._schema, self._max_bytes, self._kept, expected, min_version, self._check, self._finite)
            )
            before = self._kept.nbytes
            tries[donor] += 1
            interrupted = False
            try:
                try:
                    await self._read(donor, assembler, self._on_progress, self._kept.resume, alone=not queue)
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
        raise _AllDonorsFailedError(text, gone, unconnected=_some_unconnected(failures.values()))

    async def compare(
        self, donors: Sequence[str], wanted: int, members: Mapping[str, str] | None
    ) -> tuple[list[str], StateFingerprint]:
        """Asks donors which state they have, and returns the state that most of them have, with its donors.

        Donors that were restarted after their declaration count only if there are no others.

        Raises:
            StateError: fewer than `wanted` donors have the same state.
        """
        asked = of_all_members(donors, members or {})[:MAX_COMPARED]
        answers: dict[str, StateFingerprint | Exception] = {}
        while True:
            answers |= zip(asked, await asyncio.gather(*(self._announced(donor) for donor in asked)), strict=True)
            announced = {donor: answer for donor, answer in answers.items() if isinstance(answer, StateFingerprint)}
            restarted = {donor for donor, state in announced.items() if state.version < self._declared.get(donor, 0.0)}
            current = {donor: state for donor, state in announced.items() if donor not in restarted}
            agreeing = choose(current or announced, wanted, members)
            asked = [donor for donor in answers if self._donor_deadlines.should_retry(donor)]
            if agreeing or not (asked := asked or await self._preparing()):
                break
        if not agreeing:
            note = {donor: f", not {self._declared[donor]:.0f} as declared: probably restarted" for donor in restarted}
            reasons = _error_text(
                self._reason(name, answer) if isinstance(answer, Exception) else f"{name}: {answer}{note.get(name, '')}"
                for name, answer in answers.items()
            )
            counted = "" if members is None else " of different certificates or hosts"
            option = spelled("verify_donors")
            raise StateError(
                f"fewer than {wanted} donors{counted} have the same state, as {option} requires; {reasons}",
                unconnected=_some_unconnected(answers.values()),
            )
        return agreeing, announced[agreeing[0]]

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

    async def _announced(self, donor: str) -> StateFingerprint | Exception:
        """Fingerprint of the donor's state, or the error because of which it is unknown."""
        assembler = StateAssembler(self._schema, self._max_bytes)
        try:
            await self._read(donor, assembler, lambda _: None, at_most=1)
            if not assembler.started:
                raise StateError("it shares no state")
        except (TimeoutError, AveragingError) as error:
            return error
        return assembler.fingerprint

    async def _read(
        self,
        donor: str,
        assembler: StateAssembler,
        on_progress: Callable[[StateAssembler], object],
        resume: Resume | None = None,
        at_most: int | None = None,
        *,
        alone: bool = False,
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
                    on_progress(assembler)
                    count += 1
                    if count == at_most:
                        return
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

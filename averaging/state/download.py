"""Downloading a state: from whom, and what becomes of it if a donor is lost on the way."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from averaging.deadlines.learned_deadlines import Deadlines
from averaging.errors import AveragingError, PeerUnreachableError, StateError, TransportError
from averaging.protocol.messages import DownloadData, Resume
from averaging.protocol.schema import Schema
from averaging.state.assembler import Check, Fingerprint, Held, StateAssembler, accept_all
from averaging.state.donor_deadlines import DonorDeadlines
from averaging.state.packing import State
from averaging.transport.base import Transport, is_alive

logger = logging.getLogger("averaging.state")

MAX_COMPARED = 16
"""So many donors are asked at most what they have."""

MAX_COMPARISONS = 3
"""How often donors are compared in all, should those that agreed have another state each time it is read."""

TRIES_PER_DONOR = 5
"""How often one donor is asked that is lost again and again, but delivers more each time. Attempts in which it was too
slow do not count: their number is bounded by how often less can be expected of it, see `flow.expected_rate`."""


class _LostError(StateError):
    """No donor delivered all; donors that agreed before may have another state by now."""


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
    check: Check = accept_all,
    on_progress: Callable[[StateAssembler], object] = lambda _: None,
) -> tuple[State, str]:
    """Downloads the state from the first of `donors` that delivers it whole.

    What was read before a donor was lost does not come again from the next donor that has the very same, if it is one
    that can leave it out; see `averaging.state.manifest`. A donor that was lost after it had delivered something new is
    asked once more, after the others, and so is one that was given up before the longest deadline. One that lives, but
    has not begun within that, gets several times as long in the end, since it may have to prepare a large state.

    A donor that is much slower than the best one that was met in the last hour is left for the next, and asked again
    after the others, for a smaller and smaller rate. So nobody holds this peer for ever: each attempt ends within what
    `flow.Flow.limit` says, and of each donor there is a bounded number of them.

    Args:
        transport: this peer's.
        donors: endpoints, the best one first.
        schema: of this peer's tensors; None takes any.
        silence: seconds without a message after which a donor is given up.
        deadlines: the learned ones that take its place, and the rates, kept from one download to the next.
        declared: versions of the donors' states, as discovery tells them. Who turns out to have an earlier one was
            started anew since, and is asked again only after all others.
        max_bytes: see `StateAssembler`.
        verify_donors: so many donors must announce the same version and digests of the averaged tensors (of all, if
            there is no schema) before one of them is believed.
        check: see `StateAssembler`.
        on_progress: called after each message.

    Returns:
        The state and its donor.

    Raises:
        StateError: none of them did, or too few agree; it says why for each.
    """
    if deadlines is None:
        deadlines = Deadlines(silence, silence, "timeout")
    this_download = _Download(transport, schema, deadlines, declared or {}, max_bytes, check, on_progress)
    if verify_donors <= 1:
        return await this_download.load(donors)
    for _ in range(MAX_COMPARISONS - 1):
        try:
            return await this_download.load(*await this_download.compare(donors, verify_donors))
        except _LostError:
            logger.info("all donors that agreed were lost or have moved on; comparing anew")
    return await this_download.load(*await this_download.compare(donors, verify_donors))


def choose(announced: Mapping[str, Fingerprint], wanted: int) -> list[str]:
    """The donors of the state on which most agree, and at least `wanted`; empty if there is none.

    Of several the one that the earliest donor has.
    """
    by_state: dict[Fingerprint, list[str]] = {}
    for donor, fingerprint in announced.items():
        by_state.setdefault(fingerprint, []).append(donor)
    most = max(by_state.values(), key=len, default=[])
    return most if len(most) >= wanted else []


class _Download:
    """One download with what of it is there already."""

    def __init__(
        self,
        transport: Transport,
        schema: Schema | None,
        deadlines: Deadlines,
        declared: Mapping[str, float],
        max_bytes: int | None,
        check: Check,
        on_progress: Callable[[StateAssembler], object],
    ) -> None:
        self._transport, self._schema, self._max_bytes, self._check = transport, schema, max_bytes, check
        self._declared = declared
        self._patience = DonorDeadlines(deadlines)
        self._on_progress = on_progress
        self._held = Held()
        self._unbegun: dict[str, None] = {}  # donors that were given up before their first message

    async def load(self, donors: Sequence[str], expected: Fingerprint | None = None) -> tuple[State, str]:
        """Reads from one donor after the other until one has delivered all."""
        failures: dict[str, str] = {}
        gone: set[str] = set()
        declared = dict(self._declared)
        waiting, tries = list(donors), Counter[str]()
        while waiting or (waiting := await self._preparing()):
            donor = waiting.pop(0)
            at_least = declared.pop(donor, 0.0)
            reader = StateAssembler(self._schema, self._max_bytes, self._held, expected, at_least, self._check)
            before = self._held.nbytes
            tries[donor] += 1
            cut = False
            try:
                try:
                    await self._read(donor, reader, self._on_progress, self._held.resume, alone=not waiting)
                except (TimeoutError, TransportError):
                    if not reader.whole:  # else only the end of the stream is missing
                        raise
                state = reader.finish()
            except (TimeoutError, AveragingError) as error:
                failures[donor] = self._reason(donor, error)
                if isinstance(error, PeerUnreachableError) and error.refused:
                    gone.add(donor)
                cut = isinstance(error, TimeoutError | TransportError)
            else:
                failures.pop(donor, None)
                for failure in failures.values():
                    logger.warning("could not download the state from %s; took that of %s", failure, donor)
                return state, donor
            # Not a warning: if all fail, the error tells it, to a caller who may try again and again.
            logger.info("could not download the state from %s", failures[donor])
            if reader.spliced:  # who sent the wrong bytes is not known, so this one is asked for all of them
                self._held = replace(self._held, cut=None)
                waiting.insert(0, donor)
                continue
            # Of two states the one of which there is more.
            self._held = max(self._held, reader.held, key=lambda held: held.nbytes)
            patience = self._patience
            worthwhile = donor not in patience.too_slow and (self._held.nbytes > before or patience.owes(donor))
            if reader.outdated or (cut and worthwhile and tries[donor] < TRIES_PER_DONOR + patience.times_slow[donor]):
                waiting.append(donor)
        raise _LostError(_told(failures.values()), gone)

    async def compare(self, donors: Sequence[str], wanted: int) -> tuple[list[str], Fingerprint]:
        """Asks donors what they have, and returns those of the best-attested state.

        Those that were started anew since they declared their versions are compared only if there are no others.

        Raises:
            StateError: fewer than `wanted` have the same.
        """
        asked = donors[:MAX_COMPARED]
        answers: dict[str, Fingerprint | str] = {}
        while True:
            answers |= zip(asked, await asyncio.gather(*(self._announced(donor) for donor in asked)), strict=True)
            announced = {donor: it for donor, it in answers.items() if isinstance(it, Fingerprint)}
            anew = {donor for donor, it in announced.items() if it.version < self._declared.get(donor, 0.0)}
            agreeing = choose({donor: it for donor, it in announced.items() if donor not in anew} or announced, wanted)
            asked = [donor for donor in answers if self._patience.owes(donor)]
            if agreeing or not (asked := asked or await self._preparing()):
                break
        if not agreeing:
            declared = {who: f", not {self._declared[who]:.0f} as declared: probably started anew" for who in anew}
            told = _told(
                it if isinstance(it, str) else f"{who}: {it}{declared.get(who, '')}" for who, it in answers.items()
            )
            raise StateError(f"fewer than {wanted} donors have the same state, as verify_donors wants it; {told}")
        return agreeing, announced[agreeing[0]]

    async def _preparing(self) -> list[str]:
        """The donors that were silent from the beginning but live, and were not yet given the time that such get."""
        asked = list(self._unbegun)
        self._unbegun.clear()
        alive = await asyncio.gather(*(self._is_alive(donor) for donor in asked))
        for donor in itertools.compress(asked, alive):
            self._patience.is_preparing(donor)
        owed = [donor for donor in asked if self._patience.owes(donor)]
        for donor in owed:
            logger.warning("%s is there, but has not begun to send its state; waiting on, it may be a large one", donor)
        return owed

    async def _is_alive(self, donor: str) -> bool:
        try:
            async with asyncio.timeout(self._patience.to_answer):
                return await is_alive(self._transport, donor)
        except TimeoutError:
            return False

    async def _announced(self, donor: str) -> Fingerprint | str:
        """What a donor has, or why that is not known."""
        reader = StateAssembler(self._schema, self._max_bytes)
        try:
            await self._read(donor, reader, lambda _: None, at_most=1)
            if not reader.started:
                raise StateError("it shares no state")
        except (TimeoutError, AveragingError) as error:
            return self._reason(donor, error)
        return reader.fingerprint

    async def _read(
        self,
        donor: str,
        reader: StateAssembler,
        on_progress: Callable[[StateAssembler], object],
        resume: Resume | None = None,
        at_most: int | None = None,
        *,
        alone: bool = False,
    ) -> None:
        count = 0
        try:
            async with (
                self._patience.silence(donor, alone=alone) as silence,
                aclosing(self._transport.download_state(donor, resume)) as messages,
            ):
                async for message in messages:
                    if not count or _brings_something(message):
                        silence.heard()
                    reader.feed(message)
                    silence.delivered(reader.left)
                    on_progress(reader)
                    count += 1
                    if count == at_most:
                        return
                if reader.whole:
                    silence.finished()
        except TimeoutError:
            if not count:
                self._unbegun[donor] = None
            raise

    def _reason(self, donor: str, error: Exception) -> str:
        reason = str(error)
        return reason if reason.startswith(donor) else f"{donor}: {reason}"


def _brings_something(message: DownloadData) -> bool:
    """Whether it is one of a finite number: a donor could send others for ever."""
    piece = message.tensor_part
    return piece is not None and bool(piece.dtype or len(piece.buffer))


def _told(failures: Iterable[str]) -> str:
    told = "; ".join(failures) or "nobody offers one"
    return f"no state could be downloaded ({told}); nothing was changed"

"""Downloads a state: which donors there are, how long each is waited for, and how the next one continues."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from averaging.common import is_number, pack, unpack
from averaging.discovery import Discovery, PublishedRecord
from averaging.errors import AveragingError, PeerUnreachableError, StateError, TransportError
from averaging.protocol import Resume, donors_key
from averaging.state.assembler import ReceivedState, StateAssembler, StateLimits
from averaging.state.manifest import State
from averaging.tensors import Schema
from averaging.timing import SLOW_LINK, Deadline, FairTimeout
from averaging.transport import Transport, is_alive

LIFETIME, REFRESH = 60.0, 20.0  # seconds until a declaration expires, and between its renewals

PAUSE = 1.0
"""Minimum seconds between two declarations: newcomers need no record of each of several rounds in a second."""


class Donors:
    """The state donors of a run, from the view of the peer `endpoint`.

    The priority of a donor is the version of its state: the peer that has averaged most often is asked first. The own
    `declaration` is published only if this peer shares its state.
    """

    def __init__(
        self, run_id: str, endpoint: str, discovery: Discovery, version: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self._key = donors_key(run_id)
        self._endpoint, self._discovery = endpoint, discovery
        self.declaration = PublishedRecord(
            discovery,
            self._key,
            endpoint,
            lambda: pack(float(version())),
            lifetime=LIFETIME,
            refresh=REFRESH,
            pause=PAUSE,
            clock=clock,
        )

    async def follow(self) -> None:
        await self._discovery.follow(self._key, keep=False)

    def others(self) -> list[tuple[float, str]]:
        """Priority and endpoint of the other donors, highest priority first."""
        entries = self._discovery.get(self._key)
        declared = [(unpack_priority(entry.value), name) for name, entry in entries.items() if name != self._endpoint]
        known = [(priority, name) for priority, name in declared if priority is not None]
        return sorted(known, key=lambda donor: (-donor[0], donor[1]))


def unpack_priority(value: bytes) -> float | None:
    try:
        priority = unpack(value)
    except ValueError:
        return None
    return float(priority) if is_number(priority) else None


# How long a donor may be silent, and how slow while others are left to ask.


PREPARING = 10
"""Times `silence` for the first message of a donor that answers calls but has not begun to send. It may be copying a
large state and computing its digests, 0.6 s for a GiB on an idle AMD EPYC. While others can be asked, a donor has the
same part of `silence`: it may be stopped, and this peer would stand still."""

LEAST_RATE = SLOW_LINK / 8
"""Bytes per second below which the next donor is asked. What came is kept, and the last one may be as slow as it is."""

PER_MESSAGE = 1 << 10
"""Bytes for which a smaller message counts: it takes time as well."""


class DonorWatch:
    """Ends the reading of a donor, inside the context `limit`, that is silent for too long or too slow.

    It waits for `first` seconds until the first message, and for `silence` seconds until each further one. In each
    `silence` seconds after the first message it expects `least_rate` bytes per second. Its TimeoutErrors have figures.
    """

    def __init__(self, silence: float, *, first: float, least_rate: float) -> None:
        self._silence, self._rate = Deadline(silence, "timeout"), least_rate
        basis = "timeout" if first == silence else f"{first / silence:g} × timeout"
        self.limit = FairTimeout(Deadline(first, basis), silence)
        self._began: float | None = None  # the window of the rate, in fair seconds of the messages so far
        self._now, self._delivered = 0.0, 0

    def received(self, nbytes: int) -> None:
        """Restarts the deadline after a message; raises a TimeoutError if too little has come lately."""
        self._now += self.limit.waited
        self.limit.restart(self._silence)
        if self._began is None:
            self._began = self._now
        self._delivered += max(nbytes, PER_MESSAGE)
        if (seconds := self._now - self._began) < self._silence.seconds:
            return
        if self._delivered < (expected := self._rate * seconds):
            raise TimeoutError(
                f"delivered {self._delivered} bytes in {seconds:.1f} s, expected at least {expected:.0f} while others "
                "can be asked"
            )
        self._began, self._delivered = self._now, 0


logger = logging.getLogger("averaging.state")

TRIES_PER_DONOR = 5
"""Maximum number of downloads from one donor that is lost or slow repeatedly but delivers more each time."""

SMALL = 1 << 10
"""Bytes of a message that passes in one packet everywhere: IPv6 requires 1,280 bytes with all headers."""


async def download(
    transport: Transport,
    donors: Sequence[str],
    schema: Schema | None,
    *,
    silence: float,
    declared: Mapping[str, float] | None = None,
    limits: StateLimits | None = None,
    on_progress: Callable[[StateAssembler], object] = lambda _: None,
) -> tuple[State, str]:
    """Downloads the state from the first of `donors` that delivers it completely.

    If a donor is lost, the next one that has the same state continues where it stopped, if it supports that; see
    `averaging.state.manifest`. So it is if a donor is much slower than a slow link while others are left. A lost donor
    is asked again after the others if it delivered new data, or answers calls but has not begun to send.

    Args:
        transport: this peer's transport.
        donors: endpoints, best first.
        schema: schema of this peer's tensors; None accepts any tensors.
        silence: seconds without a message after which a donor is given up.
        declared: versions of the donors' states as declared in discovery. A donor that has an earlier version was
            restarted, and is asked again only after all others.
        limits: which states are refused.
        on_progress: callback after each message.

    Returns:
        The state and its donor.

    Raises:
        StateError: no donor delivered the state. The message has the reason for each donor.
    """
    return await _Download(transport, schema, silence, dict(declared or {}), limits, on_progress).load(donors)


def of_all_members(donors: Sequence[str], members: Mapping[str, str]) -> list[str]:
    """The donors, the first one of each member before all others: one member may have more than can be asked."""
    first = {members.get(donor, donor): donor for donor in reversed(donors)}.values()
    return sorted(donors, key=lambda donor: donor not in first)


@dataclass(slots=True)
class _Download:
    transport: Transport
    schema: Schema | None
    silence: float
    declared: dict[str, float]
    limits: StateLimits | None
    on_progress: Callable[[StateAssembler], object]
    _kept: ReceivedState = field(default_factory=ReceivedState)
    _not_started: dict[str, None] = field(default_factory=dict)  # timed out before their first message, in order
    _prepare: set[str] = field(default_factory=set)  # those of them that answer calls
    _only_small: dict[str, bool] = field(default_factory=dict)  # answer, but deliver no more than one small message

    async def load(self, donors: Sequence[str]) -> tuple[State, str]:
        """Reads from one donor after the other until one has delivered the whole state."""
        failures: dict[str, Exception] = {}
        gone: set[str] = set()
        queue, tries = list(donors), Counter[str]()
        while queue or (queue := await self._preparing()):
            donor = queue.pop(0)
            min_version = self.declared.pop(donor, 0.0)
            assembler = StateAssembler(self.schema, self.limits, self._kept, min_version)
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
            retry = interrupted and self._kept.nbytes > before and tries[donor] < TRIES_PER_DONOR
            if assembler.outdated or retry:
                queue.append(donor)
        reasons = (
            "; ".join(self._reason(donor, error) for donor, error in failures.items()) or "no peer shares its state"
        )
        text = f"no state could be downloaded ({reasons}); nothing was changed"
        unconnected = any(isinstance(error, PeerUnreachableError) and error.unconnected for error in failures.values())
        raise StateError(text, gone, unconnected=unconnected)

    async def _preparing(self) -> list[str]:
        """Donors that sent nothing but answer calls: they get more time, once."""
        asked = [donor for donor in self._not_started if donor not in self._prepare]
        self._not_started.clear()
        alive = await asyncio.gather(*(self._is_alive(donor) for donor in asked))
        preparing = list(itertools.compress(asked, alive))
        self._prepare.update(preparing)
        for donor in preparing:
            self._only_small.setdefault(donor, True)
            logger.warning("%s answers but has not begun to send its state; still waiting, it may be large", donor)
        return preparing

    async def _is_alive(self, donor: str) -> bool:
        try:
            async with asyncio.timeout(self.silence / 3):
                return await is_alive(self.transport, donor)
        except TimeoutError:
            return False

    def _reason(self, donor: str, error: Exception) -> str:
        text = str(error) if getattr(error, "endpoint", None) == donor else f"{donor}: {error}"
        if isinstance(error, TimeoutError) and self._only_small.get(donor):
            text += " (only small messages arrive from it, so the path may lose large packets: try a smaller MTU)"
        return text

    async def _read(self, donor: str, assembler: StateAssembler, resume: Resume, *, alone: bool) -> None:
        started = False
        first = self.silence
        if donor in self._prepare:
            first *= PREPARING
        elif not alone:
            first = min(first, max(1.0, first / PREPARING))
        watch = DonorWatch(self.silence, first=first, least_rate=0.0 if alone else LEAST_RATE)
        try:
            async with watch.limit, aclosing(self.transport.download_state(donor, resume)) as messages:
                async for message in messages:
                    nbytes = len(message.tensor_part.buffer) if message.tensor_part else 0
                    is_small = not started and len(message.metadata) + nbytes <= SMALL
                    self._only_small[donor] = self._only_small.get(donor, True) and is_small
                    started = True
                    assembler.feed(message)
                    self.on_progress(assembler)
                    watch.received(nbytes)
        except TimeoutError:
            if not started:
                self._not_started[donor] = None
            raise

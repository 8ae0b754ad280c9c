"""How all ranks of a site take over one result: that of a round, or a downloaded state of the run.

A process that trains alone is a site of one rank. If the model is divided, each shard has a round or a download of its
own, and either all shards take over their part of the same result, or none does.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from averaging.common import EventLoopThread, SignalSafeFuture, is_count, listed, on_loop
from averaging.errors import ClosedError, SiteError, StateError
from averaging.peer import FetchedState, Peer
from averaging.protocol import GROUP_ID_BYTES, Group
from averaging.receipts import Receipt
from averaging.state import ExtraState, State
from averaging.timing import is_set_within
from averaging.training.site import Site

T = TypeVar("T")

ROUNDS = 3
"""Rounds of one shard until it has met the same round of another site as the other shards."""

ATTEMPTS = 5
"""Downloads until all shards have the same version: a donor may average between the first shard and the last."""


def of_each_shard(site: Site, work: Callable[[], T]) -> dict[int, T | Exception]:
    """What `work` returns or raises at the owner of each shard, by shard; the same at every rank."""

    def attempt() -> tuple[int, T | Exception] | None:
        if not site.owns:
            return None
        try:
            return site.shard, work()
        except Exception as error:
            return site.shard, error

    return dict(sorted((done for done in site.all_gather(attempt) if done is not None), key=lambda done: done[0]))


# Rounds.


@dataclass(frozen=True, slots=True)
class _Proposal:
    group_id: bytes
    rounds: Mapping[str, int]  # the sites in the group, and which round of each it was


class PendingRound:
    """A round that has begun, at one rank of a site.

    If the model is divided, the result of a shard is adopted only if the rounds of all shards have one, with the same
    sites in the same of their rounds: a site whose round has failed may average more samples in its next one, while
    another shard of this site still waits for it. So the round waits for a verdict once it has its result.
    """

    def __init__(self, site: Site, tensors: Sequence[torch.Tensor], number: int) -> None:
        self.site, self.tensors, self.number = site, tensors, number
        self.receipt: SignalSafeFuture[Receipt] | None = None
        self._make: Callable[[], Coroutine[Any, Any, Receipt]] | None = None
        self._proposal: SignalSafeFuture[_Proposal | None] = SignalSafeFuture()
        self._verdict: asyncio.Future[str] | None = None  # used by the peer's thread only
        self.samples = "", 0  # the topic, and the samples of this rank when the round began

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Wraps the start of `run` in the peer's thread; all ranks learn from `end_of` that it is closed."""
        try:
            yield
        except ClosedError as error:
            if self.site.size == 1:
                raise
            self.receipt = SignalSafeFuture()
            self.receipt.set_exception(error)
            self._proposal.set_result(None)

    def run(self, make: Callable[[], Coroutine[Any, Any, Receipt]]) -> Coroutine[Any, Any, Receipt]:
        """The round of this rank, which `make` returns, and once more for each time that it has to be repeated."""
        self._make = make
        return make() if self.site.shards == 1 else self._proposing(make())

    async def _proposing(self, round_: Coroutine[Any, Any, Receipt]) -> Receipt:
        proposal = self._proposal
        try:
            return await round_
        finally:
            if not proposal.done():
                proposal.set_result(None)

    def start_again(self, thread: EventLoopThread, reason: str) -> None:
        """Ends this rank's round, whose result is not adopted for this reason, and starts another one."""
        self.decide(thread, reason)
        with suppress(Exception):  # all ranks hear of what the next round raises
            self.wait(thread)
        self._proposal, self._verdict = SignalSafeFuture(), None
        if self._make is not None:
            with self.starting():
                self.receipt = thread.start(self.run(self._make))

    def done(self) -> bool:
        return self.receipt is None or self.receipt.done()

    @property
    def is_settled(self) -> bool:
        """Whether the round has a result, or has ended without one, at this rank."""
        if self.site.shards == 1:
            return self.done()
        return self.receipt is None or self._proposal.done()

    def result(self) -> Receipt:
        if self.receipt is None:
            raise ClosedError("this rank owns no peer")
        return self.receipt.result()

    async def confirm(self, group: Group) -> str:
        """Called by the round with its group, once it has a result: see `Peer.average`."""
        rounds = dict(_round_in(member.user) or (member.endpoint, 0) for member in group.members)
        self._verdict = asyncio.get_running_loop().create_future()
        self._proposal.set_result(_Proposal(group.public_id, rounds))
        return await self._verdict

    def wait(self, thread: EventLoopThread) -> Receipt:
        if self.receipt is None:
            raise ClosedError("this rank owns no peer")
        return thread.wait(self.receipt)

    def proposed(self, thread: EventLoopThread) -> _Proposal | str:
        return thread.wait(self._proposal) or self.wait(thread).reason or "it was given up"

    def decide(self, thread: EventLoopThread, reason: str) -> None:
        """Gives the verdict: why the result is not adopted, or nothing."""

        def decide() -> None:
            if self._verdict is not None and not self._verdict.done():
                self._verdict.set_result(reason)

        with suppress(ClosedError):
            thread.start(on_loop(decide))


def end_of(pending: PendingRound, thread: EventLoopThread) -> Receipt:
    """Waits for a round at all ranks of a site; then either all of them hold its result, or none does."""
    site = pending.site
    if site.shards > 1:
        receipt = _of_all_shards(pending, thread)
    else:
        receipt = site.broadcast_from_leader(lambda: pending.wait(thread))
    if receipt.averaged:
        site.copy(pending.tensors)
    return receipt


def _of_all_shards(pending: PendingRound, thread: EventLoopThread) -> Receipt:
    # Two phases: each shard holds its result back and proposes it, then all adopt or none does. A rank that dies
    # between the two leaves shards with different parameters, so the site ends, and takes over a state as it returns.
    site = pending.site
    for attempt in range(ROUNDS):
        proposals = of_each_shard(site, lambda: pending.proposed(thread))
        reason, late = _why_not(proposals)
        if not late or attempt == ROUNDS - 1:
            break
        # The other site has begun another round since, and another shard of this one is in that already. If both sites
        # began anew, each would meet the round before of the other again.
        if site.owns and site.shard in late:
            pending.start_again(thread, reason)
    pending.decide(thread, reason)
    ends = list(of_each_shard(site, lambda: pending.wait(thread)).values())
    failed = [end for end in ends if not (isinstance(end, Receipt) and end.averaged)]
    for error in [*proposals.values(), *failed]:
        if isinstance(error, Exception) and reason:
            raise error
    if failed and not reason:
        raise SiteError(
            f"only some shards of this site have adopted the result of a round ({failed[0]}); end all processes of the "
            "site, so that torchrun starts it again and it takes over the state of the run"
        )
    receipt = next(end for end in ends if isinstance(end, Receipt))  # of the leader, which is rank 0
    group_ids = b"".join(proposal.group_id for proposal in proposals.values() if isinstance(proposal, _Proposal))
    joint = hashlib.sha256(group_ids).digest()[:GROUP_ID_BYTES] if not reason else receipt.group_id
    gathered = {name: unwrapped(user) for name, user in receipt.gathered.items()}
    return replace(receipt, group_id=joint, gathered=gathered)


def _why_not(proposals: Mapping[int, _Proposal | str | Exception]) -> tuple[str, frozenset[int]]:
    """Why the results of the shards are not adopted, and the shards that have met the older round of another site."""
    rounds: dict[int, Mapping[str, int]] = {}
    for shard, proposal in proposals.items():
        if not isinstance(proposal, _Proposal):
            return f"shard {shard} of this site was not averaged: {proposal}", frozenset()
        rounds[shard] = proposal.rounds
    if len({frozenset(met) for met in rounds.values()}) > 1:
        return "the shards of this site found groups of different sites", frozenset()
    last = {site: max(met[site] for met in rounds.values()) for met in rounds.values() for site in met}
    differing = sorted(site for site in last if len({met[site] for met in rounds.values()}) > 1)
    late = frozenset(shard for shard, met in rounds.items() if any(met[site] != last[site] for site in differing))
    return f"the shards of this site met different rounds of {listed(differing)}" if differing else "", late


def wrapped(site: str, number: int, user: Any) -> dict[str, Any]:
    return {"site": site, "round": number, "user": user}


def _round_in(gathered: Any) -> tuple[str, int] | None:
    """The name of a member's site, and which of its rounds this is; None if it names no site."""
    match gathered:
        case {"site": str(site), "round": number} if is_count(number):
            return site, number
    return None


def unwrapped(gathered: Any) -> Any:
    return gathered.get("user") if isinstance(gathered, dict) else None


# States.


class BackgroundDownload:
    """A download of the run's state while this peer trains."""

    def __init__(self, donors: Sequence[str], began: float) -> None:
        self.donors, self.began = tuple(donors), began
        self.delivering = False
        self.result: SignalSafeFuture[FetchedState] = SignalSafeFuture()
        self.started, self.ended = asyncio.Event(), asyncio.Event()  # used by the peer's thread only

    def done(self) -> bool:
        return self.result.done()


class SharedState(Protocol):
    """The state of a training besides the averaged tensors, see `TrainingState`."""

    def shared(self) -> ExtraState: ...
    def check(self, user: Mapping[str, Any]) -> None: ...
    def take_over(self, state: State) -> None: ...


class StateTakeover:
    """Downloads the state of the run, and takes it over at all ranks of a site."""

    def __init__(
        self, site: Site, peer: Peer, thread: EventLoopThread, state: SharedState, clock: Callable[[], float]
    ) -> None:
        self._site, self._peer, self._thread = site, peer, thread
        self._state, self._clock = state, clock
        self.rate = 0.0  # bytes per second of the last download

    def fetch(
        self, donors: Sequence[str], check: Callable[[Mapping[str, Any]], None] | None = None
    ) -> BackgroundDownload:
        """Begins to download this rank's part of the state of the first of `donors` that delivers one."""
        fetch = BackgroundDownload(donors, self._clock())
        if self._site.owns:
            fetch.result = self._thread.start(self._download(fetch, check))
        return fetch

    async def _download(
        self, fetch: BackgroundDownload, check: Callable[[Mapping[str, Any]], None] | None
    ) -> FetchedState:
        def started(user: Mapping[str, Any]) -> None:
            self._state.check(user)
            if check is not None:
                check(user["strategy"])
            fetch.delivering = True
            fetch.started.set()

        try:
            shard = self._peer.shard
            donors = list(fetch.donors) if shard is None else await shard.endpoints_of(fetch.donors)
            fetched = await self._peer.fetch_state(donors, started)
        finally:
            fetch.started.set()
            fetch.ended.set()
        size = sum(tensor.nbytes for tensor in fetched.state.tensors.values())
        self.rate = size / max(1e-3, self._clock() - fetch.began)
        return fetched

    def wait(self, fetch: BackgroundDownload, seconds: float | None) -> None:
        """Waits until a download ends, or starts to deliver if it did not yet; at most for `seconds`."""
        self._thread.run(is_set_within(seconds, fetch.ended if fetch.delivering else fetch.started))

    def receive(self, fetch: BackgroundDownload) -> Mapping[str, Any]:
        """Waits for a download; the strategy's part of the state, or StateError if no donor delivered a valid one."""
        user: Mapping[str, Any] = self._thread.wait(fetch.result).state.user["strategy"]
        return user

    def of_all_ranks(self, search: Callable[[], BackgroundDownload | None]) -> BackgroundDownload | None:
        """The download that `search` finds at the leader; the other shards are downloaded from the same donor."""
        at_leader: BackgroundDownload | None = None

        def look() -> str | None:
            nonlocal at_leader
            at_leader = search()
            if at_leader is None or self._site.size == 1:
                return None
            return self._thread.wait(at_leader.result).donor

        donor = self._site.broadcast_from_leader(look)
        return at_leader if donor is None or at_leader is not None else self.fetch([donor])

    def take_over(self, fetch: BackgroundDownload) -> None:
        """Takes over a download at all ranks, or none; SiteError if only some shards were taken over."""
        if self._site.shards == 1:
            self._site.broadcast_from_leader(lambda: self._write(fetch))
        else:
            self._write_all(self._of_one_version(fetch))
        if self._site.size > 1:
            self._copy()

    def _write(self, fetch: BackgroundDownload) -> None:
        self._thread.run(self._peer.take_over(self._thread.wait(fetch.result), self._state.take_over))

    def _of_one_version(self, fetch: BackgroundDownload) -> BackgroundDownload:
        """The download of this rank, once the downloads of all shards are parts of one state."""

        def source() -> tuple[str, int, int, str] | None:
            return self._source(self._thread.wait(fetch.result)) if self._site.owns else None

        # The donor's shards are downloaded one after the other, and a round may end between two of them.
        for _ in range(ATTEMPTS):
            sources = [origin for origin in self._site.all_gather(source) if origin is not None]
            if len(set(sources)) == 1:
                return fetch
            fetch = self.fetch([sources[0][0]])
        raise StateError(
            f"the shards of {sources[0][0]} were parts of different states in {ATTEMPTS} attempts: it averages "
            "faster than this site downloads"
        )

    def _source(self, fetched: FetchedState) -> tuple[str, int, int, str]:
        """The donor's site, and which state it is: equal for all shards of one state."""
        names, user = self._peer.shard, fetched.state.user
        donor = fetched.donor if names is None else names.site_of(fetched.donor) or fetched.donor
        strategy = user.get("strategy")
        history = strategy.get("history") if isinstance(strategy, dict) else None
        return donor, fetched.state.version, user.get("local_step", 0), str(history)

    def _write_all(self, fetch: BackgroundDownload) -> None:
        ends = of_each_shard(self._site, lambda: self._write(fetch))
        failures = [end for end in ends.values() if end is not None]
        if len(failures) == self._site.shards:
            raise failures[0]
        if failures:
            raise SiteError(
                f"only some shards of this site have taken over the state of the run ({failures[0]}); end all "
                "processes of the site, so that torchrun starts it again"
            ) from failures[0]

    def _copy(self) -> None:
        """Copies the owner's state to the ranks that hold the same shard."""
        site = self._site
        own = dict(zip(self._peer.tensor_names, self._peer.own_tensors, strict=True))
        sent: dict[str, torch.Tensor] = {}

        def describe() -> tuple[int, Any, list[tuple[str, torch.dtype, torch.Size]]]:
            extras = self._state.shared()
            sent.update(own, **extras.tensors)
            return (
                self._peer.version,
                extras.user,
                [(name, tensor.dtype, tensor.shape) for name, tensor in sent.items()],
            )

        version, user, described = site.broadcast_from_owner(describe)
        if not site.owns:
            sent = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in described}
        site.copy(list(sent.values()))
        if site.owns:
            return
        with self._peer.tensors(), torch.no_grad():
            self._state.take_over(State(max(1, version), sent, user))
            for name, tensor in own.items():
                tensor.copy_(sent[name])

"""A round that has begun, and how the ranks of a site agree on its result."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from averaging.common import EventLoopThread, SignalSafeFuture, on_loop
from averaging.errors import ClosedError, SiteError
from averaging.protocol import GROUP_ID_BYTES, Group
from averaging.receipts import Receipt
from averaging.training.site import Site


@dataclass(frozen=True, slots=True)
class _Proposal:
    """The result of one shard's round, which is not adopted yet: the group's id, and the sites in the group."""

    group_id: bytes
    sites: frozenset[str]


class PendingRound:
    """A round that has begun, at one rank of a site.

    If the model is divided, the result of a shard is adopted only if the rounds of all shards have one, with the same
    sites. So the round waits for a verdict once it has its result.

    Args:
        site: the site; a rank that owns no peer has no round of its own.
        tensors: what is averaged.
    """

    def __init__(self, site: Site, tensors: Sequence[torch.Tensor]) -> None:
        self.site, self.tensors = site, tensors
        self.receipt: SignalSafeFuture[Receipt] | None = None
        self._proposal: SignalSafeFuture[_Proposal | None] = SignalSafeFuture()
        self._verdict: asyncio.Future[str] | None = None  # used by the peer's thread only

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Wraps the start of the round in the peer's thread; all ranks learn from `end_of` that it is closed."""
        try:
            yield
        except ClosedError as error:
            if self.site.size == 1:
                raise
            self.receipt = SignalSafeFuture()
            self.receipt.set_exception(error)
            self._proposal.set_result(None)

    async def proposing(self, round_: Coroutine[Any, Any, Receipt]) -> Receipt:
        """Runs the round of a shard; if it ends without a result, no verdict is waited for."""
        try:
            return await round_
        finally:
            if not self._proposal.done():
                self._proposal.set_result(None)

    def done(self) -> bool:
        """Whether the round has ended at this rank."""
        return self.receipt is None or self.receipt.done()

    @property
    def is_settled(self) -> bool:
        """Whether the round has a result, or has ended without one, at this rank."""
        if self.site.shards == 1:
            return self.done()
        return self.receipt is None or self._proposal.done()

    def result(self) -> Receipt:
        """The receipt of this rank's round, which has ended.

        Raises:
            AveragingError: the round has raised it; or this rank had none.
        """
        if self.receipt is None:
            raise ClosedError("this rank owns no peer")
        return self.receipt.result()

    async def confirm(self, group: Group) -> str:
        """Called by the round with its group, once it has a result: see `Peer.average`."""
        sites = frozenset(site_in(member.user) or member.endpoint for member in group.members)
        self._verdict = asyncio.get_running_loop().create_future()
        self._proposal.set_result(_Proposal(group.public_id, sites))
        return await self._verdict

    def wait(self, thread: EventLoopThread) -> Receipt:
        """Waits for the receipt of this rank's round."""
        if self.receipt is None:
            raise ClosedError("this rank owns no peer")
        return thread.wait(self.receipt)

    def proposed(self, thread: EventLoopThread) -> _Proposal | str | Exception | None:
        """Waits until this rank's round has a result, or has ended: why, or with which error. None if it has none."""
        if self.receipt is None:
            return None
        try:
            proposal = thread.wait(self._proposal)
            if proposal is not None:
                return proposal
            return self.wait(thread).reason or "it was given up"
        except Exception as error:
            return error

    def decide(self, thread: EventLoopThread, reason: str) -> None:
        """Gives the verdict: why the result is not adopted, or nothing."""

        def decide() -> None:
            if self._verdict is not None and not self._verdict.done():
                self._verdict.set_result(reason)

        with suppress(ClosedError):
            thread.start(on_loop(decide))


def end_of(pending: PendingRound, thread: EventLoopThread) -> Receipt:
    """Waits for a round at all ranks of a site; then either all of them hold its result, or none does.

    Raises:
        SiteError: the result was adopted by some shards only.
        Exception: what the round has raised at one of the ranks.
    """
    site = pending.site
    receipt = site.agreed(lambda: pending.wait(thread)) if site.shards == 1 else _of_all_shards(pending, thread)
    if receipt.averaged:
        site.copy(pending.tensors)
    return receipt


def _of_all_shards(pending: PendingRound, thread: EventLoopThread) -> Receipt:
    site = pending.site
    heard = site.together(lambda: (site.shard, pending.proposed(thread)))
    of_shard = {shard: proposal for shard, proposal in heard if proposal is not None}
    reason = _why_not(of_shard)
    pending.decide(thread, reason)

    def ended() -> Receipt | Exception | None:
        if not site.owns:
            return None
        try:
            return pending.wait(thread)
        except Exception as error:
            return error

    ends = [end for end in site.together(ended) if end is not None]
    for proposal in of_shard.values():
        if isinstance(proposal, Exception):
            raise proposal
    for end in ends:
        if isinstance(end, Exception) and reason:
            raise end
    if not reason and not all(isinstance(end, Receipt) and end.averaged for end in ends):
        failed = next(end for end in ends if not (isinstance(end, Receipt) and end.averaged))
        raise SiteError(
            f"only some shards of this site have adopted the result of a round ({failed}); end all processes of the "
            "site, so that torchrun starts it again and it takes over the state of the run"
        )
    receipt = next(end for end in ends if isinstance(end, Receipt))  # of the leader, which is rank 0
    proposals = [of_shard[shard] for shard in sorted(of_shard)]
    group_ids = b"".join(one.group_id for one in proposals if isinstance(one, _Proposal))
    joint = hashlib.sha256(group_ids).digest()[:GROUP_ID_BYTES] if not reason else receipt.group_id
    gathered = {name: unwrapped(user) for name, user in receipt.gathered.items()}
    return replace(receipt, group_id=joint, gathered=gathered)


def _why_not(of_shard: dict[int, _Proposal | str | Exception]) -> str:
    """Why the results of the shards are not adopted; empty if they are."""
    for shard in sorted(of_shard):
        proposal = of_shard[shard]
        if not isinstance(proposal, _Proposal):
            return f"shard {shard} of this site was not averaged: {proposal}"
    sites = {one.sites for one in of_shard.values() if isinstance(one, _Proposal)}
    if len(sites) > 1:
        return "the shards of this site found groups of different sites"
    return ""


def wrapped(site: str, user: Any) -> dict[str, Any]:
    """What a shard's peer sends to its group: the name of its site, beside what the strategy sends."""
    return {"site": site, "user": user}


def site_in(gathered: Any) -> str | None:
    """The name of a member's site."""
    site = gathered.get("site") if isinstance(gathered, dict) else None
    return site if isinstance(site, str) else None


def unwrapped(gathered: Any) -> Any:
    """What the strategy of a member has sent."""
    return gathered.get("user") if isinstance(gathered, dict) else None

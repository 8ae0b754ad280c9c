"""One peer of a run: it serves others, finds groups, averages its tensors with them, and hands over its state."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Self, Unpack

import torch

from averaging.common.shared_tensors import SharedTensors
from averaging.common.validation import check_weight
from averaging.config import PeerConfig, PeerOptions, configure
from averaging.discovery.base import Discovery
from averaging.discovery.gossip.bootstrap import Waiting
from averaging.errors import ClosedError, ConfigError
from averaging.observe.receipts import DropCode, Receipt
from averaging.observe.status import PeerStatus
from averaging.peer.lifecycle import DiscoveryFactory, Running, start
from averaging.peer.round_options import Awaited, Enough, Overtaken
from averaging.peer.run_progress import RunProgress
from averaging.peer.single_average import SingleAverage
from averaging.peer.topics import Topic, TopicOptions, make_topic
from averaging.protocol.group import Mode, pack_gather
from averaging.security.credentials import read_credentials
from averaging.state.download import download
from averaging.state.packing import State
from averaging.state.snapshots import Extras, Snapshots
from averaging.transport.base import Transport
from averaging.transport.grpc import GrpcTransport
from averaging.transport.rpc_methods import RpcService

logger = logging.getLogger("averaging.peer")

MAX_TOPIC = 64
"""Characters of a topic's name: discovery's keys are short."""


@dataclass(frozen=True, slots=True)
class FetchedState:
    """A state that was downloaded and verified.

    Attributes:
        donor: whose it was.
    """

    state: State
    donor: str


class Peer:
    """One peer, an async context manager: entered, it is reachable and donates its state; left, it is gone in order.

    ```python
    async with Peer({"w": w}, run_id="demo", join=["192.0.2.7:4222"]) as peer:
        receipt = await peer.average(weight=32)
    ```

    Await the task in which it lives, as a TaskGroup does: if `asyncio.run` has to cancel that task itself, it cancels
    gRPC's own with it, of which grpcio (1.85) can crash.

    The tensors may have any shape, be empty or 0-dim, non-contiguous, on CPU or GPU, float16, bfloat16, float32 or
    float64. They are written once a round, when its result is in; with `in_place` as it comes.

    Args:
        tensors: in the same order at all peers; a mapping gives them names.
        run_id: Peers with the same run id average together.
        config: The options as one object, for example from `PeerConfig.from_toml`; single options win over it.
        extra_state: asked, with the tensors locked and in any thread, what belongs to the downloadable state besides
            them. What it raises comes out of the `average`, `download_state` or `commit` that asked; the tensors hold
            the result of that then, under the former version.
        transport: how peers reach each other; gRPC on sockets if not given.
        services: further gRPC methods that this peer serves on its port, see `averaging.rpc`. Its tokens, certificates
            and limits hold for them, too.
        discovery: how peers find each other; gossip between them if not given.
        clock: seconds since the epoch.
        rng: source of all random choices.
        on_joining: called in the event loop while none of `join` has answered, after a second and then more and more
            seldom, with who is waited for and why. It is for gossip between the peers.
        options: see `PeerConfig`.

    Raises:
        ConfigError: an option that cannot work.
        TensorError: a tensor that cannot be averaged.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
        *,
        run_id: str | None = None,
        config: PeerConfig | None = None,
        extra_state: Callable[[], Extras] | None = None,
        transport: Transport | None = None,
        services: Sequence[RpcService] = (),
        discovery: DiscoveryFactory | None = None,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        on_joining: Callable[[Waiting], None] | None = None,
        **options: Unpack[PeerOptions],
    ) -> None:
        self.config = configure(config, run_id, options)
        self._tensors = SharedTensors(tensors)
        self._own = make_topic(self.config, self._tensors, commits=True)
        self.schema = self._own.schema
        self._clock, self._rng = clock, rng or random.SystemRandom()
        self._credentials = read_credentials(self.config, clock)
        is_client = self.config.mode is Mode.CLIENT
        shared = self.config.share_state and not is_client
        self._snapshots = Snapshots(self._tensors, extra_state, self.schema, shared=shared)
        if services and transport is not None:
            raise ConfigError("services are served over gRPC; give no transport beside them")
        self._transport = transport or GrpcTransport(
            None if is_client else self.config.listen,
            self.config.advertise,
            # A part and its codec's tables, a few hundred records of discovery, or the largest metadata of a state.
            max_message_bytes=2 * self.config.part_size_bytes + (32 << 20),
            credentials=self._credentials,
            given=self.config.join,
            services=services,
        )
        self._discovery = discovery
        self._on_joining = on_joining
        self._running: Running | None = None
        self._one_average = SingleAverage()

    def __repr__(self) -> str:
        running = self._running
        if running is None:
            return f"<Peer of run {self.run_id!r}, not running>"
        doing = (
            "averaging" if running.service.round else "looking for a group" if self._one_average.in_progress else "idle"
        )
        return f"<Peer {running.endpoint} of run {self.run_id!r}, {doing}>"

    async def __aenter__(self) -> Self:
        """Listens, joins the run through `join`, and declares that its state can be downloaded.

        Raises:
            ListenError: the address cannot be had.
            NoSeedAnsweredError: none of `join` answered in time; a `JoinRefusedError` if all refuse for good, because
                of another run, token or authority.
        """
        self._running = await start(
            self.config,
            self._transport,
            self._discovery,
            self._credentials,
            self._tensors,
            self._snapshots,
            self.schema,
            clock=self._clock,
            rng=self._rng,
            on_joining=self._on_joining,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        """Ends an `average` in progress, withdraws what it declared, and closes all connections.

        Calls of others that are in progress get a moment to end.
        """
        running, self._running = self._running, None
        if running is not None:
            try:
                await self._one_average.close()
            finally:
                await running.stack.aclose()

    @property
    def run_id(self) -> str:
        """The run it belongs to."""
        return self.config.run_id

    @property
    def endpoint(self) -> str:
        """Where others reach this peer: `host:port`, or a client's name."""
        return self._entered.endpoint

    @property
    def version(self) -> int:
        """The version of its committed state."""
        return self._snapshots.version

    @property
    def peers(self) -> frozenset[str]:
        """The endpoints that discovery knows of, this peer's included."""
        return self._entered.discovery.endpoints() | {self.endpoint}

    @property
    def discovery(self) -> Discovery:
        """Where this run's peers tell each other who and what is there."""
        return self._entered.discovery

    @property
    def donors(self) -> list[tuple[float, str]]:
        """The other peers that offer their state: priority and endpoint, the best first."""
        return self._entered.donors.others()

    @property
    def excluded(self) -> dict[str, float]:
        """The peers that broke the protocol and are left out of groups for a while: until when, since the epoch."""
        return self._entered.rounds.conduct.excluded(self._clock())

    @property
    def offences(self) -> dict[str, Mapping[DropCode, int]]:
        """How often each peer broke the protocol, or sent NaN or infinity, in the last day or so."""
        return self._entered.rounds.conduct.counts

    @property
    def progress(self) -> RunProgress:
        """How far this peer and the others are."""
        return self._entered.progress

    def awaited_until(self, topic: Topic, phase: str = "") -> float | None:
        """Until when others that train have declared to wait for a group in this topic; None if nobody has.

        An auxiliary that waits for the next round all the time, say, is no reason to come before it is time.

        Returns:
            The latest moment, in seconds since the epoch.
        """
        matchmaking = self._entered.rounds.matchmaking(topic.at(phase), lasting=False)
        return matchmaking.awaited_until(by=self.progress.told)

    @property
    def status(self) -> PeerStatus:
        """Who this peer is and what it is doing; the same that the status service tells."""
        return self._entered.service.get_status()

    def tensors(self) -> AbstractContextManager[list[torch.Tensor]]:
        """The tensors, locked: no round writes them and no state is copied meanwhile.

        For any thread; it blocks. Do not wait for `average` or `download_state` inside.
        """
        return self._tensors.locked()

    @contextmanager
    def replacing(self) -> Iterator[list[torch.Tensor]]:
        """The tensors, locked, to be brought to their next version: what they hold at the end is the new state.

        For any thread; it blocks. Unlike after `tensors` and `commit`, the former state is not kept for downloads.
        If the block raises, the state is what the tensors hold then, under the old version.
        """
        running = self._entered
        with self._tensors.locked(keep=False) as tensors:
            version = self.version
            try:
                yield tensors
                version += 1
            finally:
                self._snapshots.commit(version)
        running.loop.call_soon_threadsafe(running.donors.notice.changed)

    async def commit(self, version: int | None = None) -> None:
        """Makes what the tensors hold now the state that others download.

        That happens by itself after every round and download; a peer that starts a run may call it to say that its
        tensors are worth downloading.

        Args:
            version: of this state; the next one if None. A lower one than the present is not taken.

        Raises:
            StateError: what `extra_state` adds cannot be shared.
            RoundError: the application held the tensors' lock for more than `round_timeout`.
            ClosedError: the peer is not running.
        """

        def commit() -> None:
            # Asked under the lock: a round may be committing its result meanwhile.
            self._snapshots.commit(self.version + 1 if version is None else version)

        await self._tensors.while_locked(commit, self.config.round_timeout)
        self._entered.donors.notice.changed()

    def topic(self, name: str, tensors: Mapping[str, torch.Tensor], **options: Unpack[TopicOptions]) -> Topic:
        """Something else that can be averaged with this run's peers: gradients, a part of the model.

        Args:
            name: the same at all peers that average it together, and different for whatever else has the same shapes;
                no dots. Empty only for tensors that are looked for under the run's own key, as the peer's own are.
            tensors: in the same order at all peers. They are written under the same lock as the peer's own.
            options: see `TopicOptions`.

        Raises:
            ConfigError: the name has a dot, or is too long; or there is no such `adopt` or `compression`.
            TensorError: a tensor that cannot be averaged.
        """
        if "." in name or len(name) > MAX_TOPIC:
            raise ConfigError(f"topic {name!r} must be without a dot and of at most {MAX_TOPIC} characters")
        return make_topic(self.config, SharedTensors(tensors, under=self._tensors), name, **options)

    async def average(
        self,
        topic: Topic | None = None,
        *,
        weight: float = 1.0,
        gather: Any = None,
        phase: str = "",
        enough: int | Enough | None = None,
        awaited: Awaited | None = None,
        patience: float | None = None,
        overtaken: Overtaken | None = None,
        state: str = "",
    ) -> Receipt:
        """Finds a group and averages the tensors with it.

        Cancelling it leaves the group in order and, without `in_place`, the tensors untouched, unless the average is
        being written already: then they hold it when this ends. Changes that the application makes to the tensors
        meanwhile are overwritten by an average, and kept where the reply form is `delta`.

        Args:
            topic: what is averaged, from `topic`; the peer's own tensors if None.
            weight: of this peer's tensors in the average; finite and at least 0.
            gather: handed to all members of the group: numbers, strings, bytes, lists, or dicts whose keys are strings,
                bytes or integers; at most 64 KiB packed.
            phase: of the topic, such as a step; peers in other phases are not met.
            enough: a group that this peer leads begins at once with so many that contribute, or with what it says to
                the others' progress whenever that changes; with `group_size` in all if None, and at an auxiliary with
                all that train in the run, too.
            awaited: which of the others it waits for, by their progress; those at whose address nothing listens any
                more leave the others' progress, and are not waited for.
            patience: seconds to look for a group; `round_timeout` if None.
            overtaken: asked, whenever the others' progress changes, whether to look on has become vain.
            state: a digest of what all members must hold alike as the round begins, for the receipt.

        Returns:
            The receipt, also when no group was found or the round failed.

        Raises:
            ConfigError: a weight or a gather that cannot work.
            TensorError: NaN or infinity in a tensor, unless the peer allows them.
            RoundError: another `average` of this peer is in progress.
            ClosedError: the peer is not running, or has been closed meanwhile.
        """
        running = self._entered
        weight = check_weight(weight)
        try:
            gathered = pack_gather(weight, self.config.bandwidth, self.config.mode, gather)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        topic = topic or self._own
        patience = self.config.round_timeout if patience is None else patience
        async with self._one_average.until_closed(running.endpoint):
            receipt = await running.rounds.attempt(
                topic,
                gathered,
                phase=phase,
                enough=enough,
                awaited=awaited,
                patience=patience,
                overtaken=overtaken,
                state=state,
            )
        if topic.commits and receipt.averaged:
            running.donors.notice.changed()
        logger.info("%s", receipt)
        return receipt

    async def donor_appears(self, timeout: float) -> bool:
        """Whether another peer offers a state of a version above 0, now or within `timeout` seconds.

        Raises:
            ClosedError: the peer is not running.
        """
        return await self._entered.donors.appear(0, timeout)

    async def download_state(
        self, apply: Callable[[State], None] | None = None, donors: Sequence[str] | None = None
    ) -> State:
        """Downloads the state of the peer with the highest priority, verifies it, and takes it over.

        With `verify_donors` above 1 so many of the donors must announce the same version and digests first.

        Args:
            donors: endpoints to ask, in this order; all that offer a state, the best first, if None.
            apply: called with the verified state before the tensors are overwritten, which are locked meanwhile, in any
                thread; it takes over what the application added. If it raises, nothing is changed.

        Raises:
            StateError: nobody could deliver a sound state; nothing was changed.
            RoundError: the application held the tensors' lock for more than `round_timeout`; nothing was changed.
            ClosedError: the peer is not running.
        """
        fetched = await self.fetch_state(donors)
        await self.take_over(fetched, apply)
        return fetched.state

    async def fetch_state(
        self, donors: Sequence[str] | None = None, check: Callable[[Mapping[str, Any]], None] = lambda _: None
    ) -> FetchedState:
        """Downloads and verifies a state as `download_state` does, and changes nothing.

        Args:
            donors: see `download_state`.
            check: called with the state's user dict as soon as a donor has begun; it raises StateError if that cannot
                be taken over, and then the next donor is asked.

        Raises:
            StateError: nobody could deliver a sound state.
            ClosedError: the peer is not running.
        """
        names = [name for _, name in self.donors] if donors is None else donors
        state, donor = await download(
            self._transport,
            names,
            self.schema,
            silence=self.config.stall_timeout,
            deadlines=self._entered.service.deadlines,
            declared={name: version for version, name in self.donors},
            verify_donors=self.config.verify_donors,
            check=check,
        )
        return FetchedState(state, donor)

    async def take_over(self, fetched: FetchedState, apply: Callable[[State], None] | None = None) -> None:
        """Takes over a state of `fetch_state`; see `download_state` for `apply` and for the errors."""
        state = fetched.state

        def write() -> None:
            if apply is not None:
                apply(state)
            self._tensors.copy_from(list(state.tensors.values())[: len(self.schema.tensors)])
            self._snapshots.commit(state.version)

        await self._tensors.while_locked(write, self.config.round_timeout, self._tensors.nbytes)
        self._entered.donors.notice.changed()
        logger.info("took over the state of %s, version %d", fetched.donor, state.version)

    @property
    def _entered(self) -> Running:
        if self._running is None:
            raise ClosedError(f"{self!r}; use it inside `async with`")
        return self._running

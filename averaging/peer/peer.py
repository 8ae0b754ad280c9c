"""One peer of a run: it serves others, finds groups, averages its tensors with them, and shares its state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self, Unpack

import torch

from averaging.common import InProcess, check_weight
from averaging.config import NonFinite, PeerConfig, configure
from averaging.discovery import Discovery, shards_key
from averaging.errors import ClosedError, ConfigError
from averaging.peer.lifecycle import Lifecycle, PeerContext, Running
from averaging.peer.run_progress import RunProgress
from averaging.peer.topics import RoundOptions, Topic, TopicOptions, make_topic
from averaging.protocol import Mode, attach, pack_gather, progress_key
from averaging.receipts import DriftCheck, PeerStatus, ReadByService, Receipt
from averaging.state import ExtraState, Snapshots, State, StateLimits, download, largest_state
from averaging.tensors import SharedTensors
from averaging.transport import RpcService
from averaging.transport.grpc import GrpcTransport

logger = logging.getLogger("averaging.peer")

MAX_TOPIC = 64
"""Maximum length of a topic's name in characters, since discovery's keys are short."""


@dataclass(frozen=True, slots=True)
class FetchedState:
    state: State
    donor: str


class Peer(InProcess):
    """One peer of a run, as an async context manager: while it is entered, other peers can reach it.

    ```python
    async with Peer({"w": w}, run_id="demo", join=["192.0.2.7:4222"]) as peer:
        receipt = await peer.average(weight=32)
    ```

    Await the task in which the peer runs, as a TaskGroup does. If `asyncio.run` has to cancel that task at its end, it
    also cancels tasks of grpcio (1.85), which may crash.

    The tensors may have any shape (also empty, 0-dim or non-contiguous) and be float16, bfloat16, float32 or float64 on
    CPU or GPU. They are written once a round, when its result is complete.

    Args:
        tensors: the tensors, in the same order at all peers; a mapping gives them names.
        run_id: Peers with the same run id average together.
        config: The options as one object, for example from `PeerConfig.from_toml`; single options win over it.
        extra_state: called, in any thread and with the tensors locked, for what the downloadable state holds besides
            the tensors. If it raises, the `average`, `download_state` or `commit` that called it raises the same; the
            tensors then hold the result, under the former version.
        services: further gRPC methods to serve on this peer's port, see `averaging.rpc`. The tokens, certificates and
            limits of the peer apply to them too.
        context: what embeds the peer, if not the application itself.
        options: see `PeerConfig`.

    Attributes:
        run_id: the id of its run.
        tensor_names: the names of its tensors.
        own_tensors: its tensors, without their lock: for a thread that knows that no round writes them.
        catching_up: why this peer is not ready although it has joined its run, for /readyz; empty if it is. Whoever
            makes it take over the state of the run sets it.
        further_state_bytes: bytes that a state may have beyond the default limit, see `largest_state`; set by an
            application that adds more to the state than it averages.

    Raises:
        ConfigError: an option is invalid.
        TensorError: a tensor cannot be averaged.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
        *,
        run_id: str | None = None,
        config: PeerConfig | None = None,
        extra_state: Callable[[], ExtraState] | None = None,
        services: Sequence[RpcService] = (),
        context: PeerContext | None = None,
        **options: Any,
    ) -> None:
        self.config = configure(config, run_id, options)
        self._context = context = context or PeerContext()
        self.run_id = self.config.run_id
        self._tensors = SharedTensors(tensors)
        self.tensor_names, self.own_tensors = self._tensors.names, self._tensors.tensors
        self._own = make_topic(self.config, self._tensors, commits=True)
        self.schema = self._own.schema
        shared = self.config.share_state and self.config.mode is not Mode.CLIENT
        self._snapshots = Snapshots(self._tensors, extra_state, shared=shared)
        self._lifecycle = Lifecycle(self.config, context, services, self._tensors, self._snapshots, self.schema)
        self._transport = self._lifecycle.transport
        self._running: Running | None = None
        self.shard = context.shard
        self.catching_up = ""
        self.further_state_bytes = 0

    def __repr__(self) -> str:
        running = self._running
        if running is None:
            return f"<Peer of run {self.run_id!r}, not running>"
        doing = (
            "averaging" if running.service.round else "looking for a group" if running.rounds.in_progress else "idle"
        )
        return f"<Peer {running.endpoint} of run {self.run_id!r}, {doing}>"

    async def __aenter__(self) -> Self:
        """Listens, joins the run through `join`, and declares that its state can be downloaded.

        Raises:
            ListenError: it cannot listen at the address.
            JoinError: no peer of `join` answered in time, or all refuse permanently,
                because of another run, token or authority.
        """
        self._running = await self._lifecycle.start(
            lambda: self.catching_up if self._running else "it is joining its run, or leaving it"
        )
        self._running.service.training = self._context.training
        self._running.service.read_by = [each for each in self._lifecycle.services if isinstance(each, ReadByService)]
        return self

    async def __aexit__(self, *error: object) -> None:
        """Ends an `average` in progress, withdraws this peer's records, and closes all connections.

        Calls in progress from other peers get a moment to end.
        """
        running, self._running = self._running, None
        if running is not None:
            try:
                await running.rounds.close()
            finally:
                await running.stack.aclose()

    def add_service(self, service: RpcService) -> None:
        """Serves further gRPC methods on this peer's port, like `services`.

        Raises:
            ConfigError: The peer is running, or it is in mode 'client', or it has a transport of its own.
        """
        if not isinstance(self._transport, GrpcTransport):
            raise ConfigError("services are served over gRPC; give the peer no transport")
        self._transport.add_services([service])
        self._lifecycle.services.append(service)

    @property
    def leaves(self) -> bool:
        """Whether its owner has asked it to leave; the average in progress is the last one."""
        return self._lifecycle.control.departure.asked.is_set()

    @property
    def endpoint(self) -> str:
        """The endpoint of this peer."""
        return self._entered.endpoint

    @property
    def seeds(self) -> Collection[str]:
        """The addresses of other peers that the user has named in `join`, also through its sources."""
        return self._lifecycle.seeds.named

    @property
    def metrics_endpoint(self) -> str:
        """The address of /metrics, /healthz and /readyz; empty without `metrics_listen`."""
        return self._entered.metrics_endpoint

    @property
    def version(self) -> int:
        """The state version."""
        return self._snapshots.version

    @property
    def peers(self) -> frozenset[str]:
        """All endpoints known to discovery, and this peer's own."""
        return self._entered.discovery.endpoints() | {self.endpoint}

    @property
    def discovery(self) -> Discovery:
        """The discovery of this run."""
        return self._entered.discovery

    @property
    def donors(self) -> list[tuple[float, str]]:
        """The other peers that offer their state, as (priority, endpoint), in descending order."""
        return self._entered.donors.others()

    @property
    def excluded(self) -> dict[str, float]:
        """The excluded peers, and until when, in seconds since the epoch."""
        now = self._entered.loop.time()
        excluded = self._entered.rounds.conduct.excluded(now)
        return {name: self._context.clock() + until - now for name, until in excluded.items()}

    @property
    def progress(self) -> RunProgress:
        """The progress of this peer and the others."""
        return self._entered.progress

    @property
    def data(self) -> RunProgress:
        """Which samples this peer and the others train, see `averaging.data`."""
        return self._entered.data

    def declared_until(self, topic: Topic, phase: str = "") -> float | None:
        """When the last declaration of other training peers for this topic expires; None if there is none.

        Auxiliaries do not count: they may look for a group all the time.

        Returns:
            Seconds since the epoch.
        """
        matchmaking = self._entered.rounds.matchmaking(topic.at(phase), lasting=False)
        return matchmaking.latest_declaration(of=self.progress.announcements)

    def group_began(self, topic: Topic, phase: str) -> float | None:
        """When other peers began the only group that this phase of a topic may have; None if they have not.

        In seconds since the epoch. See `quorum` in `RoundOptions`.
        """
        matchmaking = self._entered.rounds.matchmaking(topic.at(phase), lasting=False)
        return matchmaking.group_began(of=self.progress.announcements)

    async def end_search(self) -> None:
        """Ends the search of the `average` in progress, unless a leader has accepted this peer already."""
        await self._entered.rounds.end_search()

    @property
    def status(self) -> PeerStatus:
        """Identity and present activity of this peer, as the status service returns them."""
        return self._entered.service.get_status()

    def tensors(self) -> AbstractContextManager[list[torch.Tensor]]:
        """Locks the tensors: meanwhile no round writes them and no state is copied.

        It blocks, and may be called in any thread. Do not await `average` or `download_state` inside.
        """
        return self._tensors.locked()

    @contextmanager
    def replacing(self) -> Iterator[list[torch.Tensor]]:
        """Locks the tensors to replace their values: those at the end are the new state, under the next version.

        It blocks, and may be called in any thread. Unlike with `tensors` and `commit`, the former state is not kept
        for downloads. If the block raises, the values at that moment are the state, under the old version.
        """
        running = self._entered
        with self._tensors.locked(keep=False) as tensors:
            version = self.version
            try:
                yield tensors
                version += 1
            finally:
                self._snapshots.commit(version)
        try:
            running.loop.call_soon_threadsafe(running.donors.declaration.changed)
        except RuntimeError:
            if not running.loop.is_closed():  # else the peer has left meanwhile, for example in a signal handler
                raise

    async def commit(self, version: int | None = None) -> None:
        """Makes the present values of the tensors the state that newcomers download.

        Every round and download does so automatically. A peer that starts a run may call it to offer its tensors.

        Args:
            version: the new state version, not below the present one; the next one if None.

        Raises:
            StateError: `extra_state` returns something that cannot be packed.
            RoundError: the application held the tensors' lock for more than `round_timeout`.
            ClosedError: the peer is not running.
        """

        def commit() -> None:
            # Read under the lock, since a round may commit its result meanwhile.
            self._snapshots.commit(self.version + 1 if version is None else version)

        await self._tensors.while_locked(commit, self.config.round_timeout)
        self._entered.donors.declaration.changed(urgent=True)

    def topic(self, name: str, tensors: Mapping[str, torch.Tensor], **options: Unpack[TopicOptions]) -> Topic:
        """Creates a topic: further tensors to be averaged with the peers of this run, such as gradients.

        Args:
            name: the same at all peers that average it together, and different for other tensors of the same shapes; no
                dots. An empty name is for tensors that meet those of peers, such as auxiliaries, without a topic.
            tensors: tensors in the same order at all peers, written under the lock of the peer's own tensors.
            options: see `TopicOptions`.

        Raises:
            ConfigError: the name has a dot or is too long, or `adopt` or `compression` is invalid.
            TensorError: a tensor cannot be averaged.
        """
        if "." in name or len(name) > MAX_TOPIC:
            raise ConfigError(f"topic {name!r} must have no dot and at most {MAX_TOPIC} characters")
        return make_topic(self.config, SharedTensors(tensors, lock_of=self._tensors), name, **options)

    async def average(self, topic: Topic | None = None, **options: Unpack[RoundOptions]) -> Receipt:
        """Finds a group and averages tensors with it.

        Cancelling it leaves the group in order. The tensors are not changed then, unless the result was being written
        already, which is completed first. Changes that the application makes to the tensors meanwhile are overwritten.

        Args:
            topic: a topic made by `topic`; the peer's own tensors if None.
            options: see `RoundOptions`.

        Returns:
            The receipt, also if no group was found or the round failed.

        Raises:
            ConfigError: `weight` or `gather` is invalid.
            TensorError: a tensor holds NaN or infinity, unless the peer allows these.
            RoundError: another `average` of this peer is in progress.
            ClosedError: the peer is not running, or was closed meanwhile.
        """
        running, topic = self._entered, topic or self._own
        weight = check_weight(options.get("weight", 1.0))
        gathered = _gathered(self.config, weight, options.get("gather"), options.get("drift"))
        receipt = await running.rounds.average(topic, gathered, options)
        if topic.commits and receipt.averaged:
            running.donors.declaration.changed()
        logger.info("%s", receipt)
        return receipt

    async def check_division(self) -> None:
        """Checks that the known peers of the run divide the model into shards as this peer's site does.

        Raises:
            ConfigError: they do not; the message names one.
            ClosedError: the peer is not running.
        """
        discovery = self._entered.run_discovery
        if self.shard is not None:
            await discovery.follow(progress_key(self.run_id))
            self.shard.check(discovery.get(progress_key(self.run_id)).keys())
            return
        await discovery.follow(shards_key(self.run_id))
        if divided := sorted(discovery.get(shards_key(self.run_id))):
            raise ConfigError(
                f"this peer holds all of the model, but the site of {divided[0]} divides it into shards; divide the "
                "model at all sites of a run alike, or use another run_id"
            )

    async def download_state(
        self, apply: Callable[[State], None] | None = None, donors: Sequence[str] | None = None
    ) -> State:
        """Downloads the state of the donor with the highest priority, verifies it, and takes it over.

        A state with NaN or infinity is refused unless `non_finite` allows them.

        Args:
            apply: function that gets the verified state, in any thread and with the tensors locked, before they are
                overwritten; it takes over what the application added. If it raises, nothing is changed.
            donors: endpoints to ask, in this order; all donors in descending order of priority if None.

        Raises:
            StateError: no donor delivered a valid state; nothing was changed.
            RoundError: the application held the tensors' lock for more than `round_timeout`; nothing was changed.
            ClosedError: the peer is not running.
        """
        fetched = await self.fetch_state(donors)
        await self.take_over(fetched, apply)
        return fetched.state

    async def fetch_state(
        self, donors: Sequence[str] | None = None, check: Callable[[Mapping[str, Any]], None] = lambda _: None
    ) -> FetchedState:
        """Downloads and verifies a state as `download_state` does, but changes nothing.

        Args:
            donors: see `download_state`.
            check: function that gets the state's user dict as soon as a donor starts to send; it raises StateError if
                the state cannot be taken over, and then the next donor is asked.

        Raises:
            StateError: no donor delivered a valid state.
            ClosedError: the peer is not running.
        """
        await self._entered.donors.follow()
        names = [name for _, name in self.donors] if donors is None else donors
        state, donor = await download(
            self._transport,
            names,
            self.schema,
            silence=self.config.stall_timeout,
            declared={name: version for version, name in self.donors},
            limits=StateLimits(
                largest_state(self.schema) + self.further_state_bytes,
                check,
                finite=self.config.non_finite is NonFinite.REFUSE,
            ),
        )
        return FetchedState(state, donor)

    async def take_over(self, fetched: FetchedState, apply: Callable[[State], None] | None = None) -> None:
        """Takes over a state from `fetch_state`; see `download_state` for `apply` and the errors."""
        state = fetched.state

        def write() -> None:
            if apply is not None:
                apply(state)
            self._tensors.copy_from(list(state.tensors.values())[: len(self.schema.tensors)])
            self._snapshots.commit(state.version)

        await self._tensors.while_locked(write, self.config.round_timeout, self._tensors.nbytes)
        self._entered.donors.declaration.changed(urgent=True)
        logger.info("took over the state of %s, version %d", fetched.donor, state.version)

    @property
    def _entered(self) -> Running:
        if self._running is None:
            raise ClosedError(f"{self!r}; use it inside `async with`")
        return self._running


def _gathered(config: PeerConfig, weight: float, gather: Any, drift: DriftCheck | None) -> bytes:
    if drift is not None:
        with suppress(ValueError):  # no room for the fingerprint beside the application's `gather`
            return pack_gather(weight, config.bandwidth, config.mode, attach(gather, drift.own))
    try:
        return pack_gather(weight, config.bandwidth, config.mode, gather)
    except ValueError as error:
        raise ConfigError(str(error)) from None

"""The rendezvous handler of torchrun's backend `averaging`."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Hashable, Mapping
from datetime import timedelta
from hashlib import sha256
from typing import Generic, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandlerCreator,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _NodeDesc,
    _remove_participant_epilogue,
)

from averaging.common import address_for_others, are_same, is_name_of, is_own, pack, parse_address
from averaging.elastic.backend import LOG_INTERVAL, NAME, AveragingBackend
from averaging.elastic.options import PET_MASTER, RendezvousOptions, read_options
from averaging.elastic.rendezvous_state import ReplicatedValue, decode_place
from averaging.elastic.session import RegisterSession
from averaging.errors import ConfigError
from averaging.rpc import EventLoopThread, read_credentials

logger = logging.getLogger("averaging.elastic")

MAX_JOB_ID_BYTES = 200  # it is part of a key of the register, which has at most 256 bytes
UNNAMED = "none"  # torchrun's default of `--rdzv-id`, with which unrelated jobs would meet
CONNECT_SECONDS = 10  # for a connection to the store of a round. Then the state of its node is checked again
STORE_SECONDS = 300  # for which agents wait for each other's keys in the store of a round: torch's default
PAUSE = 2.0  # seconds without a call to a register that did not answer, because an agent must monitor its workers
POLL = 0.2  # seconds between two queries for the store of a round

Node = TypeVar("Node", bound=Hashable)


class Silence(Generic[Node]):
    """Counts for how long the last heartbeat of each node has stayed the same; after `limit` seconds it is dead.

    If this node could not read heartbeats, because it was stopped or the register did not answer, that time counts as
    at most one `interval` between two heartbeats.
    """

    def __init__(self, interval: float, limit: float) -> None:
        self._interval, self._limit = interval, limit
        self._seen: dict[Node, tuple[object, float]] = {}  # the last heartbeat, and the seconds without a change
        self._looked: float | None = None

    def silent(self, heartbeats: Mapping[Node, object], now: float) -> list[Node]:
        """The nodes that are silent for too long, given the last heartbeat of each, at `now` on a monotonic clock."""
        passed = 0.0 if self._looked is None else min(now - self._looked, self._interval)
        self._looked = now
        seen: dict[Node, tuple[object, float]] = {}
        for node, heartbeat in heartbeats.items():
            last = self._seen.get(node)
            same = last is not None and last[0] == heartbeat
            seen[node] = (heartbeat, last[1] + passed if same and last is not None else 0.0)
        self._seen = seen
        return [node for node, (_, silence) in seen.items() if silence > self._limit]


class _StateHolder(_BackendRendezvousStateHolder):
    """Removes nodes when no heartbeat arrives, independently of the clocks of the nodes."""

    def __init__(self, backend: AveragingBackend, settings: RendezvousSettings) -> None:
        super().__init__(backend, settings)
        interval = settings.keep_alive_interval.total_seconds()
        self._silence: Silence[_NodeDesc] = Silence(interval, interval * settings.keep_alive_max_attempt)

    def _sanitize(self) -> None:
        state = self._state
        self._dead_nodes = sorted(self._silence.silent(state.last_heartbeats, time.monotonic()))
        removed = False
        for node in self._dead_nodes:
            logger.info("node %s has sent no heartbeat for too long and is removed from the rendezvous", node)
            del state.last_heartbeats[node]
            removed = state.participants.pop(node, None) is not None or removed
            state.wait_list.discard(node)
            state.redundancy_list.discard(node)
        if removed:
            _remove_participant_epilogue(state, self._settings)


class _NodeLost(Exception):  # noqa: N818 - the round begins anew
    """The first node of a round was lost before the other nodes had the address of its store."""


class AveragingRendezvousHandler(DynamicRendezvousHandler):
    """Gives every round its own store at its first node, and continues training without the register."""

    def __init__(
        self,
        node: _NodeDesc,
        settings: RendezvousSettings,
        holder: _StateHolder,
        backend: AveragingBackend,
        stores: ReplicatedValue,
        thread: EventLoopThread,
    ) -> None:
        super().__init__(node, settings, NAME, None, holder)  # type: ignore[arg-type] # _get_store makes it
        self._backend, self._stores, self._thread = backend, stores, thread
        self._round_store: TCPStore | None = None
        self._logged = -LOG_INTERVAL
        self._ask_again = 0.0
        self._shut = threading.Event()

    def next_rendezvous(self) -> RendezvousInfo:
        end = time.monotonic() + self._settings.timeout.join.total_seconds()
        while True:
            # torch keeps these across rounds, and nodes would wait for the store of a lost node.
            self._bootstrap_store_info = None
            self._shared_tcp_store_server = None
            self._round_store = None
            try:
                with self._backend.retrying(max(1.0, end - time.monotonic())):
                    return super().next_rendezvous()
            except _NodeLost as lost:
                logger.warning("%s; the nodes meet again", lost)
            except RendezvousClosedError:
                raise RendezvousClosedError(
                    f"the job {self._settings.run_id!r} has ended, and takes no node any more. To start another one, "
                    "give another --rdzv-id, or wait two minutes"
                ) from None
            except RendezvousTimeoutError:
                raise RendezvousTimeoutError(self._too_few()) from None

    def num_nodes_waiting(self) -> int:
        if time.monotonic() < self._ask_again:
            return 0
        try:
            return super().num_nodes_waiting()
        except RendezvousError as error:
            now = time.monotonic()
            self._ask_again = now + PAUSE
            if now - self._logged >= LOG_INTERVAL:
                self._logged = now
                logger.warning("%s Training goes on; no node can join meanwhile.", error)
            return 0

    def shutdown(self) -> bool:
        try:
            return super().shutdown()
        finally:
            if not self._shut.is_set():
                self._shut.set()
                self._thread.close()

    def _too_few(self) -> str:
        state, settings = self._state_holder.state, self._settings
        there = ", ".join(str(node) for node in sorted(state.participants)) or "none"
        return (
            f"fewer than {settings.min_nodes} nodes came to the job {settings.run_id!r} within "
            f"{settings.timeout.join.total_seconds():g} s; there were: {there}. Start the others, check that all have "
            "the same --rdzv-id and --rdzv-endpoint, or give --rdzv-conf=join_timeout=SECONDS"
        )

    def _get_store(self) -> Store:
        """Returns the store of this round. The first node creates it and writes its address to the register."""
        state = self._state_holder.state
        first = next((node for node, rank in state.participants.items() if rank == 0), None)
        if first is None:
            raise _NodeLost("the first node was lost as the round began")
        place = sha256(f"{state.round}|{first!r}".encode()).digest()
        if first == self._this_node:
            store = super()._create_tcp_store_server(self._this_node.addr, 0)
            self._publish(place, store.port)
        else:
            store = self._connect(place, first)
        self._round_store = store
        return PrefixStore(f"averaging.{state.round}", store)

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        if self._round_store is None:
            raise RuntimeError("a round without a store")
        return self._round_store

    def _publish(self, place: bytes, port: int) -> None:
        payload = pack([place, self._this_node.addr, port])
        while not self._backend.run(lambda: self._replace(payload)):
            logger.debug("another node wrote the place of its store at the same time")

    async def _replace(self, payload: bytes) -> bool:
        _, done = await self._stores.write(payload, await self._stores.read())
        return done

    def _connect(self, place: bytes, first: _NodeDesc) -> TCPStore:
        """Waits for the address of the store of the first node, and connects to it.

        Raises:
            _NodeLost: That node was lost.
            RendezvousConnectionError: There was no connection in time.
        """
        end = time.monotonic() + self._settings.timeout.join.total_seconds()
        failure = f"node {first} has not announced the address of its store"
        while time.monotonic() < end:
            fenced = self._backend.run(self._stores.read)
            announced = decode_place(fenced.payload) if fenced else None
            if announced is not None and announced[0] == place:
                _, addr, port = announced
                try:
                    wait = timedelta(seconds=CONNECT_SECONDS)
                    store = TCPStore(addr, port, is_master=False, multi_tenant=True, timeout=wait)
                    store.set_timeout(timedelta(seconds=STORE_SECONDS))  # replaces the limit of the connection
                    return store
                except (RuntimeError, ValueError) as error:
                    failure = (
                        f"the store of node {first} cannot be reached at {addr}:{port} ({error}). Open that node's "
                        "ports to the others, or start it with --local-addr=ADDRESS at which they reach it"
                    )
                    logger.warning("%s", failure)
            with self._heartbeat_lock:
                self._state_holder.sync()
                if first not in self._state_holder.state.participants:
                    raise _NodeLost(f"node {first} was lost as the round began")
            time.sleep(POLL)
        raise RendezvousConnectionError(failure)


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Creates the handler for torchrun with `--rdzv-backend=averaging`.

    Raises:
        ConfigError: An option is invalid.
    """
    options = read_options(params.endpoint or "", params.config, params.max_nodes, os.environ)
    if options.origin == PET_MASTER:
        logger.info("the rendezvous is at %s, from %s", options.endpoint, PET_MASTER)
    if params.run_id == UNNAMED and params.min_nodes > 1:
        raise ConfigError(
            "a job of several nodes needs --rdzv-id=NAME, the same at all its nodes: without it, all jobs at a "
            "register would be one"
        )
    if (size := len(params.run_id.encode())) > MAX_JOB_ID_BYTES:
        raise ConfigError(f"--rdzv-id has {size} bytes of UTF-8; it may have {MAX_JOB_ID_BYTES}")
    credentials = read_credentials(tls=options.tls, token_file=options.token_file, insecure=options.insecure)
    host = parse_address(options.endpoints[0])[0].strip("[]")
    may_host = options.is_host
    if may_host is None:
        by_option = params.local_addr is not None and are_same(params.local_addr.strip("[]"), host)
        by_name = is_name_of(host, socket.gethostname(), socket.getfqdn())
        may_host = not options.etcd and (by_option or by_name or is_own(host))
    session = RegisterSession(options, credentials, may_host=may_host)
    thread = EventLoopThread(session, f"the rendezvous of job {params.run_id!r}")
    try:
        if params.run_id == UNNAMED and not session.hosted:
            raise ConfigError(
                f"the register at {options.endpoint} is shared: this node does not host it, so other jobs may use it, "
                f"and all those without --rdzv-id (torchrun's default is {UNNAMED!r}) would be one job. Give "
                "--rdzv-id=NAME, the same at all nodes of a job and another one for each job. A job of one node can "
                "have a register of its own instead: --rdzv-endpoint=localhost:0"
            )
        return _handler(params, options, session, thread, credentials.tokens)
    except BaseException:
        thread.close()
        raise


def _handler(
    params: RendezvousParameters,
    options: RendezvousOptions,
    session: RegisterSession,
    thread: EventLoopThread,
    tokens: tuple[str, ...],
) -> AveragingRendezvousHandler:
    addr = params.local_addr
    if addr is None and not options.etcd:
        addr = address_for_others(parse_address(options.endpoints[0])[0].strip("[]"))
    node = DynamicRendezvousHandler._node_desc_generator.generate(addr)
    world = f"--nnodes={params.min_nodes}:{params.max_nodes}"
    prefix, writer = f"elastic/{params.run_id}", str(node)
    state = ReplicatedValue(session, f"{prefix}/state", tokens, writer=writer, world=world)
    stores = ReplicatedValue(session, f"{prefix}/store", tokens, writer=writer)
    endpoint = session.hosted or options.endpoint
    backend = AveragingBackend(thread, state, endpoint, origin=options.origin, awaits_name=options.awaits_name)
    limits = options.join_timeout, options.last_call_timeout, options.close_timeout, options.heartbeat_timeout
    settings = RendezvousSettings(
        *(params.run_id, params.min_nodes, params.max_nodes),
        RendezvousTimeout(*(timedelta(seconds=seconds) for seconds in limits)),
        keep_alive_interval=timedelta(seconds=options.keep_alive_interval),
        keep_alive_max_attempt=options.keep_alive_max_attempt,
    )
    return AveragingRendezvousHandler(node, settings, _StateHolder(backend, settings), backend, stores, thread)


def torchrun_handler() -> RendezvousHandlerCreator:
    return create_handler

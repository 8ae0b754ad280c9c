"""Faults of one peer among complete peers in virtual time: which fault, in which role, and when."""

import asyncio
import contextvars
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any, TypeVar

import torch

from averaging import Peer, Receipt
from averaging.discovery.base import Entry
from averaging.errors import DiscoveryError
from averaging.matchmaking.rules import CLOCK_TOLERANCE
from averaging.peer import PeerContext
from averaging.protocol.group import Mode
from averaging.protocol.messages import AveragingData, DownloadData, JoinRequest, MessageFromLeader, Resume
from averaging.testing import virtual_time
from averaging.testing.discovery import MemoryDiscovery, MemoryRegistry
from averaging.testing.transport import MemoryNetwork, MemoryTransport
from averaging.transport.base import AveragingService, GossipService
from tests.support.simulated_processes import ProcessLoop, process
from tests.support.tuned import tuned

T = TypeVar("T", AveragingData, DownloadData)

LOWER, UPPER = 0.3, 4.0
"""Bounds of the deadlines, in seconds."""

TIMEOUT = 40.0
"""Timeouts of the search for a group and of a round, in seconds."""

STOPPED, GONE, CLOCK_OFF, DISCOVERY_DOWN = 5.0, 1.0, 30.0, 60.0
"""Duration of a fault, or shift of a clock, in seconds."""

BOUND = TIMEOUT + STOPPED + CLOCK_TOLERANCE + 1.0
"""Seconds within which the victim's attempt must end, with any result."""

ELEMENTS = 8000


class FlakyDiscovery(MemoryDiscovery):
    """A discovery that can be unreachable."""

    down = False

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> None:
        if self.down:
            raise DiscoveryError("discovery is out of reach")
        await super().store(key, subkey, value, expiration)

    def get(self, key: str) -> Mapping[str, Entry]:
        return {} if self.down else super().get(key)


class FaultyTransport(MemoryTransport):
    """Calls `strike` at the chosen moment, and can corrupt sent messages.

    Attributes:
        moment: empty while all is well.
        strike: called once.
        spoil: of the message at that moment: "", "corrupt" or "truncate".
    """

    moment = ""
    role = ""
    spoil = ""
    strike: Callable[[], object] = staticmethod(lambda: None)

    async def _now(self, *moments: str) -> bool:
        if self.moment not in moments:
            return False
        self.moment = ""
        self.strike()
        await asyncio.sleep(0)  # a stopped process does not continue
        return True

    async def spoiled(self, messages: AsyncIterator[T], *moments: str) -> AsyncGenerator[T, None]:
        """Strikes at the first or the last of the messages, depending on `moments`."""
        first, held = True, None
        async for message in messages:
            if held is not None:
                yield held
            held = message
            if first and self.role in moments and await self._now("first part", "reply"):
                if self.spoil == "truncate":
                    return
                held = self._corrupted(held)
            first = False
        if held is not None:
            if self.role in moments and await self._now("last part"):
                if self.spoil == "truncate":
                    return
                held = self._corrupted(held)
            yield held

    def _corrupted(self, message: T) -> T:
        part = message.tensor_part
        if self.spoil != "corrupt" or part is None:
            return message
        cut = bytes(part.buffer)[:-3] if self.role != "donor" else bytes(255 - b for b in part.buffer)
        return replace(message, tensor_part=replace(part, buffer=cut))

    async def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        async with aclosing(super().join_group(endpoint, request)) as replies:
            async for reply in replies:
                if self.role in ("follower", "client"):
                    await self._now("matchmaking")
                yield reply

    async def aggregate_part(
        self, endpoint: str, messages: AsyncIterator[AveragingData]
    ) -> AsyncGenerator[AveragingData, None]:
        moments = ("sender", "client") if self.moment != "reply" else ()
        call = super().aggregate_part(endpoint, self.spoiled(messages, *moments))
        async with aclosing(call) as replies:
            async for reply in replies:
                if self.role == "client":
                    await self._now("reply")
                yield reply

    async def serve(self, averaging: AveragingService, gossip: GossipService | None) -> None:
        await super().serve(_Serving(averaging, self), gossip)


class _Serving:
    """The service of that peer."""

    def __init__(self, service: AveragingService, transport: FaultyTransport) -> None:
        self._service, self._transport = service, transport
        self.get_status, self.get_schema = service.get_status, service.get_schema
        self.watch_rounds = service.watch_rounds

    async def join_group(self, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        async with aclosing(self._service.join_group(request)) as replies:
            async for reply in replies:
                yield reply
                struck = self._transport.role == "leader" and await self._transport._now("matchmaking")
                if struck and self._transport.spoil == "truncate":
                    return

    async def aggregate_part(self, messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        replies = self._service.aggregate_part(messages)
        async with aclosing(replies), aclosing(self._transport.spoiled(replies, "reducer")) as spoiled:
            async for reply in spoiled:
                yield reply

    async def download_state(self, resume: Resume | None, caller: str) -> AsyncGenerator[DownloadData, None]:
        chunks = self._service.download_state(resume, caller)
        async with aclosing(chunks), aclosing(self._transport.spoiled(chunks, "donor")) as spoiled:
            async for chunk in spoiled:
                yield chunk


class World:
    """Three peers and the victim, whose role follows from how long it is willing to wait for a group.

    Attributes:
        before: tensors by name, as they were when the last round began.
    """

    def __init__(self, seed: int, role: str) -> None:
        self.role = role
        self.rng = random.Random(seed)
        self._context = contextvars.copy_context()  # of no process
        self.network = MemoryNetwork(self.rng, latency=(0.001, 0.01))
        self.registry = MemoryRegistry(clock=virtual_time.clock, delay=0.02, rng=self.rng)
        self.clock_off = 0.0
        self.dead = False
        self._stuck = self._vanishing = False
        self._victims: asyncio.Task[Receipt] | None = None
        client = role == "client"
        self.transport = FaultyTransport(self.network, None if client else "victim:1")
        self.transport.role = role
        self.victim = self.transport.endpoint
        self.discovery = FlakyDiscovery(self.registry)
        patience = {"leader": 1.0, "follower": 4.0}.get(role, 3.0)
        self.noise = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}
        self.before: dict[str, torch.Tensor] = {}
        self.peers: dict[str, Peer] = {}
        self.weights: dict[str, float] = {}
        for number, name in enumerate([self.victim, "peer:1", "peer:2", "peer:3"]):
            options: dict[str, Any] = {
                "group_size": 4,
                "group_wait": patience if number == 0 else 1.5 + number / 2,
                "round_timeout": TIMEOUT,
                "stall_timeout": UPPER,
                "min_stall_timeout": LOWER,
                "part_size_bytes": 1024,
            }
            if client and number == 0:
                options["mode"] = Mode.CLIENT
            self.tensors[name] = torch.randn(ELEMENTS, generator=self.noise, dtype=torch.float64)
            self.weights[name] = number + 1.0
            self.peers[name] = Peer(
                [self.tensors[name]],
                context=PeerContext(
                    transport=self.transport if number == 0 else self.network.transport(name),
                    discovery=(lambda *_: self.discovery)
                    if number == 0
                    else (lambda *_: MemoryDiscovery(self.registry)),
                    clock=self._clock if number == 0 else virtual_time.clock,
                    rng=random.Random(self.rng.getrandbits(64)),
                ),
                **tuned({"run_id": "run", **options}),
            )

    @property
    def others(self) -> list[str]:
        return [name for name in self.peers if name != self.victim]

    @property
    def alive(self) -> list[str]:
        return self.others if self.dead else list(self.peers)

    @property
    def _loop(self) -> ProcessLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ProcessLoop)
        return loop

    def _clock(self) -> float:
        return virtual_time.clock() + self.clock_off

    async def enter(self, stack: AsyncExitStack) -> None:
        for name, peer in self.peers.items():
            with process(name):
                await stack.enter_async_context(peer)
        stack.callback(self.all_well)  # a stopped peer could not leave

    async def round(self) -> dict[str, Receipt]:
        """The receipts of one attempt of all live peers.

        Raises:
            TimeoutError: the victim's had not ended when it should.
        """
        for name, tensor in self.tensors.items():
            with self.peers[name].tensors():
                tensor += torch.randn(ELEMENTS, dtype=torch.float64, generator=self.noise)
            self.before[name] = tensor.clone()
        tasks: dict[str, asyncio.Task[Receipt]] = {}
        for name in self.alive:
            with process(name):
                tasks[name] = asyncio.create_task(self.peers[name].average(weight=self.weights[name]))
        self._victims = tasks.get(self.victim)
        receipts = {name: await tasks[name] for name in self.others}
        if self._stuck:
            self.all_well()
        if self._victims is not None:
            # It must end without help: nothing informs it about state that remains until then.
            await asyncio.wait([self._victims], timeout=BOUND)
            if not self._victims.done():
                self._victims.cancel()
                raise TimeoutError(f"{self.victim} was not done {BOUND:g} s after the others")
            if not self._victims.cancelled():
                receipts[self.victim] = self._victims.result()
        self.all_well()
        return receipts

    def all_well(self) -> None:
        """Ends the fault, unless the victim is dead."""
        self.clock_off = 0.0
        self.transport.moment = self.transport.spoil = ""
        if self._vanishing:
            self._reset()
        self._vanishing = self._stuck = False
        self._go_on()

    def _go_on(self) -> None:
        if not self.dead:
            self.network.thaw(self.victim)
            self._loop.continue_process(self.victim)

    def arm(self, fault: str, moment: str) -> None:
        """Schedules the fault for that moment of the next round, or causes it now."""
        self.transport.spoil = {"corrupted bytes": "corrupt", "truncated stream": "truncate"}.get(fault, "")
        self.transport.strike = lambda: self._strike(fault)
        if moment == "between rounds" or fault in ("clock off by 30 s", "discovery unreachable"):
            self._strike(fault)
        else:
            self.transport.moment = moment

    def _strike(self, fault: str) -> None:
        network, victim, loop = self.network, self.victim, self._loop
        match fault:
            case "killed":
                self.dead = True
                network.kill(victim)
                network.cut(frozenset({victim}))
                if self._victims is not None:
                    loop.call_soon(self._victims.cancel)
            case "stopped, then going on":  # SIGSTOP, SIGCONT: messages that arrived meanwhile are read now
                network.freeze(victim)
                loop.stop_process(victim)
                loop.call_later(STOPPED, self._go_on, context=self._context)
            case "stuck loop":  # its transport's threads still accept calls and messages
                self._stuck = True
                loop.stop_process(victim)
            case "half-open":  # messages in transit never arrive, in both directions; the process runs on
                self._vanishing = True
                network.freeze(victim)
            case "reset":
                loop.call_soon(self._reset, context=self._context)
            case "port gone and back":
                serving = network._serving.pop(victim, None)
                loop.call_soon(self._reset, context=self._context)
                if serving is not None:
                    loop.call_later(GONE, network._serving.__setitem__, victim, serving)
            case "clock off by 30 s":
                self.clock_off = self.rng.choice([-CLOCK_OFF, CLOCK_OFF])
            case "discovery unreachable":
                self.discovery.down = True
                loop.call_later(DISCOVERY_DOWN, setattr, self.discovery, "down", False)

    def _reset(self) -> None:
        self.network._break_calls(lambda call: self.victim in (call.caller, call.callee), "connection reset")

    def mean(self, *names: str) -> torch.Tensor:
        """The mean of their tensors before the round."""
        total: Any = sum(self.weights[name] * self.before[name] for name in names)
        return total / sum(self.weights[name] for name in names)  # type: ignore[no-any-return]

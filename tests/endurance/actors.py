"""The processes of a run: started, struck by faults, healed, and started again when they have ended."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.endurance.hosts import Disk, EtcdCluster, Hosts
from tests.endurance.plan import FaultKind, Strike
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.ports import free_port
from tests.support.processes import JsonProcess

PROCESS_KINDS = frozenset({FaultKind.KILL, FaultKind.STOP, FaultKind.TERM})
INNER_KINDS = frozenset({FaultKind.CLOCK, FaultKind.LOOP, FaultKind.GIL})
LINK_FAULTS = {
    FaultKind.CUT: Fault.HALF_OPEN,
    FaultKind.STALL: Fault.STALL,
    FaultKind.RESET: Fault.CUT,
    FaultKind.CORRUPT: Fault.FLIP,
}
ENDED_BY_RESTART = PROCESS_KINDS | INNER_KINDS
HOST_KINDS = frozenset({FaultKind.MTU, FaultKind.ADDRESS})

RESTART_SECONDS, TERM_SECONDS = 1.0, 40.0
"""Seconds until a process that has ended is started again, and that it has to end after SIGTERM."""


@dataclass
class Actor:
    """One process, or the ranks of one site, over all of its lives.

    Args:
        name: unique.
        plane: the part of the system to which it belongs.
        command: makes the arguments and the environment of each process from the number of the life.
        proxies: in front of its ports.
        far: whether it runs at the far host.
        slot: its number among the trainers of its run.
        ready_event: the event of all its processes after which it takes part.

    Attributes:
        struck: the faults that it has now.
        expected: whether it may end now, because of a fault.
    """

    name: str
    plane: str
    command: Callable[[int], Sequence[tuple[Sequence[str], Mapping[str, str]]]]
    hosts: Hosts
    proxies: Sequence[FaultProxy] = ()
    far: bool = False
    slot: int = 0
    ready_event: str = "ready"
    life: int = 0
    processes: list[JsonProcess] = field(default_factory=list)
    struck: set[FaultKind] = field(default_factory=set)
    ready: bool = False
    expected: bool = False
    started: float = 0.0
    ready_at: float = 0.0
    restart_at: float = 0.0
    kill_at: float = 0.0
    failed_starts: int = 0
    was_ready: bool = False
    _ready_ranks: set[int] = field(default_factory=set)
    _last_events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    _stacks: ExitStack = field(default_factory=ExitStack)

    @property
    def kinds(self) -> frozenset[FaultKind]:
        """The faults that it can have."""
        return PROCESS_KINDS | INNER_KINDS | (frozenset(LINK_FAULTS) if self.proxies else frozenset())

    @property
    def calm(self) -> bool:
        """Whether it takes part, and has no fault now."""
        return self.ready and not (self.struck - {FaultKind.CLOCK})

    def start(self, now: float) -> None:
        """Starts its next life."""
        self.life += 1
        self.failed_starts = 0 if self.was_ready else self.failed_starts + 1
        self._ready_ranks.clear()
        self.started, self.restart_at, self.kill_at = now, 0.0, 0.0
        self.ready = self.was_ready = self.expected = False
        self.struck -= ENDED_BY_RESTART
        self._stacks = ExitStack()
        prefix = self.hosts.command(far=self.far)
        self.processes = [
            self._stacks.enter_context(JsonProcess(*prefix, *arguments, env=os.environ | dict(variables)))
            for arguments, variables in self.command(self.life)
        ]

    def note_ready(self, rank: int, now: float) -> None:
        """Notes that one of its processes takes part."""
        self._ready_ranks.add(rank)
        if len(self._ready_ranks) == len(self.processes):
            self.ready, self.was_ready, self.ready_at = True, True, now

    def close(self) -> None:
        """Kills its processes."""
        for process in self.processes:
            self._continue(process)
        self._stacks.close()
        self.processes = []

    def events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """What its processes have told since the last call, with the rank."""
        last, self._last_events = self._last_events, []
        yield from last
        for rank, process in enumerate(self.processes):
            process.drain()
            seen, process.seen[:] = list(process.seen), []
            for event in seen:
                yield rank, event

    def tick(self, now: float) -> Iterator[tuple[str, str]]:
        """Starts it again if it has ended; yields what happened: (`ended` or `failed` or `overdue`, why)."""
        if self.restart_at:
            if now >= self.restart_at:
                self.start(now)
            return
        if self.kill_at and now >= self.kill_at:
            yield "overdue", f"{self.name} has not ended {TERM_SECONDS:.0f} s after SIGTERM; {self._tail()}"
            self._end_all()
        codes = [process.poll() for process in self.processes]
        if all(code is None for code in codes):
            return
        if not self.kill_at and any(code is None for code in codes):
            # As torchrun does: if a rank has ended, the others of the site end and all start again.
            self._end_all()
        if any(process.poll() is None for process in self.processes):
            return
        for process in self.processes:
            process.wait()
        self._last_events.extend(self.events())
        yield "ended" if self.expected else "failed", f"{self.name} ended with {codes}; {self._tail()}"
        self.close()
        self.ready = False
        self.restart_at = now + RESTART_SECONDS

    def strike(self, strike: Strike, now: float) -> None:
        """Begins a fault."""
        self.struck.add(strike.kind)
        match strike.kind:
            case FaultKind.KILL:
                self.expected, self.ready = True, False
                self._pick(strike).kill()
            case FaultKind.TERM:
                self.expected, self.ready, self.kill_at = True, False, now + TERM_SECONDS
                for process in self.processes:
                    process.signal(signal.SIGTERM)
            case FaultKind.STOP:
                self._pick(strike).signal(signal.SIGSTOP)
            case FaultKind.CLOCK:
                self._send(f"clock {strike.detail}", strike)
            case FaultKind.LOOP:
                self._send(f"loop {strike.seconds}", strike)
            case FaultKind.GIL:
                self._send(f"gil {strike.seconds}", strike)
            case kind if kind in LINK_FAULTS:
                chosen = [self.proxies, *([proxy] for proxy in self.proxies)][strike.number % (len(self.proxies) + 1)]
                for proxy in chosen:
                    proxy.arm(LINK_FAULTS[kind], int(strike.detail))

    def heal(self, strike: Strike) -> None:
        """Ends a fault."""
        self.struck.discard(strike.kind)
        match strike.kind:
            case FaultKind.STOP:
                for process in self.processes:
                    self._continue(process)
            case FaultKind.CLOCK:
                self._send("clock 0", strike)
            case kind if kind in LINK_FAULTS:
                for proxy in self.proxies:
                    proxy.heal()

    def _pick(self, strike: Strike) -> JsonProcess:
        return self.processes[strike.number % len(self.processes)]

    def _send(self, line: str, strike: Strike) -> None:
        with suppress(OSError, ValueError, IndexError, ZeroDivisionError):
            self._pick(strike).send(line)

    def _end_all(self) -> None:
        for process in self.processes:
            self._continue(process)
            process.kill()

    @staticmethod
    def _continue(process: JsonProcess) -> None:
        with suppress(ProcessLookupError):
            process.signal(signal.SIGCONT)

    def _tail(self) -> str:
        return " | ".join(process.stderr.strip()[-1500:] for process in self.processes if process.stderr.strip())

    def measure(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Memory in bytes and descriptors of each of its processes, with the name of this life."""
        for rank, process in enumerate(self.processes):
            with suppress(psutil.Error):
                seen = psutil.Process(process.pid)
                values = {"memory": float(seen.memory_info().rss), "descriptors": float(seen.num_fds())}
                yield f"{self.name}.{rank}#{self.life}", values


class System:
    """All actors of a run, the hosts, the disk and etcd: applies faults to whatever they hit."""

    FAR, DISK, ETCD = "far host", "disk", "etcd"

    def __init__(self, actors: Sequence[Actor], hosts: Hosts, disk: Disk, etcd: EtcdCluster | None) -> None:
        self.actors = {actor.name: actor for actor in actors}
        self.hosts, self.disk, self.etcd = hosts, disk, etcd
        self._killed_leader: int | None = None

    def strike(self, strike: Strike, now: float) -> list[Actor]:
        """Begins a fault; returns the actors that it hits."""
        match strike.kind:
            case FaultKind.MTU:
                self.hosts.open_hole()
            case FaultKind.ADDRESS:
                self.hosts.change_address(back=False)
            case FaultKind.DISK:
                self.disk.fill()
            case FaultKind.ETCD:
                assert self.etcd is not None
                self._killed_leader = self.etcd.kill_leader()
            case _:
                actor = self.actors[strike.victim]
                if actor.processes:
                    actor.strike(strike, now)
                return [actor]
        hit = [actor for actor in self.actors.values() if actor.far] if strike.victim == self.FAR else []
        for actor in hit:
            actor.struck.add(strike.kind)
        return hit

    def heal(self, strike: Strike) -> None:
        """Ends a fault."""
        match strike.kind:
            case FaultKind.MTU:
                self.hosts.close_hole()
            case FaultKind.ADDRESS:
                self.hosts.change_address(back=True)
            case FaultKind.DISK:
                self.disk.free()
            case FaultKind.ETCD:
                if self.etcd is not None and self._killed_leader is not None:
                    self.etcd.start(self._killed_leader)
            case _:
                self.actors[strike.victim].heal(strike)
        if strike.victim == self.FAR:
            for actor in self.actors.values():
                actor.struck.discard(strike.kind)

    def close(self) -> None:
        for actor in self.actors.values():
            actor.close()


def python(module: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """The command of a worker."""
    return (sys.executable, "-m", module, json.dumps(options))


def ports(count: int) -> list[int]:
    """Free ports for processes that are started again at them."""
    return [free_port() for _ in range(count)]

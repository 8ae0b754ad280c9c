"""The processes of a run: started, struck by faults, healed, and started again when they have ended."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.endurance.plan import LINK_KINDS, FaultKind, Strike
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.processes import JsonProcess

PROCESS_KINDS = frozenset(FaultKind) - LINK_KINDS
LINK_FAULTS = {
    FaultKind.CUT: Fault.HALF_OPEN,
    FaultKind.STALL: Fault.STALL,
    FaultKind.RESET: Fault.CUT,
    FaultKind.CORRUPT: Fault.FLIP,
}

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
        slot: its number among the trainers of its run.

    Attributes:
        struck: the faults that it has now.
        ready: whether all its processes take part.
        expected: whether it may end now, because of a fault.
    """

    name: str
    plane: str
    command: Callable[[int], Sequence[tuple[Sequence[str], Mapping[str, str]]]]
    proxies: Sequence[FaultProxy] = ()
    slot: int = 0
    life: int = 0
    processes: list[JsonProcess] = field(default_factory=list)
    struck: set[FaultKind] = field(default_factory=set)
    ready: bool = False
    expected: bool = False
    started: float = 0.0
    failed_starts: int = 0
    was_ready: bool = False
    _restart_at: float = 0.0
    _kill_at: float = 0.0
    _ready_ranks: set[int] = field(default_factory=set)
    _last_events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def kinds(self) -> frozenset[FaultKind]:
        return PROCESS_KINDS | (LINK_KINDS if self.proxies else frozenset())

    @property
    def calm(self) -> bool:
        """Whether it takes part, and has no fault now."""
        return self.ready and not (self.struck - {FaultKind.CLOCK})

    def start(self, now: float) -> None:
        self.life += 1
        self.failed_starts = 0 if self.was_ready else self.failed_starts + 1
        self._ready_ranks.clear()
        self.started, self._restart_at, self._kill_at = now, 0.0, 0.0
        self.ready = self.was_ready = self.expected = False
        self.struck -= PROCESS_KINDS
        self._stack = ExitStack()
        self.processes = [
            self._stack.enter_context(JsonProcess(*arguments, env=os.environ | dict(variables)))
            for arguments, variables in self.command(self.life)
        ]

    def note_ready(self, rank: int) -> None:
        self._ready_ranks.add(rank)
        if len(self._ready_ranks) == len(self.processes):
            self.ready = self.was_ready = True

    def close(self) -> None:
        self._continue()
        self._stack.close()
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
        if self._restart_at:
            if now >= self._restart_at:
                self.start(now)
            return
        if self._kill_at and now >= self._kill_at:
            yield "overdue", f"{self.name} has not ended {TERM_SECONDS:.0f} s after SIGTERM; {self._tail()}"
            self._end_all()
        codes = [process.poll() for process in self.processes]
        if all(code is None for code in codes):
            return
        if not self._kill_at and any(code is None for code in codes):
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
        self._restart_at = now + RESTART_SECONDS

    def strike(self, strike: Strike, now: float) -> None:
        if not self.processes:
            return
        self.struck.add(strike.kind)
        process = self.processes[strike.number % len(self.processes)]
        match strike.kind:
            case FaultKind.KILL:
                self.expected, self.ready = True, False
                process.kill()
            case FaultKind.TERM:
                self.expected, self.ready, self._kill_at = True, False, now + TERM_SECONDS
                for each in self.processes:
                    each.signal(signal.SIGTERM)
            case FaultKind.STOP:
                process.signal(signal.SIGSTOP)
            case FaultKind.CLOCK:
                self._send(strike, f"clock {strike.detail}")
            case FaultKind.LOOP:
                self._send(strike, f"loop {strike.seconds}")
            case FaultKind.GIL:
                self._send(strike, f"gil {strike.seconds}")
            case kind:
                chosen = [self.proxies, *([proxy] for proxy in self.proxies)][strike.number % (len(self.proxies) + 1)]
                for proxy in chosen:
                    proxy.arm(LINK_FAULTS[kind], int(strike.detail))

    def heal(self, strike: Strike) -> None:
        self.struck.discard(strike.kind)
        match strike.kind:
            case FaultKind.STOP:
                self._continue()
            case FaultKind.CLOCK:
                self._send(strike, "clock 0")
            case kind if kind in LINK_KINDS:
                for proxy in self.proxies:
                    proxy.heal()

    def measure(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Memory in bytes and descriptors of each of its processes, with the name of this life."""
        for rank, process in enumerate(self.processes):
            with suppress(psutil.Error):
                seen = psutil.Process(process.pid)
                values = {"memory": float(seen.memory_info().rss), "descriptors": float(seen.num_fds())}
                yield f"{self.name}.{rank}#{self.life}", values

    def _send(self, strike: Strike, line: str) -> None:
        # It may have ended meanwhile.
        with suppress(OSError, ValueError, ZeroDivisionError):
            self.processes[strike.number % len(self.processes)].send(line)

    def _end_all(self) -> None:
        self._continue()
        for process in self.processes:
            process.kill()

    def _continue(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.signal(signal.SIGCONT)

    def _tail(self) -> str:
        return " | ".join(process.stderr.strip()[-1500:] for process in self.processes if process.stderr.strip())

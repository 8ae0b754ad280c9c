"""Peers that train with `GradientAveraging` while failures are injected that a seed has drawn, in virtual time.

Each batch has gradients of its own, and the optimizer is plain SGD, so that the parameters say which samples are in
them: `Trace` compares every change of the parameters with the batches that the receipts name.

`python -m tests.strategies.failure_run SEED FAILURES` repeats a run of the tests, and prints what happened.
"""

import asyncio
import itertools
import logging
import random
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from averaging import DecentralizedAverager, GradientAveraging
from averaging.discovery.gossip.membership import GossipSettings
from averaging.errors import AveragingError, JoinError, PeerUnreachableError, StateError
from averaging.matchmaking.rules import CLOCK_TOLERANCE
from averaging.peer.run_progress import LIFETIME
from averaging.protocol import Digest, ExchangeReply, Refusal, Rumour
from averaging.receipts.receipt import Receipt
from averaging.testing import virtual_time
from averaging.testing.transport import MemoryTransport
from tests.support import simulated_processes as processes
from tests.support.ledger import Ledger, LedgerError, Step, check_recovery
from tests.support.scripts import run_script, scripted, sleep
from tests.support.training_run import Run, Site

BATCH, STEP_SECONDS = 4, 0.25
"""Samples of a batch, and seconds for which a peer computes it."""

GROUP_WAIT, STALL_TIMEOUT = 1.0, 2.0
"""Options of the peers, in seconds."""

LEARNING_RATE = 0.5

DEADLINE = max(2 * STALL_TIMEOUT, GROUP_WAIT + CLOCK_TOLERANCE)
"""The longest wait for one that does not answer, in seconds: for a reducer, and for a leader."""

DEADLINES = {
    "partition": DEADLINE + 3.0 * GossipSettings().exchange_interval,
    "clock": LIFETIME + DEADLINE,
    "start": 60.0,
}
"""Longer ones by the kind of failure: members that did not answer are called again once in an interval of exchanges,
which is half as long again at most, by either side; and an announcement that was written with a wrong clock goes after
its lifetime. They count for later failures, too."""

LOOK = 0.05
"""Seconds between two looks whether all have averaged; the moment itself may be as much earlier."""

HOPELESS = 120.0
"""Seconds after which it is not waited any longer, also not for newcomers."""


class Gossiping(MemoryTransport):
    """A transport that may lose discovery: no record comes in or goes out.

    Attributes:
        lost: whether it is lost now.
    """

    lost = False

    async def push(self, endpoint: str, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        """See `transport.base.Transport`."""
        self._check(endpoint)
        return await super().push(endpoint, run_id, rumours)

    async def exchange(self, endpoint: str, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        """See `transport.base.Transport`."""
        self._check(endpoint)
        async for reply in super().exchange(endpoint, digest):
            yield reply

    def _check(self, endpoint: str) -> None:
        other = self._network._serving.get(endpoint)
        if self.lost or (isinstance(other, Gossiping) and other.lost):
            raise PeerUnreachableError(endpoint, "no record passes")


@dataclass(slots=True)
class Contribution:
    """What a peer may contribute to a global step: the mean gradient of its batches since its last one."""

    batches: range
    samples: int
    mean: torch.Tensor


@dataclass(slots=True)
class Change:
    """A global step that a peer has made with others: what it did to the parameters."""

    receipt: Receipt
    before: str
    after: str
    change: torch.Tensor


@dataclass(slots=True)
class Trace:
    """Which batches are in which version.

    Attributes:
        offered: by peer, version and number of samples.
        changes: one by group, of the member that reported first.
        reported: members that have a receipt of a group.
        dropped: members that somebody in the group has dropped.
        left_out: samples of members that others dropped in a round, and that no version holds.
    """

    offered: dict[tuple[str, str, int], Contribution] = field(default_factory=dict)
    changes: dict[bytes, Change] = field(default_factory=dict)
    reported: dict[bytes, set[str]] = field(default_factory=lambda: defaultdict(set))
    dropped: dict[bytes, set[str]] = field(default_factory=lambda: defaultdict(set))
    left_out: int = 0

    def receipt(self, peer: str, receipt: Receipt) -> None:
        """Notes who is known to have dropped whom."""
        if receipt.group_id:
            self.reported[receipt.group_id].add(peer)
            self.dropped[receipt.group_id].update(lost.endpoint for lost in receipt.dropped)

    def check(self, version: str) -> int:
        """Follows a version back to the beginning; each batch may be in it once. Returns the number of its samples."""
        by_version = {change.after: change for change in self.changes.values()}
        seen: set[tuple[str, int]] = set()
        samples = 0
        while (change := by_version.get(version)) is not None:
            for name, contribution in self._members_in(change).items():
                batches = {(name, number) for number in contribution.batches}
                if twice := batches & seen:
                    raise LedgerError(f"{sorted(twice)} are in {version} and in a later version of the same run")
                seen |= batches
                samples += contribution.samples
            version = change.before
        return samples

    def _members_in(self, change: Change) -> dict[str, Contribution]:
        """The members whose batches explain the change: all, without those that somebody has dropped."""
        group, receipt = change.receipt.group_id, change.receipt
        known = {}
        for name in receipt.members:
            samples = (receipt.gathered[name] or {}).get("samples", 0)
            contribution = self.offered.get((name, change.before, samples))
            if contribution is None:
                raise LedgerError(f"{name} has put {samples} samples into {change.after} that it had not gathered")
            known[name] = contribution
        # A reducer that died after its last reply may have dropped some without telling.
        silent = set(receipt.members) - self.reported[group]
        uncertain = set(receipt.members) if silent else self.dropped[group] & known.keys()
        for count in range(len(uncertain) + 1):
            for without in itertools.combinations(sorted(uncertain), count):
                present = {name: known[name] for name in known if name not in without}
                if present and torch.allclose(_mean(present), change.change, atol=1e-4):
                    self.left_out += sum(known[name].samples for name in without)
                    return present
        raise LedgerError(
            f"the change to {change.after} is {change.change.tolist()}, not the mean of "
            f"{ {name: (one.samples, one.mean.tolist()) for name, one in known.items()} } without any of {uncertain}"
        )


def _mean(present: dict[str, Contribution]) -> torch.Tensor:
    total = sum(one.samples for one in present.values())
    return torch.stack([one.mean * (one.samples / total) for one in present.values()]).sum(dim=0)


class FailureRun(Run):
    """Peers under failures.

    Args:
        seed: of everything random.
        failures: number of failures to inject.
        count: number of peers; a killed one is replaced by a newcomer.

    Attributes:
        ledger: what is checked at every step.
        injected: number of failures by kind.
        recoveries: after each time of failures, the kinds and the seconds until those that live had averaged again.
        usual: seconds between two global steps without failures.
    """

    clock = staticmethod(processes.clock)

    def __init__(self, seed: int, failures: int, count: int = 4) -> None:
        self._numbers = itertools.count()
        super().__init__(seed, "gradients", [], until=float("inf"), group_wait=GROUP_WAIT)
        self.failures, self.count = failures, count
        self.draw = random.Random(seed)
        self.ledger, self.trace = Ledger(), Trace()
        self.injected: Counter[str] = Counter()
        self.recoveries: list[tuple[tuple[str, ...], float]] = []
        self.usual = 0.0
        self._settled = 0.0  # when the last of the longer deadlines ends
        self._living: dict[str, Gossiping] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._healing: list[Callable[[], object]] = []
        self._versions: dict[str, str] = {}
        self._averaged: dict[str, tuple[float, frozenset[str]]] = {}
        self._begun: set[str] = set()
        self.ended: dict[str, Site] = {}

    # The peers

    def _strategy(self) -> GradientAveraging:
        return GradientAveraging(BATCH * self.count)

    def train(self, site: Site, rng: random.Random) -> None:
        """The script of one peer: joins, trains until the failures are over, and finishes."""
        name = site.name
        parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        opt = self._join(site, torch.optim.SGD([parameter], lr=LEARNING_RATE), rng)
        history = opt.strategy.history
        self.ledger.begins(name, 1, history.step, history.phase)
        now = asyncio.get_running_loop().time
        batches: list[torch.Tensor] = []
        made = 0
        while now() < self.until:
            sleep(site.step_seconds * rng.uniform(0.8, 1.2))
            gradient = torch.tensor([rng.gauss(0, 1) for _ in range(3)], dtype=torch.float64)
            batches.append(gradient)
            made += 1
            parameter.grad = gradient.clone()
            before, version = parameter.detach().clone(), opt.strategy.history.phase
            mean = torch.stack(batches).mean(dim=0)
            numbers = range(made - len(batches), made)
            self.trace.offered[name, version, BATCH * len(batches)] = Contribution(numbers, BATCH * len(batches), mean)
            site.receipts.clear()
            opt.step(batch_size=BATCH)
            self._report(name, opt, tuple(site.receipts), parameter, before, version, now())
            if opt.strategy.history.phase != version:
                batches.clear()
        site.finish = opt.finish(timeout=30.0)
        ending, pending = opt.strategy.history, opt.strategy.samples
        self.ledger.step(name, 1, Step(0, pending, ending.step, ending.phase))
        self.ledger.parameters(ending.phase, tuple(parameter.detach().tolist()), name)
        self._versions[name] = ending.phase
        opt.close()
        self.ended[name] = site

    def _join(self, site: Site, optimizer: torch.optim.Optimizer, rng: random.Random) -> DecentralizedAverager:
        while True:
            try:
                return self._averager(site, optimizer, rng)
            except (JoinError, StateError):
                sleep(1.0)

    def _report(
        self,
        name: str,
        opt: DecentralizedAverager,
        receipts: tuple[Receipt, ...],
        parameter: torch.Tensor,
        before: torch.Tensor,
        version: str,
        now: float,
    ) -> None:
        history = opt.strategy.history
        for receipt in receipts:
            self.trace.receipt(name, receipt)
        self._begun.add(name)
        self.ledger.step(name, 1, Step(BATCH, opt.strategy.samples, history.step, history.phase, receipts))
        self.ledger.parameters(history.phase, tuple(parameter.detach().tolist()), name)
        self._versions[name] = history.phase
        for receipt in receipts:
            if receipt.averaged:
                change = (before - parameter.detach()) / LEARNING_RATE
                self.trace.changes.setdefault(receipt.group_id, Change(receipt, version, history.phase, change))
                present = frozenset(receipt.members) - {lost.endpoint for lost in receipt.dropped}
                self._averaged[name] = (now, present)

    def _transport(self, name: str) -> MemoryTransport:
        self._living[name] = Gossiping(self.network, name)
        return self._living[name]

    # The failures

    async def _disturb(self) -> None:
        """Alternates between failures that come together, and a calm time in which all average again."""
        await self._recover(["start"])
        await asyncio.sleep(2.0)
        began, last = asyncio.get_running_loop().time(), self._step()
        await asyncio.sleep(20 * STEP_SECONDS)
        self.usual = (asyncio.get_running_loop().time() - began) / max(1, self._step() - last)
        while self.injected.total() < self.failures:
            kinds: list[str] = []
            for _ in range(self.draw.choice([1, 1, 2, 4, 8])):
                kinds.append(self._inject())
                await asyncio.sleep(self.draw.uniform(0.0, 0.4))
            while self._healing:
                self._healing.pop(0)()
                await asyncio.sleep(self.draw.uniform(0.0, 0.3))
            await self._recover(kinds)
        self.until = 0.0

    def _step(self) -> int:
        return max(int(version.partition("-")[0]) for version in self._versions.values())

    async def _recover(self, kinds: Sequence[str]) -> None:
        """Waits until those that live have averaged together, which has a limit, and then until newcomers have, too."""
        since = asyncio.get_running_loop().time()
        what = " + ".join(kinds)
        known = self._begun & self._living.keys()
        seconds = await self._until_averaged(what, since, lambda: known)
        self.recoveries.append((tuple(kinds), seconds))
        if self.usual:
            # Failures that come together may each cost as much as one.
            deadlines = sum(DEADLINES.get(kind, DEADLINE) for kind in kinds)
            check_recovery(what, seconds, len(kinds) * self.usual, max(deadlines, self._settled - since))
            longest = max((DEADLINES[kind] for kind in kinds if kind in DEADLINES), default=0.0)
            self._settled = max(self._settled, since + longest)
        await self._until_averaged(what, since, self._living.keys)

    async def _until_averaged(self, what: str, since: float, whom: Callable[[], Collection[str]]) -> float:
        now = asyncio.get_running_loop().time
        while not all(self._has_averaged(name, since, frozenset(whom())) for name in whom()):
            if now() - since > HOPELESS:
                state = {name: (self._versions.get(name), self._averaged.get(name)) for name in whom()}
                raise LedgerError(f"{now() - since:.0f} s after {what} not all have averaged together: {state}")
            await asyncio.sleep(LOOK)
        return max(0.0, now() - since - LOOK)

    def _has_averaged(self, name: str, since: float, others: frozenset[str]) -> bool:
        when, present = self._averaged.get(name, (-1.0, frozenset[str]()))
        return when >= since and others <= present

    def _inject(self) -> str:
        """One failure; what ends later is in `_healing`."""
        names = sorted(self._living)
        kind = self.draw.choice(
            ["kill", "stop", "stuck loop", "half-open", "cut", "refused", "partition", "clock", "discovery", "slow"]
        )
        victim = self.draw.choice(names)
        self.injected[kind] += 1
        getattr(self, "_" + kind.replace("-", "_").replace(" ", "_"))(victim, names)
        return kind

    def _kill(self, victim: str, names: list[str]) -> None:
        self._loop().stop_process(victim)
        self.network.kill(victim)
        self._living.pop(victim)
        self._start([name for name in names if name != victim])

    def _stop(self, victim: str, names: list[str]) -> None:  # SIGSTOP and SIGCONT
        self.network.freeze(victim)
        self._loop().stop_process(victim)

        def go_on() -> None:
            self.network.thaw(victim)
            self._continue(victim)

        self._healing.append(go_on)

    def _stuck_loop(self, victim: str, names: list[str]) -> None:  # its transport's threads still accept calls
        self._loop().stop_process(victim)
        self._healing.append(lambda: self._continue(victim))

    def _half_open(self, victim: str, names: list[str]) -> None:
        self.network.freeze(victim)

        def reset() -> None:
            self._reset(victim)
            self.network.thaw(victim)

        self._healing.append(reset)

    def _cut(self, victim: str, names: list[str]) -> None:
        self._reset(victim)

    def _reset(self, victim: str) -> None:
        self.network._break_calls(lambda call: victim in (call.caller, call.callee), "connection reset")

    def _refused(self, victim: str, names: list[str]) -> None:
        other = self.draw.choice([name for name in names if name != victim])
        self.network.refuse(victim, other)
        self._healing.append(lambda: self.network._refused.discard((victim, other)))

    def _partition(self, victim: str, names: list[str]) -> None:
        half = frozenset(self.draw.sample(names, self.draw.randrange(1, len(names))))
        self.network.cut(half)
        self._healing.append(lambda: self.network._parts.clear())

    def _clock(self, victim: str, names: list[str]) -> None:
        steps = self._loop().clock_steps
        steps[victim] = self.draw.choice([-20.0, 20.0])
        self._healing.append(lambda: steps.pop(victim, None))

    def _discovery(self, victim: str, names: list[str]) -> None:
        transport = self._living[victim]
        transport.lost = True
        self._healing.append(lambda: setattr(transport, "lost", False))

    def _slow(self, victim: str, names: list[str]) -> None:
        task = asyncio.get_running_loop().create_task(self._starve(victim))
        self._healing.append(task.cancel)

    async def _starve(self, victim: str) -> None:
        """Gives a process a fifth of the time."""
        try:
            while victim in self._living:
                self._loop().stop_process(victim)
                await asyncio.sleep(0.08)
                self._continue(victim)
                await asyncio.sleep(0.02)
        finally:
            self._continue(victim)

    def _continue(self, victim: str) -> None:
        if victim in self._living:  # else it was killed meanwhile
            self._loop().continue_process(victim)

    # The whole

    def _start(self, known: list[str]) -> None:
        name = f"peer-{next(self._numbers)}:1"
        site = Site(
            name, self.draw.sample(known, min(3, len(known))), 0.0, step_seconds=STEP_SECONDS, strategy=self._strategy
        )
        with processes.process(name):
            self._tasks[name] = asyncio.create_task(run_script(lambda: self.train(site, self._rng)))

    async def _main(self) -> None:
        self._start([])
        for _ in range(self.count - 1):
            await asyncio.sleep(0.1)
            self._start(["peer-0:1"])
        disturbing = asyncio.create_task(self._disturb())
        try:
            while not disturbing.done() or any(name in self._living for name in self._running()):
                await asyncio.sleep(0.5)
                for task in (disturbing, *self._tasks.values()):
                    if task.done():
                        task.result()
        finally:
            disturbing.cancel()
            for name in self._tasks:
                self._loop().continue_process(name)  # or its tasks could not be cancelled

    def _running(self) -> list[str]:
        return [name for name, task in self._tasks.items() if not task.done()]

    def check(self) -> None:
        """Runs it, and checks what can only be checked at the end.

        Raises:
            LedgerError: a promise was broken; the message says how to repeat the run.
        """
        try:
            with scripted(self.seed, processes.clock) as self._rng:
                processes.run(self._main())
            if self.network.errors:
                raise LedgerError(f"a service raised {self.network.errors}")
            self.ledger.ends((name, 1) for name in self.ended)
            for name in self.ended:
                self.trace.check(self._versions[name])
        except (LedgerError, AveragingError, virtual_time.DeadlockError) as error:
            again = f"python -m tests.strategies.failure_run {self.seed} {self.failures}"
            raise LedgerError(f"{error} (after {self.injected.total()} failures; again: {again})") from error

    def summary(self) -> str:
        """What was injected, and what came of it."""
        samples = self.ledger.samples
        slowest = sorted(((seconds, kinds) for kinds, seconds in self.recoveries if kinds != ("start",)), reverse=True)
        lines = [
            f"{self.injected.total()} failures: " + ", ".join(f"{n} {kind}" for kind, n in self.injected.most_common()),
            f"{len(self.ledger.groups)} groups averaged; a usual round takes {self.usual:.2f} s",
            f"samples: {samples.trained:g} trained, {samples.averaged:g} averaged, {samples.alone:g} in steps alone, "
            f"{samples.superseded:g} superseded by a further state, {self.trace.left_out} left out by reducers",
            *(f"{seconds:6.2f} s until all averaged after {' + '.join(kinds)}" for seconds, kinds in slowest[:5]),
        ]
        return "\n".join(lines)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    repeated = FailureRun(int(sys.argv[1]), int(sys.argv[2]))
    try:
        repeated.check()
    finally:
        print(repeated.summary())

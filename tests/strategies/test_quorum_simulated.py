"""Rounds with a quorum, with real strategies on virtual time: nobody waits, no step is lost, none is made twice."""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from averaging import DecentralizedAverager, DiLoCo, Strategy
from averaging.errors import PeerUnreachableError
from averaging.protocol import MessageCode
from averaging.receipts.receipt import Receipt
from averaging.testing.transport import MemoryTransport
from tests.support.scripts import sleep
from tests.support.selection import rest_is_long
from tests.support.training_run import Noise, Run, Site, agree


@dataclass
class Trainers:
    """Peers that train with one strategy, and what they have done.

    Attributes:
        step_seconds: of each peer.
        pauses: by the number of a peer, after how many steps of its own it pauses, and for how many seconds.
        lives: by the number of a peer, when it starts and when it is killed, in seconds.
        tensors: of the model.
        options: of a peer's averager, by its number.
        stepped: steps of each peer until the end of its training.
        missed: of each peer before each step, the rounds that it says to have missed.
    """

    strategy: Callable[[], Strategy]
    step_seconds: Sequence[float]
    until: float
    pauses: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    seed: int = 1
    lives: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    tensors: int = 1
    options: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    learning_rate: float = 0.1
    stepped: Counter[str] = field(default_factory=Counter)
    paused: Counter[str] = field(default_factory=Counter)
    missed: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        names = [f"peer-{number}:1" for number in range(len(self.step_seconds))]
        self.sites = [
            Site(
                name,
                [names[0]] if number else [],
                *self.lives.get(number, (0.05 * number, float("inf"))),
                step_seconds=self.step_seconds[number],
                strategy=self.strategy,
                tamper=partial(self._before_step, number),
                learner=lambda rng: Noise(rng, {"lr": self.learning_rate}, self.tensors),
                options=self.options.get(number, {}),
            )
            for number, name in enumerate(names)
        ]
        self.run = Run(self.seed, "diloco", self.sites, until=self.until, group_wait=2.0)

    def _before_step(self, number: int, averager: DecentralizedAverager, step: int) -> None:
        name = self.sites[number].name
        every, seconds = self.pauses.get(number, (0, 0.0))
        if every and self.stepped[name] % every == every - 1:
            self.paused[name] += 1
            sleep(seconds)
        self.stepped[name] += 1
        self.missed[name].append(averager.strategy.missed)

    @property
    def shares(self) -> list[float]:
        """Share of the time of each peer that it has spent in steps."""
        return [
            self.stepped[site.name] * seconds / (self.until - site.starts)
            for site, seconds in zip(self.sites, self.step_seconds, strict=True)
        ]

    @property
    def groups(self) -> dict[str, set[bytes]]:
        """The groups that have averaged, by phase."""
        groups: dict[str, set[bytes]] = defaultdict(set)
        for receipt in self.receipts.values():
            groups[receipt.topic].add(receipt.group_id)
        return groups

    @property
    def receipts(self) -> dict[bytes, Receipt]:
        """One receipt of each round that has averaged, those at the end included."""
        every = (receipt for site in self.sites for receipt in (*site.receipts, *site.last_receipts))
        return {receipt.group_id: receipt for receipt in every if receipt.averaged}

    @property
    def gathered(self) -> Counter[str]:
        """The local steps of each peer in all averages."""
        steps: Counter[str] = Counter()
        for receipt in self.receipts.values():
            steps.update({name: user.get("steps", 0) for name, user in receipt.gathered.items()})
        return steps

    def ages(self, name: str) -> list[int]:
        """The age of each contribution of a peer, as the receipts of the first one say."""
        accounts = (account for receipt in self.receipts.values() for account in receipt.accounts)
        return [account.age for account in accounts if account.endpoint == name and account.age is not None]


def test_a_slow_peer_and_one_that_pauses_hold_nobody_up_and_lose_no_step() -> None:
    """Of three peers one makes a step in the time of ten, and of two more one pauses for a fifth of the time."""
    trainers = Trainers(partial(DiLoCo, 20, delay=5, quorum=2), (0.1, 0.1, 1.0, 0.1), 60.0, {3: (100, 6.0)}, seed=2)
    survivors = trainers.run.simulate()
    assert len(survivors) == 4
    assert agree(survivors)
    assert min(trainers.shares[:3]) > 0.97
    assert trainers.paused["peer-3:1"] >= 3
    assert trainers.gathered == trainers.stepped
    assert {len(groups) for groups in trainers.groups.values()} == {1}
    assert max(trainers.ages("peer-2:1")) >= 8
    assert set(trainers.ages("peer-0:1")) == {0}


def test_a_peer_that_is_always_late_contributes_each_of_its_rounds() -> None:
    """It needs longer for a step than the others for a round."""
    trainers = Trainers(partial(DiLoCo, 5, quorum=2), (0.1, 0.1, 2.0), 60.0)
    assert agree(trainers.run.simulate())
    assert trainers.gathered == trainers.stepped
    assert len(trainers.ages("peer-2:1")) >= 4
    assert max(trainers.missed["peer-2:1"]) >= 3
    assert max(trainers.missed["peer-0:1"]) == 0
    assert min(trainers.shares[:2]) > 0.85  # a round of the simulation takes 50 ms


def test_at_the_end_nobody_waits_for_a_peer_that_is_paused() -> None:
    """It pauses until long after the others' end, for which they would wait for half of the timeout of 30 s."""
    strategy = partial(DiLoCo, 20, quorum=2, grace=1.0)
    trainers = Trainers(strategy, (0.1, 0.1, 0.1), 30.0, {2: (200, 60.0)})
    trainers.run.simulate()
    assert trainers.paused["peer-2:1"] == 1
    for site in trainers.sites[:2]:
        assert site.finish is not None
        assert site.finish.late == ("peer-2:1",)
        assert site.finished < 36.0
    assert agree(trainers.sites[:2])


def test_a_peer_that_is_killed_and_started_again_holds_nobody_up() -> None:
    """It comes three times, each time with another name, and is killed twice; its averaged steps stay."""
    lives = {2: (2.0, 13.7), 3: (20.0, 33.2), 4: (40.0, float("inf"))}
    trainers = Trainers(partial(DiLoCo, 20, delay=5, quorum=2), (0.1,) * 5, 60.0, lives=lives)
    survivors = trainers.run.simulate()
    assert [site.name for site in survivors] == ["peer-0:1", "peer-1:1", "peer-4:1"]
    assert agree(survivors)
    assert min(trainers.shares[:2]) > 0.97
    assert {len(groups) for groups in trainers.groups.values()} == {1}
    for site in trainers.sites:
        gathered, stepped = trainers.gathered[site.name], trainers.stepped[site.name]
        assert 0 <= stepped - gathered <= (0 if site in survivors else 45), site.name  # of its last round and since
        assert gathered > 0


@pytest.mark.parametrize(("fragments", "delay", "seed"), [(2, 3, 1), (3, 0, 5)])
def test_fragments_lose_no_step_of_a_slow_peer_and_of_one_that_pauses(
    fragments: int, delay: int, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Each fragment has each local step once, also those of its last round, for which all wait."""
    strategy = partial(DiLoCo, 7 * fragments, fragments=fragments, delay=delay, quorum=2)
    trainers = Trainers(strategy, (0.1, 0.1, 1.0, 0.1), 16.0, {3: (60, 6.0)}, seed, tensors=4)
    survivors = trainers.run.simulate()
    assert len(survivors) == 4
    assert agree(survivors)
    assert min(trainers.shares[:3]) > (0.92 if delay else 0.88)  # a round of the simulation takes 50 ms
    assert {len(groups) for groups in trainers.groups.values()} == {1}
    assert trainers.gathered == {name: fragments * steps for name, steps in trainers.stepped.items()}
    assert max(trainers.ages("peer-2:1")) >= 2
    assert "too few members" not in caplog.text  # as for the moment in which the first of two has told of a step


def test_a_busy_donor_that_misses_rounds_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only donor that a newcomer reaches pauses, and sends it its state in the meantime, in some seconds."""
    busy: list[tuple[float, float]] = []
    download = MemoryTransport.download_state

    async def slowly(self: MemoryTransport, endpoint: str, resume: Any = None) -> AsyncGenerator[Any, None]:
        now, slow = asyncio.get_running_loop().time, (self.endpoint, endpoint) == ("peer-3:1", "peer-0:1") and not busy
        began = now()
        async with aclosing(download(self, endpoint, resume)) as messages:
            async for message in messages:
                await asyncio.sleep(1.5 if slow else 0.0)
                if slow:
                    busy[:] = [(began, now())]
                yield message

    monkeypatch.setattr("averaging.state.manifest.MAX_JOINED", 1)  # one message for each tensor
    monkeypatch.setattr(MemoryTransport, "download_state", slowly)
    trainers = Trainers(
        partial(DiLoCo, 20, delay=5, quorum=2),
        (0.1,) * 4,
        30.0,
        {0: (100, 6.0)},
        lives={3: (10.5, float("inf"))},
        options={2: {"share_state": False}},
    )
    trainers.run.network.refuse("peer-3:1", "peer-1:1")

    async def heal() -> None:
        await asyncio.sleep(17.0)
        trainers.run.network.heal()

    survivors = trainers.run.simulate(heal)
    assert len(survivors) == 4
    assert agree(survivors)
    assert busy[0][0] < 12.0
    assert busy[0][1] - busy[0][0] >= 3.0
    assert max(trainers.missed["peer-0:1"]) >= 1
    assert min(trainers.shares[1:3]) > 0.97
    assert trainers.gathered == trainers.stepped
    assert {len(groups) for groups in trainers.groups.values()} == {1}


def fail_one_round(
    monkeypatch: pytest.MonkeyPatch, trainers: Trainers, cause: str
) -> Callable[[], Coroutine[Any, Any, object]]:
    """The first round of `peer-0`, `peer-1` and `peer-2` after 10 s fails, because of the last of them.

    Args:
        trainers: peers whose model is large enough for parts of all members.
        cause: `unaware`: the message with which the round begins does not reach it, so it refuses all parts with
            BAD_GROUP_ID; or `killed`: it is, shortly after all know of the group.

    Returns:
        What `simulate` needs to disturb them so.
    """
    name = "peer-2:1"
    join, aggregate = MemoryTransport.join_group, MemoryTransport.aggregate_part
    begun = asyncio.Event()

    async def joining(self: MemoryTransport, endpoint: str, request: Any) -> AsyncGenerator[Any, None]:
        async with aclosing(join(self, endpoint, request)) as replies:
            async for reply in replies:
                now = asyncio.get_running_loop().time()
                if (
                    self.endpoint == name
                    and reply.code is MessageCode.BEGIN_ALLREDUCE
                    and now > 10.0
                    and not begun.is_set()
                ):
                    begun.set()
                    if cause == "unaware":
                        raise PeerUnreachableError(endpoint, "the connection broke")
                yield reply

    async def aggregating(self: MemoryTransport, endpoint: str, messages: Any) -> AsyncGenerator[Any, None]:
        if name in (self.endpoint, endpoint) and begun.is_set() and cause == "killed":
            await asyncio.sleep(0.5)  # it does not live that long
        async with aclosing(aggregate(self, endpoint, messages)) as replies:
            async for reply in replies:
                yield reply

    monkeypatch.setattr(MemoryTransport, "join_group", joining)
    monkeypatch.setattr(MemoryTransport, "aggregate_part", aggregating)

    async def disturb() -> None:
        await begun.wait()
        if cause == "killed":
            await asyncio.sleep(0.4)
            trainers.run.kill(trainers.sites[2])

    return disturb


@pytest.mark.parametrize("cause", ["unaware", "killed"])
@pytest.mark.parametrize(("delay", "seed"), [(0, 1), (5, 1)])
def test_a_round_that_fails_is_repeated_at_once(
    cause: str, delay: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes its own round for one of the others that it has missed, nor waits for a member that is dead."""
    trainers = Trainers(partial(DiLoCo, 20, delay=delay, quorum=2), (0.1, 0.1, 0.12), 30.0, seed=seed, tensors=8)
    trainers.sites[2].lives = 30.0 if cause == "killed" else float("inf")
    survivors = trainers.run.simulate(fail_one_round(monkeypatch, trainers, cause))
    assert agree(survivors)
    assert len(survivors) == (3 if cause == "unaware" else 2)
    for site in trainers.sites[:2]:
        (number,) = [number for number, receipt in enumerate(site.receipts) if not receipt.averaged]
        failed, following = site.receipts[number : number + 2]
        assert "peer-2:1" in {dropped.endpoint for dropped in failed.dropped}
        assert following.averaged
        assert following.started - (failed.started + failed.seconds) < 0.1 * (delay + 2) + 0.1
        assert trainers.missed[site.name][-1] == 0
    assert {len(groups) for groups in trainers.groups.values()} == {1}


def test_peers_that_cannot_make_a_step_say_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of three hold the last step; the third cannot download it, and the fourth, who made it with them, is dead."""
    download = MemoryTransport.download_state

    async def failing(self: MemoryTransport, endpoint: str, resume: Any = None) -> AsyncGenerator[Any, None]:
        if self.endpoint == "peer-2:1" and asyncio.get_running_loop().time() > 5.0:
            raise PeerUnreachableError(endpoint, "the connection broke")
        async with aclosing(download(self, endpoint, resume)) as messages:
            async for message in messages:
                yield message

    monkeypatch.setattr(MemoryTransport, "download_state", failing)
    trainers = Trainers(
        partial(DiLoCo, 20, delay=5, quorum=3), (0.1,) * 4, 40.0, {2: (60, 6.0)}, lives={3: (0.15, 12.0)}
    )
    trainers.run.simulate()
    said = [record.getMessage() for record in caplog.records if "no step of the run" in record.getMessage()]
    assert len(said) == 3, said
    assert sum("it has missed 3 rounds of the others and does not hold" in text for text in said) == 1, said
    assert sum("only 2 of the 3 peers of the quorum hold global step 5, not peer-2:1;" in text for text in said) == 2


def scenario(seed: int) -> tuple[Trainers, Callable[[], Coroutine[Any, Any, object]], bool]:
    """Peers of any speeds and quorum, also below half of them; some pause, and the network may be cut for a time."""
    rng = random.Random(seed)
    count = rng.choice([3, 4, 4, 5])
    quorum: float | int = rng.choice([2, 2, 0.4, 0.5, 0.75])
    speeds = [rng.choice([0.1, 0.1, 0.2, 0.5, 1.0]) for _ in range(count)]
    pauses = {rng.randrange(count): (rng.randrange(20, 80), rng.uniform(1.0, 8.0))} if rng.random() < 0.6 else {}
    options: dict[str, Any] = rng.choice([{}, {}, {"delay": 3}])
    cut = rng.random() < 0.5
    begins, lasts = rng.uniform(5.0, 15.0), rng.uniform(3.0, 25.0)
    strategy = partial(DiLoCo, 10, quorum=quorum, **options)
    trainers = Trainers(strategy, speeds, begins + lasts + 25.0 if cut else 30.0, pauses, seed)
    names = [site.name for site in trainers.sites]

    async def disturb() -> None:
        if cut:
            await asyncio.sleep(begins)
            half = rng.randrange(1, count)
            trainers.run.network.cut(frozenset(names[:half]), frozenset(names[half:]))
            await asyncio.sleep(lasts)
            trainers.run.network.heal()

    return trainers, disturb, cut


@pytest.mark.parametrize("seed", rest_is_long(range(500), 4))
def test_no_step_is_made_twice_and_after_a_cut_all_peers_agree_again(seed: int) -> None:
    trainers, disturb, cut = scenario(seed)
    survivors = trainers.run.simulate(disturb)
    assert len(survivors) == len(trainers.sites)
    assert agree(survivors), survivors
    if not cut:  # peers that do not reach each other cannot know of each other's step, with or without a quorum
        assert all(len(groups) == 1 for groups in trainers.groups.values())
        assert trainers.gathered == trainers.stepped

"""The receipts of one round at all its members: they fit together, also when somebody is lost on the way."""

import asyncio
import itertools
import random
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

from averaging.allreduce import RoundResult
from averaging.errors import TensorError
from averaging.protocol.group import Member, Mode, ReplyForm
from averaging.protocol.messages import CompressionType
from averaging.receipts.explanation import describe, merge
from averaging.receipts.receipt import DropCode, Outcome, Receipt, Role
from averaging.receipts.receipt_log import read
from averaging.state.manifest import ExtraState
from averaging.testing import virtual_time
from tests.support.rounds import STALL_TIMEOUT, Simulation, nodes
from tests.support.selection import rest_is_long
from tests.support.swarm import Swarm, scalars

NAMES = ["peer:1", "peer:2", "peer:3", "peer:4"]


def flows(results: dict[str, RoundResult]) -> dict[tuple[str, str], tuple[int, int]]:
    """For each pair of which both tell: the bytes that left the one for the other, and those that came there."""
    accounts = {name: {account.endpoint: account for account in result.accounts} for name, result in results.items()}
    return {
        (one, other): (accounts[one][other].bytes_sent, accounts[other][one].bytes_received)
        for one, other in itertools.permutations(accounts, 2)
    }


def check_sums(results: dict[str, RoundResult]) -> None:
    for name, result in results.items():
        assert sum(account.bytes_sent for account in result.accounts) == result.bytes_sent
        assert sum(account.bytes_received for account in result.accounts) == result.bytes_received
        assert next(account for account in result.accounts if account.endpoint == name).bytes_sent == 0
        assert sum(account.share for account in result.accounts) == pytest.approx(1.0)


def check_digests(results: dict[str, RoundResult], names: Iterable[str]) -> None:
    """All that have the averages of a reducer whole have the same of them."""
    for place, _ in enumerate(next(iter(results.values())).accounts):
        found = {results[name].accounts[place].digest for name in names} - {""}
        assert len(found) <= 1


@pytest.mark.parametrize("compression", [CompressionType.NONE, CompressionType.UNIFORM_8BIT])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_what_left_one_member_came_to_the_other(count: int, compression: CompressionType) -> None:
    members = [*nodes(count), Member("client::1", mode=Mode.CLIENT, weight=3.0), Member("aux:1", mode=Mode.AUXILIARY)]
    random.Random(count).shuffle(members)
    simulation = Simulation(count, members, [(3000,), (7, 5)], compression=compression, part_size_bytes=2000)
    virtual_time.run(simulation.run())
    results = simulation.results
    assert all(out == came for out, came in flows(results).values())
    assert sum(result.bytes_sent for result in results.values()) > 0
    check_sums(results)
    check_digests(results, results)
    assert len({result.digest for name, result in results.items() if name != "aux:1"} - {""}) == 1
    assert results["aux:1"].digest == ""  # it gets no averages
    (accounts,) = {
        tuple((account.endpoint, account.mode, account.weight, account.share) for account in result.accounts)
        for result in results.values()
    }
    modes = {endpoint: (mode, weight) for endpoint, mode, weight, _ in accounts}
    assert modes["client::1"] == ("client", 3.0)
    assert modes["aux:1"] == ("auxiliary", 1.0)
    assert next(share for endpoint, *_, share in accounts if endpoint == "client::1") == 0


def test_deltas_have_no_digest() -> None:
    simulation = Simulation(1, nodes(3), reply=ReplyForm.DELTA)
    virtual_time.run(simulation.run())
    for result in simulation.results.values():
        assert result.digest == ""
        assert {account.digest for account in result.accounts} == {""}


def test_other_averages_have_other_digests() -> None:
    digests = set()
    for seed in range(3):
        simulation = Simulation(seed, nodes(3))
        virtual_time.run(simulation.run())
        digests |= {result.digest for result in simulation.results.values()}
    assert len(digests) == 3


@pytest.mark.parametrize("seed", rest_is_long(range(20), 6))
def test_the_accounts_fit_together_though_a_member_dies(seed: int) -> None:
    simulation = Simulation(seed, nodes(4), [(400,)])

    async def kill(tasks: dict[str, asyncio.Task[RoundResult]]) -> None:
        await asyncio.sleep(random.Random(seed).uniform(0.005, 0.1))
        simulation.network.kill("peer:4")
        tasks["peer:4"].cancel()

    virtual_time.run(simulation.run(kill))
    results = {name: simulation.results[name] for name in NAMES[:3]}
    assert all(out == came for out, came in flows(results).values())
    check_sums(results)
    check_digests(results, results)
    for result in results.values():
        for dropped in result.dropped:
            assert dropped.endpoint == "peer:4"
            assert dropped.code in (
                DropCode.CONNECTION_LOST,
                DropCode.CANCELLED,
            )  # it may be killed as it says farewell
        if result.kept_local:
            assert result.digest == ""


@pytest.mark.parametrize("seed", range(10))
def test_a_silent_member_is_dropped_with_the_figures(seed: int) -> None:
    simulation = Simulation(seed, nodes(4), [(400,)])

    async def freeze(tasks: dict[str, asyncio.Task[RoundResult]]) -> None:
        await asyncio.sleep(random.Random(seed).uniform(0, 0.03))
        simulation.network.freeze("peer:4")
        await asyncio.wait([tasks[name] for name in NAMES[:3]])
        tasks["peer:4"].cancel()
        simulation.network.thaw("peer:4")

    virtual_time.run(simulation.run(freeze))
    results = {name: simulation.results[name] for name in NAMES[:3]}
    assert any(result.dropped for result in results.values())
    for result in results.values():
        for dropped in result.dropped:
            assert (dropped.endpoint, dropped.code) == ("peer:4", DropCode.SILENT)
            assert dropped.waited is not None
            assert dropped.deadline is not None
            assert dropped.waited >= dropped.deadline >= STALL_TIMEOUT
            assert dropped.reason.split(" for ")[0] in ("sent nothing", "took no reply", "no reply")
            assert f"s = {dropped.basis}" in dropped.reason
            assert "stall_timeout" in dropped.basis
    assert all(out == came for out, came in flows(results).values())
    check_digests(results, results)


@pytest.mark.parametrize("elements", [100, 2000])  # parts that are all read ahead, and many more
@pytest.mark.parametrize("count", [2, 4])
def test_a_slow_sender_is_the_straggler(count: int, elements: int) -> None:
    simulation = Simulation(count, nodes(count), [(elements,)])
    simulation.slow_down("peer:2", 0.2)
    virtual_time.run(simulation.run())
    assert all(not result.dropped for result in simulation.results.values())
    for name, result in simulation.results.items():
        if name != "peer:2":
            assert result.straggler is not None
            assert (result.straggler.endpoint, result.straggler.what) == ("peer:2", "parts")
            assert result.straggler.seconds > 0.15
        elif count == 2:
            assert result.straggler is None  # it sees that all is slow, not why


@pytest.mark.parametrize("seed", rest_is_long(range(10), 3))
def test_nobody_stands_out_among_equals(seed: int) -> None:
    simulation = Simulation(seed, nodes(4), [(4000,)])
    virtual_time.run(simulation.run())
    assert {result.straggler for result in simulation.results.values()} == {None}


def test_whole_peers_leave_receipts_that_fit_together(tmp_path: Path) -> None:
    swarm = Swarm(5)
    files = [tmp_path / f"{number}.jsonl" for number in range(3)]
    peers = [
        swarm.peer(f"peer:{number + 1}", [tensor], group_size=3, receipts=file)
        for number, (tensor, file) in enumerate(zip(scalars(3, 5), files, strict=True))
    ]
    given: list[list[Receipt]] = swarm.simulate(swarm.average_together(peers, rounds=2))
    for receipts, file, peer in zip(given, files, peers, strict=True):
        with file.open("rb") as lines:
            assert read(lines).receipts == receipts
        assert [receipt.round for receipt in receipts] == [1, 2]
        for receipt in receipts:
            assert (receipt.run_id, receipt.topic) == ("run", "")
            assert list(receipt.phases) == ["checking", "looking", "preparing", "allreduce", "adopting"]
            assert sum(receipt.phases.values()) == pytest.approx(receipt.seconds)
            assert receipt.accounts[receipt.members.index(receipt.endpoint)].role is receipt.role
            assert [account.role for account in receipt.accounts].count(Role.LEADER) == 1
        assert receipts[0].started < receipts[1].started
        assert peer.run_id == "run"
    rounds = merge(receipt for receipts in given for receipt in receipts)
    assert len(rounds) == 2
    for one in rounds:
        assert len({receipt.digest for receipt in one.receipts}) == 1
        assert describe(one, {"peer:1", "peer:2", "peer:3"}).endswith("; all 3 agree")


def test_an_attempt_that_raises_leaves_a_receipt_too(tmp_path: Path) -> None:
    swarm, file = Swarm(6), tmp_path / "receipts.jsonl"
    tensor = torch.ones(3)

    async def main() -> None:
        async with swarm.peer("peer:1", [tensor], receipts=file, round_timeout=3.0) as peer:
            alone = asyncio.create_task(peer.average())
            await asyncio.sleep(1.0)
            alone.cancel()
            await asyncio.wait({alone})
            with peer.tensors() as tensors:
                tensors[0][1] = float("nan")
            with pytest.raises(TensorError):
                await peer.average()
            with peer.tensors() as tensors:
                tensors[0][1] = 0
            receipt = await peer.average()
            assert receipt == peer.status.last_round
            assert receipt.outcome is Outcome.NO_GROUP

    swarm.simulate(main())
    with file.open("rb") as lines:
        cancelled, wrong, alone = read(lines).receipts
    assert (cancelled.outcome, list(cancelled.phases)) == (Outcome.CANCELLED, ["checking", "looking"])
    assert cancelled.seconds == pytest.approx(1.0)
    assert (wrong.outcome, list(wrong.phases)) == (Outcome.FAILED, ["checking"])
    assert wrong.reason.startswith("TensorError: tensor 'tensor_0' holds nan at flat index 1")
    assert (alone.outcome, alone.role, alone.accounts) == (Outcome.NO_GROUP, None, ())


def test_an_error_of_extra_state_comes_after_the_average_which_has_no_version_of_its_own() -> None:
    swarm, broken = Swarm(6), False
    tensors = [torch.full((3,), value) for value in (1.0, 3.0)]

    def extra() -> ExtraState:
        if broken:
            raise ZeroDivisionError
        return ExtraState({}, {})

    asking, other = (
        swarm.peer(f"peer:{n + 1}", [tensors[n]], group_size=2, extra_state=extra if n == 0 else None) for n in range(2)
    )

    async def main() -> None:
        nonlocal broken
        async with asking, other:
            broken = True
            ends = await asyncio.gather(asking.average(), other.average(), return_exceptions=True)
            assert isinstance(ends[0], ZeroDivisionError)
            assert [asking.version, other.version] == [0, 1]
            broken = False
            for receipt in await asyncio.gather(asking.average(), other.average()):
                assert receipt.averaged

    swarm.simulate(main())
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 3] * 2


def test_clients_who_lose_their_only_reducer_have_averaged_nothing() -> None:
    """They never hear of each other, so that neither is lost to the other."""
    swarm = Swarm(3)

    async def main() -> list[Receipt]:
        async with AsyncExitStack() as stack:
            peers = [
                await stack.enter_async_context(swarm.peer("peer:1", [tensor], mode=mode, group_size=3))
                for tensor, mode in zip(scalars(3, 3), [Mode.NODE, Mode.CLIENT, Mode.CLIENT], strict=True)
            ]
            reducer, *clients = [asyncio.create_task(peer.average()) for peer in peers]
            while not all(peer.status.members for peer in peers[1:]):
                await asyncio.wait({reducer}, timeout=0.001)
            swarm.network.kill("peer:1")
            reducer.cancel()
            return await asyncio.gather(*clients)

    for receipt in swarm.simulate(main()):
        assert len(receipt.members) == 3
        assert [lost.endpoint for lost in receipt.dropped] == ["peer:1"]
        assert receipt.kept_local == 3
        assert receipt.outcome is Outcome.FAILED
        assert receipt.reason.startswith("nothing came from any other member (peer:1: ")
        assert receipt.state_version == 0


def test_a_question_that_fails_while_a_group_is_looked_for_is_the_attempts_error(tmp_path: Path) -> None:
    swarm, file = Swarm(8), tmp_path / "receipts.jsonl"

    def stop_search(told: object) -> bool:
        raise ZeroDivisionError("in stop_search")

    async def main() -> None:
        async with swarm.peer("peer:1", [torch.ones(3)], receipts=file, round_timeout=3.0) as peer:
            with pytest.raises(ZeroDivisionError, match="in stop_search"):
                await peer.average(stop_search=stop_search)
            assert asyncio.get_running_loop().time() < 1.0

    swarm.simulate(main())
    with file.open("rb") as lines:
        [receipt] = read(lines).receipts
    assert (receipt.outcome, receipt.reason) == (Outcome.FAILED, "ZeroDivisionError: in stop_search")

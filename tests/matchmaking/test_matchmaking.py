"""Rounds of many peers in virtual time: groups become full, no peer waits for ever, and the mean is kept."""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from averaging import Mode, Outcome, Peer, Receipt
from averaging.discovery.gossip.record import RecordLimits
from averaging.matchmaking import Quorum
from averaging.matchmaking.rules import pack_looking
from averaging.peer import ExpectedAtFirst, RoundOptions, Topic, rounds
from averaging.testing import virtual_time
from tests.support import leaks
from tests.support.selection import rest_is_long
from tests.support.swarm import Swarm, scalars, spread


@pytest.mark.parametrize("count", [5, 6, 9, 10])
def test_of_more_peers_than_fit_into_a_group_at_most_one_is_alone(count: int) -> None:
    swarm = Swarm(count)
    peers = [
        swarm.peer(f"peer:{n + 1}", [tensor], group_size=4, group_wait=5.0, round_timeout=8.0)
        for n, tensor in enumerate(scalars(count, count))
    ]
    sizes = Counter(len(receipts[0].members) for receipts in swarm.simulate(swarm.average_together(peers)))
    assert sizes.pop(4) == count // 4 * 4
    assert sizes == {2: 2} if count % 4 == 2 else sizes == {0: 1}


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 1000), marks=pytest.mark.long)], ids=len)
def test_mutual_requests_end_without_a_deadlock(seeds: range) -> None:
    """Two to five peers that start at the same moment, some with the very same expiration, all find a group."""
    for seed in seeds:
        rng = random.Random(seed)
        count = rng.randrange(2, 6)
        # No delay between declarations: expirations are equal, so that only the endpoints decide who leads.
        swarm = Swarm(seed, delay=rng.choice([0.0, 0.005, 0.05]), latency=rng.choice([(0.01, 0.01), (0.001, 0.05)]))
        tensors = scalars(count, seed)
        peers = [swarm.peer(f"peer:{n + 1}", [tensors[n]], group_size=count, group_wait=5.0) for n in range(count)]
        receipts = [receipts[0] for receipts in swarm.simulate(swarm.average_together(peers))]
        for receipt in receipts:
            assert receipt.outcome is Outcome.AVERAGED, f"seed {seed}: {receipt}"
            assert len(receipt.members) == count, f"seed {seed}: {receipt}"
            assert receipt.seconds < 2.0, f"seed {seed}: {receipt}"  # by the rule, not by a declaration running out


def test_a_peer_with_other_tensors_that_has_left_does_not_end_the_search() -> None:
    swarm = Swarm(1)
    options: dict[str, Any] = {"group_size": 2, "group_wait": 2.0, "round_timeout": 20.0}
    other = swarm.peer("peer:1", [torch.zeros(4)], **options)
    peer, late = (swarm.peer(f"peer:{n}", [torch.zeros(3)], **options) for n in (2, 3))

    async def main() -> Receipt:
        async with peer, late:
            searching = asyncio.create_task(peer.average())
            async with other:
                await late.discovery.store("run.0b", late.endpoint, pack_looking(False), virtual_time.clock() + 3.0)
                differing = asyncio.create_task(other.average())
                await asyncio.sleep(1.0)
                differing.cancel()
            await asyncio.sleep(6.0)
            await late.average()
            return await searching

    receipt = swarm.simulate(main())
    assert receipt.outcome is Outcome.AVERAGED, receipt


@pytest.mark.parametrize("seed", rest_is_long(range(5), 2))
def test_clients_and_auxiliaries_join_nodes(seed: int) -> None:
    swarm = Swarm(seed)
    modes = [Mode.NODE, Mode.NODE, Mode.CLIENT, Mode.CLIENT, Mode.AUXILIARY, Mode.AUXILIARY]
    tensors = scalars(len(modes), seed)
    mean = torch.stack(tensors[:4]).mean(dim=0)
    before = [tensor.clone() for tensor in tensors]
    peers = [
        swarm.peer(f"peer:{n + 1}", [tensors[n]], group_size=6, group_wait=5.0, mode=mode)
        for n, mode in enumerate(modes)
    ]
    for receipts in swarm.simulate(swarm.average_together(peers)):
        assert len(receipts[0].members) == 6
        assert receipts[0].dropped == ()
    for tensor in tensors[:4]:
        torch.testing.assert_close(tensor, mean, rtol=1e-9, atol=1e-9)
    for tensor, untouched in zip(tensors[4:], before[4:], strict=True):
        assert torch.equal(tensor, untouched)


def test_a_client_asks_peers_with_later_declarations_than_its_own() -> None:
    """It cannot lead, so no peer would ask it instead."""
    swarm = Swarm(1)
    client = swarm.peer("", [torch.ones(2)], group_size=2, round_timeout=4.0, mode=Mode.CLIENT)
    node = swarm.peer("peer:1", [torch.ones(2)], group_size=2, group_wait=5.0)

    async def main() -> Receipt:
        async with client, node:
            searching = asyncio.create_task(client.average())
            await asyncio.sleep(1.0)
            assert node.discovery.get("run.0b") == {}  # a client declares nothing
            await node.average()
            return await searching

    assert swarm.simulate(main()).outcome is Outcome.AVERAGED


def test_a_full_group_of_auxiliaries_is_disbanded_at_once() -> None:
    swarm = Swarm(1)
    *auxiliaries, node = [
        swarm.peer(f"peer:{n + 1}", [torch.ones(2)], group_size=2, group_wait=10.0, round_timeout=20.0, mode=mode)
        for n, mode in enumerate((Mode.AUXILIARY, Mode.AUXILIARY, Mode.NODE))
    ]

    async def main() -> Receipt:
        async with auxiliaries[0], auxiliaries[1], node:
            averaging = [asyncio.create_task(peer.average()) for peer in auxiliaries]
            await asyncio.sleep(1.0)
            receipt = await node.average()
            for task in averaging:
                task.cancel()
            await asyncio.gather(*averaging, return_exceptions=True)
        return receipt

    receipt = swarm.simulate(main())
    assert receipt.outcome is Outcome.AVERAGED
    assert receipt.seconds < 3.0


def test_no_peer_waits_for_one_that_has_left() -> None:
    swarm = Swarm(1)
    first, second, leaves = [
        swarm.peer(f"peer:{n + 1}", [torch.ones(2)], group_wait=50.0, round_timeout=60.0) for n in range(3)
    ]

    async def main() -> list[Receipt]:
        async with first, second:
            async with leaves:
                for peer in (first, second, leaves):
                    peer.progress.announce(b"")
                for peer in (first, second, leaves):
                    assert len(await peer.progress.until(lambda seen: len(seen) >= 2, 10.0)) >= 2
                averaging = [
                    asyncio.create_task(peer.average(start_size=ExpectedAtFirst(frozenset).start_size))
                    for peer in (first, second)
                ]
                await asyncio.sleep(5.0)
                assert not any(task.done() for task in averaging)
            return await asyncio.gather(*averaging)

    for receipt in swarm.simulate(main()):
        assert len(receipt.members) == 2
        assert receipt.seconds < 10.0


@pytest.mark.parametrize("group_wait", [45.0, 55.0])  # it leads, or it follows
def test_an_auxiliary_makes_a_group_begin_neither_later_nor_sooner(group_wait: float) -> None:
    """It waits for all training peers, and they do not wait for it."""
    swarm = Swarm(1)
    trains = [swarm.peer(f"peer:{n + 1}", [torch.ones(2)], group_wait=50.0, round_timeout=60.0) for n in range(2)]
    auxiliary = swarm.peer("peer:3", [torch.ones(2)], group_wait=group_wait, round_timeout=60.0, mode=Mode.AUXILIARY)

    async def main() -> list[Receipt]:
        async with auxiliary, trains[0], trains[1]:
            for peer in trains:
                peer.progress.announce(b"")
            for peer in trains:
                assert await peer.progress.until(bool, 10.0)
            averaging = [asyncio.create_task(auxiliary.average())]
            for peer in trains:
                averaging.append(asyncio.create_task(peer.average(start_size=ExpectedAtFirst(frozenset).start_size)))
                await asyncio.sleep(3.0)
            return await asyncio.gather(*averaging)

    for receipt in swarm.simulate(main()):
        assert len(receipt.members) == 3
        assert receipt.seconds < 10.0


@pytest.mark.parametrize(("training", "outcome"), [(1, Outcome.NO_GROUP), (2, Outcome.AVERAGED)])
def test_an_auxiliary_that_leads_keeps_to_the_quorum_of_its_followers(training: int, outcome: Outcome) -> None:
    """A third peer is expected and does not come: two are enough, and one is not."""
    swarm = Swarm(1)
    trains = [swarm.peer(f"peer:{n + 1}", [torch.ones(2)], group_wait=50.0, round_timeout=90.0) for n in range(3)]
    auxiliary = swarm.peer("peer:9", [torch.ones(2)], group_wait=45.0, round_timeout=90.0, mode=Mode.AUXILIARY)
    quorum = Quorum(2, 0.5)

    async def main() -> list[Receipt]:
        async with auxiliary, trains[0], trains[1], trains[2]:
            for peer in trains:
                peer.progress.announce(b"")
            averaging = [asyncio.create_task(auxiliary.average(search_timeout=80.0))]
            await asyncio.sleep(1.0)
            for peer in trains[:training]:
                options: RoundOptions = {
                    "quorum": quorum,
                    "gather": {"quorum": list(quorum.stated)},
                    "search_timeout": 80.0,
                }
                options["expected_peers"] = lambda _: ["peer:3"]
                averaging.append(asyncio.create_task(peer.average(**options)))
            return await asyncio.gather(*averaging)

    receipts = swarm.simulate(main())
    assert {receipt.outcome for receipt in receipts} == {outcome}
    if outcome is Outcome.AVERAGED:
        assert max(receipt.seconds for receipt in receipts) < 5.0


async def average_together(peers: Sequence[Peer], topics: Sequence[Topic], step: int) -> list[Receipt]:
    pairs = zip(peers, topics, strict=True)
    receipts = await asyncio.gather(*(peer.average(topic, phase=str(step)) for peer, topic in pairs))
    assert {receipt.outcome for receipt in receipts} == {Outcome.AVERAGED}, f"step {step}"
    return receipts


def test_a_key_for_every_step_does_not_use_up_a_peers_records() -> None:
    """A peer may have a few hundred records, and declarations may outlive the steps in which they were made."""
    swarm = Swarm(1)
    swarm.registry.limits = RecordLimits(records_per_owner=10)
    peers = [swarm.peer(f"peer:{n + 1}", [torch.zeros(2)], group_size=2, group_wait=60.0) for n in range(2)]

    async def main() -> None:
        async with peers[0], peers[1]:
            topics = [peer.topic("gradients", {"w": torch.zeros(2)}) for peer in peers]
            for step in range(30):
                await average_together(peers, topics, step)
                await asyncio.sleep(2.0)

    swarm.simulate(main())


def test_a_topic_of_its_own_for_every_average_leaves_little_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "MAX_LASTING", 8)
    swarm = Swarm(1)
    peer = swarm.peer("peer:1", [torch.zeros(2)])

    async def main() -> None:
        async with peer:
            before = leaks.sizes(peer)
            for number in range(50):
                await peer.average(peer.topic(f"of{number}", {"w": torch.zeros(2)}), search_timeout=0.0)
            grown = leaks.sizes(peer) - before
        assert max(grown.values()) <= 8, grown

    swarm.simulate(main())


@pytest.mark.parametrize(("size", "rounds"), rest_is_long([(2, 3), (4, 2), (4, 3), (8, 3)], 2))
def test_a_grid_of_groups_reaches_the_exact_mean(size: int, rounds: int) -> None:
    swarm, count = Swarm(3), size**rounds
    tensors = scalars(count, 3)
    mean = torch.stack(tensors).mean(dim=0)
    digits = (size - 1).bit_length()

    def bits(number: int) -> str:
        return "".join(format(number // size**axis % size, f"0{digits}b") for axis in range(rounds - 1))

    peers = [
        swarm.peer(f"peer:{n + 1}", [tensors[n]], group_size=size, group_bits=bits(n), group_wait=30.0)
        for n in range(count)
    ]
    for receipts in swarm.simulate(swarm.average_together(peers, rounds)):
        assert [len(receipt.members) for receipt in receipts] == [size] * rounds
    assert spread(tensors) < 1e-9
    torch.testing.assert_close(torch.stack(tensors).mean(dim=0), mean, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", [Mode.NODE, Mode.CLIENT])
def test_the_first_bit_is_dropped_if_no_other_peer_is_seen(mode: Mode) -> None:
    swarm = Swarm(2)
    tensors = scalars(2, 2)
    peers = [
        swarm.peer(f"peer:{n + 1}", [tensors[n]], group_size=2, group_bits=bits, group_wait=2.0, mode=mode)
        for n, (bits, mode) in enumerate([("0011", Mode.NODE), ("1011", mode)])
    ]
    for receipts in swarm.simulate(swarm.average_together(peers)):
        assert receipts[0].outcome is Outcome.AVERAGED
        assert receipts[0].seconds > 2.0


def test_a_dropped_bit_is_back_at_the_next_search() -> None:
    """Otherwise a peer that was alone once would always look under a shorter key than all others."""
    swarm = Swarm(2)
    (tensor,) = scalars(1, 2)
    peer = swarm.peer("peer:1", [tensor], group_bits="0011", group_wait=2.0, round_timeout=5.0)
    keys: list[str] = []

    async def main() -> None:
        async with peer:
            for _ in range(2):
                keys.append(peer.status.group_key)
                searching = asyncio.create_task(peer.average())
                await asyncio.sleep(1.0)
                keys.append(peer.status.group_key)
                await asyncio.sleep(2.0)
                keys.append(peer.status.group_key)
                await searching

    swarm.simulate(main())
    whole, shorter = "0b0011", "0b011"
    found = [key.rpartition(".")[2] for key in keys]
    assert found[:3] == [whole, whole, shorter]
    assert found[4:] == [whole, shorter]


SWAPPED = {"x": torch.zeros(4), "y": torch.full((4,), 100.0)}, {"y": torch.full((4,), 100.0), "x": torch.zeros(4)}


@pytest.mark.parametrize("modes", [(Mode.NODE, Mode.NODE), (Mode.NODE, Mode.CLIENT)])
@pytest.mark.parametrize("share_state", [True, False])
def test_tensors_of_one_shape_in_another_order_are_refused_by_name(modes: tuple[Mode, Mode], share_state: bool) -> None:
    swarm = Swarm(2)
    peers = [
        swarm.peer(f"peer:{n}", tensors, mode=mode, share_state=share_state, group_wait=2.0)
        for n, (tensors, mode) in enumerate(zip(SWAPPED, modes, strict=True), 1)
    ]
    receipts = [receipt for [receipt] in swarm.simulate(swarm.average_together(peers))]
    assert {receipt.outcome for receipt in receipts} == {Outcome.NO_GROUP}
    assert re.search("tensor '[xy]' is '[xy]' there", " ".join(receipt.reason for receipt in receipts))
    assert all(peer.own_tensors[list(peer.tensor_names).index("x")].sum() == 0 for peer in peers)


def test_wrappers_prefixes_and_tensors_without_names_keep_nobody_apart() -> None:
    swarm = Swarm(3)
    zeros, ones = [torch.zeros(3), torch.ones(3)], [torch.ones(3), torch.zeros(3)]
    sets: list[Any] = [
        dict(zip(("0.weight", "buffer/0.mean"), zeros, strict=True)),
        dict(zip(("module.0.weight", "buffer/module.0.mean"), ones, strict=True)),
        dict(zip(("group0.param0", "buffer/_orig_mod.0.mean"), ones, strict=True)),
        ones,
    ]
    peers = [swarm.peer(f"peer:{n}", tensors, group_size=4, group_wait=2.0) for n, tensors in enumerate(sets, 1)]
    for [receipt] in swarm.simulate(swarm.average_together(peers)):
        assert (receipt.outcome, len(receipt.members)) == (Outcome.AVERAGED, 4)


@pytest.mark.parametrize("seed", rest_is_long(range(6), 2))
@pytest.mark.parametrize("mode", [Mode.AUXILIARY, Mode.NODE])
def test_a_leader_without_names_mixes_nobody_who_has_others(seed: int, mode: Mode) -> None:
    """An auxiliary has none, since nothing of its tensors is in the average."""
    swarm = Swarm(seed)
    unnamed = [torch.zeros(4), torch.full((4,), 100.0)]
    peers = [swarm.peer("peer:1", unnamed if mode is Mode.NODE else SWAPPED[1], mode=mode, group_wait=2.0)]
    # Members would change their tensors at once, so each peer has its own.
    sets = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in (*SWAPPED, SWAPPED[0])]
    peers += [swarm.peer(f"peer:{n}", tensors, group_wait=3.0) for n, tensors in enumerate(sets, 2)]
    receipts = [receipt for [receipt] in swarm.simulate(swarm.average_together(peers))]
    mixed = {"peer:3", "peer:2"}, {"peer:3", "peer:4"}
    assert not any(pair <= set(receipt.members) for receipt in receipts for pair in mixed)
    assert any(receipt.averaged for receipt in receipts)

"""A collector learns the peers of a run from one of them, and asks each at most once in two seconds."""

import json
import socket
from itertools import pairwise

import pytest

from averaging.monitor import Collector, snapshot_json
from averaging.monitor.collector import INTERVAL
from tests.monitor.monitored import light_run
from tests.support.ports import free_address


async def test_all_peers_are_learned_from_one_and_asked_at_most_once_in_two_seconds() -> None:
    async with light_run(64) as run:
        async with Collector([run.endpoint], receipts=4) as collector:
            snapshot = await collector.collect()
            snapshots = collector.snapshots()
            while len(snapshot.answering) < 64 or max(len(peer.calls) for peer in run.peers) < 2:
                snapshot = await anext(snapshots)
            await snapshots.aclose()
        calls = [peer.calls for peer in run.peers]
        assert [peer.endpoint for peer in snapshot.peers] == sorted(peer.endpoint for peer in run.peers)
        assert all(after - before >= INTERVAL for times in calls for before, after in pairwise(times))
        view = snapshot.peers[0]
        assert view.last_round is not None
        assert [receipt.round for receipt in collector.receipts_of(view.endpoint)][-1] == view.last_round.round
        assert snapshot.rounds_per_minute == pytest.approx(64 / 8 * 120, rel=0.5)
        assert snapshot.waiting_share is not None
        assert snapshot.readers[0][1].name == "192.0.2.9:4300"


async def test_a_receipt_is_in_one_snapshot_only() -> None:
    async with light_run(1) as run, Collector([run.endpoint], receipts=64, interval=0.1) as collector:
        await collector.collect()
        seen = [receipt.round for receipt in collector.snapshot().peers[0].receipts]
        assert collector.snapshot().peers[0].receipts == ()
        snapshots = collector.snapshots()
        while len(run.peers[0].calls) < 3:
            seen += [receipt.round for receipt in (await anext(snapshots)).peers[0].receipts]
        await snapshots.aclose()
        assert seen == sorted(set(seen))


async def test_peers_that_do_not_answer_are_named_with_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system accepts connections, and nobody reads
        stopped = f"127.0.0.1:{silent.getsockname()[1]}"
        await _check_silent_peers(stopped)


async def _check_silent_peers(stopped: str) -> None:
    async with light_run(3) as run, Collector([run.endpoint]) as collector:
        gone, client = free_address(), "client::1234"
        run.peers[0].others += (stopped, gone, client, "169.254.169.254:80", "not an address")
        snapshot = await collector.collect()
        errors = {peer.endpoint: peer.error for peer in snapshot.peers}
        assert len(snapshot.answering) == 3
        assert "no answer within 3 s" in errors[stopped]
        assert "refuse" in errors[gone]
        assert "accepts no calls" in errors[client]
        assert "is not dialled" in errors["169.254.169.254:80"]
        assert "not an address" not in errors


async def test_a_peer_of_another_run_is_not_mixed_in() -> None:
    async with light_run(1) as run, light_run(1, run_id="other") as other, Collector([run.endpoint]) as collector:
        run.peers[0].others += (other.endpoint,)
        snapshot = await collector.collect()
        assert snapshot.run_id == "demo"
        assert {peer.endpoint: peer.error for peer in snapshot.peers} == {
            run.endpoint: "",
            other.endpoint: "belongs to run 'other'",
        }


async def test_a_peer_under_another_address_is_shown_once() -> None:
    async with light_run(2) as run:
        alias = run.endpoint.replace("127.0.0.1", "localhost")
        async with Collector([alias]) as collector:
            snapshot = await collector.collect()
            assert sorted(peer.endpoint for peer in snapshot.peers) == sorted(peer.endpoint for peer in run.peers)
            assert [len(peer.calls) for peer in run.peers] == [1, 1]


async def test_text_of_a_hostile_peer_is_harmless_in_json() -> None:
    evil = "\x1b[2J\x00evil"
    async with light_run(1) as run, Collector([run.endpoint]) as collector:
        run.peers[0].changes = {"software": evil, "waiting_for": (evil,), "group_key": evil}
        text = json.dumps(snapshot_json(await collector.collect()), allow_nan=False)
        assert "\\u001b" not in text
        assert "evil" in text

"""What the page shows of a snapshot, and what it takes from real peers."""

import asyncio
import json
import math
import subprocess
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging import Peer
from averaging.dashboard import RECEIPTS, RunHistory, views_of
from averaging.monitor import Collector, PeerView, RunSnapshot, snapshot_json
from averaging.peer import PeerContext
from averaging.receipts import Account, TrainingProgress, WeightReader
from tests.dashboard.dashboards import ENDPOINTS, NOW, receipt
from tests.support.grpc_fakes import STATUS
from tests.support.processes import DEADLINE


def test_when_rounds_begin_what_weights_count_and_who_is_late_are_shown() -> None:
    account = Account(ENDPOINTS[0], weight=1600.0, weight_unit="samples", age=9, discount=0.63)
    last = replace(receipt(), accounts=(account,))
    status = replace(STATUS, endpoint=ENDPOINTS[0], members=(), last_round=last)
    view = snapshot_json(RunSnapshot(NOW, "run", (PeerView(ENDPOINTS[0], status=status),)), receipts=False)
    (peer,) = view["peers"]
    assert (peer["doing"], peer["training"]["missed"], peer["training"]["grace"]) == ("late", 3, 0.6)
    assert ([peer["training"]["terms"]], peer["weight"]) == (view["terms"], "1600 samples")
    assert view["terms"] == ["a round every 120s, quorum 0.5 (grace at most 10.0 s), weights in samples"]
    history = RunHistory()
    history.add_receipt(ENDPOINTS[0], last, NOW)
    (round_,) = history.everything()["rounds"]
    details = history.details(round_["id"]) or {}
    (shown,) = details["receipts"][0]["accounts"]
    assert (shown["weight"], shown["weight_unit"]) == (1600.0, "samples")
    assert details["receipts"][0]["late"] == {ENDPOINTS[0]: "9 steps late, weight × 0.63"}


PAGE = Path(__file__).parents[2] / "averaging" / "dashboard" / "page" / "page.js"


@pytest.mark.browser
def test_the_page_reads_what_the_server_sends() -> None:
    """Its functions between the JSON and what is shown run without a browser."""
    client = PeerView("client::a", error="a client, which accepts no calls")
    silent = PeerView(ENDPOINTS[0], error="connection refused")
    reader = WeightReader("follower", "192.0.2.9:4300", version=3, newest=5)
    answering = PeerView(ENDPOINTS[1], status=replace(STATUS, readers=(reader,)))
    snapshot = RunSnapshot(NOW, "run", (client, silent))
    update = snapshot_json(snapshot, receipts=False)
    update["followers"] = snapshot_json(RunSnapshot(NOW, "run", (answering,)))["followers"]
    source = PAGE.read_text()
    functions = source[source.index("function shownPeer") : source.index("function show()")]
    helpers = "\n".join(line for line in source.splitlines() if line.startswith(("const words =", "const counted =")))
    program = f"""{helpers}
{functions}
const update = {json.dumps(update)};
const peers = update.peers.map(shownPeer);
console.log(JSON.stringify([peers, shownRun(update, peers), othersOf(update)]));"""
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    (first, second), run, others = json.loads(done.stdout)
    assert (first["error"], first["doing"], first["role"]) == ("", "accepts no calls", "client")
    assert second["error"] == "connection refused"
    assert run["problem"] == f"No peer of the run answers. {ENDPOINTS[0]}: connection refused"
    assert run["bytes_in"] == 0
    assert [(other["kind"], other["text"]) for other in others] == [
        ("follower", f"2 behind version 5 of {ENDPOINTS[1]}")
    ]


async def test_real_peers_are_shown_with_their_rounds() -> None:
    progress = TrainingProgress("LocalSGD", "training", 30, 3, steps_per_second=2.5, samples_per_second=math.nan)
    options: dict[str, Any] = {"run_id": "run", "group_size": 2}
    async with (
        asyncio.timeout(DEADLINE),
        Peer([torch.ones(5)], context=PeerContext(training=lambda: progress), **options) as first,
        Peer([torch.zeros(5)], join=[first.endpoint], **options) as second,
    ):
        await asyncio.gather(first.average(), second.average())
        history = RunHistory()
        async with (
            Collector([second.endpoint], receipts=RECEIPTS) as collector,
            aclosing(views_of(collector)(history)) as views,
        ):
            async for view in views:
                if len(view["peers"]) == 2 and all(peer["state_version"] for peer in view["peers"]):
                    break
        shown = {peer["endpoint"]: peer for peer in view["peers"]}
        training = shown[first.endpoint]["training"]
        assert (training["strategy"], training["local_step"], training["steps_per_second"]) == ("LocalSGD", 30, 2.5)
        assert shown[second.endpoint]["outcomes"] == {"averaged": 1}
        assert shown[second.endpoint]["last"]["outcome"] == "averaged"
        (round_,) = history.everything()["rounds"]
        assert {each["peer"] for each in round_["receipts"]} == {first.endpoint, second.endpoint}
        assert round_["text"].endswith("all 2 agree")
        json.dumps([view, history.everything()], allow_nan=False)

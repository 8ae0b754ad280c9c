"""What the page shows of a snapshot, and what it takes from real peers."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import torch

from averaging import Peer
from averaging.dashboard import RECEIPTS, RunHistory, views_of
from averaging.dashboard.views import GonePeers, remember, view_of
from averaging.monitor import Collector, PeerView, RunSnapshot, ServiceView
from averaging.receipts import Account, TrainingProgress
from tests.support.dashboards import ENDPOINTS, NOW, receipt
from tests.support.grpc_fakes import STATUS
from tests.support.processes import DEADLINE


def test_a_peer_that_does_not_answer_keeps_its_reason() -> None:
    silent = PeerView(ENDPOINTS[0], error=f"{ENDPOINTS[0]}: connection refused")
    view = view_of(RunSnapshot(NOW, "", (silent,)))
    assert view["peers"][0]["error"] == "connection refused"
    assert view["run"]["problem"] == f"No peer of the run answers. {ENDPOINTS[0]}: connection refused"
    assert view["run"]["bytes_in"] == 0
    assert view_of(RunSnapshot(NOW, "", ()))["run"]["problem"] == ""


def test_a_client_is_no_silent_peer() -> None:
    client = PeerView("client::a", error="a client, which accepts no calls")
    (shown,) = view_of(RunSnapshot(NOW, "run", (client,)))["peers"]
    assert (shown["error"], shown["doing"], shown["role"]) == ("", "accepts no calls", "client")


def test_texts_of_a_peer_are_short_and_printable() -> None:
    status = replace(STATUS, software=100_000 * "x" + "\x1b", mode="client")
    view = view_of(RunSnapshot(NOW, "run\u202e", (PeerView(ENDPOINTS[0], status=status, error="\x00" * 5000),)))
    assert len(json.dumps(view)) < 6000
    assert view["run"]["id"] == "run?"


def test_when_rounds_begin_what_weights_count_and_who_is_late_are_shown() -> None:
    account = Account(ENDPOINTS[0], weight=1600.0, weight_unit="samples", age=9, discount=0.63)
    last = replace(receipt(), accounts=(account,))
    status = replace(STATUS, endpoint=ENDPOINTS[0], members=(), last_round=last)
    view = view_of(RunSnapshot(NOW, "run", (PeerView(ENDPOINTS[0], status=status),)))
    (peer,) = view["peers"]
    assert (peer["doing"], peer["late"], peer["grace"]) == ("late", "late by 3 rounds", 0.6)
    assert (peer["terms"], peer["weight"]) == (view["run"]["terms"], "1600 samples")
    assert peer["terms"] == "a round every 120s, quorum 0.5 (grace at most 10.0 s), weights in samples"
    history = RunHistory()
    history.add_receipt(ENDPOINTS[0], last, NOW)
    (round_,) = history.everything()["rounds"]
    (shown,) = (history.details(round_["id"]) or {})["receipts"][0]["accounts"]
    assert (shown["weight"], shown["weight_unit"], shown["late"]) == (1600.0, "samples", "9 steps late, weight × 0.63")


def test_services_are_shown_with_what_they_say_or_why_they_do_not() -> None:
    feed = ServiceView("http://a:8000", values={"current_step": 7, "nested": {"a": 1}})
    register = ServiceView("b:29400", error="connection refused")
    others = view_of(RunSnapshot(NOW, "run", (), register=register, feed=feed))["others"]
    assert others[0] == {
        "kind": "register",
        "name": "b:29400",
        "version": None,
        "error": "connection refused",
        "text": "answers",
    }
    assert others[1]["text"] == "current step 7"


def test_a_peer_that_the_run_has_forgotten_is_still_told_of() -> None:
    gone = GonePeers()
    one, other = (PeerView(name, status=STATUS) for name in ENDPOINTS[:2])
    gone.observe(RunSnapshot(NOW, "run", (one, other)))
    gone.observe(RunSnapshot(NOW + 5, "run", (one, replace(other, error="connection refused"))))
    assert gone.to_json(NOW + 5) == []
    gone.observe(RunSnapshot(NOW + 300, "run", (one,)))
    (line,) = gone.to_json(NOW + 300)
    assert (line["name"], line["text"]) == (ENDPOINTS[1], "last answer 5 min ago; then connection refused")
    gone.observe(RunSnapshot(NOW + 301, "run", (one, other)))
    assert gone.to_json(NOW + 301) == []
    gone.observe(RunSnapshot(NOW + 4000, "run", (one,)))
    assert gone.to_json(NOW + 4000) == []


def test_receipts_and_rates_are_remembered() -> None:
    history = RunHistory()
    remember(RunSnapshot(NOW, "run", (PeerView(ENDPOINTS[0], receipts=(receipt(),)),)), history)
    assert len(history.everything()["rounds"]) == 1
    assert history.everything()["points"] == [[NOW, 0, 0, {}]]


@pytest.mark.asyncio
async def test_real_peers_are_shown_with_their_rounds() -> None:
    progress = TrainingProgress("LocalSGD", "training", 30, 3, steps_per_second=2.5, samples_per_second=math.nan)
    options: dict[str, Any] = {"run_id": "run", "group_size": 2}
    async with (
        asyncio.timeout(DEADLINE),
        Peer([torch.ones(5)], training=lambda: progress, **options) as first,
        Peer([torch.zeros(5)], join=[first.endpoint], **options) as second,
    ):
        await asyncio.gather(first.average(), second.average())
        history = RunHistory()
        async with (
            Collector([second.endpoint], receipts=RECEIPTS) as collector,
            aclosing(views_of(collector)(history)) as views,
        ):
            async for view in views:
                if len(view["peers"]) == 2 and all(peer["version"] for peer in view["peers"]):
                    break
        shown = {peer["endpoint"]: peer for peer in view["peers"]}
        assert shown[first.endpoint]["strategy"] == "LocalSGD"
        assert (shown[first.endpoint]["local_step"], shown[first.endpoint]["rate"]) == (30, 2.5)
        assert shown[second.endpoint]["rounds"] == {"averaged": 1}
        assert shown[second.endpoint]["last"]["outcome"] == "averaged"
        (round_,) = history.everything()["rounds"]
        assert {each["peer"] for each in round_["receipts"]} == {first.endpoint, second.endpoint}
        assert round_["text"].endswith("all 2 agree")
        json.dumps([view, history.everything()], allow_nan=False)

"""What the page remembers of a run: rounds, curves, and who reduces for whom, within bounds."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from averaging.dashboard import CurvePoint, RunHistory, history as history_module
from averaging.receipts import Account, Outcome
from tests.dashboard.dashboards import ENDPOINTS, NOW, receipt


def filled(*receipts: Any) -> RunHistory:
    history = RunHistory()
    for each in receipts:
        history.add_receipt(each.endpoint, each, NOW)
    return history


def test_receipts_of_one_group_are_one_round() -> None:
    history = filled(*(receipt(name) for name in ENDPOINTS), receipt(number=2))
    rounds = history.everything()["rounds"]
    assert [len(each["receipts"]) for each in rounds] == [3, 1]
    assert rounds[0]["outcome"] == "averaged"
    assert not rounds[0]["fault"]
    assert rounds[0]["receipts"][0]["phases"] == [["looking", 1.0], ["allreduce", 2.0]]


def test_rounds_without_a_group_stay_apart() -> None:
    alone: dict[str, Any] = {
        "outcome": Outcome.NO_GROUP,
        "members": (),
        "accounts": (),
        "group_id": b"",
        "reason": "nobody came",
    }
    history = filled(*(replace(receipt(name), **alone) for name in ENDPOINTS))
    rounds = history.everything()["rounds"]
    assert len({each["id"] for each in rounds}) == 3
    assert all(each["fault"] and "nobody came" in each["text"] for each in rounds)
    assert history.everything()["graph"] is None


def test_changes_are_given_once_and_a_round_again_when_a_receipt_comes() -> None:
    history = filled(receipt(ENDPOINTS[0]))
    history.add_point(CurvePoint(NOW, 1.0, 2.0, {ENDPOINTS[0]: 3.0}))
    first = history.changes()
    assert len(first["rounds"]) == 1
    assert first["points"] == [[NOW, 1, 2, {ENDPOINTS[0]: 3.0}]]
    assert history.changes() == {"rounds": [], "points": [], "graph": None}
    history.add_receipt(ENDPOINTS[1], receipt(ENDPOINTS[1]), NOW)
    history.add_receipt(ENDPOINTS[1], receipt(ENDPOINTS[1]), NOW)  # the same one again
    (again,) = history.changes()["rounds"]
    assert again["id"] == first["rounds"][0]["id"]
    assert len(again["receipts"]) == 2
    assert history.everything()["points"] == first["points"]


def test_the_graph_is_that_of_the_latest_averaged_round() -> None:
    accounts = (
        Account(ENDPOINTS[0], share=0.5),
        Account(ENDPOINTS[1], share=0.5, bytes_sent=100, bytes_received=40, lane="grpc", lane_reason="refused"),
        Account(ENDPOINTS[2], mode="client", bytes_sent=70),
    )
    history = filled(receipt(number=3, accounts=accounts), receipt(number=1))
    graph = history.everything()["graph"]
    assert [node["share"] for node in graph["nodes"]] == [0.5, 0.5, 0.0]
    assert graph["nodes"][2]["mode"] == "client"
    # The bytes that came back are known from the one receipt, but not on which lane.
    assert graph["edges"] == [[0, 1, 100, "grpc", "refused"], [0, 2, 70, "", ""], [1, 0, 40, "", ""]]


@pytest.mark.parametrize(
    "strange",
    [
        {"started": math.nan},
        {"started": NOW + 1e6},
        {"seconds": 1e300},
        {"seconds": -1.0},
        {"phases": {"looking": math.inf}},
        {"phases": dict.fromkeys(map(str, range(17)), 0.1)},
        {"members": tuple(f"10.1.{i // 250}.{i % 250}:1" for i in range(1025))},
    ],
)
def test_receipts_that_cannot_be_shown_are_ignored(strange: dict[str, Any]) -> None:
    assert filled(receipt(**strange)).everything()["rounds"] == []


def test_a_peer_speaks_only_for_itself_and_its_texts_are_printable() -> None:
    history = RunHistory()
    text = "\x1b[31m\u202e" + 1_000_000 * "x"
    forged = receipt(ENDPOINTS[1], reason=text, topic=text, outcome=Outcome.FAILED, phases={text: 1.0})
    history.add_receipt(ENDPOINTS[0], forged, NOW)
    (shown,) = history.everything()["rounds"]
    assert [each["peer"] for each in shown["receipts"]] == [ENDPOINTS[0]]
    texts = json.dumps([history.everything(), history.details(shown["id"])], allow_nan=False, ensure_ascii=False)
    assert "\x1b" not in texts
    assert "\u202e" not in texts
    assert len(texts) < 100_000


def test_no_number_of_a_receipt_breaks_the_page() -> None:
    strange = Account(ENDPOINTS[0], share=math.nan, weight=math.inf, bytes_sent=2**64 - 1)
    history = filled(receipt(accounts=(strange, strange, strange), bytes_sent=2**64 - 1, kept_local=2**63))
    json.dumps([history.everything(), history.details(history.everything()["rounds"][0]["id"])], allow_nan=False)


def test_memory_is_bounded_and_the_oldest_rounds_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_ROUNDS", 5)
    history = filled(*(receipt(number=number) for number in range(1, 9)))
    assert [each["receipts"][0]["round"] for each in history.everything()["rounds"]] == [4, 5, 6, 7, 8]
    monkeypatch.setattr(history_module, "MAX_ACCOUNTS", 8)
    history.add_receipt(ENDPOINTS[0], receipt(number=9), NOW)
    assert [each["receipts"][0]["round"] for each in history.everything()["rounds"]] == [8, 9]
    assert len(history.changes()["rounds"]) == 2

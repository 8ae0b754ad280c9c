"""What the keys of `averaging top` do, and how peers are shown; without a terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from averaging.monitor import PeerView, RunSnapshot, TopScreen, keys_in, snapshot_json
from averaging.monitor.history import LEAST_WINDOW, WINDOW, PeerHistory
from averaging.monitor.screen import Page
from averaging.monitor.table import COLUMNS, age, as_text, compact
from averaging.receipts import Account, Outcome, PeerStatus, Receipt, Totals, TrainingProgress
from tests.support.grpc_fakes import RECEIPT, STATUS

NOW = 1.8e9


def status(number: int, **changes: object) -> PeerStatus:
    return replace(STATUS, endpoint=f"10.0.0.{number}:1", **changes)  # type: ignore[arg-type]


def run(count: int) -> RunSnapshot:
    peers = tuple(PeerView(f"10.0.0.{n}:1", status=status(n, state_version=n)) for n in range(count))
    return RunSnapshot(NOW, "demo", peers)


def shown(screen: TopScreen, snapshot: RunSnapshot, width: int = 80, height: int = 24) -> list[str]:
    lines = screen.lines(snapshot, lambda _: (), width, height)
    assert len(lines) == height
    assert all(line.cell_len <= width for line in lines)
    return [line.plain for line in lines]


@pytest.mark.parametrize("width", [1, 7, 80, 500])
@pytest.mark.parametrize("height", [1, 2, 5, 24, 100])
@pytest.mark.parametrize("page", list(Page))
def test_every_page_fits_every_size(width: int, height: int, page: Page) -> None:
    screen = TopScreen()
    screen.page = page
    shown(screen, run(64), width, height)
    shown(screen, RunSnapshot(NOW, "", ()), width, height)


def test_hostile_text_has_no_control_characters_and_keeps_its_column() -> None:
    evil = "\x1b[2J" + "\u4e2d" * 50 + "\n"
    peer = PeerView("10.0.0.1:1", status=status(1, software=evil, waiting_for=(evil,), run_id=evil))
    snapshot = RunSnapshot(NOW, evil, (peer, PeerView("10.0.0.2:1", error=evil)), notes=(evil,))
    screen = TopScreen()
    for _ in range(len(COLUMNS)):
        assert "\x1b" not in "".join(shown(screen, snapshot))
        screen.press("right")
    assert "\x1b" not in "".join(as_text(snapshot))


QUORUM = TrainingProgress(
    "DiLoCo", "training", 90, 7, sync_every="120s", quorum="2", grace=0.6, max_grace=10.0, weight_unit="samples"
)


def test_when_rounds_begin_what_weights_count_and_who_is_late_are_shown() -> None:
    idle: dict[str, object] = {"members": (), "looking": True, "leader": "", "waiting_for": ()}
    account = Account("10.0.0.0:1", weight=1600.0, weight_unit="samples")
    in_time = status(0, training=QUORUM, last_round=replace(STATUS.last_round or RECEIPT, accounts=(account,)), **idle)
    late = status(1, training=replace(QUORUM, missed=3, grace=0.25), **idle)
    snapshot = RunSnapshot(NOW, "demo", tuple(PeerView(each.endpoint, status=each) for each in (in_time, late)))
    text = as_text(snapshot)
    terms = "a round every 120s, quorum 2 (grace at most 10.0 s), weights in samples; late: 10.0.0.1:1 (3)"
    assert terms in text
    head, first, second = (line.split() for line in text[-3:])
    assert {"EVERY", "QUORUM", "GRACE", "WEIGHT"} <= set(head)
    assert (first[1], second[1:3]) == ("looking", ["late", "3"])
    assert "120s 2 0.60 s 1.6k samples" in " ".join(first)
    assert "120s 2 0.25 s" in " ".join(second)
    training = snapshot_json(snapshot)["peers"][1]["training"]
    assert (training["sync_every"], training["quorum"], training["grace"], training["missed"]) == ("120s", "2", 0.25, 3)


def test_peers_with_other_terms_are_shown_with_theirs() -> None:
    steps = replace(QUORUM, sync_every="20 steps", quorum="", max_grace=None, weight_unit="")
    peers = (status(0, training=QUORUM), status(1, training=QUORUM), status(2, training=steps))
    snapshot = RunSnapshot(NOW, "demo", tuple(PeerView(each.endpoint, status=each) for each in peers))
    assert snapshot.terms == (QUORUM.terms, "a round every 20 steps")
    silent = replace(snapshot, peers=tuple(replace(peer, error="silent") for peer in snapshot.peers))
    assert silent.terms == ()


def test_the_selected_peer_stays_selected_while_others_come() -> None:
    screen = TopScreen()
    shown(screen, run(3))
    screen.press("down")
    assert screen.selected == "10.0.0.1:1"
    shown(screen, run(64))
    assert screen.selected == "10.0.0.1:1"
    screen.press("end")
    assert screen.selected == shown(screen, run(64))[-2].split()[0]
    screen.press("home")
    screen.press("up")
    assert screen.selected == "10.0.0.0:1"


def test_numbers_are_sorted_downwards_and_names_upwards() -> None:
    screen, version = TopScreen(), [column.title for column in COLUMNS].index("VERSION")
    for _ in range(version):
        screen.press("s")
    shown(screen, run(12))
    assert [peer.endpoint for peer in screen._shown][:2] == ["10.0.0.11:1", "10.0.0.10:1"]
    screen.press("r")
    shown(screen, run(12))
    assert screen._shown[0].endpoint == "10.0.0.0:1"
    screen.press("S")
    assert "STEPS/S" in shown(screen, run(12))[-1]


def test_a_filter_takes_letters_that_are_keys_elsewhere() -> None:
    screen = TopScreen()
    for key in ("/", *"0.0.3:1q", "backspace", "enter"):
        screen.press(key)
    assert not screen.ended
    shown(screen, run(5))
    assert [peer.endpoint for peer in screen._shown] == ["10.0.0.3:1"]
    screen.press("escape")
    shown(screen, run(5))
    assert len(screen._shown) == 5
    screen.press("q")
    assert screen.ended


def test_keys_of_a_terminal() -> None:
    assert keys_in(b"j\x1b[A\x1bOB\x1b[5~q") == ["j", "up", "down", "pageup", "q"]
    assert keys_in(b"\x1b") == ["escape"]
    assert keys_in(b"\x1b\x1b[B") == ["escape", "down"]
    assert keys_in(b"\x1b[1;5Cx\x7f\r\x03") == ["x", "backspace", "enter", "ctrl+c"]
    assert keys_in(b"\x1bq") == ["escape", "q"]
    assert keys_in(b"") == []
    assert keys_in(b"\xff") == ["\ufffd"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, ""),
        (0, "0"),
        (0.25, "0.25"),
        (9.994, "9.99"),
        (42.4, "42"),
        (999.4, "999"),
        (999.6, "1.0k"),
        (4.5e6, "4.5M"),
        (1e300, "?"),
        (float("nan"), "?"),
    ],
)
def test_numbers_are_short(number: float | None, text: str) -> None:
    assert compact(number) == text


def test_ages_are_short() -> None:
    assert [age(seconds) for seconds in (3, 720, 7200, 86400 * 9, 1e300)] == ["3s", "12m", "2h", "9d", "?"]


def answer(rounds: int, *, started: float = NOW - 1000, received: int = 0) -> PeerStatus:
    totals = Totals(
        {Outcome.AVERAGED: rounds}, float(rounds), {"looking": rounds / 2}, {"direct": received}, {}, rounds / 4
    )
    return status(1, started=started, totals=totals, receipts=(Receipt(rounds, Outcome.AVERAGED),))


def test_rates_cover_the_time_since_the_start_and_later_a_minute() -> None:
    history = PeerHistory("10.0.0.1:1")
    history.answered(answer(1000, received=2000), NOW, 0.01)
    view = history.view(NOW)
    assert (view.window, view.rounds_per_minute, view.bytes_sent) == (1000, 60, 2)
    assert (view.waiting_share, view.phase_seconds) == (0.25, {"looking": 0.5})
    for second in range(2, 200, 2):
        history.answered(answer(1000 + 2 * second), NOW + second, 0.01)
        view = history.view(NOW + second)
        if second >= LEAST_WINDOW:
            assert view.rounds_per_minute == pytest.approx(120)
            assert view.window <= WINDOW + 2


def test_a_restarted_peer_begins_anew() -> None:
    history = PeerHistory("10.0.0.1:1")
    history.answered(answer(1000), NOW, 0.01)
    history.answered(answer(5, started=NOW + 5), NOW + 15, 0.01)
    view = history.view(NOW + 15)
    assert (view.window, view.rounds_per_minute) == (10, 30)
    assert [receipt.round for receipt in history.receipts] == [5]


def test_a_round_counts_once_however_many_members_it_has() -> None:
    members = tuple(f"10.0.0.{n}:1" for n in range(4))
    last = Receipt(3, Outcome.AVERAGED, members=members)
    views = [PeerView(name, status=status(n, last_round=last), rounds_per_minute=6.0) for n, name in enumerate(members)]
    assert RunSnapshot(NOW, "demo", tuple(views)).rounds_per_minute == pytest.approx(6.0)

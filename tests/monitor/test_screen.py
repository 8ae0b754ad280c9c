"""What the keys of `averaging top` do, and how peers are shown; without a terminal."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import cast

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from averaging.monitor import Collector, PeerView, RunSnapshot, TopApp, as_text, snapshot_json
from averaging.monitor.collector import LEAST_WINDOW, WINDOW, PeerHistory
from averaging.monitor.table import COLUMNS, MAX_CELL
from averaging.receipts import Drift, DriftKind, Outcome, PeerStatus, Receipt, Totals, TrainingProgress
from tests.support.grpc_fakes import RECEIPT, STATUS

NOW = 1.8e9


def status(number: int, **changes: object) -> PeerStatus:
    return replace(STATUS, endpoint=f"10.0.0.{number}:1", **changes)  # type: ignore[arg-type]


def run(count: int) -> RunSnapshot:
    peers = tuple(PeerView(f"10.0.0.{n}:1", status=status(n, state_version=n)) for n in range(count))
    return RunSnapshot(NOW, "demo", peers)


class FakeCollector:
    """Stands in for a collector whose snapshots the test shows itself."""

    def snapshot(self) -> RunSnapshot:
        return RunSnapshot(NOW, "demo", ())

    def receipts_of(self, endpoint: str) -> tuple[Receipt, ...]:
        return (replace(RECEIPT, round=6), replace(RECEIPT, round=7))

    async def snapshots(self) -> AsyncGenerator[RunSnapshot, None]:
        return
        yield


@asynccontextmanager
async def screen(snapshot: RunSnapshot, size: tuple[int, int] = (80, 24)) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    app = TopApp(cast("Collector", FakeCollector()))
    async with app.run_test(size=size) as pilot:
        app.show(snapshot)
        await pilot.pause()
        yield app, pilot


def rows(app: TopApp) -> list[str]:
    """The peers in the order of the table."""
    return [str(row.key.value) for row in app.table.ordered_rows]


def shown(app: TopApp) -> str:
    return "\n".join(str(widget.render()) for widget in app.screen.query(Static))


@pytest.mark.parametrize("size", [(1, 1), (7, 2), (80, 24), (300, 100)])
async def test_every_size_can_be_shown(size: tuple[int, int]) -> None:
    async with screen(run(16), size) as (app, pilot):
        keys = ("down", "right", "end", "w", "escape", "enter", "escape")
        for key in keys[:: 3 if size == (1, 1) else 1]:  # a second for each in the smallest
            await pilot.press(key)
        assert len(rows(app)) == 16
        app.show(RunSnapshot(NOW, "", ()))
        await pilot.press("enter")
        assert rows(app) == []


async def test_hostile_text_has_no_control_characters() -> None:
    evil = "\x1b[2J" + "\u4e2d" * 50 + "\n"
    peer = PeerView("10.0.0.1:1", status=status(1, software=evil, waiting_for=(evil,), run_id=evil))
    snapshot = RunSnapshot(NOW, evil, (peer, PeerView("10.0.0.2:1", error=evil)), notes=(evil,))
    async with screen(snapshot) as (app, _):
        cells = [cell.plain for name in rows(app) for cell in app.table.get_row(name)]
        assert not [text for text in (*cells, shown(app)) if "\x1b" in text]
        assert max(map(len, cells)) <= MAX_CELL
    assert "\x1b" not in "".join(as_text(snapshot))


QUORUM = TrainingProgress(
    "DiLoCo", "training", 90, 7, sync_every="120s", quorum="2", grace=0.6, max_grace=10.0, weight_unit="samples"
)


def test_peers_with_other_terms_are_shown_with_theirs() -> None:
    steps = replace(QUORUM, sync_every="20 steps", quorum="", max_grace=None, weight_unit="")
    peers = (status(0, training=QUORUM), status(1, training=QUORUM), status(2, training=steps))
    snapshot = RunSnapshot(NOW, "demo", tuple(PeerView(each.endpoint, status=each) for each in peers))
    assert snapshot.terms == (QUORUM.terms, "a round every 20 steps")
    silent = replace(snapshot, peers=tuple(replace(peer, error="silent") for peer in snapshot.peers))
    assert silent.terms == ()


async def test_the_selected_peer_stays_selected_while_others_come_and_go() -> None:
    async with screen(run(3)) as (app, pilot):
        await pilot.press("down")
        app.show(run(64))
        assert app.selected == "10.0.0.1:1"
        await pilot.press("up")
        assert app.selected == "10.0.0.19:1"  # the one before by name
        app.show(RunSnapshot(NOW, "demo", run(64).peers[5:]))
        assert app.selected == "10.0.0.19:1"
        assert len(rows(app)) == 59


async def test_numbers_are_sorted_downwards_and_names_upwards() -> None:
    version = [column.title for column in COLUMNS].index("VERSION")
    async with screen(run(12)) as (app, pilot):
        assert rows(app)[:2] == ["10.0.0.0:1", "10.0.0.10:1"]
        await pilot.press(*version * ["s"])
        assert rows(app)[:2] == ["10.0.0.11:1", "10.0.0.10:1"]
        await pilot.press("r")
        assert rows(app)[0] == "10.0.0.0:1"
        await pilot.press("S")
        assert "12 of 12, sorted by STEPS/S" in shown(app)


async def test_a_filter_takes_letters_that_are_keys_elsewhere() -> None:
    async with screen(run(5)) as (app, pilot):
        await pilot.press("slash", *"0.0.3:1q", "backspace", "enter")
        assert rows(app) == ["10.0.0.3:1"]
        assert "1 of 5, sorted by PEER, filter '0.0.3:1'" in shown(app)
        await pilot.press("escape")
        assert len(rows(app)) == 5


async def test_receipts_of_the_selected_peer_are_a_page_the_newest_first() -> None:
    async with screen(run(5)) as (app, pilot):
        await pilot.press("down", "enter")
        text = shown(app)
        assert text.startswith("Receipts of 10.0.0.1:1")
        assert 0 < text.index("round 7") < text.index("round 6")
        await pilot.press("escape", "w")
        assert "Followers and explorers" in shown(app)
        await pilot.press("escape")
        assert len(rows(app)) == 5


def answer(rounds: int, *, started: float = NOW - 1000, received: int = 0) -> PeerStatus:
    totals = Totals(
        {Outcome.AVERAGED: rounds}, float(rounds), {"looking": rounds / 2}, {"direct": received}, {}, rounds / 4
    )
    return status(1, started=started, totals=totals, receipts=(Receipt(rounds, Outcome.AVERAGED),))


def test_rates_cover_the_time_since_the_start_and_later_a_minute() -> None:
    history = PeerHistory("10.0.0.1:1")
    history.answered(answer(1000, received=2000), NOW, 0.01)
    view = history.view(NOW)
    assert (view.window_seconds, view.rounds_per_minute, view.bytes_sent_per_second) == (1000, 60, 2)
    assert (view.waiting_share, view.phase_seconds) == (0.25, {"looking": 0.5})
    history.failed("no answer")
    assert history.view(NOW).state == "silent"
    for second in range(2, 200, 2):
        history.answered(answer(1000 + 2 * second), NOW + second, 0.01)
        view = history.view(NOW + second)
        assert view.answers
        if second >= LEAST_WINDOW:
            assert view.rounds_per_minute == pytest.approx(120)
            assert view.window_seconds <= WINDOW + 2
    history.answered(answer(5, started=NOW + 205), NOW + 215, 0.01)  # it was restarted
    view = history.view(NOW + 215)
    assert (view.window_seconds, view.rounds_per_minute) == (10, 30)
    assert [receipt.round for receipt in history.receipts] == [5]


def test_a_round_counts_once_however_many_members_it_has() -> None:
    members = tuple(f"10.0.0.{n}:1" for n in range(4))
    last = Receipt(3, Outcome.AVERAGED, members=members)
    views = [PeerView(name, status=status(n, last_round=last), rounds_per_minute=6.0) for n, name in enumerate(members)]
    assert RunSnapshot(NOW, "demo", tuple(views)).rounds_per_minute == pytest.approx(6.0)
    views[3] = replace(views[3], error="no answer")  # it was stopped, and the others go on
    last = Receipt(4, Outcome.AVERAGED, members=members[:3])
    views[:3] = [replace(view, status=status(n, last_round=last)) for n, view in enumerate(views[:3])]
    assert RunSnapshot(NOW, "demo", tuple(views)).rounds_per_minute == pytest.approx(6.0)


def test_a_peer_that_differs_from_the_others_is_marked_in_its_own_line() -> None:
    members = "10.0.0.0:1", "10.0.0.1:1"
    drift = Drift(members[1], DriftKind.HYPERPARAMETER, "lr of group 0", "0.2", "0.1")
    last = Receipt(3, Outcome.AVERAGED, members=members, drift=(drift,))
    views = [PeerView(name, status=status(n, last_round=last)) for n, name in enumerate(members)]
    peers = snapshot_json(RunSnapshot(NOW, "demo", tuple(views)))["peers"]
    assert [peer["last"]["outcome"] for peer in peers] == ["averaged", "drifted"]

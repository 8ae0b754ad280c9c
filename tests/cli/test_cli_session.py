"""When `averaging peer` tries again, gives up and writes, and what signals do to it; its peer follows a script."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self, cast

import pytest
import torch
from safetensors.torch import load_file

from averaging.cli import peer as sessions
from averaging.cli.files import Document, Output
from averaging.cli.peer import CommandSession, RoundPlan
from averaging.cli.running import CommandError, CommandOutput, Stop, Stopped, run
from averaging.peer import Adopt
from averaging.peer.peer import Peer
from averaging.protocol import Mode, ReplyForm
from averaging.receipts.receipt import Outcome, Receipt
from averaging.tensors.schema import describe

ME, OTHER = "127.0.0.1:1", "127.0.0.1:2"
AVERAGED = Receipt(0, Outcome.AVERAGED, members=(ME, OTHER))
FAILED = Receipt(0, Outcome.FAILED, reason="all other members were lost")
ALONE = Receipt(0, Outcome.NO_GROUP, reason="no other peer is in the run")

Step = Receipt | Exception | Callable[["ScriptedPeer"], Awaitable[Receipt]]


class ScriptedPeer:
    """Behaves as `Peer` does towards a session. Each step is one attempt: its receipt, or what happens in it."""

    run_id, endpoint, metrics_endpoint = "demo", ME, ""
    config = SimpleNamespace(mode=Mode.NODE, etcd=(), reply_form=ReplyForm.AVERAGE)

    def __init__(self, tensor: torch.Tensor, steps: Sequence[Step]) -> None:
        self.schema = describe(["w"], [tensor], part_size_bytes=1 << 20)
        self.tensor, self.steps = tensor, list(steps)
        self.in_round = False
        self.left = False
        self.topics: list[str | None] = []

    @property
    def status(self) -> SimpleNamespace:
        return SimpleNamespace(group_id=b"1" if self.in_round else b"", members=(), known_peers=1)

    def topic(self, name: str, tensors: dict[str, torch.Tensor], **options: Any) -> str:
        assert (name, options) == ("", {"adopt": Adopt.WHOLE, "commits": True})
        return "whole"

    async def average(self, topic: str | None, *, weight: float) -> Receipt:
        assert weight == 2.0
        self.topics.append(topic)
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        receipt = step if isinstance(step, Receipt) else await step(self)
        if receipt.averaged:
            self.tensor += 1
        return receipt

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.left = True


def play(
    steps: Sequence[Step], output: Path | None = None, *, rounds: int | None = 1, serve: bool = False
) -> tuple[CommandSession, ScriptedPeer]:
    tensor = torch.zeros(2)
    peer = ScriptedPeer(tensor, steps)
    plan = RoundPlan(rounds=rounds, serve=serve, retries=2, interval=0.0, weight=2.0, join_command=["averaging"])
    destination = Output(output, overwrite=False) if output else None
    return CommandSession(plan, Document({"w": tensor}, None), destination, CommandOutput(as_json=True)), peer


def perform(session: CommandSession, peer: ScriptedPeer) -> None:
    run(lambda stop: session.run(cast(Peer, peer), stop))


def told(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def names(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [event["event"] for event in told(capsys)]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "RETRY_PAUSE", 0.0)


async def interrupted(peer: ScriptedPeer, *, in_round: bool, times: int = 1) -> Receipt:
    """An attempt during which SIGTERM comes."""
    peer.in_round = in_round
    try:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(10):  # the event loop takes the signal
                await asyncio.sleep(0)
    finally:
        peer.in_round = False
    return AVERAGED


while_looking = partial(interrupted, in_round=False)
while_averaging = partial(interrupted, in_round=True)
twice_while_averaging = partial(interrupted, in_round=True, times=2)


def test_rounds_are_done_and_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session, peer = play([AVERAGED] * 3, tmp_path / "out", rounds=3)
    perform(session, peer)
    assert (session.rounds, session.output, peer.left) == (3, str(tmp_path / "out"), True)
    assert torch.equal(load_file(tmp_path / "out")["w"], torch.full((2,), 3.0))
    assert [(event["event"], event.get("round")) for event in told(capsys)] == [
        ("ready", None),
        *(("round", number) for number in (1, 2, 3)),
    ]


def test_failed_rounds_are_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    session, peer = play([FAILED, FAILED, AVERAGED, FAILED, FAILED, AVERAGED], rounds=2)
    perform(session, peer)
    assert session.rounds == 2
    assert names(capsys) == ["ready", "retry", "retry", "round", "retry", "retry", "round"]


@pytest.mark.parametrize(
    ("steps", "reason"), [([AVERAGED, FAILED, FAILED, FAILED], "3 rounds failed"), ([AVERAGED, ALONE], "no other peer")]
)
def test_it_gives_up(tmp_path: Path, steps: list[Step], reason: str) -> None:
    session, peer = play(steps, tmp_path / "out", rounds=2)
    with pytest.raises(CommandError, match=f"round 2 of 2.*{reason}.*Nothing was written") as caught:
        perform(session, peer)
    assert caught.value.exit_code == 1
    assert peer.left
    assert list(tmp_path.iterdir()) == []


def test_serving_never_gives_up_and_writes_after_every_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out"

    async def look(peer: ScriptedPeer) -> Receipt:
        assert torch.equal(load_file(path)["w"], peer.tensor)
        return AVERAGED

    session, peer = play(
        [ALONE, FAILED, FAILED, FAILED, AVERAGED, look, look, while_looking], path, rounds=2, serve=True
    )
    with pytest.raises(Stopped):
        perform(session, peer)
    assert (session.rounds, session.output, peer.left) == (3, str(path), True)
    assert names(capsys) == ["ready", *["retry"] * 4, "round", "round", "serving", "round"]


def test_a_signal_ends_the_search_at_once(tmp_path: Path) -> None:
    session, peer = play([while_looking], tmp_path / "out")
    with pytest.raises(Stopped) as caught:
        perform(session, peer)
    assert caught.value.number == signal.SIGTERM
    assert (session.rounds, session.output, peer.left) == (0, None, True)
    assert list(tmp_path.iterdir()) == []


def test_a_signal_lets_a_round_end_and_no_other_begin(tmp_path: Path) -> None:
    session, peer = play([while_averaging, AVERAGED], tmp_path / "out", rounds=2, serve=True)
    with pytest.raises(Stopped):
        perform(session, peer)
    assert (session.rounds, len(peer.steps), peer.left) == (1, 1, True)
    assert session.output == str(tmp_path / "out")


def test_a_signal_in_the_last_round_changes_nothing(tmp_path: Path) -> None:
    session, peer = play([while_averaging], tmp_path / "out")
    perform(session, peer)
    assert (session.rounds, session.output) == (1, str(tmp_path / "out"))


def test_a_second_signal_ends_the_round(tmp_path: Path) -> None:
    session, peer = play([twice_while_averaging], tmp_path / "out")
    with pytest.raises(Stopped):
        perform(session, peer)
    assert (session.rounds, session.output, peer.left) == (0, None, True)


@pytest.mark.parametrize("serve", [False, True])
def test_a_second_signal_while_the_result_is_written_does_not_deny_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: bool
) -> None:
    write = Output.write

    def while_writing(*arguments: Any) -> None:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            asked.acquire(timeout=60)
        write(*arguments)

    request = Stop.request

    def noted(stop: Stop, number: int) -> None:
        request(stop, number)
        asked.release()

    asked = threading.Semaphore(0)
    monkeypatch.setattr(Output, "write", while_writing)
    monkeypatch.setattr(Stop, "request", noted)
    session, peer = play([AVERAGED], tmp_path / "out", serve=serve)
    with pytest.raises(Stopped):
        perform(session, peer)
    assert torch.equal(load_file(tmp_path / "out")["w"], torch.ones(2))
    assert (session.output, peer.left) == (str(tmp_path / "out"), True)


def test_a_cancellation_that_no_signal_caused_goes_on() -> None:
    async def cancelled(_: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        run(cancelled)


def test_only_whole_averages_are_written(tmp_path: Path) -> None:
    session, peer = play([AVERAGED], tmp_path / "mean.safetensors")
    perform(session, peer)
    assert peer.topics == ["whole"]


def test_a_later_round_of_a_peer_that_serves_mends_a_part_that_is_missing(tmp_path: Path) -> None:
    session, peer = play([AVERAGED, while_looking], tmp_path / "mean.safetensors", serve=True)
    with pytest.raises(Stopped):
        perform(session, peer)
    assert peer.topics == [None, None]

"""From `opt.step()` to the socket it takes few calls, so that a reader can follow a part on its way."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any

import pytest

from averaging import DiLoCo, GradientAveraging, LocalSGD, Strategy
from averaging.transport.direct.link import Link
from tests.support.training import SGD, Start, backward, batch_of

MOST_CALLS = 12

Calls = tuple[str, ...]

CALLERS: ContextVar[Calls] = ContextVar("CALLERS", default=())
"""The calls in whose course the present task was begun, the first one first."""

LOOP = ("EventLoopThread._run_thread", "EventLoopThread._main", "EventLoopThread._begin")


def present_calls() -> Calls:
    """The functions of the package that are being called, in all threads and tasks up to this one."""
    calls: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_qualname
        if frame.f_globals.get("__name__", "").startswith("averaging.") and name not in LOOP:
            calls.append(name)
        frame = frame.f_back
    return CALLERS.get() + tuple(reversed(calls))


class WatchedSocket:
    """A socket that notes the calls on the way to what it sends."""

    def __init__(self, sock: socket.socket, sent: list[Calls]) -> None:
        self._socket, self._sent = sock, sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def sendmsg(self, *arguments: Any) -> int:
        self._sent.append(present_calls())
        return self._socket.sendmsg(*arguments)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Calls]:
    """The calls on the way to each frame that is sent over a direct connection."""
    sent: list[Calls] = []

    def remembering(schedule: Callable[..., Any]) -> Callable[..., Any]:
        def scheduled(*arguments: Any, **options: Any) -> Any:
            token = CALLERS.set(present_calls())
            try:
                return schedule(*arguments, **options)
            finally:
                CALLERS.reset(token)

        return scheduled

    make = Link.__init__

    def watched(link: Link, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        make(link, sock, *arguments, **options)
        link._socket = WatchedSocket(sock, sent)  # type: ignore[assignment]

    loop = asyncio.BaseEventLoop
    monkeypatch.setattr(loop, "create_task", remembering(loop.create_task))
    monkeypatch.setattr(loop, "call_soon_threadsafe", remembering(loop.call_soon_threadsafe))
    monkeypatch.setattr(Link, "__init__", watched)
    return sent


@pytest.mark.parametrize(
    ("make", "options"),
    [(lambda: LocalSGD(2), {}), (lambda: DiLoCo(2), {}), (lambda: GradientAveraging(8), {"batch_size": 4})],
    ids=["LocalSGD", "DiLoCo", "GradientAveraging"],
)
def test_a_step_reaches_the_socket_in_few_calls(
    start: Start, sent: list[Calls], make: Callable[[], Strategy], options: dict[str, Any]
) -> None:
    run = start()
    for _ in range(2):
        run.add(make(), SGD)
    run.meet()

    def train(number: int) -> None:
        for seed in range(4):
            backward(run.models[number], batch_of(seed, 4))
            run.averagers[number].step(**options)

    run.each(train)
    parts = {calls for calls in sent if "SenderSide.send_to" in calls}
    assert parts
    for calls in parts:
        assert calls[0] == "DecentralizedAverager.step"
        assert calls[-1] == "Link.send"
        assert len(calls) <= MOST_CALLS, calls

"""`averaging leave`: the method Leave of averaging.control.v1, and how far a process is that was asked to leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from enum import IntEnum
from urllib.parse import unquote

from averaging.common import is_own
from averaging.errors import ProtocolViolationError, ViolationKind, printable
from averaging.transport import RpcHandler, RpcMethod, rpc_caller
from averaging.transport.grpc import claim_checker
from averaging.wire import control_pb2 as wire

logger = logging.getLogger("averaging.control")

REPEAT_SECONDS = 2.0  # seconds between two replies without news, so that the caller sees that the peer lives

LEAVE = RpcMethod(
    "/averaging.control.v1.Control/Leave",
    wire.LeaveRequest,
    wire.LeaveProgress,
    replies_stream=True,
    max_request_bytes=1 << 10,
    max_reply_bytes=1 << 10,
)

LEAVE_REQUEST = wire.LeaveRequest()


class LeaveStep(IntEnum):
    """How far a process is that was asked to leave. The numbers are those of the wire."""

    STAYS = wire.LEAVE_STEP_UNSPECIFIED
    ROUND = wire.LEAVE_STEP_ROUND
    DOWNLOADS = wire.LEAVE_STEP_DOWNLOADS
    CLOSING = wire.LEAVE_STEP_CLOSING
    LEFT = wire.LEAVE_STEP_LEFT


def step_of(reply: wire.LeaveProgress) -> LeaveStep:
    """The step in a reply. Those that only later releases know count as ROUND."""
    known: dict[int, LeaveStep] = {step.value: step for step in LeaveStep}
    return known.get(reply.step, LeaveStep.ROUND)


class Departure:
    """Whether a process was asked to leave, and how far it is. It belongs to one event loop."""

    def __init__(self) -> None:
        self.step = LeaveStep.STAYS
        self.asked = asyncio.Event()
        self._changed = asyncio.Event()

    def ask(self) -> None:
        self.advance(LeaveStep.ROUND)
        self.asked.set()

    def advance(self, step: LeaveStep) -> None:
        """Goes on to a step; never back."""
        self.step = max(self.step, step)
        self._changed.set()
        self._changed = asyncio.Event()

    async def steps(self) -> AsyncGenerator[LeaveStep, None]:
        """Yields the present step, each further one, and a step again that lasts long; ends after LEFT."""
        while True:
            step, changed = self.step, self._changed
            yield step
            if step is LeaveStep.LEFT:
                return
            if step is self.step:
                try:
                    async with asyncio.timeout(REPEAT_SECONDS):
                        await changed.wait()
                except TimeoutError:
                    continue


class ControlService:
    """Serves Leave to the owner of a process, see SECURITY.md."""

    def __init__(self, run_id: str, *, certified: bool) -> None:
        self.endpoint = ""
        self.departure = Departure()
        self._run_id, self._certified = run_id, certified

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        return [LEAVE.streams(self._leave)]

    async def _leave(self, _: wire.LeaveRequest) -> AsyncGenerator[wire.LeaveProgress, None]:
        reason = self._permission()
        if not self.departure.asked.is_set():
            caller = printable(rpc_caller().connection, 100)
            logger.warning("%s leaves: asked by %s, %s", self.endpoint, caller, reason)
        self.departure.ask()
        async for step in self.departure.steps():
            yield wire.LeaveProgress(step=step.value, endpoint=self.endpoint, run_id=self._run_id)

    def _permission(self) -> str:
        """Why the caller may end this process, or ProtocolViolationError. Who calls has the run's token already."""
        host = unquote(rpc_caller().host).partition(":")[2].strip("[]")  # gRPC says ipv4:ADDRESS or ipv6:%5BADDRESS%5D
        if host and is_own(host):
            return "on this machine"
        if self._certified and self._has_certificate():
            return "with a certificate for this host"
        other = " or with a certificate for its host" if self._certified else ""
        raise ProtocolViolationError(
            f"a peer is ended on its own machine{other}; call from there, or send it SIGTERM",
            kind=ViolationKind.FOREIGN_ENDPOINT,
        )

    def _has_certificate(self) -> bool:
        """Whether the caller's certificate is valid for this peer's endpoint, so that it could take its place."""
        try:
            claim_checker()(self.endpoint)
        except ProtocolViolationError:
            return False
        return True

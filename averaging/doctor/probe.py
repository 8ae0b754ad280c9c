"""What a peer answers to `averaging doctor` elsewhere: its run and options, its clock, and a connection back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from importlib import metadata
from typing import TYPE_CHECKING, Any

from averaging.common import is_loopback, parse_address
from averaging.config import OPTIONS, PeerConfig
from averaging.doctor.dial_back import DialLimits, dial_back
from averaging.errors import CallRefusedError, RefusalCause
from averaging.transport import RpcHandler, RpcMethod, rpc_caller
from averaging.wire import probe_pb2

if TYPE_CHECKING:
    from averaging.security import Tls

SOFTWARE = f"averaging {metadata.version('averaging')}"
"""Name and version of this software, as peers announce them."""

_PROBE = "/averaging.probe.v1.Probe"

MAX_REPLY_BYTES = 64 << 10

DESCRIBE = RpcMethod(
    f"{_PROBE}/Describe", probe_pb2.DescribeRequest, probe_pb2.Description, max_reply_bytes=MAX_REPLY_BYTES
)
CLOCK = RpcMethod(f"{_PROBE}/Clock", probe_pb2.ClockRequest, probe_pb2.ClockReply, max_reply_bytes=MAX_REPLY_BYTES)
DIAL_BACK = RpcMethod(
    f"{_PROBE}/DialBack",
    probe_pb2.DialBackRequest,
    probe_pb2.DialBackReply,
    max_reply_bytes=MAX_REPLY_BYTES,
    sender=lambda request: request.endpoint,
)


def options_alike(config: PeerConfig) -> dict[str, str]:
    """The options that must be the same at all peers of a run, as text, in the order of the documentation."""
    return {name: _text(getattr(config, name)) for name, declared in OPTIONS.items() if declared.alike}


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name.lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


class ProbeService:
    """Serves `averaging.probe.v1.Probe` at a peer.

    Args:
        config: The options of the peer.
        tls: Its certificates, if its run has any.
        clock: Seconds since the epoch.
        limits: Counts connections back.
    """

    def __init__(
        self,
        config: PeerConfig,
        tls: Tls | None,
        *,
        clock: Callable[[], float] = time.time,
        limits: DialLimits | None = None,
    ) -> None:
        self._config, self._tls, self._clock = config, tls, clock
        self._limits = limits or DialLimits()
        self._options: Mapping[str, str] = options_alike(config)
        hosts = {parse_address(each)[0] for each in (config.listen, config.advertise) if each}
        self._loopback = any(map(is_loopback, hosts))

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        """See `RpcService`."""
        return [DESCRIBE.answers(self._describe), CLOCK.answers(self._tell_time), DIAL_BACK.answers(self._dial_back)]

    async def _describe(self, _: probe_pb2.DescribeRequest) -> probe_pb2.Description:
        config = self._config
        return probe_pb2.Description(
            run_id=config.run_id, software=SOFTWARE, mode=config.mode.name.lower(), options=self._options
        )

    async def _tell_time(self, _: probe_pb2.ClockRequest) -> probe_pb2.ClockReply:
        return probe_pb2.ClockReply(time=self._clock())

    async def _dial_back(self, request: probe_pb2.DialBackRequest) -> probe_pb2.DialBackReply:
        """Dials the caller.

        Raises:
            CallRefusedError: The caller does not know the run.
        """
        if request.run_id != self._config.run_id:
            raise CallRefusedError("", "another run; only peers of this run are called back", RefusalCause.WRONG_RUN)
        dialled = await dial_back(
            rpc_caller().host, request.endpoint, request.nonce, self._tls, self._limits, loopback=self._loopback
        )
        return probe_pb2.DialBackReply(
            outcome=dialled.outcome,
            caller=dialled.caller,
            reason=dialled.reason,
            seconds=dialled.seconds,
            at_caller=dialled.at_caller,
        )

"""A register over gRPC: `averaging.register.v1.Register`, on the port of a peer or on its own port."""

from __future__ import annotations

from collections.abc import Iterable

from averaging.elastic.register import MAX_VALUE_BYTES, MemoryRegister, Register, RegisterEntry, SwapResult
from averaging.rpc import RpcChannel, RpcHandler, RpcMethod
from averaging.wire import register_pb2 as wire

MESSAGE_BYTES = MAX_VALUE_BYTES + 4096

GET = RpcMethod(
    "/averaging.register.v1.Register/Get",
    wire.GetRequest,
    wire.Entry,
    max_request_bytes=4096,
    max_reply_bytes=MESSAGE_BYTES,
)
COMPARE_AND_SET = RpcMethod(
    "/averaging.register.v1.Register/CompareAndSet",
    wire.SetRequest,
    wire.SetReply,
    max_request_bytes=MESSAGE_BYTES,
    max_reply_bytes=MESSAGE_BYTES,
)

CALL_SECONDS = 3.0
"""Time limit of one call: less than the 5 s that torch allows for a heartbeat."""


class RegisterService:
    """Serves a register; give it to `RpcServer` or to `Peer(services=…)`.

    Args:
        register: The register to serve; a new one in memory if None.
    """

    def __init__(self, register: Register | None = None) -> None:
        self.register = register or MemoryRegister()

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        """See `RpcService`."""
        return [GET.answers(self._get), COMPARE_AND_SET.answers(self._compare_and_set)]

    async def _get(self, request: wire.GetRequest) -> wire.Entry:
        return _message(await self.register.get(request.key))

    async def _compare_and_set(self, request: wire.SetRequest) -> wire.SetReply:
        written = await self.register.compare_and_set(request.key, request.value, request.token or None)
        return wire.SetReply(entry=_message(written.entry), done=written.done)


class GrpcRegister:
    """The register at the other end of a channel."""

    def __init__(self, channel: RpcChannel, timeout: float = CALL_SECONDS) -> None:
        self._channel = channel
        self._timeout = timeout

    async def get(self, key: str) -> RegisterEntry | None:
        """See `Register`."""
        return _entry(await self._channel.call(GET, wire.GetRequest(key=key), self._timeout))

    async def compare_and_set(self, key: str, value: bytes, token: bytes | None) -> SwapResult:
        """See `Register`."""
        request = wire.SetRequest(key=key, value=value, token=token or b"")
        reply = await self._channel.call(COMPARE_AND_SET, request, self._timeout)
        return SwapResult(_entry(reply.entry), reply.done)


def _message(entry: RegisterEntry | None) -> wire.Entry:
    return wire.Entry(token=entry.token, value=entry.value) if entry else wire.Entry()


def _entry(message: wire.Entry) -> RegisterEntry | None:
    return RegisterEntry(message.value, message.token) if message.token else None

"""Definitions of gRPC methods and services, of the core and of the rooms above it. Pure."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

from google.protobuf.message import DecodeError

from averaging.errors import ConfigError, ProtocolViolationError

DEFAULT_REQUEST_BYTES = 64 << 10  # default maximum size of a request

RESERVED = (
    "grpc.",
    "DecentralizedAveraging",
    "averaging.direct.v1.Direct",
    "averaging.gossip.v1.Gossip",
    "averaging.status.v1.Status",
)
"""Prefixes of the services that every peer has, some of which are answered without a token."""

_PATH = re.compile(r"/([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)/([A-Za-z_]\w*)", re.ASCII)


class Message(Protocol):
    """The interface of a generated protobuf class."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        ...

    @classmethod
    def FromString(cls, raw: bytes, /) -> Self:  # noqa: N802 - protobuf's name
        ...


Content = TypeVar("Content")
Request = TypeVar("Request")
Reply = TypeVar("Reply")


class MessageType(Protocol[Content]):
    """What `RpcMethod` needs of the type of a message: a generated class has it, and so does a `MessageCopier`."""

    def SerializeToString(self, message: Content, /) -> bytes:  # noqa: N802 - protobuf's name
        ...

    def FromString(self, raw: bytes, /) -> Content:  # noqa: N802 - protobuf's name
        ...


def parse(kind: MessageType[Content], raw: bytes) -> Content:  # of a message of another peer
    try:
        return kind.FromString(raw)
    except DecodeError:
        descriptor: Any = getattr(kind, "DESCRIPTOR", None)
        raise ProtocolViolationError(f"{len(raw)} bytes that are not a {descriptor.full_name}") from None


@dataclass(frozen=True, slots=True)
class RpcCaller:
    host: str = ""  # Address of the caller, without the port. Several processes may share it.
    connection: str = ""  # the connection over which it calls
    # metadata of the call; two calls over one connection are equal without it
    headers: tuple[tuple[str, str | bytes], ...] = field(default=(), compare=False, repr=False)


_NOBODY = RpcCaller()

CALLER: ContextVar[RpcCaller] = ContextVar("CALLER", default=_NOBODY)
"""The caller of the call that the current task serves."""


def rpc_caller() -> RpcCaller:
    return CALLER.get()


@dataclass(frozen=True, slots=True)
class RpcMethod(Generic[Request, Reply]):
    """One gRPC method, for both server and caller.

    ```python
    GET = RpcMethod("/averaging.register.v1.Register/Get", register_pb2.GetRequest, register_pb2.Entry)
    ```

    Attributes:
        path: `/package.Service/Method`, as in the proto file.
        request: Generated class of a request, or another `MessageType`.
        reply: Generated class of a reply, or another `MessageType`.
        requests_stream: Whether the caller sends a stream of requests.
        replies_stream: Whether the server answers with a stream of replies.
        max_request_bytes: Longer requests are refused before they are decoded; with None the limit of all messages.
        max_reply_bytes: The same for replies.
        sender: Returns the endpoint that a request names as its sender, which the caller's certificate must cover.

    Raises:
        ConfigError: The path is malformed.
    """

    path: str
    request: MessageType[Request]
    reply: MessageType[Reply]
    requests_stream: bool = False
    replies_stream: bool = False
    max_request_bytes: int | None = DEFAULT_REQUEST_BYTES
    max_reply_bytes: int | None = None
    sender: Callable[[Request], str] | None = None

    def __post_init__(self) -> None:
        if not _PATH.fullmatch(self.path):
            raise ConfigError(f"{self.path!r} is not the path of a method; give /package.Service/Method")

    @property
    def service(self) -> str:
        return self.path.split("/")[1]

    @property
    def name(self) -> str:
        return self.path.split("/")[2]

    def read_request(self, raw: bytes) -> Request:
        """Decodes a request of another peer; raises a ProtocolViolationError if it is too long or malformed."""
        return parse(self.request, self._short(raw, self.max_request_bytes))

    def read_reply(self, raw: bytes) -> Reply:
        """Decodes a reply of another peer; raises a ProtocolViolationError if it is too long or malformed."""
        return parse(self.reply, self._short(raw, self.max_reply_bytes))

    def answers(self, answer: Callable[[Request], Awaitable[Reply]]) -> RpcHandler:
        """Handles one request with one reply. `RpcHandler` lists the errors that `answer` may raise."""
        return self._handler(answer, requests_stream=False, replies_stream=False)

    def streams(self, answer: Callable[[Request], AsyncGenerator[Reply, None]]) -> RpcHandler:
        """Handles one request with many replies. The generator is closed when the call ends."""
        return self._handler(answer, requests_stream=False, replies_stream=True)

    def collects(self, answer: Callable[[AsyncIterator[Request]], Awaitable[Reply]]) -> RpcHandler:
        """Handles many requests with one reply."""
        return self._handler(answer, requests_stream=True, replies_stream=False)

    def exchanges(self, answer: Callable[[AsyncIterator[Request]], AsyncGenerator[Reply, None]]) -> RpcHandler:
        """Handles many requests with many replies. The generator is closed when the call ends."""
        return self._handler(answer, requests_stream=True, replies_stream=True)

    def _handler(self, answer: Callable[[Any], Any], *, requests_stream: bool, replies_stream: bool) -> RpcHandler:
        if (self.requests_stream, self.replies_stream) != (requests_stream, replies_stream):
            raise ConfigError(f"the streams of {self.path} differ from those of its handler; change one of them")
        return RpcHandler(self, answer)

    def _short(self, raw: bytes, most: int | None) -> bytes:
        if most is not None and len(raw) > most:
            raise ProtocolViolationError(f"a message of {len(raw)} bytes in {self.path}; at most {most} are accepted")
        return raw


@dataclass(frozen=True, slots=True)
class RpcHandler:
    """A method and its handler, from `RpcMethod.answers`, `streams`, `collects` or `exchanges`.

    An error of `averaging.errors` that `answer` raises reaches the caller as a `CallRefusedError` with its message; a
    `BusyError` and so on keep their gRPC status. For any other exception the caller gets INTERNAL, and
    the traceback is logged here.
    """

    method: RpcMethod[Any, Any]
    answer: Callable[[Any], Any]


class RpcService(Protocol):
    """A service that a server or a peer serves besides its own methods."""

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        """Returns the handlers of this service. Called once, before the server starts."""
        ...


def handlers_of(services: Iterable[RpcService], present: Iterable[RpcHandler] = ()) -> list[RpcHandler]:
    handlers = [*present, *(handler for service in services for handler in service.rpc_handlers())]
    paths: set[str] = set()
    for path in (handler.method.path for handler in handlers):
        if path in paths:
            raise ConfigError(f"{path} is served twice; give each service once")
        if path.startswith(tuple(f"/{name}" for name in RESERVED)):
            raise ConfigError(f"{path} is a name of a peer's own services; rename the service")
        paths.add(path)
    return handlers

"""Where the errors of gRPC become those of `averaging.errors`, and the other way round.

| at the callee                     | status              | at the caller                                |
|-----------------------------------|---------------------|----------------------------------------------|
| nobody there, connection lost     | UNAVAILABLE         | PeerUnreachableError                         |
| it ends calls, or loses a peer    | CANCELLED           | PeerUnreachableError                         |
| ProtocolViolationError            | INVALID_ARGUMENT    | CallRefusedError with its words              |
| it takes no such token, or none   | UNAUTHENTICATED     | UnauthenticatedError                         |
| WrongRunError                     | NOT_FOUND           | WrongRunError with its words                 |
| ForeignEndpointError              | PERMISSION_DENIED   | CallRefusedError with its words, definite    |
| BusyError                         | RESOURCE_EXHAUSTED  | CallRefusedError with its words              |
| another AveragingError            | FAILED_PRECONDITION | CallRefusedError with its words              |
| any other exception               | INTERNAL            | CallRefusedError; the traceback stays there  |
| no such service                   | UNIMPLEMENTED       | CallRefusedError                             |
| it sends too large a message      | RESOURCE_EXHAUSTED  | ProtocolViolationError                       |
| it takes no message so large      | RESOURCE_EXHAUSTED  | CallRefusedError                             |
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Never, TypeVar

import grpc

from averaging.errors import (
    AveragingError,
    BusyError,
    CallRefusedError,
    ForeignEndpointError,
    PeerUnreachableError,
    ProtocolViolationError,
    UnauthenticatedError,
    WrongRunError,
    printable,
)

logger = logging.getLogger("averaging.transport")

Decoded = TypeVar("Decoded")

MAX_REASON = 300
"""Characters of another peer's words that are repeated in an error of ours, and sent of our own."""

_UNREACHABLE = {
    grpc.StatusCode.UNAVAILABLE: "not available",
    grpc.StatusCode.CANCELLED: "it ended the call",
    grpc.StatusCode.DEADLINE_EXCEEDED: "no answer in time",
}

_LOST = "connection lost"
_REFUSED = "connection refused"
_SILENT = "no answer to the connection"
_TOO_MANY_PINGS = "connection lost (its server must allow a ping every 20 s)"

_DEFINITE = (
    ("wrong_version_number", "it does not speak TLS: start both peers with TLS, or both without"),
    (
        "hostname verification",
        "its certificate does not stand for this host: issue it another (averaging ca issue)",
    ),
    (
        "certificate has expired",
        "its certificate has expired: issue it another one (averaging ca issue), or check this machine's clock",
    ),
    ("certificate is not yet valid", "its certificate is not valid yet: check the clocks"),
    (
        "certificate_verify_failed",
        "its certificate is not of an authority in tls_ca: a run has one for all its peers",
    ),
)
"""Words of gRPC's that say what this side saw of the other side's certificate, and the reason told for each.

Where the other side refuses this peer's certificate it closes the connection, which may have other causes as well."""

_REASONS = (
    *_DEFINITE,
    ("handshake failed", "no TLS connection came about: check the certificates of both"),
    ("ping timeout", "connection lost: no answer to pings"),
    # Older releases give up dialling so; whoever refuses a connection resets none.
    ("getsockopt(so_error): connection reset", _SILENT),
    ("fd shutdown", _SILENT),  # likewise, in the midst of TLS
    ("read failed (endpoint closing", _SILENT),  # the same, by gRPC's newer engine
    # Two clocks of gRPC's run out at the same time, that of the socket and that of the whole connection.
    ("timed out", _SILENT),
    ("handshaker shutdown", _SILENT),
    ("alpn", "what answers there is not a peer"),
    # Before the words below, with which gRPC surrounds what grpc-go says as it breaks the connection.
    ("too_many_pings", _TOO_MANY_PINGS),
    ("too many pings", _TOO_MANY_PINGS),
    ("stream removed", _LOST),
    ("socket closed", _LOST),
    ("connection reset", _LOST),
    ("broken pipe", _LOST),
    ("connection refused", _REFUSED),
    ("domain name not found", "unknown host"),
    ("errors resolving", "unknown host"),
    ("dns resolution failed", "unknown host"),
    ("no route to host", "no route to the host"),
    ("network is unreachable", "network unreachable"),
    ("failed parsing http/2", "what answers there is not a peer"),
    ("with status: ", "what answers there is not a peer"),
    # What keeps this machine from dialling.
    ("too many open files", "this process may open no more files: raise its limit (ulimit -n)"),
    ("address family not supported", "this machine speaks no IPv6: it needs an IPv4 address or a name that has one"),
    ("cannot assign requested address", "this machine has no address or port left to call from"),
    (
        "connect: invalid argument",
        "the system takes no such address (a link-local one needs its interface, as in [fe80::7%eth0]:4222)",
    ),
    ("connect: permission denied", "the rules of this machine forbid the connection"),
    ("connect: operation not permitted", "the rules of this machine forbid the connection"),
    ("cancelling all calls", "it ended the call"),
)
"""Words of gRPC's in an error, the first that is found, and the reason told for it."""

_TOO_LARGE = re.compile(r"((?:CLIENT|SERVER): (?:Received|Sent)) message larger than max \((\d+) vs\. (\d+)\)")
_TOO_LARGE_WORDS = {
    "CLIENT: Sent": "the message is too large to be sent",
    "SERVER: Received": "it does not take so large a message",
    "SERVER: Sent": "its answer is too large to be sent",
}


_WITHOUT = "its run wants a token, and this peer has none: give token_file with one of the run's"
_UNKNOWN = "its run does not take this peer's token: make one of the run's tokens the first line of token_file"


def error_of_call(endpoint: str, error: grpc.aio.AioRpcError, *, sent_token: bool = False) -> AveragingError:
    """What the failure of a call to `endpoint` means; `sent_token` says whether a token went with it."""
    code, details = error.code(), error.details() or ""
    if too_large := _TOO_LARGE.search(details):
        where, nbytes, limit = too_large.groups()
        if where == "CLIENT: Received":
            return ProtocolViolationError(f"{endpoint} sent a message of {nbytes} bytes; {limit} are allowed")
        return CallRefusedError(endpoint, f"{_TOO_LARGE_WORDS[where]}: {nbytes} bytes, and {limit} are allowed")
    reason = next((reason for words, reason in _REASONS if words in details.lower()), "")
    if reason == _LOST and details.lower().startswith("failed to connect"):
        reason = "it hung up at once; do both use TLS, with certificates of one authority?"
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return UnauthenticatedError(endpoint, _UNKNOWN if sent_token else _WITHOUT)
    if code in _UNREACHABLE:
        definite = any(reason == told for _, told in _DEFINITE)
        return PeerUnreachableError(
            endpoint, reason or _UNREACHABLE[code], refused=reason == _REFUSED, definite=definite
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return CallRefusedError(endpoint, reason or "does not serve this")
    told = printable(details, MAX_REASON) or code.name.lower().replace("_", " ")
    if code is grpc.StatusCode.NOT_FOUND:
        return WrongRunError(endpoint, told)
    return CallRefusedError(endpoint, told, definite=code is grpc.StatusCode.PERMISSION_DENIED)


def is_failed_write(details: str | None) -> bool:
    """Whether a status is not the callee's but grpcio's own, about a write that failed because the call was over."""
    return details == "Internal error from Core"


@contextmanager
def calling(endpoint: str, *, sent_token: bool) -> Iterator[None]:
    """Around everything that is awaited of a call to `endpoint`; `sent_token` says whether a token goes with it.

    Raises:
        TransportError: the call failed.
        ProtocolViolationError: the answer was too large.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        logger.debug("%s: %s", endpoint, printable(error.debug_error_string() or ""))
        # From Python 3.12 on its traceback would come back to it, and keep the call and with it gRPC's connection.
        raise error_of_call(endpoint, error.with_traceback(None), sent_token=sent_token) from None
    except asyncio.CancelledError:
        # gRPC raises it too if the call was cancelled (its channel closed, its upload failed), and not this task.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise PeerUnreachableError(endpoint, "this peer closed the connection") from None


def read_reply(endpoint: str, decode: Callable[[bytes], Decoded], raw: bytes) -> Decoded:
    """Decodes what `endpoint` answered.

    Raises:
        ProtocolViolationError: it is malformed.
    """
    try:
        return decode(raw)
    except ProtocolViolationError as error:
        raise ProtocolViolationError(f"{endpoint} answered with {error}") from None


async def refuse(context: grpc.aio.ServicerContext[Any, Any], path: str, error: Exception) -> Never:
    """Ends a call at the callee, after `error`; the caller is told as much as is its business."""
    if isinstance(error, grpc.aio.BaseError):
        code, words = None, str(error)
    elif isinstance(error, ForeignEndpointError):
        code, words = grpc.StatusCode.PERMISSION_DENIED, str(error)
    elif isinstance(error, WrongRunError):
        code, words = grpc.StatusCode.NOT_FOUND, str(error)
    elif isinstance(error, BusyError):
        code, words = grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
    elif isinstance(error, ProtocolViolationError):
        code, words = grpc.StatusCode.INVALID_ARGUMENT, str(error)
    elif isinstance(error, AveragingError):
        code, words = grpc.StatusCode.FAILED_PRECONDITION, str(error)
    else:
        logger.error("%s from %s failed", path, context.peer(), exc_info=error)
        code, words = grpc.StatusCode.INTERNAL, "internal error; the log of that peer tells more"
    try:
        if code is not None:
            await context.abort(code, printable(words, MAX_REASON))
    except grpc.aio.InternalError as lost:
        words = str(lost)
    # The caller is gone and hears no answer; gRPC takes a cancellation as the quiet end of a call.
    logger.debug("%s: the caller is gone: %s", path, printable(words))
    raise asyncio.CancelledError

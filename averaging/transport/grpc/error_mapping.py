"""Maps the errors of gRPC to those of `averaging.errors` and back.

| at the callee                     | status              | at the caller                                |
|-----------------------------------|---------------------|----------------------------------------------|
| unreachable, connection lost      | UNAVAILABLE         | PeerUnreachableError                         |
| it ends calls, or loses a peer    | CANCELLED           | PeerUnreachableError                         |
| ProtocolViolationError            | INVALID_ARGUMENT    | CallRefusedError with its message            |
| no token, or a wrong one          | UNAUTHENTICATED     | CallRefusedError, UNAUTHENTICATED            |
| CallRefusedError, WRONG_RUN       | NOT_FOUND           | CallRefusedError, WRONG_RUN                  |
| … of the kind FOREIGN_ENDPOINT    | PERMISSION_DENIED   | CallRefusedError with its message, definite  |
| BusyError                         | RESOURCE_EXHAUSTED  | CallRefusedError with its message            |
| CallRefusedError, SAME_NAME       | FAILED_PRECONDITION | CallRefusedError, SAME_NAME                  |
| another AveragingError            | FAILED_PRECONDITION | CallRefusedError with its message            |
| any other exception               | INTERNAL            | CallRefusedError; the traceback stays there  |
| no such service                   | UNIMPLEMENTED       | CallRefusedError, NOT_SERVED                 |
| it sends too large a message      | RESOURCE_EXHAUSTED  | ProtocolViolationError                       |
| it receives too large a message   | RESOURCE_EXHAUSTED  | CallRefusedError                             |
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any, Never, TypeVar

import grpc

from averaging.common import shown_proxy, spelled
from averaging.errors import (
    AveragingError,
    BusyError,
    CallRefusedError,
    PeerUnreachableError,
    ProtocolViolationError,
    RefusalCause,
    ViolationKind,
    printable,
)

logger = logging.getLogger("averaging.transport")

Decoded = TypeVar("Decoded")

MAX_REASON = 300  # maximum length of an error message that is sent to or quoted from another peer, in characters

_UNREACHABLE = {
    grpc.StatusCode.UNAVAILABLE: "not available",
    grpc.StatusCode.CANCELLED: "it ended the call",
    grpc.StatusCode.DEADLINE_EXCEEDED: "no answer in time",
}

_LOST = "connection lost"
_REFUSED = "connection refused"
_SILENT = "no answer to the connection"
_UNKNOWN_HOST = "unknown host"
_NO_ROUTE = "no route to the host"
_NO_NETWORK = "network unreachable"
_UNCONNECTED = frozenset({_REFUSED, _SILENT, _UNKNOWN_HOST, _NO_ROUTE, _NO_NETWORK})
_TOO_MANY_PINGS = "connection lost (its server must allow a ping every 20 s)"

_DEFINITE = (
    ("wrong_version_number", "it does not speak TLS: start both peers with TLS, or both without"),
    (
        "hostname verification",
        "its certificate is not valid for this host: issue another one for it (averaging ca issue)",
    ),
    (
        "certificate has expired",
        "its certificate has expired: issue another one for it (averaging ca issue), or check this machine's clock",
    ),
    ("certificate is not yet valid", "its certificate is not valid yet: check the clocks"),
    (
        "certificate_verify_failed",
        "its certificate was not issued by this peer's certificate authority: all peers of a run need one",
    ),
)
"""Parts of gRPC's messages about the other peer's certificate, and the reason reported for each.

If the other peer refuses this peer's certificate, it closes the connection, which may also have other causes."""

_REASONS = (
    *_DEFINITE,
    ("handshake failed", "the TLS handshake failed: check the certificates of both peers"),
    ("ping timeout", "connection lost: no answer to pings"),
    # Timeouts while connecting: of older releases, ...
    ("getsockopt(so_error): connection reset", _SILENT),
    ("fd shutdown", _SILENT),  # ... during the TLS handshake, ...
    ("read failed (endpoint closing", _SILENT),  # ... and of gRPC's newer engine.
    # Two timers of gRPC expire at the same time, that of the socket and that of the whole connection.
    ("timed out", _SILENT),
    ("handshaker shutdown", _SILENT),
    ("alpn", "what answers there is not a peer"),
    # Before the entries below, which gRPC's message also contains if grpc-go closes the connection for this reason.
    ("too_many_pings", _TOO_MANY_PINGS),
    ("too many pings", _TOO_MANY_PINGS),
    ("stream removed", _LOST),
    ("socket closed", _LOST),
    ("connection reset", _LOST),
    ("broken pipe", _LOST),
    ("connection refused", _REFUSED),
    ("domain name not found", _UNKNOWN_HOST),
    ("errors resolving", _UNKNOWN_HOST),
    ("dns resolution failed", _UNKNOWN_HOST),
    ("no route to host", _NO_ROUTE),
    ("network is unreachable", _NO_NETWORK),
    ("failed parsing http/2", "what answers there is not a peer"),
    ("with status: ", "what answers there is not a peer"),
    # Errors of this machine.
    ("too many open files", "this process has too many open files: raise its limit (ulimit -n)"),
    ("address family not supported", "this machine has no IPv6: use an IPv4 address or a name that has one"),
    ("cannot assign requested address", "this machine has no address or port left to call from"),
    (
        "connect: invalid argument",
        "the system refuses this address (a link-local one needs its interface, as in [fe80::7%eth0]:4222)",
    ),
    ("connect: permission denied", "the firewall or security policy of this machine forbids it"),
    ("connect: operation not permitted", "the firewall or security policy of this machine forbids it"),
    ("http proxy returned response code 407", "the proxy requires a user and a password"),
    ("http proxy returned response code", "the proxy does not allow CONNECT to it"),
    ("cancelling all calls", "it ended the call"),
)
"""Parts of gRPC's messages, and the reason reported for each. The first match counts."""

_TOO_LARGE = re.compile(r"((?:CLIENT|SERVER): (?:Received|Sent)) message larger than max \((\d+) vs\. (\d+)\)")
_TOO_LARGE_REASONS = {
    "CLIENT: Sent": "the message is too large to be sent",
    "SERVER: Received": "the message is too large for it",
    "SERVER: Sent": "its answer is too large to be sent",
}


HAS_NO_TOKEN, TO_ALL_OR_NONE = "this run has no token", "give token_file to all peers of the run, or to none"
"""What a callee answers; a caller recognizes the first one."""


def _credential_reason(sent_token: bool, details: str) -> str:
    file = spelled("token_file")
    if details.startswith(HAS_NO_TOKEN):
        return f"its run has no token, and this peer has one: give {file} to all peers of the run, or to none"
    if sent_token:
        return f"its run does not accept this peer's token: make one of the run's tokens the first line of {file}"
    return f"its run requires a token, and this peer has none: give {file} with one of the run's tokens"


def error_of_call(endpoint: str, error: grpc.aio.AioRpcError, *, sent_token: bool = False) -> AveragingError:
    code, details = error.code(), error.details() or ""
    if too_large := _TOO_LARGE.search(details):
        where, nbytes, limit = too_large.groups()
        if where == "CLIENT: Received":
            return ProtocolViolationError(f"sent a message of {nbytes} bytes, limit {limit}", endpoint)
        return CallRefusedError(endpoint, f"{_TOO_LARGE_REASONS[where]}: {nbytes} bytes, limit {limit}")
    reason = next((reason for text, reason in _REASONS if text in details.lower()), "")
    if reason == _LOST and details.lower().startswith("failed to connect"):
        reason = "it closed the connection at once; do both use TLS, with one authority?"
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return CallRefusedError(endpoint, _credential_reason(sent_token, details), RefusalCause.UNAUTHENTICATED)
    if code in _UNREACHABLE:
        definite = any(reason == definite_reason for _, definite_reason in _DEFINITE)
        return PeerUnreachableError(
            endpoint,
            reason or _UNREACHABLE[code],
            refused=reason == _REFUSED,
            unknown_host=reason == _UNKNOWN_HOST,
            unconnected=reason in _UNCONNECTED,
            definite=definite,
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        cause = RefusalCause.OTHER if reason else RefusalCause.NOT_SERVED
        return CallRefusedError(endpoint, reason or cause.value, cause)
    message = printable(details, MAX_REASON) or code.name.lower().replace("_", " ")
    if code is grpc.StatusCode.NOT_FOUND:
        return CallRefusedError(endpoint, message, RefusalCause.WRONG_RUN)
    if message.endswith(RefusalCause.SAME_NAME.value):
        return CallRefusedError(endpoint, message, RefusalCause.SAME_NAME)
    return CallRefusedError(endpoint, message, definite=code is grpc.StatusCode.PERMISSION_DENIED)


def _through(proxy: str | None, failure: AveragingError) -> AveragingError:
    """Says that the call went through a proxy. What cannot be reached may be the proxy, so the peer is not gone."""
    if proxy is None or not isinstance(failure, PeerUnreachableError):
        return failure
    reason = str(failure).removeprefix(f"{failure.endpoint}: ")
    return PeerUnreachableError(failure.endpoint, f"{reason}, through the proxy {shown_proxy(proxy)}")


def is_failed_write(details: str | None) -> bool:
    return details == "Internal error from Core"


@contextmanager
def calling(endpoint: str, *, sent_token: bool, proxy: str | None = None) -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        logger.debug("%s: %s", endpoint, printable(error.debug_error_string() or ""))
        # From Python 3.12 on its traceback would refer to itself, and keep the call and gRPC's connection alive.
        # Nor may a variable here hold the new error, whose traceback has this frame.
        raise _through(proxy, error_of_call(endpoint, error.with_traceback(None), sent_token=sent_token)) from None
    except asyncio.CancelledError:
        # gRPC also raises it if only the call was cancelled: its channel was closed, or its upload failed.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise PeerUnreachableError(endpoint, "this peer closed the connection") from None


def read_reply(endpoint: str, decode: Callable[[bytes], Decoded], raw: bytes) -> Decoded:
    try:
        return decode(raw)
    except ProtocolViolationError as error:
        raise ProtocolViolationError(f"answered with {error}", endpoint) from None


async def refuse(context: grpc.aio.ServicerContext[Any, Any], path: str, error: Exception) -> Never:
    """Ends a call at the callee because of `error`. Details of unexpected errors are not sent to the caller."""
    message, code = str(error), None
    match error:
        case grpc.aio.BaseError():
            pass
        case ProtocolViolationError(kind=ViolationKind.FOREIGN_ENDPOINT):
            code = grpc.StatusCode.PERMISSION_DENIED
        case CallRefusedError(cause=RefusalCause.WRONG_RUN):
            code = grpc.StatusCode.NOT_FOUND
        case BusyError():
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
        case ProtocolViolationError():
            code = grpc.StatusCode.INVALID_ARGUMENT
        case AveragingError():
            code = grpc.StatusCode.FAILED_PRECONDITION
        case _:
            logger.error("%s from %s failed", path, context.peer(), exc_info=error)
            code, message = grpc.StatusCode.INTERNAL, "internal error; see the log of that peer"
    try:
        if code is not None:
            await context.abort(code, printable(message, MAX_REASON))
    except grpc.aio.InternalError as lost:
        message = str(lost)
    # The caller is gone and gets no answer. gRPC treats a cancellation as a silent end of the call.
    logger.debug("%s: the caller is gone: %s", path, printable(message))
    raise asyncio.CancelledError


# Errors that grpcio causes or logs and that mean nothing, dropped from the log.


POLLER = "PollerCompletionQueue._handle_events"  # where an event loop reads that gRPC has news


class _LostEnds(logging.Filter):  # an error of gRPC's own log: a caller disconnected while its call ended
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("ExecuteBatchError raised in core by servicer method")


class _LateWakeUps(logging.Filter):
    """Drops an error of asyncio's log: an event loop was woken for gRPC, and there was nothing to read any more.

    All event loops of a process share one pair of sockets, over which gRPC wakes them. Another loop may have read the
    event before, or may have closed the sockets with the last object of grpc.aio (grpcio 1.85). Or the event is for a
    loop that was closed meanwhile, to which this one cannot hand it on.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        frames = [frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)]
        if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
            return not any(name.endswith(POLLER) for name in frames)
        return not (isinstance(error, OSError) and frames and frames[-1].endswith(POLLER))


_FILTERS = {"grpc._cython.cygrpc": _LostEnds(), "asyncio": _LateWakeUps()}


def quieten() -> None:
    for name, drop in _FILTERS.items():
        logging.getLogger(name).addFilter(drop)  # once: a logger has a filter only one time

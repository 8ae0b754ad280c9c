"""What gRPC says of a failed call, and what is told for it. Which of its words come is decided by its timers."""

from __future__ import annotations

import asyncio
import pickle
from typing import cast

import grpc
import pytest

from averaging.errors import (
    AveragingError,
    BusyError,
    CallRefusedError,
    ClosedError,
    PeerUnreachableError,
    ProtocolViolationError,
    RefusalCause,
    TransportError,
    ViolationKind,
)
from averaging.transport.grpc.error_mapping import MAX_REASON, error_of_call, is_failed_write, refuse

DIALLING = "failed to connect to all addresses; last error: "


@pytest.mark.parametrize(
    "details",
    [
        "UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: connect() timed out",
        "UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: "
        "Timeout occurred: FD Shutdown (connect() timed out)",
        "UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: "
        "getsockopt(SO_ERROR): Connection reset by peer (104)",
        "UNKNOWN: ipv4:127.0.0.1:1: tcp handshaker shutdown",
        "UNKNOWN: ipv4:127.0.0.1:1: connection attempt timed out before receiving SETTINGS frame",
        "UNAVAILABLE: ipv4:127.0.0.1:1: Handshake read failed (FD Shutdown (endpoint shutdown))",
        "UNAVAILABLE: ipv4:127.0.0.1:1: Handshake read failed (Endpoint closing)",
    ],
)
def test_a_peer_that_does_not_answer_is_reported_as_unanswering(details: str) -> None:
    failure = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details=DIALLING + details
    )
    error = error_of_call("127.0.0.1:1", failure)
    assert isinstance(error, PeerUnreachableError)
    assert str(error) == "127.0.0.1:1: no answer to the connection"


@pytest.mark.parametrize(
    "details",
    [
        "Too many pings",  # gRPC's C core
        "Stream removed (Socket closed (GOAWAY received; Error code: 11; Debug Text: too_many_pings))",  # grpc-go
    ],
)
def test_a_server_that_wants_fewer_pings_is_reported_as_one(details: str) -> None:
    failure = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details
    )
    error = error_of_call("127.0.0.1:1", failure)
    assert isinstance(error, PeerUnreachableError)
    assert str(error) == "127.0.0.1:1: connection lost (its server must allow a ping every 20 s)"


@pytest.mark.parametrize(
    ("details", "told"),
    [
        ("INTERNAL: ipv4:127.0.0.1:1: socket: Too many open files", "raise its limit (ulimit -n)"),
        ("UNKNOWN: ipv6:%5B::1%5D:1: socket: Address family not supported by protocol (97)", "has no IPv6"),
        ("UNKNOWN: ipv4:127.0.0.1:1: connect: Cannot assign requested address (99)", "to call from"),
        ("UNKNOWN: ipv6:%5Bfe80::1%5D:1: connect: Invalid argument (22)", "needs its interface, as in [fe80::7%eth0]"),
        ("UNKNOWN: ipv4:127.0.0.1:1: connect: Permission denied (13)", "security policy of this machine forbids"),
        ("UNKNOWN: ipv4:127.0.0.1:1: connect: Operation not permitted (1)", "security policy of this machine forbids"),
    ],
)
def test_what_keeps_this_machine_from_dialling_is_reported(details: str, told: str) -> None:
    failure = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details=DIALLING + details
    )
    error = error_of_call("127.0.0.1:1", failure)
    assert isinstance(error, PeerUnreachableError)
    assert told in error.reason


_NO_PEER = "what answers there is not a peer"


def told(code: grpc.StatusCode, details: str, *, sent_token: bool = False) -> AveragingError:
    failure = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details or None)
    return error_of_call("a:1", failure, sent_token=sent_token)


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        (
            "Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: OPENSSL_internal:WRONG_VERSION_NUMBER",
            "speak TLS",
        ),
        ("Hostname Verification Check failed.", "is not valid for this host"),
        ("Ssl handshake failed: CERTIFICATE_VERIFY_FAILED: certificate has expired", "its certificate has expired"),
        ("Ssl handshake failed: CERTIFICATE_VERIFY_FAILED: certificate is not yet valid", "not valid yet"),
        (
            "Ssl handshake failed: CERTIFICATE_VERIFY_FAILED: self signed certificate",
            "not issued by this peer's certificate authority",
        ),
        ("Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL", "check the certificates of both"),
        ("Cannot check peer: missing selected ALPN property.", "what answers there is not a peer"),
        ("connect: Connection refused (111)", "connection refused"),
        ("connect: No route to host (113)", "no route to the host"),
        ("connect: Network is unreachable (101)", "network unreachable"),
        ("recvmsg: Connection reset by peer (104)", "it closed the connection at once; do both use TLS"),
        ("Socket closed", "it closed the connection at once; do both use TLS"),
        ("nothing that is known", "not available"),
    ],
)
def test_why_no_connection_came_about_is_reported(details: str, reason: str) -> None:
    error = told(grpc.StatusCode.UNAVAILABLE, f"{DIALLING}UNKNOWN: ipv4:127.0.0.1:1: {details}")
    assert isinstance(error, PeerUnreachableError)
    assert reason in error.reason


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        ("Socket closed", "connection lost"),
        ("Stream removed", "connection lost"),
        ("recvmsg:Connection reset by peer", "connection lost"),
        ("sendmsg: Broken pipe (32)", "connection lost"),
        ("ping timeout", "connection lost: no answer to pings"),
        (
            "DNS resolution failed for nobody:1: C-ares status is not ARES_SUCCESS: Domain name not found",
            "unknown host",
        ),
        ("DNS resolution failed for nobody:1", "unknown host"),
        ("errors resolving nobody:1", "unknown host"),
        ("Failed parsing HTTP/2", "what answers there is not a peer"),
        ("Received http2 header with status: 404", "what answers there is not a peer"),
        ("Cancelling all calls", "it ended the call"),
        ("", "not available"),
    ],
)
def test_why_a_call_broke_off_is_reported(details: str, reason: str) -> None:
    error = told(grpc.StatusCode.UNAVAILABLE, details)
    assert isinstance(error, PeerUnreachableError)
    assert error.reason == reason


@pytest.mark.parametrize(
    ("code", "details", "kind", "reason"),
    [
        (grpc.StatusCode.CANCELLED, "", PeerUnreachableError, "it ended the call"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", PeerUnreachableError, "no answer in time"),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", CallRefusedError, "does not serve this"),
        (
            grpc.StatusCode.UNIMPLEMENTED,
            "Received http2 header with status: 404",
            CallRefusedError,
            _NO_PEER,
        ),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "as busy\nas can be", CallRefusedError, "as busy as can be"),
        (grpc.StatusCode.INTERNAL, "", CallRefusedError, "internal"),
        (grpc.StatusCode.FAILED_PRECONDITION, "", CallRefusedError, "failed precondition"),
        (grpc.StatusCode.INVALID_ARGUMENT, "!" * MAX_REASON, CallRefusedError, "!" * MAX_REASON),
        (grpc.StatusCode.INVALID_ARGUMENT, "!" * 9999, CallRefusedError, "!" * (MAX_REASON - 1) + "…"),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "SERVER: Sent message larger than max (9 vs. 4)",
            CallRefusedError,
            "its answer is too large to be sent: 9 bytes, limit 4",
        ),
    ],
)
def test_what_a_status_means(
    code: grpc.StatusCode, details: str, kind: type[CallRefusedError | PeerUnreachableError], reason: str
) -> None:
    error = told(code, details)
    assert type(error) is kind
    assert isinstance(error, kind)
    assert error.reason == reason


@pytest.mark.parametrize(
    ("sent_token", "reason"),
    [
        (False, "its run requires a token, and this peer has none: give token_file with one of the run's tokens"),
        (True, "its run does not accept this peer's token: make one of the run's tokens the first line of token_file"),
    ],
)
def test_a_wrong_token_is_reported_as_wrong_and_not_as_missing(sent_token: bool, reason: str) -> None:
    error = told(grpc.StatusCode.UNAUTHENTICATED, "whatever the other side calls it", sent_token=sent_token)
    assert isinstance(error, CallRefusedError)
    assert error.cause is RefusalCause.UNAUTHENTICATED
    assert error.reason == reason
    assert error.definite


@pytest.mark.parametrize(
    ("code", "details", "definite"),
    [
        (grpc.StatusCode.NOT_FOUND, "the called peer belongs to run 'one', not to 'other'", True),
        (grpc.StatusCode.PERMISSION_DENIED, "calls itself b:1, but its certificate is for c", True),
        (grpc.StatusCode.UNAVAILABLE, f"{DIALLING}Ssl handshake failed: WRONG_VERSION_NUMBER", True),
        (grpc.StatusCode.UNAVAILABLE, f"{DIALLING}Ssl handshake failed: CERTIFICATE_VERIFY_FAILED: self signed", True),
        (grpc.StatusCode.UNAVAILABLE, f"{DIALLING}Hostname Verification Check failed.", True),
        # The other side may close a connection for many reasons.
        (grpc.StatusCode.UNAVAILABLE, f"{DIALLING}Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL", False),
        (grpc.StatusCode.UNAVAILABLE, f"{DIALLING}Socket closed", False),
        (grpc.StatusCode.UNAVAILABLE, f"{DIALLING}connect: Connection refused (111)", False),
        (grpc.StatusCode.UNAVAILABLE, "DNS resolution failed for nobody:1", False),
        (grpc.StatusCode.UNAVAILABLE, f"{DIALLING}Cannot check peer: missing selected ALPN property.", False),
        (grpc.StatusCode.UNAVAILABLE, "", False),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", False),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", False),
        (grpc.StatusCode.FAILED_PRECONDITION, "has left the run", False),
        (grpc.StatusCode.INVALID_ARGUMENT, "malformed", False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", False),
        (grpc.StatusCode.INTERNAL, "", False),
    ],
)
def test_which_failures_are_definite(code: grpc.StatusCode, details: str, definite: bool) -> None:
    error = told(code, details)
    assert isinstance(error, TransportError)
    assert error.definite is definite


def test_only_grpcs_own_texts_are_a_failed_write() -> None:
    assert is_failed_write("Internal error from Core")
    assert not is_failed_write("internal error; see the log of that peer")
    assert not is_failed_write(None)


class Context:
    """The context of a call, which keeps what its caller is told."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.told = code, details
        raise grpc.aio.AbortError("as gRPC's own does")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ProtocolViolationError("words"), grpc.StatusCode.INVALID_ARGUMENT),
        (ProtocolViolationError("words", kind=ViolationKind.NON_FINITE), grpc.StatusCode.INVALID_ARGUMENT),
        (ProtocolViolationError("words", kind=ViolationKind.FOREIGN_ENDPOINT), grpc.StatusCode.PERMISSION_DENIED),
        (CallRefusedError("a:1", "words", RefusalCause.WRONG_RUN), grpc.StatusCode.NOT_FOUND),
        (BusyError("words"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (ClosedError("words"), grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
def test_each_refusal_has_its_status(error: Exception, code: grpc.StatusCode) -> None:
    context = Context()
    with pytest.raises(grpc.aio.AbortError):
        asyncio.run(refuse(cast("grpc.aio.ServicerContext[bytes, bytes]", context), "/a/b", error))
    assert context.told == (code, str(error))


@pytest.mark.parametrize(
    ("details", "refused", "unknown_host", "unconnected"),
    [
        ("connect: Connection refused (111)", True, False, True),
        ("DNS resolution failed for nobody:1", False, True, True),
        ("connect: No route to host (113)", False, False, True),
        ("connect: Network is unreachable (101)", False, False, True),
        ("fd shutdown", False, False, True),
        ("Socket closed", False, False, False),
        ("ping timeout", False, False, False),
        ("something else", False, False, False),
    ],
)
def test_an_unreachable_peer_says_how_far_the_call_came(
    details: str, refused: bool, unknown_host: bool, unconnected: bool
) -> None:
    error = told(grpc.StatusCode.UNAVAILABLE, details)
    assert isinstance(error, PeerUnreachableError)
    assert (error.refused, error.unknown_host, error.unconnected) == (refused, unknown_host, unconnected)


def test_the_reason_of_a_violation_is_its_message_without_the_endpoint() -> None:
    error = ProtocolViolationError("sent too much", "a:1")
    assert (str(error), error.reason, error.endpoint) == ("a:1 sent too much", "sent too much", "a:1")
    anonymous = pickle.loads(pickle.dumps(ProtocolViolationError("a:1 is no sentence of ours")))
    assert (anonymous.reason, anonymous.endpoint) == ("a:1 is no sentence of ours", "")
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.reason, copied.endpoint) == (str(error), error.reason, error.endpoint)

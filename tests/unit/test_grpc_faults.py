"""What gRPC says of a failed call, and what is told for it. Which of its words come is decided by its timers."""

from __future__ import annotations

import grpc
import pytest

from averaging.errors import PeerUnreachableError
from averaging.transport.grpc.faults import error_of_call

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
def test_who_does_not_answer_is_told_as_one_who_does_not_answer(details: str) -> None:
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
def test_a_server_that_wants_fewer_pings_is_told_as_one(details: str) -> None:
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
        ("UNKNOWN: ipv6:%5B::1%5D:1: socket: Address family not supported by protocol (97)", "speaks no IPv6"),
        ("UNKNOWN: ipv4:127.0.0.1:1: connect: Cannot assign requested address (99)", "to call from"),
        ("UNKNOWN: ipv6:%5Bfe80::1%5D:1: connect: Invalid argument (22)", "needs its interface, as in [fe80::7%eth0]"),
        ("UNKNOWN: ipv4:127.0.0.1:1: connect: Permission denied (13)", "rules of this machine forbid"),
        ("UNKNOWN: ipv4:127.0.0.1:1: connect: Operation not permitted (1)", "rules of this machine forbid"),
    ],
)
def test_what_keeps_this_machine_from_dialling_is_told(details: str, told: str) -> None:
    failure = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details=DIALLING + details
    )
    error = error_of_call("127.0.0.1:1", failure)
    assert isinstance(error, PeerUnreachableError)
    assert told in error.reason

"""What is told of a failed call: what gRPC says of it, whose words its timers decide, and what services refuse."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import grpc
import pytest

from averaging.errors import AveragingError, CallRefusedError, ClosedError, PeerUnreachableError, ProtocolViolationError
from averaging.protocol.messages import AveragingData, JoinRequest, MessageFromLeader
from averaging.transport.grpc.error_mapping import MAX_REASON, error_of_call
from tests.support.grpc_fakes import (
    MAX_MESSAGE_BYTES,
    REQUEST,
    FakePeer,
    client,
    endless,
    number_of,
    part,
    parts,
    read_all,
    serving,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

DIALLING = "failed to connect to all addresses; last error: "


def told(code: grpc.StatusCode, details: str, *, sent_token: bool = False) -> AveragingError:
    failure = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details or None)
    return error_of_call("a:1", failure, sent_token=sent_token)


SILENT, NO_PEER, AT_ONCE = (
    "no answer to the connection",
    "what answers there is not a peer",
    "closed the connection at once",
)
HERE = "UNKNOWN: ipv4:127.0.0.1:1: "
REMOTE = f"{HERE}Failed to connect to remote host: "
PINGS = "connection lost (its server must allow a ping every 20 s)"


@pytest.mark.parametrize(
    ("details", "reason", "flags"),
    [
        # Flags: r for refused, h for an unknown host, u for unconnected, d for definite.
        (f"{DIALLING}{REMOTE}connect() timed out", SILENT, "u"),
        (f"{DIALLING}{REMOTE}Timeout occurred: FD Shutdown (connect() timed out)", SILENT, "u"),
        (f"{DIALLING}{REMOTE}getsockopt(SO_ERROR): Connection reset by peer (104)", SILENT, "u"),
        (f"{DIALLING}{HERE}tcp handshaker shutdown", SILENT, "u"),
        (f"{DIALLING}{HERE}connection attempt timed out before receiving SETTINGS frame", SILENT, "u"),
        (f"{DIALLING}{HERE}Handshake read failed (FD Shutdown (endpoint shutdown))", SILENT, "u"),
        (f"{DIALLING}{HERE}Handshake read failed (Endpoint closing)", SILENT, "u"),
        (f"{DIALLING}{HERE}connect: Connection refused (111)", "connection refused", "ru"),
        (f"{DIALLING}{HERE}connect: No route to host (113)", "no route to the host", "u"),
        (f"{DIALLING}{HERE}connect: Network is unreachable (101)", "network unreachable", "u"),
        (
            "DNS resolution failed for nobody:1: C-ares status is not ARES_SUCCESS: Domain name not found",
            "unknown host",
            "hu",
        ),
        ("DNS resolution failed for nobody:1", "unknown host", "hu"),
        ("errors resolving nobody:1", "unknown host", "hu"),
        # Of certificates
        (f"{DIALLING}Ssl handshake failed: SSL_ERROR_SSL: OPENSSL_internal:WRONG_VERSION_NUMBER", "speak TLS", "d"),
        (f"{DIALLING}Hostname Verification Check failed.", "is not valid for this host", "d"),
        (f"{DIALLING}CERTIFICATE_VERIFY_FAILED: certificate has expired", "its certificate has expired", "d"),
        (f"{DIALLING}CERTIFICATE_VERIFY_FAILED: certificate is not yet valid", "not valid yet", "d"),
        (f"{DIALLING}CERTIFICATE_VERIFY_FAILED: self signed", "not issued by this peer's certificate authority", "d"),
        (f"{DIALLING}Ssl handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL", "check the certificates of both", ""),
        # The other side may close a connection for many reasons.
        (f"{DIALLING}recvmsg: Connection reset by peer (104)", AT_ONCE, ""),
        (f"{DIALLING}Socket closed", AT_ONCE, ""),
        (f"{DIALLING}Cannot check peer: missing selected ALPN property.", NO_PEER, ""),
        ("Failed parsing HTTP/2", NO_PEER, ""),
        ("Received http2 header with status: 404", NO_PEER, ""),
        ("Socket closed", "connection lost", ""),
        ("Stream removed", "connection lost", ""),
        ("recvmsg:Connection reset by peer", "connection lost", ""),
        ("sendmsg: Broken pipe (32)", "connection lost", ""),
        ("ping timeout", "connection lost: no answer to pings", ""),
        ("Too many pings", PINGS, ""),  # gRPC's C core, and grpc-go
        ("Stream removed (Socket closed (GOAWAY received; Error code: 11; Debug Text: too_many_pings))", PINGS, ""),
        ("Cancelling all calls", "it ended the call", ""),
        ("", "not available", ""),
        # What keeps this machine from dialling
        (f"{DIALLING}{HERE}socket: Too many open files", "raise its limit (ulimit -n)", ""),
        (f"{DIALLING}{HERE}socket: Address family not supported by protocol (97)", "has no IPv6", ""),
        (f"{DIALLING}{HERE}connect: Cannot assign requested address (99)", "to call from", ""),
        (f"{DIALLING}{HERE}connect: Invalid argument (22)", "needs its interface, as in [fe80::7%eth0]", ""),
        (f"{DIALLING}{HERE}connect: Permission denied (13)", "security policy of this machine forbids", ""),
        (f"{DIALLING}{HERE}connect: Operation not permitted (1)", "security policy of this machine forbids", ""),
    ],
)
def test_why_a_peer_is_unreachable(details: str, reason: str, flags: str) -> None:
    error = told(grpc.StatusCode.UNAVAILABLE, details)
    assert isinstance(error, PeerUnreachableError)
    assert reason in error.reason
    assert (error.reason == reason) or reason not in (SILENT, "connection lost", "not available")
    shown = (error.refused, error.unknown_host, error.unconnected, error.definite)
    assert "".join(letter for letter, is_so in zip("rhud", shown, strict=True) if is_so) == flags


@pytest.mark.parametrize(
    ("code", "details", "kind", "reason", "definite"),
    [
        (grpc.StatusCode.CANCELLED, "", PeerUnreachableError, "it ended the call", False),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", PeerUnreachableError, "no answer in time", False),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", CallRefusedError, "does not serve this", False),
        (grpc.StatusCode.UNIMPLEMENTED, "Received http2 header with status: 404", CallRefusedError, NO_PEER, False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "as busy\nas can be", CallRefusedError, "as busy as can be", False),
        (grpc.StatusCode.INTERNAL, "", CallRefusedError, "internal", False),
        (grpc.StatusCode.FAILED_PRECONDITION, "", CallRefusedError, "failed precondition", False),
        (grpc.StatusCode.NOT_FOUND, "in another run", CallRefusedError, "in another run", True),
        (grpc.StatusCode.PERMISSION_DENIED, "calls itself b:1", CallRefusedError, "calls itself b:1", True),
        (grpc.StatusCode.INVALID_ARGUMENT, "!" * MAX_REASON, CallRefusedError, "!" * MAX_REASON, False),
        (grpc.StatusCode.INVALID_ARGUMENT, "!" * 9999, CallRefusedError, "!" * (MAX_REASON - 1) + "…", False),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "SERVER: Sent message larger than max (9 vs. 4)",
            CallRefusedError,
            "its answer is too large to be sent: 9 bytes, limit 4",
            False,
        ),
    ],
)
def test_what_a_status_means(
    code: grpc.StatusCode,
    details: str,
    kind: type[CallRefusedError | PeerUnreachableError],
    reason: str,
    definite: bool,
) -> None:
    error = told(code, details)
    assert type(error) is kind
    assert isinstance(error, kind)
    assert (error.reason, error.definite) == (reason, definite)


async def test_a_failure_of_the_service_is_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fails(_: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        raise ZeroDivisionError("a secret")
        yield

    async with serving(FakePeer(join=fails)) as (_, endpoint), client() as caller:
        with pytest.raises(CallRefusedError, match="internal error") as raised:
            await anext(caller.join_group(endpoint, REQUEST))
    assert "secret" not in str(raised.value)
    (record,) = [record for record in caplog.records if record.name == "averaging.transport"]
    assert record.levelno >= logging.WARNING
    assert "/DecentralizedAveraging/rpc_join_group" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


@pytest.mark.parametrize("error", [ProtocolViolationError, ClosedError])
async def test_a_refusal_of_the_service_is_reported_with_its_text(error: type[Exception]) -> None:
    async def refuses(messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        yield await anext(messages)
        raise error("a:1 is not a member\nof this group" + "!" * 10_000)

    async with (
        serving(FakePeer(aggregate=refuses)) as (_, endpoint),
        client() as caller,
        aclosing(caller.aggregate_part(endpoint, endless())) as replies,
    ):
        await anext(replies)
        with pytest.raises(CallRefusedError, match="a:1 is not a member of this group!") as raised:
            await anext(replies)
    assert len(str(raised.value)) < 400


async def test_the_last_reply_and_the_end_survive_a_failing_write() -> None:
    """The callee answers and ends while the caller is writing: its answer counts, not the write that fails."""

    async def answers_the_first(messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        yield await anext(messages)
        yield part(77)

    async def megabytes() -> AsyncGenerator[AveragingData, None]:
        while True:
            yield part(5, 1 << 20)

    async with serving(FakePeer(aggregate=answers_the_first)) as (_, endpoint), client() as caller:
        for _ in range(30):
            async with aclosing(caller.aggregate_part(endpoint, megabytes())) as replies:
                assert [number_of(reply) async for reply in replies] == [5, 77]


@pytest.mark.usefixtures("lane")
async def test_what_the_senders_messages_raise_is_raised_at_the_caller() -> None:
    async def breaks() -> AsyncGenerator[AveragingData, None]:
        yield part(0)
        raise KeyError("the sender's own")

    service = FakePeer()
    async with serving(service) as (_, endpoint), client() as caller:
        with pytest.raises(KeyError, match="the sender's own"):
            await read_all(caller.aggregate_part(endpoint, breaks()))
        await asyncio.wait_for(service.closed.wait(), 5)


async def test_messages_that_are_too_large() -> None:
    async def swells(messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        yield part(number_of(await anext(messages)), MAX_MESSAGE_BYTES * 2)

    large = 4 * MAX_MESSAGE_BYTES
    async with serving(FakePeer(aggregate=swells), limit=large) as (_, endpoint), client() as caller:
        with pytest.raises(ProtocolViolationError, match=f"{endpoint} sent a message of 83886.. bytes, limit 4194304"):
            await anext(caller.aggregate_part(endpoint, parts(1)))
    async with serving(FakePeer()) as (_, endpoint), client(large) as caller:
        with pytest.raises(CallRefusedError, match="the message is too large for it: 8"):
            await anext(caller.aggregate_part(endpoint, parts(1, 2 * MAX_MESSAGE_BYTES)))
    async with serving(FakePeer()) as (_, endpoint), client() as caller:
        with pytest.raises(CallRefusedError, match="the message is too large to be sent: 8"):
            await anext(caller.aggregate_part(endpoint, parts(1, 2 * MAX_MESSAGE_BYTES)))

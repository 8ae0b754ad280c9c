"""Who may call whom, on real sockets: certificates, tokens, names."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import grpc
import pytest

from averaging.errors import CallRefusedError, ConfigError, PeerUnreachableError, ProtocolViolationError
from averaging.protocol.messages import AveragingData, Rumour
from averaging.security.credentials import Credentials
from averaging.transport.grpc import GrpcTransport, methods
from averaging.transport.grpc.authentication import call_metadata, channel_credentials
from averaging.transport.grpc.dialling import Dialling
from tests.support.certificates import HERE, OLD_TOKEN, TOKEN, secure, tls
from tests.support.grpc_fakes import (
    ACCEPTED,
    DIGEST,
    MAX_MESSAGE_BYTES,
    METHODS,
    RECORD,
    REQUEST,
    SCHEMA,
    STATUS,
    FakeGossip,
    FakePeer,
    client,
    part,
    serving,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

OURS = [method.path for method in METHODS]
HEALTH, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
INSPECTION = [
    methods.GET_STATUS.path,
    methods.GET_SCHEMA.path,
    methods.LIST_RECORDS.path,
    "/grpc.channelz.v1.Channelz/GetServers",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
]
EVERYTHING = sorted({*OURS, *INSPECTION, WATCH, "/no.such.Service/Method"})

Call = Callable[[GrpcTransport, str], Awaitable[object]]


async def one(replies: AsyncGenerator[object, None]) -> object:
    async with aclosing(replies):
        return await anext(replies, None)


async def sent(*messages: AveragingData) -> AsyncGenerator[AveragingData, None]:
    for message in messages:
        yield message


def refused(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("refused a call")]


CALLS: dict[str, Call] = {
    "join_group": lambda caller, peer: one(caller.join_group(peer, REQUEST)),
    "aggregate_part": lambda caller, peer: one(caller.aggregate_part(peer, sent(part(0)))),
    "download_state": lambda caller, peer: one(caller.download_state(peer)),
    "get_status": lambda caller, peer: caller.get_status(peer),
    "get_schema": lambda caller, peer: caller.get_schema(peer),
    "exchange": lambda caller, peer: one(caller.exchange(peer, replace(DIGEST, endpoint=""))),
    "push": lambda caller, peer: caller.push(peer, "run", (Rumour(RECORD),)),
    "subscribe": lambda caller, peer: one(caller.subscribe(peer, replace(DIGEST, endpoint=""))),
}


Metadata = tuple[tuple[str, str], ...]


async def status_of(channel: grpc.aio.Channel, path: str, metadata: Metadata = ()) -> grpc.StatusCode:
    """How a call with an empty message ends, or OK once there is an answer."""
    start: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(path)
    call = start(b"", metadata=metadata)
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    call.cancel()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("name", CALLS)
async def test_every_method_works_over_tls(name: str) -> None:
    here = replace(secure(*HERE), tokens=(TOKEN,))
    async with serving(FakePeer(), FakeGossip(), credentials=here) as (_, endpoint), client(credentials=here) as caller:
        if name == "aggregate_part":
            assert await one(caller.aggregate_part(endpoint, sent(replace(part(0), endpoint=endpoint))))
        elif name == "join_group":
            for own in (endpoint, "client::0b5e6ff2-6a0f-4a3e-9c1b-2f8f6f0d8d11"):
                assert await one(caller.join_group(endpoint, replace(REQUEST, endpoint=own))) == ACCEPTED
        else:
            await CALLS[name](caller, endpoint)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
async def test_a_peer_is_dialled_by_address_and_by_name(host: str) -> None:
    async with (
        serving(FakePeer(), listen=f"{host}:0", credentials=secure(*HERE)) as (_, endpoint),
        client(credentials=secure()) as caller,
    ):
        assert await caller.get_status(endpoint) == STATUS


@pytest.mark.parametrize(
    "credentials",
    [Credentials(), secure(*HERE, of="foreign"), secure(*HERE, age=2), secure(*HERE, age=-1)],
    ids=["plain", "foreign", "expired", "not yet valid"],
)
async def test_a_caller_without_a_good_certificate_is_turned_away(credentials: Credentials) -> None:
    service = FakePeer()
    async with serving(service, credentials=secure(*HERE)) as (_, endpoint), client(credentials=credentials) as caller:
        with pytest.raises(PeerUnreachableError, match="closed the connection at once; do both use TLS"):
            await one(caller.join_group(endpoint, REQUEST))
    assert service.requests == []


async def test_a_caller_without_any_certificate_is_turned_away() -> None:
    credentials = grpc.ssl_channel_credentials(tls().ca_pem)
    async with (
        serving(FakePeer(), credentials=secure(*HERE)) as (_, endpoint),
        grpc.aio.secure_channel(f"ipv4:{endpoint}", credentials) as channel,
    ):
        for path in (HEALTH, methods.GET_STATUS.path):
            assert await status_of(channel, path) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("listener", "words"),
    [
        (Credentials(), "does not speak TLS"),
        (secure(*HERE, of="foreign", believes="foreign"), "not issued by this peer's certificate authority"),
        (secure(*HERE, age=2), "has expired"),
        (secure(*HERE, age=-1), "is not valid yet"),
    ],
)
async def test_nobody_talks_to_a_listener_without_a_good_certificate(listener: Credentials, words: str) -> None:
    service = FakePeer()
    async with serving(service, credentials=listener) as (_, endpoint), client(credentials=secure(*HERE)) as caller:
        with pytest.raises(PeerUnreachableError, match=words):
            await one(caller.join_group(endpoint, REQUEST))
    assert service.requests == []


async def test_a_listener_at_a_host_that_is_not_its_own_is_not_believed() -> None:
    """Another peer's port, taken over by somebody with a certificate for another host."""
    advertised = GrpcTransport(
        "127.0.0.1:0", "b.example.org:0", max_message_bytes=MAX_MESSAGE_BYTES, credentials=secure("b.example.org")
    )
    port = (await advertised.bind()).rpartition(":")[2]
    await advertised.serve(FakePeer(), None)
    async with client(credentials=secure(*HERE)) as caller:
        with pytest.raises(PeerUnreachableError, match="its certificate is not valid for this host"):
            await caller.get_status(f"127.0.0.1:{port}")
    await advertised.close()


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4222", "c.b.example.org:1"])
async def test_nobody_uses_the_endpoint_of_another(endpoint: str) -> None:
    service, gossip = FakePeer(), FakeGossip()
    claims: list[Call] = [
        lambda caller, peer: one(caller.join_group(peer, replace(REQUEST, endpoint=endpoint))),
        lambda caller, peer: one(caller.aggregate_part(peer, sent(replace(part(0), endpoint=endpoint)))),
        lambda caller, peer: one(caller.exchange(peer, replace(DIGEST, endpoint=endpoint))),
        lambda caller, peer: one(caller.subscribe(peer, replace(DIGEST, endpoint=endpoint))),
    ]
    async with (
        serving(service, gossip, credentials=secure(*HERE)) as (_, peer),
        client(credentials=secure("b.example.org")) as caller,
    ):
        for claim in claims:
            with pytest.raises(CallRefusedError, match=f"calls itself {re.escape(endpoint)}, but .* is for b.ex"):
                await claim(caller, peer)
    assert service.requests == []
    assert gossip.digests == []


async def test_a_certificate_that_expires_while_a_connection_lasts_lets_nobody_into_a_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its records are believed no longer, so all others would refuse each group with it, and lose that round."""
    service, gossip = FakePeer(), FakeGossip()
    own = "127.0.0.1:1"
    async with serving(service, gossip, credentials=secure(*HERE)) as (_, peer), client(credentials=secure(*HERE)) as c:
        assert await one(c.join_group(peer, replace(REQUEST, endpoint=own))) == ACCEPTED
        year = time.time() + 370 * 86400
        monkeypatch.setattr("averaging.transport.grpc.authentication.time", SimpleNamespace(time=lambda: year))
        for call in (
            c.join_group(peer, replace(REQUEST, endpoint=own)),
            c.exchange(peer, replace(DIGEST, endpoint=own)),
            c.subscribe(peer, replace(DIGEST, endpoint=own)),
        ):
            with pytest.raises(CallRefusedError, match="the caller's certificate expired on"):
                await one(call)
        assert await one(c.aggregate_part(peer, sent(replace(part(0), endpoint=own))))
    assert len(service.requests) == 1
    assert gossip.digests == []


# Tokens


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
async def test_every_method_needs_a_token(encrypted: bool) -> None:
    credentials = Credentials(tls=tls(*HERE) if encrypted else None, tokens=(TOKEN, OLD_TOKEN))
    wrong = [
        (),
        call_metadata(["another-token-012345"]),
        call_metadata([TOKEN[:-1]]),
        call_metadata([TOKEN + "0"]),
        (("authorization", TOKEN),),
        (("authorization", f"Basic {TOKEN}"),),
        (("authorization", "Bearer"),),
        (("x-authorization", f"Bearer {TOKEN}"),),
    ]
    async with serving(FakePeer(), FakeGossip(), credentials=credentials) as (_, endpoint):
        where = f"ipv4:{endpoint}"
        channel = (
            grpc.aio.secure_channel(where, channel_credentials(tls(*HERE)))
            if encrypted
            else grpc.aio.insecure_channel(where)
        )
        async with channel:
            good = [call_metadata([TOKEN]), call_metadata([OLD_TOKEN]), (("authorization", f"bearer {TOKEN}"),)]
            for path in EVERYTHING:
                for metadata in (*wrong, *good):
                    refused = await status_of(channel, path, metadata) is grpc.StatusCode.UNAUTHENTICATED
                    assert refused is (metadata in wrong), (path, metadata)
            assert await status_of(channel, HEALTH) is grpc.StatusCode.OK


@pytest.mark.parametrize("name", ["join_group", "get_status"])
async def test_the_caller_is_informed_what_to_give_and_the_callee_logs_who_has_none(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    service, gossip = FakePeer(), FakeGossip()
    async with serving(service, gossip, credentials=Credentials(tokens=(TOKEN,))) as (_, endpoint):
        for tokens in ((), ("another-token-012345",), (OLD_TOKEN, TOKEN)):
            told = "does not accept this peer's token" if tokens else "requires a token, and this peer has none"
            async with client(credentials=Credentials(tokens=tokens)) as caller:
                with pytest.raises(CallRefusedError, match=f"its run {told}: .* token_file"):
                    await CALLS[name](caller, endpoint)
        assert service.requests == []
        assert (gossip.digests, gossip.pushed) == ([], [])
        assert not service.started.is_set()
        [line] = refused(caplog)
        assert line.startswith("refused a call from 127.0.0.1: this run requires a token, and none was sent; ")
        assert TOKEN not in line
        async with client(credentials=Credentials(tokens=(TOKEN, OLD_TOKEN))) as caller:
            await CALLS[name](caller, endpoint)


@pytest.mark.parametrize("name", ["aggregate_part", "push"])  # who only looks may
async def test_a_token_at_the_caller_only_is_refused_and_both_are_told(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    async with serving(FakePeer(), FakeGossip()) as (_, endpoint):
        async with client(credentials=Credentials(tokens=(TOKEN,))) as caller:
            with pytest.raises(CallRefusedError, match="its run has no token, and this peer has one: .*, or to none"):
                await CALLS[name](caller, endpoint)
        async with client() as caller:
            await CALLS[name](caller, endpoint)
    (line,) = refused(caplog)
    assert "this run has no token, and one was sent; give token_file to all peers of the run, or to none" in line
    assert TOKEN not in line


async def test_tokens_are_changed_one_peer_after_the_other() -> None:
    """First all accept the new one, then all send it, then none accepts the old one."""
    stages = [(OLD_TOKEN,), (OLD_TOKEN, TOKEN), (TOKEN, OLD_TOKEN), (TOKEN,)]
    for ours, theirs in [*zip(stages, stages, strict=True), *pairwise(stages)]:
        for listening, calling in ((ours, theirs), (theirs, ours)):
            async with (
                serving(FakePeer(), credentials=Credentials(tokens=listening)) as (_, endpoint),
                client(credentials=Credentials(tokens=calling)) as caller,
            ):
                assert await caller.get_schema(endpoint) == SCHEMA
    async with (
        serving(FakePeer(), credentials=Credentials(tokens=stages[-1])) as (_, endpoint),
        client(credentials=Credentials(tokens=stages[0])) as caller,
    ):
        with pytest.raises(CallRefusedError, match="token"):
            await caller.get_schema(endpoint)


async def test_without_tokens_everybody_may_look_into_a_peer() -> None:
    async with serving(FakePeer(), FakeGossip()) as (_, endpoint), grpc.aio.insecure_channel(endpoint) as channel:
        for path in INSPECTION:
            for metadata in ((), call_metadata([TOKEN])):
                assert await status_of(channel, path, metadata) is grpc.StatusCode.OK


# Listening and dialling


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
async def test_other_machines_connect_with_tls_or_if_that_is_wanted(listen: str) -> None:
    async def bind(credentials: Credentials | None) -> str:
        one = GrpcTransport(listen, "a.example.org:0", max_message_bytes=MAX_MESSAGE_BYTES, credentials=credentials)
        try:
            return await one.bind()
        finally:
            await one.close()

    for exposed in (None, Credentials(tokens=(TOKEN,))):
        with pytest.raises(ConfigError, match="other machines can connect to .*: give tls_ca, .* or insecure=True if"):
            await bind(exposed)
    assert (await bind(Credentials(insecure=True))).startswith("a.example.org:")
    assert (await bind(secure("a.example.org"))).startswith("a.example.org:")


async def test_loopback_is_dialled_by_those_that_are_there() -> None:
    elsewhere = Credentials(insecure=True)
    async with serving(FakePeer()) as (local, endpoint):
        assert await local.get_schema(endpoint) == SCHEMA
        for given, dialled in (((), False), ((endpoint,), True), (("127.0.0.1:1",), False)):
            remote = GrpcTransport(
                "0.0.0.0:0", "192.0.2.7:0", max_message_bytes=MAX_MESSAGE_BYTES, credentials=elsewhere, given=given
            )
            await remote.bind()
            if dialled:
                assert await remote.get_schema(endpoint) == SCHEMA
            else:
                with pytest.raises(ProtocolViolationError, match="a loopback address"):
                    await remote.get_schema(endpoint)
            await remote.close()
        for given, dialled in ((("127.0.0.1:1",), True), (("192.0.2.7:1",), False)):
            one = GrpcTransport(None, max_message_bytes=MAX_MESSAGE_BYTES, given=given)
            if dialled:
                assert await one.get_schema(endpoint) == SCHEMA
            else:
                with pytest.raises(ProtocolViolationError):
                    await one.get_schema(endpoint)
            await one.close()


async def test_names_are_judged_by_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        known = {
            "evil.example.org": ["192.0.2.7", "169.254.169.254"],
            "good.example.org": ["192.0.2.7"],
            "0": ["0.0.0.0"],
        }
        if host not in known:
            raise OSError("unknown")
        return [(2, 1, 6, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    rule = Dialling(["evil.example.org:2"])
    with pytest.raises(
        ProtocolViolationError, match=r"evil\.example\.org is 169\.254\.169\.254, and that is a link-local"
    ):
        await rule.check("evil.example.org:1")
    with pytest.raises(ProtocolViolationError, match="unspecified"):
        await rule.check("0:80")
    await rule.check("evil.example.org:2")  # the user's own choice
    await rule.check("good.example.org:1")
    await rule.check("unknown.example.org:1")  # gRPC says why it cannot

"""Attacks on the connections of a run with TLS: old versions, plaintext, old sessions, chains."""

import asyncio
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from grpc.experimental import session_cache

from averaging import Peer
from averaging.errors import JoinError, PeerUnreachableError
from averaging.security.credentials import Credentials, Tls, issue
from averaging.transport.grpc import authentication, methods
from tests.support.certificates import HERE, NOW, TOKEN, certificate, secure, tls, token_file, write
from tests.support.grpc_fakes import FakePeer, client, serving
from tests.support.listening import listening

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

PATIENCE = 20.0
HANDSHAKE, ALERT = 22, 21
TLS_1_1, TLS_1_2 = 0x0302, 0x0303

PROTOCOL_VERSION_ALERT = bytes([ALERT, 3, 1, 0, 2, 2, 70])
HTTP2_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def client_hello(version: int) -> bytes:
    """A whole first message of a caller that speaks no later version."""
    suites = b"\xc0\x2b\xc0\x2c\xc0\x09\xc0\x0a\xc0\x13\xc0\x14\x00\x2f\x00\x35"
    curves, formats, signatures = "000a00040002 0017", "000b00020100", "000d000600040403 0804"
    extensions = bytes.fromhex(curves + formats + signatures + "0010000500030268 32")  # the last for HTTP/2
    body = version.to_bytes(2, "big") + bytes(32) + b"\x00" + len(suites).to_bytes(2, "big") + suites + b"\x01\x00"
    body += len(extensions).to_bytes(2, "big") + extensions
    message = b"\x01" + len(body).to_bytes(3, "big") + body
    return bytes([HANDSHAKE, 3, 1]) + len(message).to_bytes(2, "big") + message


@pytest.mark.parametrize(("version", "taken"), [(TLS_1_1, False), (TLS_1_2, True)])
async def test_a_caller_that_speaks_an_old_version_is_turned_away(version: int, taken: bool) -> None:
    async with serving(FakePeer(), credentials=secure(*HERE)) as (_, endpoint), asyncio.timeout(PATIENCE):
        host, _, port = endpoint.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with closing(writer):
            writer.write(client_hello(version))
            answer = await reader.read(1)
    assert (answer == bytes([HANDSHAKE])) is taken


@pytest.mark.parametrize("answer", [PROTOCOL_VERSION_ALERT, HTTP2_SETTINGS], ids=["alert", "plaintext"])
async def test_a_peer_never_falls_back_to_an_old_version_or_to_plaintext(answer: bytes, tmp_path: Path) -> None:
    """Whatever a listener answers, each attempt of the peer begins with the same offer, and no token is sent."""
    heard: list[bytes] = []

    async def downgrade(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(first := await reader.read(1 << 16))
        writer.write(answer)
        await writer.drain()
        heard[-1] = first + await reader.read(1 << 16)

    async with listening(downgrade) as endpoint:
        options = write(tmp_path, *HERE) | {"token_file": token_file(tmp_path)}
        peer = Peer([torch.zeros(1)], run_id="run", join=[endpoint], join_timeout=2.0, **options)  # type: ignore[arg-type]
        with pytest.raises(JoinError):
            await peer.__aenter__()
    assert len(heard) >= 2  # it has tried again
    for sent in filter(None, heard):
        assert sent[0] == HANDSHAKE
        assert TOKEN.encode() not in sent


async def test_a_resumed_session_does_not_outlive_its_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    certificate_of, resumed = authentication.certificate_of, []
    own, kept = tls(*HERE), session_cache.ssl_session_cache_lru(2)  # type: ignore[no-untyped-call]
    credentials = grpc.ssl_channel_credentials(own.ca_pem, own.key_pem, own.certificate_pem)

    def seen(context: authentication.Context) -> x509.Certificate | None:
        resumed.append(context.auth_context()["ssl_session_reused"])
        return certificate_of(context)

    async def call(endpoint: str) -> None:
        # Sessions are kept by the name of a server, which an address is not.
        options = [("grpc.ssl_session_cache", kept), ("grpc.ssl_target_name_override", "localhost")]
        async with grpc.aio.secure_channel(endpoint, credentials, options=options) as channel:
            await channel.unary_unary(methods.GET_SCHEMA.path)(b"", timeout=PATIENCE)  # type: ignore[arg-type]

    monkeypatch.setattr(authentication, "certificate_of", seen)
    async with serving(FakePeer(), credentials=Credentials(tls=own)) as (_, endpoint):
        await call(endpoint)
        await call(endpoint)
        year = time.time() + 370 * 86400
        monkeypatch.setattr(authentication, "time", SimpleNamespace(time=lambda: year))
        with pytest.raises(grpc.aio.AioRpcError, match="the caller's certificate expired on") as caught:
            await call(endpoint)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert resumed == [[b"false"], [b"true"], [b"true"]]


def chain_of_a_member() -> Tls:
    """What a member with a certificate for another host makes itself: one for this host, issued by its own."""
    own, believed = certificate("b.example.org"), tls("b.example.org")
    made = issue(own, "peer", HERE, NOW, 1)
    key = load_pem_private_key(made.key, None)
    assert isinstance(key, EllipticCurvePrivateKey)
    leaf = x509.load_pem_x509_certificate(made.certificate)
    chain = made.certificate + own.certificate
    return Tls(believed.ca_pem, chain, made.key, believed.authorities, leaf, key, "chain.pem")


async def test_a_member_is_no_authority() -> None:
    """Neither as a caller nor as a listener."""
    service, fake = FakePeer(), Credentials(tls=chain_of_a_member())
    async with (
        serving(service, credentials=secure(*HERE)) as (_, honest),
        serving(service, credentials=fake) as (_, liar),
        client(credentials=fake) as caller,
        client(credentials=secure(*HERE)) as other,
    ):
        for calling, endpoint in ((caller, honest), (other, liar)):
            with pytest.raises(PeerUnreachableError):
                await calling.get_schema(endpoint)
        await other.get_schema(honest)

"""Changed frames at the direct port: nothing breaks, and a sealed connection passes none of them on."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings, strategies as st

from averaging.protocol.messages import AveragingData
from averaging.security.credentials import Credentials
from averaging.transport.direct import DirectTransport
from averaging.transport.direct.frames import (
    MAGIC,
    TAG_BYTES,
    Cipher,
    FrameKind,
    derive_keys,
    pack_header,
    shared_secret,
)
from averaging.transport.direct.opening import OPEN, Request
from averaging.transport.direct.streams import encode_head
from tests.support.certificates import HERE, secure
from tests.support.grpc_fakes import FakePeer, number_of, part
from tests.support.selection import examples

LIMIT = 1 << 20
SENT = [replace(part(number, 64), endpoint="") for number in range(3)]


def frame(kind: FrameKind, head: bytes = b"", body: bytes = b"", cipher: Cipher | None = None) -> bytes:
    header = pack_header(kind, len(head), len(body))
    if cipher is None:
        return header + body + head
    pieces = []
    for piece in (body, head) if body else (head,):
        room = bytearray(len(piece) + TAG_BYTES)
        cipher.seal(piece, header, memoryview(room))
        pieces.append(bytes(room))
    return header + b"".join(pieces)


def stream(cipher: Cipher | None) -> bytes:
    """The frames of a caller that sends `SENT`."""
    frames = [frame(FrameKind.READY, cipher=cipher)]
    for message in SENT:
        assert message.tensor_part is not None
        frames.append(frame(FrameKind.PART, encode_head(message), bytes(message.tensor_part.buffer), cipher))
    return b"".join([*frames, frame(FrameKind.END, cipher=cipher)])


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["flip", "delete", "insert", "cut", "repeat"]),
        st.floats(0, 1),
        st.binary(min_size=1, max_size=9),
    ),
    min_size=1,
    max_size=3,
)


def changed(raw: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    data = bytearray(raw)
    for what, where, content in changes:
        place = min(int(where * len(data)), max(0, len(data) - 1))
        if not data:
            break
        match what:
            case "flip":
                data[place] ^= content[0] or 1
            case "delete":
                del data[place : place + len(content)]
            case "insert":
                data[place:place] = content
            case "repeat":
                data[place:place] = data[: len(content) * 8]
            case _:
                del data[place:]
    return bytes(data)


async def attack(changes: list[tuple[str, float, bytes]], credentials: Credentials | None) -> list[AveragingData]:
    """Sends changed frames to a peer, and then honest ones; returns what its service got of the former."""
    got: list[AveragingData] = []

    async def collects(messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        async for message in messages:
            got.append(replace(message, tensor_part=message.tensor_part))
            yield message

    service = FakePeer(aggregate=collects)
    peer = DirectTransport("127.0.0.1:0", max_message_bytes=LIMIT, max_part_bytes=LIMIT, credentials=credentials)
    caller = DirectTransport(None, max_message_bytes=LIMIT, max_part_bytes=LIMIT, credentials=credentials)
    endpoint = await peer.bind()
    await peer.serve(service, None)
    try:
        own = X25519PrivateKey.generate()
        public = own.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        grant = await caller._channels.call(endpoint, OPEN, Request(public if credentials else b""))
        cipher = None
        if credentials:
            secret = shared_secret(own, grant.public_key)
            cipher = Cipher(derive_keys(secret, public, grant.public_key, grant.ticket)[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", grant.port)
        writer.write(MAGIC + grant.ticket + changed(stream(cipher), changes))
        writer.write_eof()
        async with asyncio.timeout(10):
            try:
                while await reader.read(1 << 16):
                    pass
            except ConnectionResetError:
                pass
        writer.close()
        before = list(got)
        caller.prepare_lane(endpoint)
        await asyncio.gather(*(lane.opening for lane in caller._lanes._lanes.values() if lane.opening))

        async def honest() -> AsyncGenerator[AveragingData, None]:
            for message in SENT:
                yield message

        replies = [number_of(reply) async for reply in caller.aggregate_part(endpoint, honest())]
        assert replies == [0, 1, 2]
        lane = caller.lane(endpoint)
        assert lane is not None
        assert lane.name == ("sealed" if credentials else "direct")
        return before
    finally:
        await caller.close()
        await peer.close()


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
@settings(max_examples=examples(240))
@given(CHANGES)
def test_changed_frames(sealed: bool, changes: list[tuple[str, float, bytes]]) -> None:
    got = asyncio.run(attack(changes, secure(*HERE) if sealed else None))
    if sealed:
        assert got == SENT[: len(got)]
    assert len(got) <= 200

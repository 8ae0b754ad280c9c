"""The encryption of direct connections: test vectors, and bytes that are changed, repeated, moved or left out."""

import itertools

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from averaging.errors import ProtocolViolationError
from averaging.transport.direct.frames import (
    TAG_BYTES,
    Cipher,
    Ciphers,
    FrameKind,
    derive_keys,
    pack_header,
    shared_secret,
)

CALLER = X25519PrivateKey.from_private_bytes(bytes(range(32)))
CALLEE = X25519PrivateKey.from_private_bytes(bytes(range(32, 64)))
TICKET = bytes(range(64, 96))
SECRET = shared_secret(CALLER, CALLEE.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))
HEADER = pack_header(FrameKind.PART, 4, 8)


def public(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def keys() -> tuple[bytes, bytes]:
    """To the callee, and to the caller."""
    return derive_keys(SECRET, public(CALLER), public(CALLEE), TICKET)


def of_caller() -> Ciphers:
    to_callee, to_caller = keys()
    return Ciphers(Cipher(to_callee), Cipher(to_caller))


def of_callee() -> Ciphers:
    to_callee, to_caller = keys()
    return Ciphers(Cipher(to_caller), Cipher(to_callee))


def sealed(cipher: Cipher, data: bytes, header: bytes = HEADER) -> bytes:
    room = bytearray(len(data) + TAG_BYTES)
    cipher.seal(data, header, memoryview(room))
    return bytes(room)


def opened(cipher: Cipher, raw: bytes, header: bytes = HEADER) -> bytes:
    room = bytearray(raw)
    cipher.open(memoryview(room), header)
    return bytes(room[:-TAG_BYTES])


def test_vectors_of_the_keys() -> None:
    """SECURITY.md gives the same figures; another implementation must get them too."""
    assert public(CALLER).hex() == VECTORS["caller's public key"]
    assert public(CALLEE).hex() == VECTORS["callee's public key"]
    assert [key.hex() for key in keys()] == [VECTORS["key to the callee"], VECTORS["key to the caller"]]
    assert shared_secret(CALLEE, public(CALLER)) == SECRET


def test_vectors_of_a_frame() -> None:
    """The body is sealed first, with nonce 1, then the head with nonce 2; both with the header as additional data."""
    assert HEADER.hex() == VECTORS["header"]
    cipher = of_caller().sending
    body, head = sealed(cipher, b"the body"), sealed(cipher, b"head")
    assert body.hex() == VECTORS["sealed body"]
    assert head.hex() == VECTORS["sealed head"]
    plain = AESGCM(keys()[0])
    assert plain.decrypt((1).to_bytes(12, "big"), body, HEADER) == b"the body"
    assert plain.decrypt((2).to_bytes(12, "big"), head, HEADER) == b"head"
    receiving = of_callee().receiving
    assert opened(receiving, body) == b"the body"
    assert opened(receiving, head) == b"head"


def test_no_bit_can_be_changed() -> None:
    """Neither of a frame nor of its header."""
    raw = sealed(of_caller().sending, b"part")
    for place in range(len(raw) + len(HEADER)):
        both = bytearray(raw + HEADER)
        both[place] ^= 1
        with pytest.raises(ProtocolViolationError):
            opened(of_callee().receiving, bytes(both[: len(raw)]), bytes(both[len(raw) :]))


def test_nothing_can_be_left_out_repeated_or_moved() -> None:
    cipher = of_caller().sending
    pieces = [sealed(cipher, bytes([number])) for number in range(3)]
    for order in itertools.product(range(3), repeat=2):
        receiving = of_callee().receiving
        if order == (0, 1):
            assert [opened(receiving, pieces[number]) for number in order] == [b"\0", b"\1"]
            continue
        with pytest.raises(ProtocolViolationError):
            _ = [opened(receiving, pieces[number]) for number in order]


VECTORS = {
    "caller's public key": "8f40c5adb68f25624ae5b214ea767a6ec94d829d3d7b5e1ad1ba6f3e2138285f",
    "callee's public key": "358072d6365880d1aeea329adf9121383851ed21a28e3b75e965d0d2cd166254",
    "key to the callee": "303591900e5183fecd29fd8a23c1d20befd8cdab02e86183abb49769e4b7b588",
    "key to the caller": "6e1dd4a7b468b07e2322da15f54aa895b286366d00846546592116fbb4300122",
    "header": "0300040008000000",
    "sealed body": "00dd890773703ee7ecca4dfbd32280280404f21f36e9b641",
    "sealed head": "7f18fed450190081d14e69d3abdc921a4c72567a",
}
"""The private keys are the bytes 0 to 31 and 32 to 63, the ticket the bytes 64 to 95; a frame
PART with the body `the body` and the head `head`, sent by the caller."""

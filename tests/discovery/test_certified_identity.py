"""Records are accepted only from owners whose certificate is valid for the endpoint in them."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from averaging.discovery.gossip.identity import MAX_PROOF_BYTES, Author, CertifiedIdentity, Ed25519Identity, Identity
from averaging.discovery.gossip.record import Reason, RecordLimits
from averaging.discovery.gossip.record_table import RecordStore, RecordTable
from averaging.errors import DiscoveryError
from averaging.protocol.messages import Record
from averaging.security.ca import Issued, issue, make_authority
from averaging.security.credentials import Tls

NOW = datetime.datetime.now(datetime.UTC)
AUTHORITY, FOREIGN = make_authority("run", NOW, 10), make_authority("run", NOW, 10)
T = NOW.timestamp()


def identity(
    *hosts: str,
    authority: Issued = AUTHORITY,
    trusts: Issued = AUTHORITY,
    now: float | Callable[[], float] = T,
    days: float = 1,
) -> CertifiedIdentity:
    issued = issue(authority, "a", hosts, NOW, days)
    key = load_pem_private_key(issued.key, None)
    authorities = (x509.load_pem_x509_certificate(trusts.certificate),)
    own = x509.load_pem_x509_certificate(issued.certificate)
    tls = Tls(trusts.certificate, issued.certificate, issued.key, authorities, own, key, "a.pem")  # type: ignore[arg-type]
    return CertifiedIdentity(tls, now if callable(now) else lambda: now)


def rsa_identity(*hosts: str, certified: RSAPublicKey | Ed25519PublicKey | None = None) -> CertifiedIdentity:
    """An identity with an RSA key; its certificate is for the key `certified` if that is given."""
    key, issuer = rsa.generate_private_key(65537, 2048), load_pem_private_key(AUTHORITY.key, None)
    template, root = (
        x509.load_pem_x509_certificate(issued.certificate)
        for issued in (issue(AUTHORITY, "r", hosts, NOW, 1), AUTHORITY)
    )
    builder = (
        x509.CertificateBuilder()
        .subject_name(template.subject)
        .issuer_name(root.subject)
        .public_key(certified or key.public_key())
        .serial_number(1)
        .not_valid_before(template.not_valid_before_utc)
        .not_valid_after(template.not_valid_after_utc)
        .add_extension(template.extensions.get_extension_for_class(x509.SubjectAlternativeName).value, critical=False)
    )
    own = builder.sign(issuer, hashes.SHA256())  # type: ignore[arg-type]
    return CertifiedIdentity(Tls(b"", b"", b"", (root,), own, key, "r.pem"), lambda: T)


def test_rsa_keys_are_accepted() -> None:
    written = record(rsa_identity("a.example.org"), "a.example.org:1")
    assert READER.verify("run", written)
    assert not READER.verify("run", replace(written, signature=written.signature[:-1] + b"x"))
    assert not READER.verify("run", record(rsa_identity("a.example.org"), "b.example.org:1"))


@pytest.mark.parametrize("kind", ["RSA", "Ed25519"])
def test_a_certificate_proves_nothing_without_its_key(kind: str) -> None:
    rsa_key = rsa.generate_private_key(65537, 2048).public_key()
    certified = rsa_key if kind == "RSA" else Ed25519PrivateKey.generate().public_key()
    assert not READER.verify("run", record(rsa_identity("a.example.org", certified=certified), "a.example.org:1"))


def record(owner: Identity, subkey: str, run_id: str = "run") -> Record:
    return Author(run_id, owner, RecordLimits()).write("run.0b", subkey, b"v", T + 60, T, None)


READER = identity("192.0.2.1")


@pytest.mark.parametrize("subkey", ["a.example.org:1", "A.example.org:65535", "192.0.2.7:4222", "client::x", "rank-3"])
def test_an_owner_may_use_its_hosts_and_subkeys_that_are_no_host(subkey: str) -> None:
    written = record(identity("a.example.org", "192.0.2.7"), subkey)
    assert READER.verify("run", written)
    assert READER.verify("run", written)  # from the cache
    assert RecordTable(RecordLimits(), lambda r: READER.verify("run", r)).merge(written, T).is_new


@pytest.mark.parametrize("subkey", ["b.example.org:1", "192.0.2.8:4222", "[2001:db8::1]:1", "127.0.0.1:1"])
def test_an_owner_may_not_use_another_host(subkey: str) -> None:
    written = record(identity("a.example.org", "192.0.2.7"), subkey)
    assert not READER.verify("run", written)
    outcome = RecordTable(RecordLimits(), lambda r: READER.verify("run", r)).merge(written, T)
    assert outcome.reason is Reason.FORGED


def test_a_client_has_no_host() -> None:
    assert READER.verify("run", record(identity(), "client::x"))
    assert not READER.verify("run", record(identity(), "192.0.2.7:4222"))


def test_an_owner_needs_a_valid_certificate_of_the_run() -> None:
    assert not READER.verify("run", record(identity("a", authority=FOREIGN, trusts=FOREIGN), "a:1"))
    assert not READER.verify("run", record(Ed25519Identity(), "a:1"))
    assert not identity("b", now=T + 2 * 86400).verify("run", record(identity("a"), "a:1")), "it has expired"
    assert not identity("b", now=T - 7200).verify("run", record(identity("a"), "a:1")), "it is not valid yet"


def test_an_owner_with_an_expired_certificate_cannot_write() -> None:
    later = T + 2 * 86400
    store = RecordStore(Author("run", identity("a", now=later), RecordLimits()), RecordLimits(), lambda: later)
    with pytest.raises(DiscoveryError, match="expired"):
        store.write("run.peers", "a:1", b"", later + 30)


def test_a_warning_is_logged_before_the_certificate_expires_and_when_it_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    moments = iter([T, T, T + 2 * 86400, T + 5 * 86400, T + 10.5 * 86400, T + 11 * 86400])
    own = identity("a", now=lambda: next(moments), days=10)
    warnings = []
    for _ in range(5):
        caplog.clear()
        record(own, "a:1")
        warnings.append([found.getMessage() for found in caplog.records])
    assert [len(some) for some in warnings] == [0, 0, 1, 1, 0]
    assert warnings[2][0].startswith("a.pem expires on ")
    assert warnings[3][0].startswith("a.pem expired on ")


def test_a_proof_is_valid_for_one_owner_and_one_run() -> None:
    honest = record(identity("a"), "a:1")
    thief = Ed25519Identity()
    bare = replace(honest, owner=thief.owner, signature=b"")
    stolen = replace(bare, signature=thief.sign("run", bare) + honest.signature[64:])
    for _ in range(2):
        assert not READER.verify("run", stolen)
        assert READER.verify("run", honest)  # and is cached for its owner only
    owner = identity("a")
    elsewhere = record(owner, "a:1", "other")
    assert READER.verify("other", elsewhere)  # and is cached for that run only
    here = record(owner, "a:1")
    assert READER.verify("run", here)
    assert not READER.verify("run", replace(here, signature=here.signature[:64] + elsewhere.signature[64:]))


def test_a_proof_by_ecdsa_is_in_der() -> None:
    """As docs/reference/protocol.md says. The plain concatenation, which many libraries can write, is not accepted."""
    honest = record(identity("a"), "a:1")
    end = 66 + int.from_bytes(honest.signature[64:66], "little")
    numbers = decode_dss_signature(honest.signature[end:])
    raw = b"".join(number.to_bytes(32, "big") for number in numbers)
    assert READER.verify("run", honest)
    assert not READER.verify("run", replace(honest, signature=honest.signature[:end] + raw))


def test_any_changed_byte_is_noticed() -> None:
    honest = record(identity("a"), "a:1")
    rng = random.Random(1)
    for place in rng.sample(range(len(honest.signature)), 60):
        changed = bytearray(honest.signature)
        changed[place] ^= 1 << rng.randrange(8)
        assert not READER.verify("run", replace(honest, signature=bytes(changed)))
    for length in (0, 1, 63, 64, 65, 66, 67, len(honest.signature) - 1):
        assert not READER.verify("run", replace(honest, signature=honest.signature[:length]))
    assert not READER.verify("run", replace(honest, signature=honest.signature + bytes(MAX_PROOF_BYTES)))
    assert not READER.verify("run", replace(honest, value=b"w"))


def test_a_valid_proof_that_is_too_long_is_refused() -> None:
    """Otherwise one member could make all others store and forward records as large as a message."""
    written = record(identity("a", *(f"{number}.example.org" for number in range(300))), "a:1")
    assert len(written.signature) > 64 + MAX_PROOF_BYTES
    assert not READER.verify("run", written)


def test_a_record_stays_below_a_kibibyte_and_a_half() -> None:
    assert len(record(identity("a.example.org", "192.0.2.7", "2001:db8::7"), "a.example.org:1").signature) < 1024


def test_readers_see_which_certificate_has_written_a_record() -> None:
    """Peers of one certificate count as one member, whatever their keys, hosts and ports are."""
    one, other = identity("a.example.org", "b.example.org"), identity("c.example.org")
    table = RecordTable(
        RecordLimits(), lambda known: READER.verify("run", known), lambda known: READER.holder("run", known)
    )
    again = CertifiedIdentity(one._tls, lambda: T)
    for writer, endpoint in ((one, "a.example.org:1"), (again, "b.example.org:2"), (other, "c.example.org:1")):
        merged = table.merge(record(writer, endpoint), T)
        assert merged.is_new
    holders = [
        entry.holder for key in {known.key for known in table.list_records("")} for entry in table.read(key).values()
    ]
    assert len(holders) == 3
    assert len(set(holders)) == 2
    assert all(holders)

"""The certificate authority of a run, and the certificates of its peers.

Keys are ECDSA on P-256. A certificate is valid for both sides of a connection, since every peer is client and server.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from averaging.common import parse_ip
from averaging.errors import ConfigError

BACKDATED = datetime.timedelta(hours=1)
"""How long before their creation certificates become valid, since the clocks of machines differ."""

_REMEDY = (
    "restore the ca.pem and ca.key that were made together, or make another authority (averaging ca init --force). "
    "Then every peer needs the new ca.pem and a new certificate"
)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its private key, in PEM."""

    certificate: bytes
    key: bytes = field(repr=False)

    @property
    def expires(self) -> datetime.datetime:
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc


def make_authority(name: str, now: datetime.datetime, days: float) -> Issued:
    """A new authority, which can issue certificates for peers and not for other authorities."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    certificate = (
        _builder(subject, subject, key.public_key(), now, now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _issued(certificate, key)


def issue(authority: Issued, name: str, hosts: Sequence[str], now: datetime.datetime, days: float) -> Issued:
    """A certificate of `authority` for one peer, valid no longer than that; `hosts` are without ports."""
    issuer, issuer_key = _load(authority)
    if issuer.not_valid_after_utc <= now:
        raise ConfigError(f"the authority expired on {issuer.not_valid_after_utc:%Y-%m-%d}; make another one")
    key = ec.generate_private_key(ec.SECP256R1())
    until = min(now + datetime.timedelta(days=days), issuer.not_valid_after_utc)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        _builder(_name(name), issuer.subject, key.public_key(), now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if hosts:
        names = x509.SubjectAlternativeName([_general_name(host) for host in dict.fromkeys(hosts)])
        builder = builder.add_extension(names, critical=False)
    return _issued(builder.sign(issuer_key, hashes.SHA256()), key)


def _load(authority: Issued) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate(authority.certificate)
        key = load_pem_private_key(authority.key, None)
    except (ValueError, TypeError):
        raise ConfigError(f"the authority's certificate or its key is unreadable; {_REMEDY}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigError(f"the authority's key does not match its certificate; {_REMEDY}")
    return certificate, key


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    until: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(name: str) -> x509.Name:
    try:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    except ValueError:
        raise ConfigError(f"the name {name!r} must have 1 to 64 characters") from None


def _general_name(host: str) -> x509.GeneralName:
    address = parse_ip(host)
    if address is not None:
        return x509.IPAddress(address)
    labels = host.removeprefix("*.").rstrip(".").split(".")
    if not host.isascii() or not all(label.replace("-", "").replace("_", "").isalnum() for label in labels):
        raise ConfigError(f"{host!r} is not a host; give a name in ASCII (xn--…) or an address, without a port")
    return x509.DNSName(host.rstrip("."))


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _issued(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Issued:
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Issued(certificate.public_bytes(Encoding.PEM), private)

"""The certificate, the trusted authorities and the tokens of a peer, read from files and checked before use.

The certificates come from the authority of the run (`make_authority`, `issue`). Keys are ECDSA on P-256. A certificate
is valid for both sides of a connection, since every peer is client and server. Pure.
"""

from __future__ import annotations

import datetime
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from averaging.common import covers, parse_ip, spelled
from averaging.config import FilePath, PeerConfig, tls_files
from averaging.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20  # largest file with certificates, a key or tokens

MIN_TOKEN, MAX_TOKEN, MAX_TOKENS = 16, 1024, 16
"""Shortest and longest token in characters, and the number of tokens that may be valid at the same time."""

EXPIRES_SOON = 7 * 86400.0  # seconds before a certificate expires from which on a peer logs a warning
PrivateKey: TypeAlias = EllipticCurvePrivateKey | RSAPrivateKey

_UNREADABLE = (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError)

Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Tls:
    """A peer's certificate and key, and the authorities that it trusts."""

    ca_pem: bytes  # the authorities' certificates
    certificate_pem: bytes  # this peer's certificate, and the intermediate ones, if any
    key_pem: bytes = field(repr=False)  # its private key
    authorities: tuple[x509.Certificate, ...]
    certificate: x509.Certificate
    key: PrivateKey = field(repr=False)
    source: str  # the file of the certificate, for errors

    @property
    def expires(self) -> float:
        return self.certificate.not_valid_after_utc.timestamp()

    def check_host(self, host: str) -> None:
        """Raises a ConfigError unless other peers will accept the certificate of this peer at `host`."""
        hosts = hosts_of(self.certificate)
        if not covers(hosts, host):
            raise ConfigError(
                f"{self.source} is for {', '.join(hosts) or 'no host'}, but other peers reach this one at {host}: "
                f"issue a certificate for it (averaging ca issue NAME --host {host.strip('[]')}), or advertise another "
                "host"
            )
        if not _may_be_used_for(self.certificate, ExtendedKeyUsageOID.SERVER_AUTH):
            raise ConfigError(f"{self.source} is not for servers; issue one with the extended key usage serverAuth too")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The security settings of a transport."""

    tls: Tls | None = None  # none for connections that are neither encrypted nor authenticated
    # the first is sent, all are accepted. If empty, no token is required.
    tokens: tuple[str, ...] = field(default=(), repr=False)
    insecure: bool = False  # whether other machines may connect without TLS


def read_credentials(config: PeerConfig, clock: Callable[[], float]) -> Credentials:
    """Reads the files that `config` names.

    Args:
        config: names the files, and has the other settings.
        clock: seconds since the epoch; called only if there is a certificate to check.

    Raises:
        ConfigError: a file cannot be read, or does not match the others.
    """
    return Credentials(
        tls=read_tls(config.tls_ca, config.tls_cert, config.tls_key, clock),
        tokens=read_tokens(config.token_file),
        insecure=config.insecure,
    )


def read_tls(
    ca: FilePath | None, cert: FilePath | None, key: FilePath | None, clock: Callable[[], float]
) -> Tls | None:
    """Reads and checks a peer's certificate and key, and the authorities' certificates; None if no file is given."""
    files = tls_files(ca, cert, key)
    if files is None:
        return None
    ca, cert, key = files.ca, files.cert, files.key
    of_ca, of_cert, of_key = spelled("tls_ca", ca), spelled("tls_cert", cert), spelled("tls_key", key)
    ca_pem, own_pem, key_pem = _read("tls_ca", ca), _read("tls_cert", cert), _read_secret("tls_key", key)
    authorities = _parse(of_ca, "certificates in PEM", lambda: x509.load_pem_x509_certificates(ca_pem))
    certificate = _parse(of_cert, "certificate in PEM", lambda: x509.load_pem_x509_certificate(own_pem))
    private = _parse(of_key, "key in PEM without a password", lambda: load_pem_private_key(key_pem, None))
    if not isinstance(private, EllipticCurvePrivateKey | RSAPrivateKey):
        raise ConfigError(f"{of_key} is neither an elliptic curve key nor RSA; peers accept no other")
    if private.public_key() != certificate.public_key():
        raise ConfigError(f"{of_key} is not the key of {of_cert}; give two files that belong together")
    if not any(is_issued_by(certificate, authority) for authority in authorities):
        raise ConfigError(f"{of_cert} was not issued by an authority in {of_ca}; give the ca.pem of its run")
    if problem := validity_problem(certificate, clock()):
        raise ConfigError(f"{of_cert} {problem}; issue another one (averaging ca issue), or set the clock right")
    if validity_problem(certificate, clock() + EXPIRES_SOON):
        logger.warning("%s expires on %s; issue another one", of_cert, f"{certificate.not_valid_after_utc:%Y-%m-%d}")
    if not _may_be_used_for(certificate, ExtendedKeyUsageOID.CLIENT_AUTH):
        raise ConfigError(f"{of_cert} is not for clients; issue one with the extended key usage clientAuth too")
    return Tls(ca_pem, own_pem, key_pem, tuple(authorities), certificate, private, of_cert)


def read_tokens(file: FilePath | None, option: str = "token_file") -> tuple[str, ...]:
    """The tokens in a file, one per line. Empty lines and lines that begin with # are ignored."""
    if file is None:
        return ()
    name = spelled(option, file)
    try:
        lines = [line.strip() for line in _read_secret(option, file).decode("ascii").splitlines()]
    except UnicodeDecodeError:
        raise ConfigError(f"{name} holds characters that are not ASCII; use ASCII tokens") from None
    tokens = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not tokens or len(tokens) > MAX_TOKENS:
        raise ConfigError(f"{name} holds {len(tokens)} tokens; it must hold 1 to {MAX_TOKENS}, one per line")
    for number, token in enumerate(tokens, 1):
        if not MIN_TOKEN <= len(token) <= MAX_TOKEN or not token.isprintable() or " " in token:
            raise ConfigError(
                f"token {number} in {name} must have {MIN_TOKEN} to {MAX_TOKEN} characters and no spaces; "
                "`openssl rand -hex 32` makes one"
            )
    return tokens


def hosts_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """The names and addresses for which a certificate is valid (its subject alternative names)."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except _UNREADABLE:
        return ()
    addresses = (str(address) for address in names.get_values_for_type(x509.IPAddress))
    return (*names.get_values_for_type(x509.DNSName), *addresses)


def is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether `authority` is an authority and has signed `certificate` directly."""
    try:
        constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
        certificate.verify_directly_issued_by(authority)
    except (*_UNREADABLE, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return constraints.ca


def validity_problem(certificate: x509.Certificate, now: float) -> str | None:
    """Why a certificate is not valid at `now` (seconds since the epoch); None if it is."""
    moment = datetime.datetime.fromtimestamp(now, datetime.UTC)
    if moment < certificate.not_valid_before_utc:
        return f"is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
    if moment > certificate.not_valid_after_utc:
        return f"expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    return None


def _may_be_used_for(certificate: x509.Certificate, usage: x509.ObjectIdentifier) -> bool:
    try:
        return usage in certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return True


def _read(option: str, file: FilePath) -> bytes:
    try:
        with Path(file).open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{spelled(option, file)} cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{spelled(option, file)} has more than {MAX_FILE_BYTES} bytes, so it is the wrong file")
    return content


def is_open_to_others(file: FilePath) -> bool:
    """Whether more users than need be may read or change a file with a secret.

    Another owner's file, such as root's in a pod, can be given to this user through its group only.
    """
    status = Path(file).stat()
    return bool(status.st_mode & (0o077 if status.st_uid == os.geteuid() else 0o037))


def _read_secret(option: str, file: FilePath) -> bytes:
    content = _read(option, file)
    if is_open_to_others(file):
        logger.warning("%s can be read by other users of this machine; chmod 600 it", spelled(option, file))
    return content


def _parse(source: str, wanted: str, parse: Callable[[], Read]) -> Read:
    try:
        return parse()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{source} holds no {wanted}; give the right file") from None


# A token that the processes of one user share on one machine, so that a service on loopback is not open to others.


def local_credentials(service: str) -> Credentials:
    """The credentials of a service whose user gives none: the token in `token_path`, which is made if it is missing."""
    try:
        file = token_path(service)
        if not file.exists():
            _make(file)
        status = file.stat()
    except (OSError, RuntimeError) as error:  # the user may have no home
        raise ConfigError(
            f"the token that {service} of one user share cannot be made: {error}; set XDG_STATE_HOME to a folder of "
            "your own, or give credentials"
        ) from None
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{file} belongs to another user or can be read by others; delete it and start again")
    return Credentials(tokens=read_tokens(file))


def token_path(service: str) -> Path:
    """The file with the token of a service: in $XDG_STATE_HOME, by default ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "averaging" / f"{service}.token"


def _make(file: Path) -> None:
    """Makes the file in one step, so that of several processes that start at once all read the same token."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mine = file.with_suffix(f".{secrets.token_hex(8)}")
    try:
        mine.touch(mode=0o600, exist_ok=False)
        mine.write_text(f"{secrets.token_hex(32)}\n")
        with suppress(FileExistsError):
            os.link(mine, file)
    finally:
        mine.unlink(missing_ok=True)


# The endpoints of clients, `client::<uuid>`. With TLS, the UUID is bound to the key of the client's certificate: a
# client has no host that its certificate could name, so without this another member could use its endpoint.


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

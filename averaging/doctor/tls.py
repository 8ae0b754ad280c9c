"""The checks of certificates: this peer's own files, and the handshake with another peer."""

from __future__ import annotations

import asyncio
import ssl
import stat
from contextlib import suppress
from pathlib import Path

from cryptography import x509

from averaging.common import covers, parse_address, spelled
from averaging.config import PeerConfig
from averaging.doctor.dial_back import trusting
from averaging.doctor.findings import Finding, failure, ok, told, warning
from averaging.errors import ConfigError
from averaging.protocol import Mode
from averaging.security import EXPIRES_SOON, Tls, hosts_of, is_open_to_others, read_tls, read_tokens, validity_problem

ISSUE = "issue another one (averaging ca issue)"

HANDSHAKE_SECONDS = 8.0

_EXPIRED, _NOT_YET, _HOST, _IP = 10, 9, 62, 64
"""Codes of OpenSSL for what is wrong with a certificate (`X509_V_ERR_…`). The others concern its authority."""


# This peer's own files.


def check_certificate(config: PeerConfig, now: float) -> tuple[Tls | None, list[Finding]]:
    """Checks the certificate, its key and its authority, and returns them if a peer could use them.

    Args:
        config: Names the files.
        now: Seconds since the epoch.
    """
    if config.tls_ca is None or config.tls_cert is None or config.tls_key is None:
        return None, [_without_tls(config)]
    try:
        tls = read_tls(config.tls_ca, config.tls_cert, config.tls_key, lambda: now)
    except ConfigError as error:
        return None, [told("certificate", error)]
    if tls is None:
        return None, []
    certificate, end = tls.certificate, tls.certificate.not_valid_after_utc
    issuer = certificate.issuer.rfc4514_string()
    findings = [
        ok("certificate", f"{tls.source} was issued by an authority in {config.tls_ca} ({issuer}); the key fits")
    ]
    days = (end.timestamp() - now) / 86400
    text = f"{tls.source} is valid until {end:%Y-%m-%d %H:%M} UTC ({days:.0f} days)"
    soon = validity_problem(certificate, now + EXPIRES_SOON)
    findings.append(warning("expiry", text, ISSUE) if soon else ok("expiry", text))
    if config.mode is not Mode.CLIENT:
        findings.append(_coverage(tls, config.advertise or config.listen))
    return tls, [*findings, *_mode_of("certificate-key", Path(config.tls_key))]


def _without_tls(config: PeerConfig) -> Finding:
    if config.insecure:
        text = "no TLS files, and --insecure: every machine that can connect reads and changes the traffic"
        return warning("certificate", text, "`averaging ca init` makes certificates")
    return ok("certificate", "no TLS files; only this machine may connect")


def _coverage(tls: Tls, endpoint: str) -> Finding:
    host = parse_address(endpoint)[0]
    try:
        tls.check_host(host)
    except ConfigError as error:
        return told("coverage", error)
    return ok("coverage", f"{tls.source} covers {host}, at which other peers reach this one")


def check_token_file(config: PeerConfig) -> list[Finding]:
    """Checks that the tokens can be read, and by their owner only."""
    if config.token_file is None:
        return [ok("token-file", "none is given; a run with a token will refuse this peer")]
    try:
        tokens = read_tokens(config.token_file)
    except ConfigError as error:
        return [told("token-file", error)]
    text = f"{config.token_file}: the first of {len(tokens)} is sent" if len(tokens) > 1 else f"{config.token_file}"
    return _mode_of("token-file", Path(config.token_file)) or [ok("token-file", f"{text}; only its owner can read it")]


def _mode_of(check: str, file: Path) -> list[Finding]:
    """A warning if other users can read a secret."""
    with suppress(OSError):
        mode = stat.S_IMODE(file.stat().st_mode)
        if is_open_to_others(file):
            text = f"{file} has mode {mode:03o}, so other users of this machine can read it"
            return [warning(check, text, f"chmod 600 {file}")]
    return []


# The handshake with another peer.


async def check_handshake(config: PeerConfig, seed: str, address: str, host: str) -> Finding:
    """Checks that both sides accept each other's certificates, or that neither uses TLS.

    Args:
        config: Names this peer's files.
        seed: HOST:PORT of the peer.
        address: An IP address of it that accepts connections.
        host: The host that its certificate must cover, without brackets.
    """
    port = parse_address(seed)[1]
    if config.tls_ca is None:
        theirs = await _certificate_at(address, port)
        if theirs is None:
            return ok("tls", "neither side uses TLS", seed)
        remedy = f"give {spelled('tls_ca')}, {spelled('tls_cert')} and {spelled('tls_key')} of its run"
        return failure("tls", "the peer speaks TLS, and this one has no certificate", remedy, seed)
    try:
        context = client_context(config)
    except (OSError, ssl.SSLError):
        return warning("tls", "not checked, since this peer's own files cannot be used", "see certificate above", seed)
    try:
        version = await _shake_hands(context, address, port, host)
    except ssl.SSLCertVerificationError as error:
        return _refused_by_us(error, seed, host, await _certificate_at(address, port))
    except ssl.SSLError as error:
        return _refused_by_them(error, seed)
    except OSError as error:  # a timeout is one too
        text = "it does not answer" if isinstance(error, TimeoutError) else "it closed the connection"
        remedy = (
            "check that a peer with TLS is up there, and that no firewall inspects the connection; --deep says whether "
            "large packets vanish"
        )
        return failure("tls", f"{text} during the TLS handshake", remedy, seed)
    if not version:
        text = "the peer closes the connection after the handshake, so it refuses the certificate of this one"
        why = "by its clock the certificate has expired, or its authority is unknown there"
        return failure("tls", f"{text}: {why}", f"give both peers the same ca.pem, or {ISSUE}", seed)
    return ok("tls", f"{version}; both sides accept each other's certificates", seed)


def client_context(config: PeerConfig) -> ssl.SSLContext:
    """The settings of TLS with this peer's files, as gRPC has them.

    Raises:
        OSError: A file cannot be read (`ssl.SSLError` is one).
    """
    if config.tls_ca is None or config.tls_cert is None:
        raise FileNotFoundError("no TLS files")
    context = trusting(Path(config.tls_ca).read_bytes())
    context.load_cert_chain(config.tls_cert, config.tls_key)
    return context


def server_context(config: PeerConfig) -> ssl.SSLContext | None:
    """The settings of a listener with this peer's certificate, which asks for none; None without TLS.

    Raises:
        OSError: A file cannot be read.
    """
    if config.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(config.tls_cert, config.tls_key)
    context.set_alpn_protocols(["h2"])
    return context


async def _shake_hands(context: ssl.SSLContext, address: str, port: int, name: str) -> str:
    """Returns the version of TLS; empty if the server closes the connection then.

    With TLS 1.3 a server refuses a certificate only after the handshake, and gRPC does so without a reason.
    """
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        reader, writer = await asyncio.open_connection(address, port, ssl=context, server_hostname=name)
        try:
            begun = await reader.read(1)  # a gRPC server begins with its settings
            return str(writer.get_extra_info("ssl_object").version()) if begun else ""
        finally:
            writer.transport.abort()


async def _certificate_at(address: str, port: int) -> x509.Certificate | None:
    """The certificate of whatever listens there, unchecked; None if it speaks no TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # it is shown to the user, and nothing is sent
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            _, writer = await asyncio.open_connection(address, port, ssl=context, server_hostname="")
            raw = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            writer.transport.abort()
            return x509.load_der_x509_certificate(raw) if raw else None
    except (OSError, ValueError):  # SSLError and TimeoutError are OSErrors
        return None


def _refused_by_us(
    error: ssl.SSLCertVerificationError, seed: str, host: str, theirs: x509.Certificate | None
) -> Finding:
    """What is wrong with the certificate of the other peer."""
    shown = "" if theirs is None else f" (it is for {', '.join(hosts_of(theirs)) or 'no host'})"
    code = error.verify_code
    if code == _EXPIRED:
        when = "" if theirs is None else f" on {theirs.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        return failure("tls", f"expired certificate: that of the peer expired{when}", f"there, {ISSUE}", seed)
    if code == _NOT_YET:
        return failure("tls", "the certificate of the peer is not valid yet", "set the clocks of both machines", seed)
    wrong_host = theirs is not None and not covers(hosts_of(theirs), host)
    if code in (_HOST, _IP):
        remedy = f"there, {ISSUE} for {host.strip('[]')}, or join it at a name that its certificate has"
        return failure("tls", f"wrong name: the certificate of the peer is not for {host}{shown}", remedy, seed)
    also = f"; it is not for {host} either" if wrong_host else ""
    issuer = "" if theirs is None else f" ({theirs.issuer.rfc4514_string()})"
    text = f"unknown authority: the certificate of the peer was not issued by an authority in this peer's file{issuer}"
    return failure("tls", f"{text}{also}", f"give the ca.pem of that run as {spelled('tls_ca')}", seed)


_ALERTS = {
    "UNKNOWN_CA": (
        "it was issued by an authority that the peer does not know",
        "get one from the authority of its run",
    ),
    "EXPIRED": ("it has expired by the clock of the peer", ISSUE),
    "CERTIFICATE_REQUIRED": ("none was sent", f"give the files of TLS; {ISSUE}"),
    "BAD_CERTIFICATE": ("the peer cannot use it", ISSUE),
    "CERTIFICATE_UNKNOWN": ("the peer does not accept it", ISSUE),
    "DECRYPT_ERROR": ("it was issued by another authority of the same name", "get one from the authority of its run"),
}


def _refused_by_them(error: ssl.SSLError, seed: str) -> Finding:
    """Why a handshake failed for another reason than the certificate of the other peer."""
    reason = error.reason or ""
    if "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER_FAILURE" in reason:
        return failure("tls", "the peer speaks no TLS", "start all peers of a run with TLS, or none", seed)
    for part, (text, remedy) in _ALERTS.items():
        if part in reason:
            return failure("tls", f"the peer refuses the certificate of this one: {text}", remedy, seed)
    words = reason.lower().replace("_", " ") or "TLS failed"
    return failure("tls", f"the handshake failed: {words}", "check the certificates of both peers", seed)

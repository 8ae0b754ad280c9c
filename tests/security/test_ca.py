"""The authority of a run, the files that it makes, and errors in the files of a peer."""

import datetime
import os
import shutil
from pathlib import Path
from time import time

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from averaging.cli import main
from averaging.config import PeerConfig
from averaging.errors import ConfigError
from averaging.security.credentials import (
    Issued,
    Tls,
    hosts_of,
    is_issued_by,
    issue,
    make_authority,
    read_credentials,
    read_tls,
    read_tokens,
)

NOW = datetime.datetime.now(datetime.UTC)
AUTHORITY = make_authority("run", NOW, 10)


def certificate_of(issued: Issued) -> x509.Certificate:
    return x509.load_pem_x509_certificate(issued.certificate)


def ca(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["ca", *map(str, arguments)])


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With an authority in ca/, and the certificate of a peer `a`."""
    monkeypatch.chdir(tmp_path)
    assert ca("init").exit_code == 0
    assert ca("issue", "a", "--host", "a.example.org", "--host", "192.0.2.7").exit_code == 0
    return tmp_path / "ca"


def read(directory: Path, name: str = "a", authority: str = "ca", key: str = "", now: float | None = None) -> Tls:
    files = (directory / f"{authority}.pem", directory / f"{name}.pem", directory / f"{key or name}.key")
    tls = read_tls(*files, lambda: time() if now is None else now)
    assert tls is not None
    return tls


def test_a_certificate_is_for_both_sides_and_for_its_hosts_only() -> None:
    issued = issue(AUTHORITY, "a", ["a.example.org", "192.0.2.7", "[2001:db8::7]", "*.b.example.org"], NOW, 1)
    certificate, authority = certificate_of(issued), certificate_of(AUTHORITY)
    assert is_issued_by(certificate, authority)
    assert hosts_of(certificate) == ("a.example.org", "*.b.example.org", "192.0.2.7", "2001:db8::7")
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert certificate.not_valid_before_utc <= NOW - datetime.timedelta(minutes=59)
    assert certificate.not_valid_after_utc == (NOW + datetime.timedelta(days=1)).replace(microsecond=0)
    key = load_pem_private_key(issued.key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(key.curve, ec.SECP256R1)
    assert key.public_key() == certificate.public_key()


def test_no_certificate_outlives_its_authority() -> None:
    until = certificate_of(issue(AUTHORITY, "a", ["a"], NOW, 1000)).not_valid_after_utc
    assert until == certificate_of(AUTHORITY).not_valid_after_utc
    with pytest.raises(ConfigError, match="the authority expired on"):
        issue(AUTHORITY, "a", ["a"], NOW + datetime.timedelta(days=11), 1)


def test_the_commands_write_matching_files_and_print_the_next_step(directory: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}
    assert modes == {"ca.pem": 0o644, "ca.key": 0o600, "a.pem": 0o644, "a.key": 0o600}
    assert directory.stat().st_mode & 0o777 == 0o700
    tls = read(directory)
    assert hosts_of(tls.certificate) == ("a.example.org", "192.0.2.7")
    tls.check_host("192.0.2.7")
    told = ca("issue", "b", "--client-mode", "--days", "2").output
    assert "wrote ca/b.pem: certificate for a peer in client mode, valid until" in told
    assert "wrote ca/b.key: its private key; only that peer may have it" in told
    assert "--mode client --join HOST:PORT --tls-ca ca/ca.pem --tls-cert ca/b.pem --tls-key ca/b.key" in told
    lifetime = read(directory, "b").certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=1.9) < lifetime < datetime.timedelta(days=2)
    told = ca("issue", "c", "--host", "[2001:db8::7]").output
    assert "--listen '[::]:4222' --advertise '[2001:db8::7]:4222' " in told  # quoted: some shells expand brackets
    assert "--advertise HOST:4222" in ca("issue", "f", "--host", "*.example.org").output


def test_nothing_is_replaced_without_force(directory: Path) -> None:
    before = {path: path.read_bytes() for path in directory.iterdir()}
    for arguments, other in ((["init"], "directory"), (["issue", "a", "--host", "x"], "name")):
        result = ca(*arguments)
        assert result.exit_code == 2
        assert f"exist; give --force to replace, or another {other}" in result.stderr
    (directory / "b.key").write_bytes(b"precious")
    assert ca("issue", "b", "--host", "x").exit_code == 2
    assert {path: path.read_bytes() for path in directory.iterdir()} == before | {directory / "b.key": b"precious"}
    assert ca("issue", "a", "--host", "x", "--force").exit_code == 0
    assert hosts_of(read(directory).certificate) == ("x",)
    assert (directory / "a.key").stat().st_mode & 0o777 == 0o600
    assert ca("init", "--force").exit_code == 0
    with pytest.raises(ConfigError, match="was not issued by an authority in tls_ca"):
        read(directory)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["issue", "a"], "give --host for every host"),
        (["issue", "a", "--host", "x", "--client-mode"], "or --client-mode"),
        (["issue", "ca", "--host", "x"], "; not 'ca'"),
        (["issue", "../a", "--host", "x"], "must consist of letters"),
        (["issue", "a", "--host", "x:1"], "without a port"),
        (["issue", "a", "--host", "x", "--days", "1e-30"], "must be a finite number of days from 0.001 to 36500"),
        (["init", "--days", "nan"], "must be a finite number of days from 0.001 to 36500"),
        (["issue", "a", "--host", "x", "--directory", "none"], "averaging ca init --directory none"),
    ],
)
def test_wrong_usage_writes_nothing(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "issue":
        assert ca("init").exit_code == 0
    before = sorted(tmp_path.rglob("*"))
    result = ca(*arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_files_that_do_not_match_are_refused_with_a_remedy(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert ca("issue", "b", "--host", "b").exit_code == 0
    assert ca("init", "--directory", directory / "foreign").exit_code == 0
    with pytest.raises(ConfigError, match=r"tls_key=.*b\.key' is not the key of tls_cert=.*a\.pem"):
        read(directory, key="b")
    with pytest.raises(ConfigError, match="was not issued by an authority in tls_ca=.*; give the ca.pem of its run"):
        read(directory, authority="foreign/ca")
    with pytest.raises(ConfigError, match="expired on .*; issue another one"):
        read(directory, now=time() + 366 * 86400)
    with pytest.raises(ConfigError, match="is not valid before"):
        read(directory, now=time() - 2 * 3600)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(directory, "none")
    (directory / "empty.pem").touch()
    with pytest.raises(ConfigError, match="empty.pem' holds no certificate in PEM"):
        read(directory, "empty", key="a")
    shutil.copy(directory / "a.pem", directory / "c.key")
    with pytest.raises(ConfigError, match=r"c\.key' holds no key in PEM without a password"):
        read(directory, key="c")
    (directory / "large.pem").write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        read(directory, "large", key="a")
    caplog.clear()
    read(directory)
    assert not caplog.records
    read(directory, now=time() + 359 * 86400)
    assert "expires on" in caplog.text
    (directory / "a.key").chmod(0o640)
    read(directory)
    assert "chmod 600" in caplog.text


def test_unsuitable_certificates_of_other_tools_are_refused_with_a_remedy(directory: Path) -> None:
    other = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (directory / "other.key").write_bytes(other)
    with pytest.raises(ConfigError, match=r"tls_key=.*other\.key' is neither an elliptic curve key nor RSA"):
        read(directory, key="other")
    root, own = (x509.load_pem_x509_certificate((directory / f"{name}.pem").read_bytes()) for name in ("ca", "a"))
    signer = load_pem_private_key((directory / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    builder = (
        x509.CertificateBuilder(root.subject, own.subject, own.public_key(), own.serial_number)
        .not_valid_before(own.not_valid_before_utc)
        .not_valid_after(own.not_valid_after_utc)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    served = builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM)
    (directory / "server.pem").write_bytes(served)
    with pytest.raises(ConfigError, match=r"server\.pem' is not for clients; issue one with .* clientAuth too"):
        read(directory, "server", key="a")


def test_a_bundle_of_authorities_is_accepted(directory: Path) -> None:
    assert ca("init", "--directory", directory / "next").exit_code == 0
    bundle = directory / "bundle.pem"
    bundle.write_bytes((directory / "next" / "ca.pem").read_bytes() + (directory / "ca.pem").read_bytes())
    assert len(read(directory, authority="bundle").authorities) == 2


def test_a_certificate_must_be_valid_for_the_advertised_host(directory: Path) -> None:
    assert ca("issue", "b", "--client-mode").exit_code == 0
    read(directory).check_host("A.example.org")
    with pytest.raises(ConfigError, match=r"is for a\.example\.org, 192\.0\.2\.7, but .* --host 192\.0\.2\.8"):
        read(directory).check_host("192.0.2.8")
    with pytest.raises(ConfigError, match="is for no host"):
        read(directory, "b").check_host("a.example.org")


@pytest.mark.parametrize("given", [("tls_ca",), ("tls_cert", "tls_key"), ("tls_key",)])
def test_tls_needs_all_of_its_files(given: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="TLS needs tls_ca, tls_cert and tls_key together; give "):
        PeerConfig(run_id="run", **dict.fromkeys(given, "x"))  # type: ignore[arg-type]


def test_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tokens"
    file.write_text("# of May\n\nnew-token-0123456789\n  old-token-0123456789  \nnew-token-0123456789\n")
    file.chmod(0o600)
    assert read_tokens(file) == ("new-token-0123456789", "old-token-0123456789")
    assert read_tokens(None) == ()
    credentials = read_credentials(PeerConfig(run_id="run", token_file=file), time)
    assert credentials.tokens[0] == "new-token-0123456789"
    assert "new-token" not in repr(credentials)
    assert not caplog.records
    file.chmod(0o644)
    read_tokens(file)
    assert "can be read by other users" in caplog.text


@pytest.mark.parametrize(("mode", "warned"), [(0o440, False), (0o444, True), (0o460, True)])
def test_a_file_of_another_owner_may_be_read_by_its_group(
    mode: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod reads root's files through its group, see deploy/kubernetes."""
    file = tmp_path / "tokens"
    file.write_text("new-token-0123456789")
    file.chmod(mode)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    read_tokens(file)
    assert ("can be read by other users" in caplog.text) is warned


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds 0 tokens"),
        ("short\n", "token 1 in .* must have 16 to 1024 characters"),
        ("0123456789abcdef\nwith a space in it", "token 2"),
        ("x" * 1025, "token 1"),
        ("ä" * 20, "not ASCII"),
        ("\n".join(f"token-number-{n:06}" for n in range(17)), "holds 17 tokens"),
    ],
)
def test_invalid_tokens(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_tokens(file)

"""Certificates of one run, good and bad ones, made once for all tests."""

import datetime
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from averaging.security.credentials import Credentials, Issued, Tls, issue, make_authority

NOW = datetime.datetime.now(datetime.UTC)
HERE = ("127.0.0.1", "localhost", "::1")
TOKEN, OLD_TOKEN = "new-token-0123456789", "old-token-0123456789"


@cache
def authority(name: str = "run") -> Issued:
    return make_authority(name, NOW, 10)


@cache
def certificate(*hosts: str, of: str = "run", age: float = 0.0) -> Issued:
    """For one day, `age` days ago."""
    return issue(authority(of), "peer", hosts, NOW - datetime.timedelta(days=age), 1)


def tls(*hosts: str, of: str = "run", age: float = 0.0, believes: str = "run") -> Tls:
    """As it would be read from files, without a look at whether it is any good."""
    issued, root = certificate(*hosts, of=of, age=age), authority(believes).certificate
    key = load_pem_private_key(issued.key, None)
    own, roots = x509.load_pem_x509_certificate(issued.certificate), tuple(x509.load_pem_x509_certificates(root))
    return Tls(root, issued.certificate, issued.key, roots, own, key, "peer.pem")  # type: ignore[arg-type]


def secure(*hosts: str, of: str = "run", age: float = 0.0, believes: str = "run") -> Credentials:
    return Credentials(tls=tls(*hosts, of=of, age=age, believes=believes))


def write(directory: Path, *hosts: str, of: str = "run") -> dict[str, Path]:
    return stored(directory, authority(of), certificate(*hosts, of=of), "-".join(hosts) or "client")


def token_file(directory: Path, text: str = TOKEN) -> Path:
    path = directory / "token"
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def stored(directory: Path, root: Issued, issued: Issued, name: str = "peer") -> dict[str, Path]:
    """Files of a peer, as options of a `Peer`."""
    directory.mkdir(exist_ok=True)
    contents = {"tls_ca": root.certificate, "tls_cert": issued.certificate, "tls_key": issued.key}
    paths = {option: directory / f"{name}.{option}" for option in contents}
    for option, path in paths.items():
        path.touch(mode=0o600)
        path.write_bytes(contents[option])
    return paths

"""Tests with a real etcd server, which `make test-etcd` runs."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.certificates import write
from tests.support.ports import free_port


@dataclass
class Etcd:
    """A server with mutual TLS."""

    process: subprocess.Popen[bytes]
    port: int
    files: dict[str, Path]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    """A server of its own for each test."""
    files = write(tmp_path / "certificates", "127.0.0.1")
    port, peer = free_port(), free_port()
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "etcd",
                f"--data-dir={tmp_path / 'data'}",
                f"--listen-client-urls=https://127.0.0.1:{port}",
                f"--advertise-client-urls=https://127.0.0.1:{port}",
                f"--listen-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-cluster=default=http://127.0.0.1:{peer}",
                f"--trusted-ca-file={files['tls_ca']}",
                f"--cert-file={files['tls_cert']}",
                f"--key-file={files['tls_key']}",
                "--client-cert-auth",
            ],
            stdout=log,
            stderr=log,
        )
        yield Etcd(process, port, files)
        process.kill()
        process.wait()

"""The Dockerfile and the compose file, as far as that is possible without a daemon."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from averaging import PeerConfig
from averaging.security import read_tls, read_tokens
from tests.support.pages import ROOT

pytestmark = pytest.mark.deploy

DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = DEPLOY / "compose" / "compose.yaml"
BIN = Path(sys.executable).parent


def test_hadolint_finds_nothing() -> None:
    found = subprocess.run([BIN / "hadolint", DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_what_the_dockerfile_copies_is_enough_to_build_the_package(tmp_path: Path) -> None:
    """And no file is copied that the list of the context leaves out."""
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)]
    for source in [source for sources in copied for source in sources]:
        assert f"!{source}" in ignored
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("*_pb2*", "__pycache__"))
        else:
            (tmp_path / source).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / source, tmp_path / source)
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "dist", tmp_path],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert len(list((tmp_path / "dist").glob("averaging-*.whl"))) == 1


def test_the_compose_file_is_valid() -> None:
    import compose_spec

    compose_spec.PyOptions(apply_merge=True).from_yaml(COMPOSE.read_text()).validate()


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def test_each_peer_has_the_certificate_that_the_first_service_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its script runs here as it stands there, twice: the second time it changes nothing."""
    script = services()["credentials"]["command"][-1].replace("$$", "$")
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    for _ in range(2):
        subprocess.run(["sh", "-euc", script], cwd=tmp_path, env=environment, check=True, capture_output=True)
    peers = {name: service for name, service in services().items() if name.startswith("peer-")}
    assert len(peers) == 4
    for name, service in peers.items():
        options = PeerConfig.from_toml(COMPOSE.with_name("peer.toml"), environ=service["environment"])
        assert options.advertise == f"{name}:4222"
        ca, cert, key = (
            tmp_path / Path(str(file)).name for file in (options.tls_ca, options.tls_cert, options.tls_key)
        )
        tls = read_tls(ca, cert, key, time.time)
        assert tls
        tls.check_host(name)
        tls.check_host("peers")
        assert len(read_tokens(tmp_path / Path(str(options.token_file)).name)) == 1
        assert all(file.stat().st_mode & 0o077 == 0 for file in (ca, cert, key))
        assert service["networks"]["default"]["aliases"] == ["peers"]

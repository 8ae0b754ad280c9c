"""`averaging ca`: certificates with which the peers of a run authenticate each other."""

from __future__ import annotations

import re
import shlex
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from averaging.cli.files import replaced_atomically, sync
from averaging.cli.options import KindType, option, switch
from averaging.cli.running import CommandError, InputError
from averaging.common import number

if TYPE_CHECKING:
    from averaging.security import Issued

CA_DAYS, PEER_DAYS = 3650, 365  # default validity of certificates
AUTHORITY = "ca"  # name of the authority's own files

DAYS = KindType(number("days", least=0.001, most=36500, metavar="DAYS"))
DIRECTORY = click.Path(path_type=Path, file_okay=False)


@click.group("ca")
def ca_command() -> None:
    r"""Makes a run's own certificate authority, and the certificates of its peers.

    A peer accepts every peer that has a certificate of its run's authority, under the hosts in that certificate and no
    others. The authority's key (ca.key) is needed only to issue certificates: keep it on a machine where no peer runs.

    \b
    Make an authority, a certificate for a peer at a.example.org, and one for a peer behind a firewall:
      averaging ca init
      averaging ca issue a --host a.example.org --host 192.0.2.7
      averaging ca issue b --client-mode
    """


@ca_command.command("init")
@option("--directory", "Where to write; created if needed.", "DIR", default=AUTHORITY, type=DIRECTORY)
@option("--days", "Validity of the authority.", "DAYS", default=CA_DAYS, type=DAYS)
@switch("--force", "Replace the authority; the certificates that it issued become useless.")
def init_command(directory: Path, days: float, force: bool) -> None:
    r"""Makes an authority: DIR/ca.pem, which every peer gets, and DIR/ca.key, which stays here.

    \b
    For example:
      averaging ca init --directory ~/run-ca --days 365
    """
    from averaging.security import make_authority

    made = make_authority("averaging run", datetime.now(UTC), days)
    certificate, key = _write(directory, AUTHORITY, made, force=force)
    where = "" if directory == Path(AUTHORITY) else f" --directory {shlex.quote(str(directory))}"
    click.echo(
        f"wrote {certificate}: the authority's certificate, valid until {made.expires:%Y-%m-%d}; every peer needs "
        "it\n"
        f"wrote {key}: its private key; anyone who has it can join the run under any name, so keep it here\n"
        "next, for each peer, with every host at which other peers reach it:\n"
        f"  averaging ca issue NAME{where} --host HOST"
    )


@ca_command.command("issue")
@click.argument("name")
@option("--host", "Name or address, without a port, of the peer; repeatable.", "HOST", name="hosts", multiple=True)
@switch("--client-mode", "For a peer in client mode, which accepts no connections.")
@option("--directory", "Where the authority is.", "DIR", default=AUTHORITY, type=DIRECTORY)
@option("--days", "Validity of the certificate.", "DAYS", default=PEER_DAYS, type=DAYS)
@switch("--force", "Replace NAME's files if they exist; the old certificate stays valid.")
def issue_command(
    name: str, hosts: tuple[str, ...], client_mode: bool, directory: Path, days: float, force: bool
) -> None:
    r"""Issues a certificate for the peer NAME: DIR/NAME.pem and DIR/NAME.key.

    \b
    For a peer with two addresses, and for one in client mode:
      averaging ca issue a --host a.example.org --host 192.0.2.7
      averaging ca issue b --client-mode
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) or name.lower() == AUTHORITY:
        raise click.UsageError(f"NAME {name!r} must consist of letters, digits, '.', '_', '-'; not {AUTHORITY!r}.")
    if bool(hosts) == client_mode:
        raise click.UsageError("give --host for every host at which other peers reach the peer, or --client-mode.")
    from averaging.security import issue

    made = issue(_read_authority(directory), name, hosts, datetime.now(UTC), days)
    certificate, key = _write(directory, name, made, force=force)
    subject = ", ".join(hosts) or "a peer in client mode"
    options = ["--tls-ca", directory / f"{AUTHORITY}.pem", "--tls-cert", certificate, "--tls-key", key]
    place = "--mode client --join HOST:PORT"
    if hosts:
        host = _in_url(next((host for host in hosts if "*" not in host), "HOST"))
        everywhere = "[::]" if host.startswith("[") else "0.0.0.0"  # noqa: S104 - only printed
        place = shlex.join(["--listen", f"{everywhere}:4222", "--advertise", f"{host}:4222"])
    click.echo(
        f"wrote {certificate}: certificate for {subject}, valid until {made.expires:%Y-%m-%d}\n"
        f"wrote {key}: its private key; only that peer may have it\n"
        f"next: copy these two and {directory / f'{AUTHORITY}.pem'} to the machine of {name}, and start it there:\n"
        f"  averaging peer FILE.safetensors --run-id RUN {place} {shlex.join(map(str, options))}"
    )


def _read_authority(directory: Path) -> Issued:
    from averaging.security import Issued

    certificate, key = _paths(directory, AUTHORITY)
    try:
        return Issued(certificate.read_bytes(), key.read_bytes())
    except FileNotFoundError as error:
        init = f"averaging ca init --directory {shlex.quote(str(directory))}"
        raise InputError(f"there is no {error.filename}; make an authority first: {init}") from None
    except OSError as error:
        raise CommandError(
            f"{error.filename} cannot be read: {error.strerror}; make it readable, or run this as its owner"
        ) from None


def _in_url(host: str) -> str:
    return f"[{host.strip('[]')}]" if ":" in host else host


def _paths(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}.pem", directory / f"{name}.key"


def _write(directory: Path, name: str, made: Issued, *, force: bool) -> tuple[Path, Path]:
    certificate, key = _paths(directory, name)
    another = "directory" if name == AUTHORITY else "name"
    try:
        present = [str(path) for path in (certificate, key) if path.exists() or path.is_symlink()]
        if present and not force:
            raise InputError(f"{' and '.join(present)} exist; give --force to replace, or another {another}")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with ExitStack() as stack:
            for path, content, mode in ((key, made.key, 0o600), (certificate, made.certificate, 0o644)):
                temporary = stack.enter_context(replaced_atomically(path))
                temporary.touch(mode, exist_ok=False)  # nobody else may read a key, from its first byte on
                temporary.write_bytes(content)
                sync(temporary)  # both are complete before one is moved
    except OSError as error:
        raise CommandError(
            f"{error.filename or directory} cannot be written: {error.strerror}; nothing was replaced. Free disk "
            "space, or give another --directory"
        ) from None
    return certificate, key

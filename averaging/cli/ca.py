"""`averaging ca`: the certificates by which the peers of a run know each other."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from averaging.cli.atomic_files import replaced_atomically
from averaging.cli.error_reporting import NOT_DONE, WRONG_USAGE, CommandError, failure_of, starting, write_line

if TYPE_CHECKING:
    from averaging.security.ca import Issued

CA_DAYS, PEER_DAYS = 3650, 365
"""For how long certificates are valid by default."""

AUTHORITY = "ca"
"""The name of the authority's own files."""

SECRET_MODE, PUBLIC_MODE = 0o600, 0o644

LEAST_DAYS, MOST_DAYS = 0.001, 36500


def lifetime(value: str | float) -> float:
    """A type for days: enough to do something with the certificate, and at most a hundred years."""
    try:
        days = float(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a number.") from None
    if not LEAST_DAYS <= days <= MOST_DAYS:  # nor is NaN
        raise click.BadParameter(
            f"{value!r} must be from {LEAST_DAYS} (a minute and a half) to {MOST_DAYS} (a hundred years)."
        )
    return days


DIRECTORY = click.Path(path_type=Path, file_okay=False)


@click.group("ca")
def ca_group() -> None:
    r"""Makes a run's own certificate authority, and the certificates of its peers.

    A peer believes whoever has a certificate of its run's authority, and lets it call itself by the hosts that are in
    that certificate, and by no others. The authority's key (ca.key) is needed to issue certificates and for nothing
    else: keep it on a machine where no peer runs.

    \b
    Make an authority, and certificates for a peer that others reach at a.example.org and for one behind a firewall:
      averaging ca init
      averaging ca issue a --host a.example.org --host 192.0.2.7
      averaging ca issue b --client-mode

    Exit codes: 0 done; 1 a file could not be written; 2 wrong usage, or a file exists and --force was not given.
    """


@ca_group.command("init")
@click.option("--directory", default=AUTHORITY, type=DIRECTORY, metavar="DIR", help="Where to write; made if needed.")
@click.option("--name", default="averaging run", metavar="NAME", help="Told in the certificate, for people.")
@click.option("--days", default=CA_DAYS, type=lifetime, metavar="DAYS", help="How long the authority is valid.")
@click.option("--force", is_flag=True, help="Replace an authority: certificates that it has issued end with it.")
def init_command(directory: Path, name: str, days: float, force: bool) -> None:
    r"""Makes an authority: DIR/ca.pem, which every peer gets, and DIR/ca.key, which stays here.

    \b
    For example:
      averaging ca init --directory ~/run-ca --days 365

    Exit codes: 0 done; 1 a file could not be written; 2 wrong usage, or a file exists and --force was not given.
    """
    with starting():
        from averaging.errors import AveragingError
        from averaging.security.ca import make_authority

        try:
            made = make_authority(name, datetime.now(UTC), days)
        except AveragingError as error:
            raise failure_of(error) from None
        certificate, key = _write(directory, AUTHORITY, made, force=force)
        where = "" if directory == Path(AUTHORITY) else f" --directory {shlex.quote(str(directory))}"
        _tell(
            f"wrote {certificate}: the authority's certificate, until {made.expires:%Y-%m-%d}; every peer needs it\n"
            f"wrote {key}: its private key; whoever has it can join the run under any name, so keep it here\n"
            "next, for each peer, with every host at which others reach it:\n"
            f"  averaging ca issue NAME{where} --host HOST"
        )


@ca_group.command("issue")
@click.argument("name")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="Name or address, without a port, at which others reach the peer; may be given several times.",
)
@click.option("--client-mode", is_flag=True, help="For a peer in client mode, which nobody reaches.")
@click.option("--directory", default=AUTHORITY, type=DIRECTORY, metavar="DIR", help="Where the authority is.")
@click.option("--days", default=PEER_DAYS, type=lifetime, metavar="DAYS", help="How long the certificate is valid.")
@click.option("--force", is_flag=True, help="Replace NAME's files if they exist; the old certificate stays valid.")
def issue_command(
    name: str, hosts: tuple[str, ...], client_mode: bool, directory: Path, days: float, force: bool
) -> None:
    r"""Issues a certificate for the peer NAME: DIR/NAME.pem and DIR/NAME.key.

    \b
    For a peer that others reach at two addresses, and for one in client mode:
      averaging ca issue a --host a.example.org --host 192.0.2.7
      averaging ca issue b --client-mode

    Exit codes: 0 done; 1 a file could not be written or read; 2 wrong usage, there is no authority, or a file exists
    and --force was not given.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) or name.lower() == AUTHORITY:
        raise click.UsageError(f"NAME {name!r} must be of letters, digits, '.', '_' and '-', and not {AUTHORITY!r}.")
    if bool(hosts) == client_mode:
        raise click.UsageError("give --host for every host at which others reach the peer, or else --client-mode.")
    with starting():
        from averaging.errors import AveragingError
        from averaging.security.ca import issue

        authority = _read_authority(directory)
        try:
            made = issue(authority, name, hosts, datetime.now(UTC), days)
        except AveragingError as error:
            raise failure_of(error) from None
        certificate, key = _write(directory, name, made, force=force)
        stands_for = ", ".join(hosts) or "a peer in client mode"
        options = ["--tls-ca", directory / f"{AUTHORITY}.pem", "--tls-cert", certificate, "--tls-key", key]
        place = "--client-mode --join HOST:PORT"
        if hosts:
            host = _in_url(next((host for host in hosts if "*" not in host), "HOST"))
            everywhere = "[::]" if host.startswith("[") else "0.0.0.0"  # noqa: S104 - only told
            place = shlex.join(["--listen", f"{everywhere}:4222", "--advertise", f"{host}:4222"])
        _tell(
            f"wrote {certificate}: certificate for {stands_for}, valid until {made.expires:%Y-%m-%d}\n"
            f"wrote {key}: its private key; only that peer may have it\n"
            f"next: copy these two and {directory / f'{AUTHORITY}.pem'} to the machine of {name}, and start it there:\n"
            f"  averaging peer FILE.safetensors --run-id RUN {place} {shlex.join(map(str, options))}"
        )


def _tell(told: str) -> None:
    """Tells what was done; that it cannot be told undoes nothing."""
    if why_not := write_line(told):
        click.echo(f"{why_not}; the files are written", err=True)


def _read_authority(directory: Path) -> Issued:
    from averaging.security.ca import Issued

    certificate, key = _paths(directory, AUTHORITY)
    try:
        return Issued(certificate.read_bytes(), key.read_bytes())
    except FileNotFoundError as error:
        raise CommandError(
            f"there is no {error.filename}; make an authority first: averaging ca init --directory "
            f"{shlex.quote(str(directory))}",
            WRONG_USAGE,
        ) from None
    except OSError as error:
        raise CommandError(
            f"{error.filename} cannot be read: {error.strerror}; make it readable, or do this as the user who made it",
            NOT_DONE,
        ) from None


def _in_url(host: str) -> str:
    return f"[{host.strip('[]')}]" if ":" in host else host


def _paths(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}.pem", directory / f"{name}.key"


def _write(directory: Path, name: str, made: Issued, *, force: bool) -> tuple[Path, Path]:
    """Writes a certificate and its key, both or, if one of them exists, none.

    Raises:
        Failure: a file exists and may not be replaced, or cannot be written.
    """
    certificate, key = _paths(directory, name)
    another = "directory" if name == AUTHORITY else "name"
    try:
        present = [str(path) for path in (certificate, key) if path.exists() or path.is_symlink()]
        if present and not force:
            raise CommandError(
                f"{' and '.join(present)} exist; give --force to replace, or another {another}", WRONG_USAGE
            )
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with nullcontext() if force else _taken(key, another):
            _replace({key: (made.key, SECRET_MODE), certificate: (made.certificate, PUBLIC_MODE)})
    except OSError as error:
        raise CommandError(
            f"{error.filename or directory} cannot be written: {error.strerror}; nothing was replaced. Make room "
            "there, or give --directory another place",
            NOT_DONE,
        ) from None
    return certificate, key


@contextmanager
def _taken(path: Path, another: str) -> Iterator[None]:
    """Takes the place of a file that is about to be written, so that of two commands at once only one goes on.

    Raises:
        Failure: the other one was first.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, SECRET_MODE))
    except FileExistsError:
        raise CommandError(
            f"another command has just made {path}; give --force to replace it, or another {another}", WRONG_USAGE
        ) from None
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _replace(contents: Mapping[Path, tuple[bytes, int]]) -> None:
    """Writes each file beside its place, with its mode from the first byte on, and moves all when all are whole."""
    with ExitStack() as stack:
        for path, (content, mode) in contents.items():
            temporary = stack.enter_context(replaced_atomically(path))
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)  # before any is moved

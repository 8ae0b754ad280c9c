"""The security options of all commands that call peers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from averaging.security.credentials import Credentials

Command = TypeVar("Command", bound=Callable[..., Any])

FILE = click.Path(path_type=Path)

SECURITY_OPTIONS = ("tls_ca", "tls_cert", "tls_key", "token_file")
"""The names of the parameters below."""


def security_options(command: Command) -> Command:
    """Adds --tls-ca, --tls-cert, --tls-key and --token-file."""
    for decorate in reversed(
        (
            click.option(
                "--tls-ca",
                type=FILE,
                metavar="FILE.pem",
                help="Certificate of the run's authority, from `averaging ca init`; give all three --tls- options.",
            ),
            click.option(
                "--tls-cert", type=FILE, metavar="FILE.pem", help="Certificate of this peer, from `averaging ca issue`."
            ),
            click.option("--tls-key", type=FILE, metavar="FILE.key", help="Private key of the certificate."),
            click.option(
                "--token-file",
                type=FILE,
                metavar="FILE",
                help="The run's tokens, one per line: the first is sent, all are accepted. Read once, at the start.",
            ),
        )
    ):
        command = decorate(command)
    return command


def credentials_of(given: dict[str, Any]) -> Credentials:
    """Reads the credentials of a command that calls peers and does not listen.

    Raises:
        ConfigError: a file cannot be read, or does not match the others.
    """
    from averaging.security.credentials import Credentials, read_tls, read_tokens

    tls = read_tls(given["tls_ca"], given["tls_cert"], given["tls_key"], time.time)
    return Credentials(tls=tls, tokens=read_tokens(given["token_file"]))

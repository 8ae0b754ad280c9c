"""Types of options (`type=` of click). A wrong value ends the command with exit code 2.

Click adds the name of the option to a `BadParameter`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    from averaging.security import Credentials


def finite(*, above: float = -math.inf, at_least: float = -math.inf) -> Callable[[str | float], float]:
    """Returns a type for finite numbers within a lower bound."""

    def number(value: str | float) -> float:
        try:
            read = float(value)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a number.") from None
        if not math.isfinite(read):
            raise click.BadParameter(f"{value!r} is not finite.")
        if read <= above:
            raise click.BadParameter(f"{value!r} must be above {above:g}.")
        if read < at_least:
            raise click.BadParameter(f"{value!r} must be at least {at_least:g}.")
        return read

    return number


class PathToLookAt(click.Path):
    """The path of a file, which may not exist yet. A path that the system refuses is a usage error with its reason.

    Before Python 3.14 `Path.exists` raises for such paths: no permission, a name that is too long, a cycle of links.
    """

    def __init__(self, *, dir_okay: bool = True) -> None:
        super().__init__(path_type=Path, dir_okay=dir_okay)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Checks that the system accepts the path."""
        path = cast(Path, super().convert(value, param, ctx))
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            pass  # the command reports a missing file, with a remedy
        except OSError as error:
            self.fail(f"{str(path)!r} cannot be looked at ({error.strerror}); give another name.", param, ctx)
        return path


def address(value: str) -> str:
    """`HOST:PORT`."""
    _port(value)
    return value


def address_or_word(value: str) -> str:
    """`HOST:PORT`, `auto` or `off`."""
    return value if value in ("auto", "off") else address(value)


def address_to_dial(value: str) -> str:
    """`HOST:PORT` of a listening peer; port 0 is refused."""
    if _port(value) == 0:
        raise click.BadParameter(f"{value!r} has port 0; give the port on which that peer listens.")
    return value


def json_value(value: str) -> Any:
    """A value written as JSON."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a number in JSON")

    try:
        found = json.loads(value, parse_constant=refuse)
        json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError:  # bytes outside the terminal's encoding, or a lone surrogate \udXXX
        raise click.BadParameter(
            f"{value!r} has characters that are not Unicode; write complete \\uXXXX escapes."
        ) from None
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{value!r} is not JSON ({error}); for example: '{{\"loss\": 0.5}}'") from None


def run_id(value: str) -> str:
    """The name of a run."""
    if not value or not value.isprintable() or "." in value:
        raise click.BadParameter(f"{value!r} must be printable, not empty, and without a dot.")
    if len(value.encode()) > 128:
        raise click.BadParameter(f"{value[:20]!r}… is too long; it may have 128 bytes of UTF-8.")
    return value


def aggregation(value: str) -> str:
    """The name of an aggregation."""
    from averaging.errors import ConfigError
    from averaging.protocol import parse_aggregation

    try:
        return str(parse_aggregation(value))
    except ConfigError as error:
        raise click.BadParameter(f"{error}.") from None


def group_bits(value: str) -> str:
    """The first group key."""
    if set(value) - {"0", "1"}:
        raise click.BadParameter(f"{value!r} must be zeros and ones.")
    return value


def _port(value: str) -> int:
    from averaging.common import parse_address
    from averaging.errors import ConfigError

    try:
        return parse_address(value)[1]
    except ConfigError as error:
        raise click.BadParameter(f"{error}.") from None


# The security options of all commands that call peers.


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
    from averaging.security import Credentials, read_tls, read_tokens

    tls = read_tls(given["tls_ca"], given["tls_cert"], given["tls_key"], time.time)
    return Credentials(tls=tls, tokens=read_tokens(given["token_file"]))

"""Values of options, checked as they are read, so that a wrong one names its option and ends with exit code 2.

Each of these is a `type=` of click, which adds the name of the option to a `BadParameter`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import click


def finite(*, above: float = -math.inf, at_least: float = -math.inf) -> Callable[[str | float], float]:
    """A type for finite numbers, above or at least a bound."""

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
    """Where a file is or may be made; one at which the system will not even look is refused with its reason.

    Until Python 3.14 `Path.exists` and its like raise there: no permission, too long a name, links in a circle.
    """

    def __init__(self, *, dir_okay: bool = True) -> None:
        super().__init__(path_type=Path, dir_okay=dir_okay)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Looks there."""
        path = cast(Path, super().convert(value, param, ctx))
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            pass  # which is told later, with what to do
        except OSError as error:
            self.fail(f"{str(path)!r} cannot be looked at ({error.strerror}); give another name.", param, ctx)
        return path


def address(value: str) -> str:
    """`HOST:PORT`."""
    _port(value)
    return value


def address_to_dial(value: str) -> str:
    """`HOST:PORT` of somebody who listens there."""
    if _port(value) == 0:
        raise click.BadParameter(f"{value!r} has port 0; give the port on which that peer listens.")
    return value


def json_value(value: str) -> Any:
    """Any value, written as JSON."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no number in JSON")

    try:
        found = json.loads(value, parse_constant=refuse)
        json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError:  # the terminal's encoding lacks a letter, or half a letter is given as \udXXX
        raise click.BadParameter(f"{value!r} has letters that are no Unicode; write them as \\uXXXX, whole.") from None
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
    """How contributions become one."""
    from averaging.errors import ConfigError
    from averaging.protocol.aggregation import parse_aggregation

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
    from averaging.common.addresses import parse_address
    from averaging.errors import ConfigError

    try:
        return parse_address(value)[1]
    except ConfigError as error:
        raise click.BadParameter(f"{error}.") from None

"""Options: an option is declared once, as the metadata of a dataclass field, and read, checked and named from that.

`Kind` describes the values, `Option` is the declaration, `Setting` a value from a file, the environment or an argument.
Errors name an option with `spelled`, as its user wrote it.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeGuard, TypeVar, cast

from averaging.common.addresses import PROXY_VARIABLE, parse_address
from averaging.common.seed_sources import SourceKind, is_folder, parse_seed, split_seeds
from averaging.errors import ConfigError

ENVIRONMENT_PREFIX = "AVERAGING_"
CONFIG_VARIABLE = f"{ENVIRONMENT_PREFIX}CONFIG"
"""Names the TOML file of `averaging peer`; it is no option of a peer, nor is the proxy."""

E = TypeVar("E", bound=Enum)

KEY = "option"  # key of the `Option` in the metadata of a field


Spelling: TypeAlias = "Callable[[str, Any], str]"
"""Returns the text for an option and a value; for the option alone if the value is None."""


def as_argument(option: str, value: Any = None) -> str:
    return option if value is None else f"{option}={str(value) if isinstance(value, os.PathLike) else value!r}"


def as_flag(option: str, value: Any = None) -> str:
    name = option.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}" if value is None else f"--{name} {value}"


_spelling: ContextVar[Spelling] = ContextVar("spelling", default=as_argument)


def spelled(option: str, value: Any = None) -> str:
    """Names an option in an error, as the user of this program writes it: as an argument, unless `spelling` is open."""
    return _spelling.get()(option, value)


@contextmanager
def spelling(style: Spelling) -> Iterator[None]:
    """Within it, and in the tasks that it starts, `spelled` uses another style."""
    token = _spelling.set(style)
    try:
        yield
    finally:
        _spelling.reset(token)


# What an option may be.


@dataclass(frozen=True, slots=True)
class Kind:
    """The values that an option may have."""

    metavar: str  # placeholder of a value in --help
    expected: str  # description of the values in errors, such as "a whole number from 1 to 16"
    accepts: Callable[[Any], bool]  # whether something is such a value
    # returns the value as it is kept. It may raise a ConfigError with a reason of its own.
    convert: Callable[[Any], Any] = lambda value: value
    # parses the text of a variable or of the command line. A ValueError means that the text does not fit.
    read: Callable[[str], Any] = str
    bounds: str = ""  # the range of a number x in --help, such as "x>=2"

    def check(self, name: str, value: Any) -> Any:
        """Returns the value as it is kept, or raises a ConfigError that names the option by `name`."""
        if not self.accepts(value):
            raise ConfigError(f"{name} must be {self.expected}, not {value!r:.200}")
        try:
            return self.convert(value)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None

    def parse(self, text: str) -> Any:
        """Parses a text. One that does not fit is returned as it is, and `check` refuses it."""
        try:
            return self.read(text)
        except ValueError:
            return text


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def text(metavar: str, check: Callable[[str], Any] = str) -> Kind:
    """Texts; `check` raises a ConfigError if one is invalid."""

    def convert(value: str) -> str:
        check(value)
        return value

    return Kind(metavar, "a text", _is_text, convert)


def texts(metavar: str, expected: str, check: Callable[[Collection[str]], Any]) -> Kind:
    """Lists of texts, which are separated by commas in a text; `check` returns the list as it is kept."""
    return Kind(
        metavar, expected, _are_texts, check, lambda value: [each for each in map(str.strip, value.split(",")) if each]
    )


def whole(least: int, most: int | None = None, metavar: str = "N") -> Kind:
    """Whole numbers in a range that includes its bounds."""
    expected = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    bounds = f"x>={least}" if most is None else f"{least}<=x<={most}"

    def accepts(value: Any) -> bool:
        return _is_number(value, Integral) and least <= value and (most is None or value <= most)

    return Kind(metavar, expected, accepts, read=int, bounds=bounds)


def number(
    unit: str = "",
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    metavar: str = "SECONDS",
) -> Kind:
    """Finite numbers above `above`, at least `least`, or from `least` to `most`."""
    bound = f" above {above:g}" if above > -math.inf else f" of at least {least:g}" if least > -math.inf else ""
    bound = f" from {least:g} to {most:g}" if most < math.inf else bound

    def accepts(value: Any) -> bool:
        return _is_number(value, Real) and math.isfinite(value) and value > above and least <= value <= most

    return Kind(metavar, f"a finite number{f' of {unit}' if unit else ''}{bound}", accepts, read=float)


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def choice(names: Mapping[str, Enum] | type[Enum]) -> Kind:
    """Members of an enum, or their names in any case; `names` are lower-case."""
    known = names if isinstance(names, Mapping) else {member.name.lower(): member for member in names}

    def convert(value: Any) -> Any:
        # A member of a StrEnum or IntEnum equals its value, and members of other enums with that value.
        if any(value is member for member in known.values()):
            return value
        return known.get(value.strip().lower()) if isinstance(value, str) else None

    return Kind(f"[{'|'.join(known)}]", f"one of {', '.join(known)}", lambda value: convert(value) is not None, convert)


def one_of(kind: type[E], value: E | str, option: str) -> E:
    """Returns the member of `kind` that `value` is or names; case does not matter."""
    return cast(E, choice(kind).check(option, value))


def _port(address: str) -> int:
    return parse_address(address)[1]


def _check_dialled(address: str) -> None:
    if _port(address) == 0:
        raise ConfigError(f"{address!r} has port 0; give the port on which that peer listens")


def _are_texts(value: Any) -> bool:
    return isinstance(value, Collection) and not _is_text(value) and all(map(_is_text, value))


def _check_all_dialled(addresses: Collection[str]) -> Collection[str]:
    for address in addresses:
        parse_seed(address)
    return addresses


_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

ADDRESS = text("HOST:PORT", _port)
ADDRESS_TO_DIAL = text("HOST:PORT", _check_dialled)
SEED = text("HOST:PORT", parse_seed)  # the address of a peer, or a source of addresses, see `seed_sources`
FOLLOWED = text("HOST:PORT", lambda value: is_folder(value) or parse_seed(value))  # or a folder of versions
ADDRESSES_TO_DIAL = Kind(
    "HOST:PORT", "a list of addresses, each a text HOST:PORT", _are_texts, _check_all_dialled, split_seeds
)
PATH = Kind("FILE", "the path of a file", lambda value: isinstance(value, str | os.PathLike) and str(value) != "")
SWITCH = Kind(
    "", "True or False", lambda value: isinstance(value, bool), read=lambda text: _TRUTH.get(text.lower(), text)
)
SECONDS = number("seconds", above=0)

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|min|m|h)")
_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """The seconds of a text such as `500ms`, `120s`, `2min` or `1.5h`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r:.100} is no time; write it with its unit, as 500ms, 120s, 2min or 1.5h")
    return float(match[1]) * _UNITS[match[2]]


# Declarations.


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of an option."""

    kind: Kind  # its values
    default: Any  # its default; MISSING if it has none
    # meaning, with the unit; `{other_option}` stands for the name of another option. In --help and the docs.
    help: str = ""
    section: str = ""  # title under which it is documented; empty for an option that is not
    shared: bool = False  # whether the command with which other peers join names it
    optional: bool = False  # whether None is a value beside the default
    alike: bool = False  # whether it must be the same at all peers of a run, or their rounds fail

    def help_as(self, style: Callable[[str], str]) -> str:
        return re.sub(r"\{(\w+)\}", lambda name: style(name[1]), self.help)


def option(default: Any, kind: Kind, help: str = "", **more: Any) -> Any:
    return field(default=default, metadata={KEY: Option(kind, default, help, **more)})


def required(kind: Kind, help: str = "", **more: Any) -> dict[str, Option]:
    return {KEY: Option(kind, MISSING, help, **more)}


def options_of(config: Any) -> dict[str, Option]:
    return {each.name: each.metadata[KEY] for each in fields(config) if KEY in each.metadata}


def check_options(config: Any) -> None:
    """Checks each option of a frozen dataclass, and replaces it by the value as it is kept."""
    for name, declared in options_of(config).items():
        value = getattr(config, name)
        if value is None and (declared.default is None or declared.optional):
            continue
        try:
            object.__setattr__(config, name, declared.kind.check(spelled(name), value))
        except ConfigError as error:
            raise ConfigError(str(error), name) from None


# Where the value of an option comes from.


class Setting(NamedTuple):
    """The value of an option from one source, and how its user wrote it there."""

    name: str
    value: Any
    spelling: Spelling = spelled


def read_toml(path: str | os.PathLike[str], options: Mapping[str, Option]) -> list[Setting]:
    """Reads a flat TOML file: relative paths are beside it, and the keys of a table `[tls]` become options `tls_…`."""
    try:
        content = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check the name of the file") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    tls = content.pop("tls", {})
    if not isinstance(tls, dict):
        raise ConfigError(f"tls in {path} must be a table with ca, cert and key, not {tls!r:.200}", "tls")
    content |= {f"tls_{name}": file for name, file in tls.items()}
    for name, value in content.items():
        kind = options[name].kind if name in options else None
        if kind is PATH and isinstance(value, str):
            content[name] = str(Path(path).parent / value)
        elif kind is ADDRESSES_TO_DIAL and isinstance(value, list):
            content[name] = [_beside(path, seed) for seed in value]

    def in_file(option: str, value: Any = None) -> str:
        return f"{option} in {path}" if value is None else f"{option} = {value!r} in {path}"

    return [Setting(name, value, in_file) for name, value in content.items()]


def _beside(path: str | os.PathLike[str], seed: Any) -> Any:
    """`seed`, with a relative `file:` in it relative to the directory of `path`."""
    prefix = SourceKind.FILE.value
    if not isinstance(seed, str) or not seed.startswith(prefix) or seed == prefix:
        return seed
    return f"{prefix}{Path(path).parent / seed.removeprefix(prefix)}"


def read_environment(environ: Mapping[str, str], options: Mapping[str, Option]) -> list[Setting]:
    """Reads variables such as `AVERAGING_RUN_ID`. An empty variable counts as not set."""
    settings = []
    for variable, text in environ.items():
        if variable.startswith(ENVIRONMENT_PREFIX) and text and variable not in (CONFIG_VARIABLE, PROXY_VARIABLE):
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            value = options[name].kind.parse(text) if name in options else text
            settings.append(Setting(name, value, as_variable))
    return settings


def as_variable(option: str, value: Any = None) -> str:
    name = ENVIRONMENT_PREFIX + option.upper()
    return name if value is None else f"{name}={value}"


def read_arguments(arguments: Mapping[str, Any]) -> list[Setting]:
    """Reads arguments; None and an empty tuple count as not given."""
    return [Setting(name, value) for name, value in arguments.items() if value not in (None, ())]


def merge(settings: Iterable[Setting], names: Collection[str], former_names: Mapping[str, str]) -> dict[str, Setting]:
    """The last setting of each option; the error about an unknown one names its source and the most similar option."""
    merged = {}
    for setting in settings:
        if setting.name not in names:
            written = setting.spelling(setting.name, None)
            raise ConfigError(unknown_option(setting.name, written, names, former_names), setting.name)
        merged[setting.name] = setting
    return merged


@contextmanager
def spelled_as_set(settings: Mapping[str, Setting]) -> Iterator[None]:
    """Within it, `spelled` names each of these options as it was set."""
    own = {name: setting.spelling for name, setting in settings.items() if setting.spelling is not spelled}
    usual = _spelling.get()

    def style(option: str, value: Any = None) -> str:
        return own.get(option, usual)(option, value)

    with spelling(style):
        yield


def unknown_option(
    name: str, written: str, names: Collection[str], former_names: Mapping[str, str] | None = None
) -> str:
    """The error text for an option that does not exist; `written` is its name as its user wrote it."""
    former_names = former_names or {}
    close: Sequence[str] = [former_names[name]] if name in former_names else difflib.get_close_matches(name, names, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"the options are {', '.join(sorted(names))}"
    return f"unknown option {written}; {remedy}"


# Checks of values that users pass as options or arguments.


MAX_COUNT = 1 << 62
"""Maximum count that is accepted from other peers, so that larger ones still fit into the 64 bits of messages."""


def check_weight(weight: float) -> float:
    """Returns `weight` as a float; raises a ConfigError unless it is finite and at least 0."""
    if not (is_finite(weight) and weight >= 0):
        raise ConfigError(f"weight must be finite and at least 0, not {weight!r}")
    return float(weight)


def is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is an integer from 0 to `MAX_COUNT` and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT

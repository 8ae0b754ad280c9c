"""Options from a TOML file, from the environment and from arguments; errors name the source of a value."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from averaging.errors import ConfigError

ENVIRONMENT_PREFIX = "AVERAGING_"
ARGUMENT = "by an argument"
CONFIG_VARIABLE = f"{ENVIRONMENT_PREFIX}CONFIG"
"""Names the TOML file of `averaging peer`; it is no option of a peer."""


class Setting(NamedTuple):
    """One option, and where it was set, for error messages."""

    name: str
    value: Any
    source: str


def read_toml(path: str | os.PathLike[str], paths: Collection[str]) -> list[Setting]:
    """Reads a flat TOML file; the keys of a table `[tls]` become options `tls_…`.

    Args:
        path: The file.
        paths: Options that are file names; relative ones are relative to the directory of `path`.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        content = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check the name of the file") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    source, directory = f"in {path}", Path(path).parent
    tls = content.pop("tls", {})
    if not isinstance(tls, dict):
        raise ConfigError(f"tls must be a table with ca, cert and key, not {tls!r:.200} (set {source})")
    content |= {f"tls_{name}": file for name, file in tls.items()}
    for name in paths:
        if isinstance(content.get(name), str):
            content[name] = str(directory / content[name])
    return [Setting(name, value, source) for name, value in content.items()]


def read_environment(environ: Mapping[str, str], parse: Callable[[str, str], Any]) -> list[Setting]:
    """Reads variables such as `AVERAGING_RUN_ID`. An empty variable counts as not set.

    Args:
        environ: The variables.
        parse: Makes a value of an option's name and text.
    """
    settings = []
    for variable, text in environ.items():
        if variable.startswith(ENVIRONMENT_PREFIX) and text and variable != CONFIG_VARIABLE:
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            settings.append(Setting(name, parse(name, text), f"in the environment as {variable}"))
    return settings


def read_arguments(arguments: Mapping[str, Any]) -> list[Setting]:
    """Reads arguments; None and an empty tuple count as not given."""
    return [Setting(name, value, ARGUMENT) for name, value in arguments.items() if value not in (None, ())]


def merge(settings: Iterable[Setting], names: Collection[str], former_names: Mapping[str, str]) -> dict[str, Setting]:
    """The last setting of each option.

    Raises:
        ConfigError: An option is unknown; the message names its source and the most similar option.
    """
    merged = {}
    for setting in settings:
        if setting.name not in names:
            text = unknown_option(setting.name, setting.source, names, former_names)
            raise ConfigError(text, setting.name, unknown=True)
        merged[setting.name] = setting
    return merged


def with_sources(error: ConfigError, settings: Mapping[str, Setting]) -> ConfigError:
    """The error, with the sources of its options."""
    involved = [setting for setting in settings.values() if setting.name in error.options]
    if all(setting.source == ARGUMENT for setting in involved):
        return error
    sources = ", ".join(f"{name} is set {source}" for name, _, source in involved)
    return ConfigError(f"{error} ({sources})", *error.options)


def unknown_option(name: str, source: str, names: Collection[str], former_names: Mapping[str, str]) -> str:
    """The error text for an option that does not exist."""
    close: Sequence[str] = [former_names[name]] if name in former_names else difflib.get_close_matches(name, names, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"the options are {', '.join(sorted(names))}"
    return f"unknown option {name!r} {source}; {remedy}"

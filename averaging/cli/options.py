"""Options of commands: those of `PeerConfig` as flags, and the types of the others.

An option of a peer is declared in `averaging/config.py` alone. It comes from --config FILE.toml, from the environment
or from the command line; later ones win.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from averaging.common import ADDRESS_TO_DIAL, FOLLOWED, SECONDS, SEED, SWITCH, Kind, Option, as_flag, number
from averaging.config import OPTIONS, PeerConfig, tls_files
from averaging.errors import ConfigError
from averaging.protocol import CompressionType, Mode

if TYPE_CHECKING:
    from averaging.rpc import Credentials

Command = TypeVar("Command", bound=Callable[..., Any])

SECURITY = ("tls_ca", "tls_cert", "tls_key", "token_file")  # the options of all commands that call peers


class KindType(click.ParamType[Any]):
    """The values of a `Kind` as a type of click. A wrong one ends the command with exit code 2."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.name = kind.metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = param.get_error_hint(ctx).strip("'") if param is not None else "the value"
        try:
            return self.kind.check(name, self.kind.parse(value) if isinstance(value, str) else value)
        except ConfigError as error:
            raise click.UsageError(str(error), ctx) from None


DIALLED = KindType(ADDRESS_TO_DIAL)
JOINED = KindType(SEED)  # the address of a peer, or a source of addresses, see `averaging.seeds.look_up`
FOLLOWED_TYPE = KindType(FOLLOWED)
DURATION = KindType(SECONDS)
NOT_NEGATIVE = KindType(number(least=0))


class CheckedPath(click.Path):
    """The path of a file, which may not exist yet. A path that the system refuses is a usage error with its reason.

    Before Python 3.14 `Path.exists` raises for such paths: no permission, a name that is too long, a cycle of links.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = cast(Path, super().convert(value, param, ctx))
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            pass  # the command reports a missing file, with a remedy
        except OSError as error:
            self.fail(f"{str(path)!r} cannot be looked at ({error.strerror}); give another name.", param, ctx)
        return path


# Declarations of one line each.


def option(
    flag: str, text: str, metavar: str | None = None, *, name: str | None = None, **more: Any
) -> Callable[[Command], Command]:
    return click.option(flag, *filter(None, [name]), metavar=metavar, help=text, **more)


def switch(flag: str, text: str, *, name: str | None = None) -> Callable[[Command], Command]:
    return option(flag, text, name=name, is_flag=True)


def count(
    flag: str, text: str, default: int | None = None, *, least: int = 1, metavar: str = "N"
) -> Callable[[Command], Command]:
    return option(flag, text, metavar, default=default, type=click.IntRange(min=least))


def seconds(flag: str, text: str, default: float | None = None) -> Callable[[Command], Command]:
    return option(flag, text, "SECONDS", default=default, type=DURATION)


def path(flag: str, metavar: str, text: str, *, required: bool = False) -> Callable[[Command], Command]:
    return option(flag, text, metavar, type=CheckedPath(), required=required)


def one_of(flag: str, text: str, *words: str, default: str | None = None) -> Callable[[Command], Command]:
    return option(flag, text, default=default, type=click.Choice(words))


def max_bytes_option(text: str) -> Callable[[Command], Command]:
    return count("--max-bytes", text, 16 << 30, metavar="BYTES")


def model_folder_options(command: Command) -> Command:
    text = (
        "Folder of the base model. Its config.json, tokenizer and other files are copied, and its weights, if it has "
        "some, complete those that the run does not train."
    )
    limit = "Divide the weights of a folder between files of at most this size, with an index."
    return path("--config", "DIR", text)(count("--max-shard-bytes", limit, 5_000_000_000, metavar="BYTES")(command))


def _flag(name: str, declared: Option, **more: Any) -> Callable[[Command], Command]:
    """One option of `PeerConfig` as an option of click. `more` replaces what is declared."""
    settings = {"help": declared.help_as(as_flag), "metavar": declared.kind.metavar or None} | more
    switch = f"{as_flag(name)}/{as_flag(name, False)}" if settings.get("is_flag") else as_flag(name)
    return click.option(switch, name, **settings)


def flag(name: str, **more: Any) -> Callable[[Command], Command]:
    """An option of `PeerConfig` for another command, which checks its value and has a default of its own, or None."""
    return _flag(name, OPTIONS[name], type=KindType(OPTIONS[name].kind), **more)


def security_options(command: Command) -> Command:
    for name in reversed(SECURITY):
        command = flag(name)(command)
    return command


insecure_option = switch("--insecure", "Let other machines connect without TLS, in a network that you trust.")
hosts_option = option(
    *("--allow-host", "DNS name under which clients reach this server without TLS and token; repeatable.", "NAME"),
    name="hosts",
    multiple=True,
)


def output_options(command: Command) -> Command:
    verbose = click.option("-v", "--verbose", count=True, show_default=False, help="Log to stderr; -vv logs all.")
    text = "Print events as one JSON object per line; a failure is the event `error` with a message."
    return switch("--json", text, name="as_json")(verbose(command))


def credentials_of(given: dict[str, Any]) -> Credentials:
    from averaging.rpc import read_credentials

    tls = tls_files(given["tls_ca"], given["tls_cert"], given["tls_key"])
    return read_credentials(tls=tls, token_file=given["token_file"], insecure=given.get("insecure", False))


class PeerCommand(click.Command):
    """A command whose --help shows the basic options first, then its own, then the advanced ones."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {OPTIONS["run_id"].section: [], "This command": []}
        for parameter in self.get_params(ctx):
            declared = OPTIONS.get(str(parameter.name))
            if record := isinstance(parameter, click.Option) and parameter.get_help_record(ctx):
                sections.setdefault(declared.section if declared else "This command", []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def peer_options(command: Command) -> Command:
    """Adds --config and all options of `PeerConfig`, which are None if the command line does not give them.

    Their values are texts, as those of variables are: `PeerConfig` checks both.
    """
    for name, declared in reversed(OPTIONS.items()):
        default = as_flag(name, declared.default) if declared.kind is SWITCH else as_text(declared.default)
        text = declared.help_as(as_flag) + (" May be given several times." if name == "join" else "")
        notes = "; ".join(filter(None, (default and f"default: {default}", declared.kind.bounds)))
        text += f"  [{notes}]" if notes else ""
        more = {"is_flag": True} if declared.kind is SWITCH else {"multiple": name == "join", "type": str}
        command = _flag(name, declared, default=None, show_default=False, help=text, **more)(command)
    text = "File with options, such as `group_size = 4`. Variables such as AVERAGING_GROUP_SIZE win over it, and the "
    text += "command line wins over both."
    file = click.Path(path_type=Path, dir_okay=False)
    return option("--config", text, "FILE.toml", type=file, envvar="AVERAGING_CONFIG")(command)


def as_text(value: Any) -> str:
    """The value of an option as the command line takes it; empty if there is none."""
    if isinstance(value, CompressionType | Mode):
        return value.name.lower()
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(value) if isinstance(value, tuple) else "" if value in (None, MISSING) else str(value)


def peer_config(given: dict[str, Any]) -> PeerConfig:
    """The options of a peer from --config, the environment and the command line, checked together.

    Raises:
        click.UsageError: They contradict each other.
        ConfigError: An option is invalid.
    """
    texts = {name: given[name] for name in OPTIONS}
    arguments = {n: OPTIONS[n].kind.parse(value) if isinstance(value, str) else value for n, value in texts.items()}
    if given["config"] is None:
        config = PeerConfig.from_environment(**arguments)
    else:
        config = PeerConfig.from_toml(given["config"], **arguments)
    if config.mode is Mode.CLIENT:
        for name in ("listen", "advertise"):
            if given[name]:
                raise click.UsageError(f"--mode client accepts no connections; leave --{name} out.")
        if not config.join and not config.etcd:
            raise click.UsageError("--mode client needs --join: no peer could ever reach this one otherwise.")
    return config


def read_config(output: Path | None, given: dict[str, Any]) -> PeerConfig:
    """Like `peer_config`, for a command that averages and may write its result to `output`."""
    config = peer_config(given)
    if config.mode is Mode.AUXILIARY and output:
        raise click.UsageError("--mode auxiliary gets no result, so there is nothing to write; leave --output out.")
    if given["overwrite"] and not output:
        raise click.UsageError("--overwrite is for --output; add --output FILE.")
    if config.receipts is not None:
        _check_receipts(Path(config.receipts))
    return config


def _check_receipts(path: Path) -> None:
    # Refuses a name that cannot be meant. Whether the file can be written shows later, and stops no round.
    CheckedPath().convert(path, None, None)
    if path.is_dir() or not path.parent.is_dir():
        raise click.UsageError(f"--receipts: {path} is a directory, or is in none; give a file in one that exists.")
    beginning = b""
    with suppress(OSError):  # it may be a FIFO, or not readable
        if path.is_file():
            with path.open("rb") as file:
                beginning = file.read(1)
    if beginning not in (b"", b"{"):
        raise click.UsageError(f"--receipts: {path} holds something other than receipts; give another name.")


def join_command(file: Path, config: PeerConfig) -> list[str]:
    """The command that starts another peer of the run, without `--join` and its value."""
    defaults = PeerConfig(run_id=config.run_id)
    command = ["averaging", "peer", str(file), "--run-id", config.run_id]
    for name, declared in OPTIONS.items():
        value = getattr(config, name)
        if declared.shared and value != getattr(defaults, name):
            command += [as_flag(name), as_text(value)]
    return command

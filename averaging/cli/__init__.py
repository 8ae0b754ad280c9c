"""The command line, `averaging COMMAND`: `main` has all commands, and `COMMANDS` says where they are.

Read in this order: `options` (flags, from the declarations in `averaging/config.py`), `running` (what a command prints,
how it fails, signals), `files` (what it reads and writes), `peer`.

Nothing here imports torch or grpc before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import inspect
import io
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import click

from averaging.cli.running import DEFAULTS, NOT_DONE, failure_of, starting
from averaging.common import as_flag, chosen_proxy, spelling
from averaging.errors import SUPPORTED_SYSTEMS, AveragingError, ConfigError

COMMANDS = {
    "peer": "peer",
    "doctor": "doctor",
    "state": "model",
    "watch": "rounds",
    "top": "top",
    "explain": "rounds",
    "plan": "plan",
    "leave": "peer",
    "follow": "follow",
    "export": "model",
    "serve": "serve",
    "dashboard": "dashboard",
    "feed": "feed",
    "rollouts": "rollouts",
    "register": "register",
    "ca": "ca",
}
"""The registry of commands: the module in which each is, as `NAME_command`."""

CONTEXT = {"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100}


class Commands(click.Group):
    """The group of all commands. Ctrl+C or SIGTERM ends any of them at any moment with one line of text."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Runs a command. Signals after its end do not change its exit code.

        With torch and gRPC loaded, Python takes half a second to exit. With `standalone_mode=False` the program
        continues, and signals keep their handlers.
        """
        if not hasattr(signal, "SIGHUP") or not all(map(find_spec, ("fcntl", "resource", "termios"))):
            click.echo(
                f"Error: averaging does not run on this operating system ({sys.platform}); {SUPPORTED_SYSTEMS}",
                err=True,
            )
            sys.exit(NOT_DONE)
        try:
            return super().__call__(*arguments, **options)
        finally:
            if options.get("standalone_mode", True):
                for number in DEFAULTS:
                    signal.signal(number, signal.SIG_IGN)

    def invoke(self, ctx: click.Context) -> Any:
        with starting(), spelling(as_flag):
            try:
                chosen_proxy()  # every command that calls others reads it
            except ConfigError as error:
                raise click.UsageError(str(error), ctx) from None
            try:
                return super().invoke(ctx)
            except (AveragingError, ModuleNotFoundError) as error:
                raise failure_of(error) from None


@click.group(cls=Commands, context_settings=CONTEXT)
@click.version_option(package_name="averaging", message="%(package)s %(version)s")
def main() -> None:
    r"""Averages tensors between machines that nobody orchestrates.

    Peers find each other, form groups, and all-reduce their tensors over gRPC. None of them is a server: any peer that
    is up can be given to --join.

    \b
    Average two files, in two terminals:
      averaging peer a.safetensors --run-id demo --listen 127.0.0.1:4222 --output a-mean.safetensors
      averaging peer b.safetensors --run-id demo --join 127.0.0.1:4222 --output b-mean.safetensors

    \b
    See a run, with all its peers:
      averaging top 127.0.0.1:4222

    Exit codes: 0 done, 1 failed, 2 wrong usage or unreadable input, 130 or 143 stopped by Ctrl+C or SIGTERM.
    """
    # Names and gathered values of other peers may contain characters that the encoding of the terminal lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


EXIT_CODES = """

Exit codes: 0 done, or a server or a view was ended by Ctrl+C or SIGTERM; 1 failed; 2 wrong usage or unreadable input;
130 or 143 stopped by Ctrl+C or SIGTERM before it was done."""


def _complete(command: click.Command) -> None:
    """Adds the exit codes to a help that has none of its own, and keeps the lines of its examples.

    Click keeps a paragraph as it is after a backspace, which raw docstrings contain as two characters.
    """
    text = inspect.cleandoc(command.help or "").replace("\\b\n", "\b\n")
    command.help = text if "Exit codes:" in text else text + EXIT_CODES
    for each in command.commands.values() if isinstance(command, click.Group) else ():
        _complete(each)


for _name, _module in COMMANDS.items():
    main.add_command(getattr(import_module(f"averaging.cli.{_module}"), f"{_name}_command"))
_complete(main)

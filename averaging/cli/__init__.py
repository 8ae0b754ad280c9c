"""The command line: `averaging peer`, `state`, `watch`, `explain`, `feed`, `register` and `ca`.

Nothing here imports torch or grpc before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from averaging.cli.ca import ca_group
from averaging.cli.error_reporting import DEFAULTS, NOT_DONE, starting
from averaging.cli.explain import explain_command
from averaging.cli.feed import feed_command
from averaging.cli.peer import peer_command
from averaging.cli.register import register_command
from averaging.cli.state import state_command
from averaging.cli.watch import watch_command

CONTEXT = {"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100}


class Commands(click.Group):
    """The commands; a Ctrl+C or SIGTERM at any moment ends each of them in one line."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """As a process of its own; once it is done its exit code stands, whatever signal comes while Python ends.

        With torch and gRPC in it that takes half a second. A program that goes on afterwards, as with
        `standalone_mode=False`, hears signals as before, and so do the processes that it starts.
        """
        if sys.stderr is None:  # closed by whoever started the command; click would tell errors on stdout then
            sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - for as long as the process lives
        try:
            return super().__call__(*arguments, **options)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            # Click's own words, such as those of --help: what the commands write they take care of themselves.
            with contextlib.suppress(OSError):
                click.echo(f"Error: cannot write this out: {error.strerror}; make room there", err=True)
            sys.exit(NOT_DONE)
        finally:
            if options.get("standalone_mode", True):
                for number in DEFAULTS:
                    signal.signal(number, signal.SIG_IGN)
                _give_up_unwritten()

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command that is meant; its arguments are read here, too, which may import torch."""
        with starting():
            return super().invoke(ctx)


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
    Keep a peer up, and fetch what it holds:
      averaging peer a.safetensors --run-id demo --listen 127.0.0.1:4222 --serve
      averaging state 127.0.0.1:4222 --output now.safetensors

    \b
    See what the rounds of a peer are like, and what they were like:
      averaging watch 127.0.0.1:4222
      averaging peer a.safetensors --run-id demo --join 127.0.0.1:4222 --receipts a.jsonl
      averaging explain a.jsonl

    \b
    Let the nodes of elastic torchrun jobs meet:
      averaging register --listen 127.0.0.1:29400

    \b
    Between machines, let peers know each other by certificates of the run's own authority:
      averaging ca init

    Exit codes: 0 done, 1 it could not be done, 2 wrong usage or unreadable input, 130 or 143 stopped by Ctrl+C or
    SIGTERM before it was done.
    """
    # What others call themselves, and what they gather, may be in letters that the terminal's encoding lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


main.add_command(peer_command)
main.add_command(state_command)
main.add_command(watch_command)
main.add_command(explain_command)
main.add_command(feed_command)
main.add_command(register_command)
main.add_command(ca_group)


def _give_up_unwritten() -> None:
    """Forgets what stdout or stderr did not take, as on a full disk: Python would tell that and exit with 120."""
    for name in ("stdout", "stderr"):
        try:
            with contextlib.suppress(AttributeError):  # nobody has opened one
                getattr(sys, name).flush()
        except OSError:
            setattr(sys, name, None)  # it is for Python to close, which is silent


for _command in (main, *main.commands.values(), *ca_group.commands.values()):
    # Docstrings are raw, so that click does not see its mark of a paragraph that is left as it is: a backspace.
    _command.help = (_command.help or "").replace("\\b\n", "\b\n")

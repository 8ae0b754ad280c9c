"""The command line, `averaging COMMAND`: `main` has all commands.

Each command is a file. Read in this order: `options` (flags, from the declarations in `averaging/config.py`), `peer`,
`events` (what is printed) and `output` (how), `exits` (errors, exit codes and signals), `files` (safetensors).

Nothing here imports torch or grpc before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from averaging.cli.ca import ca_group
from averaging.cli.dashboard import dashboard_command
from averaging.cli.doctor import doctor_command
from averaging.cli.exits import DEFAULTS, NOT_DONE, starting
from averaging.cli.explain import explain_command
from averaging.cli.export import export_command
from averaging.cli.feed import feed_command
from averaging.cli.follow import follow_command
from averaging.cli.leave import leave_command
from averaging.cli.peer import peer_command
from averaging.cli.plan import plan_command
from averaging.cli.register import register_command
from averaging.cli.rollouts import rollouts_command
from averaging.cli.serve import serve_command
from averaging.cli.state import state_command
from averaging.cli.top import top_command
from averaging.cli.watch import watch_command
from averaging.common import as_flag, chosen_proxy, spelling
from averaging.errors import SUPPORTED_SYSTEMS, ConfigError

CONTEXT = {"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100}


class Commands(click.Group):
    """The group of all commands. Ctrl+C or SIGTERM ends any of them at any moment with one line of text."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Runs a command. Signals after its end do not change its exit code.

        With torch and gRPC loaded, Python takes half a second to exit. With `standalone_mode=False` the program
        continues, and signals keep their handlers.
        """
        if sys.stderr is None:  # closed by the parent process; click would write errors to stdout
            sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - open until the process exits
        if not hasattr(signal, "SIGHUP") or not all(map(find_spec, ("fcntl", "resource", "termios"))):
            click.echo(
                f"Error: averaging does not run on this operating system ({sys.platform}); {SUPPORTED_SYSTEMS}",
                err=True,
            )
            sys.exit(NOT_DONE)
        try:
            return super().__call__(*arguments, **options)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            with contextlib.suppress(OSError):
                click.echo(f"Error: cannot write to stdout: {error.strerror}; free space there", err=True)
            sys.exit(NOT_DONE)
        finally:
            if options.get("standalone_mode", True):
                for number in DEFAULTS:
                    signal.signal(number, signal.SIG_IGN)
                _give_up_unwritten()

    def invoke(self, ctx: click.Context) -> Any:
        """Reads the arguments, which may import torch, and runs the command."""
        with starting(), spelling(as_flag):
            try:
                chosen_proxy()  # every command that calls others reads it
            except ConfigError as error:
                raise click.UsageError(str(error), ctx) from None
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
    Check before a run what will not work, here and on the way to a peer:
      averaging doctor --run-id demo --listen 0.0.0.0:4222 --advertise example.org:4222 --join 192.0.2.7:4222

    \b
    Keep a peer up, and fetch what it holds:
      averaging peer a.safetensors --run-id demo --listen 127.0.0.1:4222 --serve
      averaging state 127.0.0.1:4222 --output now.safetensors

    \b
    See a run, with all its peers:
      averaging top 127.0.0.1:4222

    \b
    Watch the rounds of a peer, or explain its past rounds:
      averaging watch 127.0.0.1:4222
      averaging peer a.safetensors --run-id demo --join 127.0.0.1:4222 --receipts a.jsonl
      averaging explain a.jsonl

    \b
    See the whole run in a browser:
      averaging dashboard --join 127.0.0.1:4222

    \b
    Reckon what a run will cost before it is started:
      averaging plan --parameters 1.2e9 --dtype bf16 --peers 8 --link 300Mbit/40ms --step-seconds 1.4

    \b
    End a peer in order, so that the others lose nothing:
      averaging leave 127.0.0.1:4222

    \b
    Keep a file at the newest weights that a training process publishes:
      averaging follow 127.0.0.1:4222 --output now.safetensors

    \b
    Write the model of a run, or of a checkpoint, as from_pretrained of transformers reads it:
      averaging export 127.0.0.1:4222 --config base --output model

    \b
    Make rollouts of an environment with an engine, for the trainer of a feed:
      averaging rollouts --environment gsm8k --engine http://127.0.0.1:8000 --feed http://127.0.0.1:8001

    \b
    Serve a language model that follows a run, with OpenAI's API:
      averaging serve base --follow 127.0.0.1:4222

    \b
    Serve the rendezvous of elastic torchrun jobs:
      averaging register --listen 127.0.0.1:29400

    \b
    Create a certificate authority for a run across machines:
      averaging ca init

    Exit codes: 0 done, 1 failed, 2 wrong usage or unreadable input, 130 or 143 stopped by Ctrl+C or SIGTERM.
    """
    # Names and gathered values of other peers may contain characters that the encoding of the terminal lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


main.add_command(peer_command)
main.add_command(doctor_command)
main.add_command(state_command)
main.add_command(watch_command)
main.add_command(top_command)
main.add_command(explain_command)
main.add_command(plan_command)
main.add_command(leave_command)
main.add_command(follow_command)
main.add_command(export_command)
main.add_command(serve_command)
main.add_command(dashboard_command)
main.add_command(feed_command)
main.add_command(rollouts_command)
main.add_command(register_command)
main.add_command(ca_group)


def _give_up_unwritten() -> None:
    """Discards unwritten output, as on a full disk. Otherwise Python would report it and exit with 120."""
    for name in ("stdout", "stderr"):
        try:
            with contextlib.suppress(AttributeError):  # the stream is None
                getattr(sys, name).flush()
        except OSError:
            setattr(sys, name, None)  # Python closes the stream silently


for _command in (main, *main.commands.values(), *ca_group.commands.values()):
    # Click keeps a paragraph unwrapped after a backspace, which these raw docstrings contain as two characters.
    _command.help = (_command.help or "").replace("\\b\n", "\b\n")

"""Common parts of the examples' command lines: how peers find each other, and error handling."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import TypedDict

from averaging import AveragingError
from averaging.errors import ConfigError


def parser_of(example: str, description: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that every peer has."""
    prog = f"python -m examples.{example}"
    parser = argparse.ArgumentParser(prog=prog, usage=f"{prog} [options]", description=description)
    parser.add_argument("--run-id", default=example, help=f"peers with the same run id train together ({example})")
    parser.add_argument("--join", nargs="+", default=[], metavar="HOST:PORT", help="any peers of the run")
    parser.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="address to listen on (a free local port)",
    )
    parser.add_argument("--advertise", metavar="HOST:PORT", help="where other peers reach it, if that differs")
    for option, what in (("ca", "certificate of the run's authority"), ("cert", "this peer's own"), ("key", "its key")):
        parser.add_argument(f"--tls-{option}", metavar="FILE", help=f"{what}; `averaging ca` makes them")
    parser.add_argument("--token-file", metavar="FILE", help="the run's tokens, one a line")
    parser.add_argument("--insecure", action="store_true", help="let other machines connect without TLS")
    parser.add_argument("--client-mode", action="store_true", help="accept no connections; needs --join")
    parser.add_argument(
        "--wait-for",
        type=positive,
        default=1,
        metavar="N",
        help="wait at most a minute for N peers at the start (1)",
    )
    return parser


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line. Invalid options end the process with exit code 2."""
    options = parser.parse_args(arguments)
    if options.client_mode and not options.join:
        parser.error("--client-mode needs --join: no peer can join a peer that accepts no connections")
    return options


class Security(TypedDict):
    """Returns the options of `PeerConfig`."""

    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None
    token_file: str | None
    insecure: bool


def security_of(options: argparse.Namespace) -> Security:
    """Returns the security options of the command line, for the averager."""
    return {
        "tls_ca": options.tls_ca,
        "tls_cert": options.tls_cert,
        "tls_key": options.tls_key,
        "token_file": options.token_file,
        "insecure": options.insecure,
    }


def security_arguments(options: argparse.Namespace) -> list[str]:
    """Returns the security options for the command line of another peer."""
    files = (("--tls-ca", options.tls_ca), ("--tls-cert", options.tls_cert), ("--tls-key", options.tls_key))
    given = [f"{name}={file}" for name, file in (*files, ("--token-file", options.token_file)) if file]
    return [*given, *["--insecure"] * options.insecure]


def positive(text: str) -> int:
    """Parses a whole number above 0."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


def share(text: str) -> float:
    """Parses a number that may be written as a fraction."""
    try:
        return float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"must be a number such as 1/64 or 0.0156, not {text!r}") from None


@contextmanager
def in_order(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Wraps an example: errors print one clear line instead of a traceback, and set the exit code."""
    try:
        yield
    except KeyboardInterrupt:
        print("Stopped.", flush=True)
        sys.exit(130)
    except ConfigError as error:
        parser.error(str(error))
    except AveragingError as error:
        sys.exit(f"{parser.prog}: {error}")

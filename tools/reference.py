"""Writes the reference of options and commands from the code: `make reference`.

A test compares the pages with what this would write, so they say what the code does.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path

import click

from averaging import PeerConfig
from averaging.cli import main as averaging_command

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Basic options": (
        "run_id",
        "join",
        "listen",
        "advertise",
        "group_size",
        "mode",
        "tls_ca",
        "tls_cert",
        "tls_key",
        "token_file",
        "compression",
    ),
    "Groups and waiting times": (
        "min_group_size",
        "group_bits",
        "group_wait",
        "round_timeout",
        "stall_timeout",
        "min_stall_timeout",
        "join_timeout",
    ),
    "What is averaged, and how": ("aggregation", "non_finite", "reply_form", "part_size_bytes", "bandwidth"),
    "State, receipts and access": ("share_state", "verify_donors", "receipts", "insecure", "inspection"),
}
"""Options by what they are for. Those in no group stand at the end."""

FLAGS = {
    "mode": "`--client-mode`, `--auxiliary`",
    "non_finite": "`--allow-non-finite`",
    "part_size_bytes": "`--part-size`",
    "share_state": "`--no-share-state`",
}
"""The flags of `averaging peer` that are not named as the option."""

INTRODUCTION = """# Options of a peer

This page is written by `make reference` from `PeerConfig`; do not edit it.

`Peer` and `DecentralizedAverager` take these options as keyword arguments.
`averaging peer` takes most of them as flags.
Most runs need the basic ones only. The [Python API](api.md) has the further arguments of `DecentralizedAverager`.
In a run with a strategy, give `compression` to the strategy.
"""

COMMANDS = ("peer", "state", "watch", "explain", "ca init", "ca issue")


def main() -> None:
    """Writes both pages."""
    (REFERENCE / "options.md").write_text(options_page())
    (REFERENCE / "cli.md").write_text(cli_page())


def options_page() -> str:
    """The options of `PeerConfig`, the basic ones first."""
    known = {field.name: field for field in fields(PeerConfig)}
    grouped = {name for names in GROUPS.values() for name in names}
    others = tuple(name for name in known if name not in grouped)
    flags = {parameter.name for parameter in averaging_command.commands["peer"].params}
    meanings = described()
    page = [INTRODUCTION]
    for title, names in {**GROUPS, "Further options": others}.items():
        if not names:
            continue
        advanced = "" if title == "Basic options" else "These are advanced options.\n\n"
        page.append(f"## {title}\n\n{advanced}| option | default | `averaging peer` |\n|---|---|---|")
        for name in names:
            flag = FLAGS.get(name) or (f"`--{name.replace('_', '-')}`" if name in flags else "")
            page.append(f"| [`{name}`](#{name}) | {default(known[name].default, name)} | {flag} |")
        page.append("")
        page += [f"### {name}\n\n{meanings[name]}\n" for name in names]
    return "\n".join(page)


def described() -> dict[str, str]:
    """What the docstring says of each option, one sentence after the other."""
    text = inspect.cleandoc(PeerConfig.__doc__ or "").partition("Attributes:")[2].partition("\nRaises:")[0]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {name: capitalised(" ".join(meaning.split())) for name, meaning in found}


def capitalised(text: str) -> str:
    """With a capital letter, unless it begins with code; pages of the repository are named as links."""
    linked = re.sub(r"docs/([\w/-]+\.md)", link, text)
    return linked[:1].upper() + linked[1:]


def link(page: re.Match[str]) -> str:
    """To a page that a docstring names."""
    name = Path(page[1])
    return f"[{name.stem}]({os.path.relpath(REFERENCE.parent / name, REFERENCE)})"


def default(value: object, name: str) -> str:
    """As it is written in Python."""
    if value is MISSING:
        return "required"
    if name == "part_size_bytes" and value == 1 << 20:
        return "1 MiB"
    return f"`{value.name.lower() if isinstance(value, Enum) else value!r}`"


def cli_page() -> str:
    """What `--help` prints, for each command."""
    helps = [f"## {context.command_path}\n\n```text\n{context.get_help()}\n```\n" for context in contexts()]
    return "\n".join(["# Command line\n", "This page is written by `make reference`; do not edit it.\n", *helps])


def contexts() -> Iterator[click.Context]:
    """Of each command, as if it had been called."""
    settings = averaging_command.context_settings
    root = click.Context(averaging_command, info_name="averaging", terminal_width=100, **settings)
    yield root
    for name in COMMANDS:
        context = root
        for part in name.split():
            assert isinstance(context.command, click.Group)
            context = click.Context(context.command.commands[part], info_name=part, parent=context)
        yield context


if __name__ == "__main__":
    main()

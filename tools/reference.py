"""Writes the reference pages of options and commands from the code: `make reference`.

A test fails if a page differs from the code.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path

import click

from averaging import PeerConfig
from averaging.cli import main as averaging_command
from averaging.cli.peer_options import SECTIONS

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"

INTRODUCTION = """# Options of a peer

This page is written by `make reference` from `PeerConfig`; do not edit it.

`Peer`, `BlockingPeer` and `DecentralizedAverager` take these options as keyword arguments, or as one object
(`config=PeerConfig(...)`).
`averaging peer` takes them as flags: `group_size` is `--group-size`.
Most runs need the basic ones only. The [Python API](api.md) has the further arguments of `DecentralizedAverager`.
In a run with a strategy, give `compression` to the strategy.

## Options from a file and from the environment

`PeerConfig.from_toml("run.toml")` and `averaging peer --config run.toml` read a file such as this:

```toml
run_id = "gpt"
join = ["a.example.org:4222"]
group_size = 4

[tls]
ca = "ca.pem"
cert = "b.pem"
key = "b.key"
```

Relative paths in the file are relative to its directory.
A variable such as `AVERAGING_GROUP_SIZE=8` wins over the file, and an argument wins over both.
`PeerConfig.from_environment()` and `averaging peer` read the variables without a file.
Lists are separated by commas, truth values are `true` or `false`, and an empty variable counts as not set.
An error says where a value was set. An unknown name is an error, which suggests the most similar option.
"""

WITHOUT_FLAG = {"tls": "tls_ca", "on_drift": "verify_donors"}
"""Options that `averaging peer` does not have as a flag, and an option of the section in which they stand."""

COMMANDS = ("peer", "state", "watch", "explain", "follow", "feed", "register", "ca init", "ca issue")


def main() -> None:
    """Writes both pages."""
    (REFERENCE / "options.md").write_text(options_page())
    (REFERENCE / "cli.md").write_text(cli_page())


def options_page() -> str:
    """The page of the options of `PeerConfig`, the basic ones first."""
    known = {field.name: field for field in fields(PeerConfig)}
    meanings = described()
    page = [INTRODUCTION]
    for title, options in SECTIONS.items():
        names = [*options, *(name for name, after in WITHOUT_FLAG.items() if after in options)]
        page.append(f"## {title}\n\n| option | default |\n|---|---|")
        page += [f"| [`{name}`](#{name}) | {default(known[name].default, name)} |" for name in names]
        page.append("")
        page += [f"### {name}\n\n{meanings[name]}\n" for name in names]
    return "\n".join(page)


def described() -> dict[str, str]:
    """The description of each option, from the docstring of `PeerConfig`."""
    text = inspect.cleandoc(PeerConfig.__doc__ or "").partition("Attributes:")[2].partition("\nRaises:")[0]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {name: capitalised(" ".join(meaning.split())) for name, meaning in found}


def capitalised(text: str) -> str:
    """Capitalizes the first letter, and turns names of documentation pages into links."""
    linked = re.sub(r"docs/([\w/-]+\.md)", link, text)
    return linked[:1].upper() + linked[1:]


def link(page: re.Match[str]) -> str:
    """Returns the link to a page that a docstring names."""
    name = Path(page[1])
    return f"[{name.stem}]({os.path.relpath(REFERENCE.parent / name, REFERENCE)})"


def default(value: object, name: str) -> str:
    """The default value in Python syntax."""
    if value is MISSING:
        return "required"
    if name == "part_size_bytes" and value == 1 << 20:
        return "1 MiB"
    return f"`{value.name.lower() if isinstance(value, Enum) else value!r}`"


def cli_page() -> str:
    """The page with the `--help` of each command."""
    helps = [f"## {context.command_path}\n\n```text\n{context.get_help()}\n```\n" for context in contexts()]
    return "\n".join(["# Command line\n", "This page is written by `make reference`; do not edit it.\n", *helps])


def contexts() -> Iterator[click.Context]:
    """Yields a context for each command, as for a call of it."""
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

"""Writes the reference pages of options, commands and metrics from the code: `make reference`.

A test fails if a page differs from the code.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from averaging.cli import main as averaging_command
from averaging.config import OPTIONS
from averaging.metrics import CERTIFICATE_METRICS, Metric, MetricKind, counter, gauge

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"

INTRODUCTION = """# Options of a peer

This page is written by `make reference` from the fields of `PeerConfig`; do not edit it.

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


ENTRY = re.compile(r"^  -.*\n(?: {6,}.*\n)*", re.MULTILINE)
"""An option in a help text."""

SHARED = 5
"""Commands that have an option in the same words, from which on it stands once."""


def main() -> None:
    """Writes the pages."""
    (REFERENCE / "options.md").write_text(options_page())
    (REFERENCE / "cli.md").write_text(cli_page())
    (REFERENCE / "metrics.md").write_text(metrics_page())


def options_page() -> str:
    """The page of the options of `PeerConfig`, the basic ones first."""
    sections: dict[str, list[str]] = {}
    for name, declared in OPTIONS.items():
        if declared.section:
            sections.setdefault(declared.section, []).append(name)
    page = [INTRODUCTION]
    for title, names in sections.items():
        page.append(f"## {title}\n\n| option | value | default | meaning |\n|---|---|---|---|")
        page += [f"| `{name}` | {value(name)} | {default(name)} | {meaning(name)} |" for name in names]
        page.append("")
    return "\n".join(page)


def meaning(name: str) -> str:
    """The description of an option, with links to the pages that it names."""
    return re.sub(r"docs/([\w/-]+\.md)", link, OPTIONS[name].help_as(lambda other: f"`{other}`"))


def value(name: str) -> str:
    """The values of an option, for the table."""
    kind = OPTIONS[name].kind
    return f"`{kind.metavar}`".replace("|", "`, `") if kind.expected == "a text" else kind.expected


def link(page: re.Match[str]) -> str:
    """Returns the link to a page that a docstring names."""
    name = Path(page[1])
    return f"[{name.stem}]({os.path.relpath(REFERENCE.parent / name, REFERENCE)})"


def default(name: str) -> str:
    """The default value in Python syntax."""
    value = OPTIONS[name].default
    if value is MISSING:
        return "required"
    return f"`{value.name.lower() if isinstance(value, Enum) else value!r}`"


def cli_page() -> str:
    """The page with a map of the commands, and the `--help` of each. What many have in the same words stands once."""
    every = list(contexts())
    helps = {context.command_path: help_of(context) for context in every}
    entries = [entry for text in helps.values() for entry in ENTRY.findall(text)]
    counts = Counter(" ".join(entry.split()) for entry in entries)
    once = {key: entry for entry in entries if counts[key := " ".join(entry.split())] >= SHARED}
    page = ["# Command line\n", "This page is written by `make reference`; do not edit it.\n", *_map(every)]
    page.append(f"## Options of many commands\n\n```text\n{''.join(once.values())}```\n")
    for path, text in helps.items():
        own = ENTRY.sub(lambda entry: "" if " ".join(entry[0].split()) in once else entry[0], text)
        page.append(f"## {path}\n\n{own}")
    return "\n".join(page)


def _map(every: list[click.Context]) -> Iterator[str]:
    """Yields the lines of the map: a command, and the first sentence of its help."""
    yield "| command | what it does |\n|---|---|"
    for context in every[1:]:
        path, sentence = context.command_path, context.command.get_short_help_str(limit=200)
        yield f"| [`{path}`](#{path.replace(' ', '-')}) | {sentence.rstrip('.')} |"
    yield ""


def help_of(context: click.Context) -> str:
    """The `--help` of a command without the options of a peer, which have a page of their own."""
    text = context.get_help() + "\n"
    parts = re.split(r"^(?=\S.*:$)", text, flags=re.MULTILINE)
    titles = {declared.section for declared in OPTIONS.values()}
    own = "".join(part for part in parts if part.partition(":\n")[0] not in titles)
    options = "It takes the [options of a peer](options.md) too: `group_size` is `--group-size`.\n\n"
    return f"{'' if own == text else options}```text\n{own}```\n"


def contexts() -> Iterator[click.Context]:
    """Yields a context for each command, as for a call of it; a group comes before its commands."""
    settings = averaging_command.context_settings
    root = click.Context(averaging_command, info_name="averaging", terminal_width=100, **settings)
    yield root
    yield from _inside(averaging_command, root)


def _inside(group: click.Group, parent: click.Context) -> Iterator[click.Context]:
    for name, command in group.commands.items():
        context = click.Context(command, info_name=name, parent=parent)
        yield context
        if isinstance(command, click.Group):
            yield from _inside(command, context)


_PLACES = {
    "Of every process": ("averaging.metrics", "PROCESS_METRICS"),
    "Of a process with a certificate": ("averaging.metrics", "CERTIFICATE_METRICS"),
    "Of a peer and its averager": ("averaging.metrics", "PEER_METRICS"),
    "Of a follower of weights (`averaging follow`, `WeightFollower`)": ("averaging.weights", "FOLLOWER_METRICS"),
    "Of a register (`averaging register`)": ("averaging.elastic", "REGISTER_METRICS"),
    "Of a model worker (`ModelWorker`)": ("averaging.rl.workers", "WORKER_METRICS"),
    "Of rollouts (`averaging rollouts`)": ("averaging.rl.rollouts", "ROLLOUT_METRICS"),
    "Of the feed (`averaging feed`), at its own `/metrics`": ("averaging.rl.feed.server", "COUNTERS"),
}


def _metrics(module: Any, name: str) -> tuple[Metric, ...]:
    if name == "COUNTERS":
        seconds = "averaging_feed_request_duration_seconds"
        counters = {key.removesuffix("_total"): row for key, row in module.COUNTERS.items()}
        return (
            *(counter(f"feed_{key}", text, *labels) for key, (text, labels) in counters.items()),
            Metric(seconds, MetricKind.HISTOGRAM, "Time to answer a request.", ("route",)),
            *(gauge(f"feed_{key}", text) for key, (text, _) in module.GAUGES.items()),
        )
    found: tuple[Metric, ...] = getattr(module, name)
    return found if name == "CERTIFICATE_METRICS" else tuple(each for each in found if each not in CERTIFICATE_METRICS)


METRICS = {title: _metrics(import_module(module), name) for title, (module, name) in _PLACES.items()}
"""All metrics by who has them."""

LIST = re.compile(r"(<!-- make reference writes the list from here -->\n).*?(<!-- to here -->\n)", re.DOTALL)


def metrics_page() -> str:
    """The page of metrics, with the list of those of Prometheus. The rest of the page is written by hand."""
    page = (REFERENCE / "metrics.md").read_text()
    tables = "\n".join(f"### {title}\n\n{metrics_table(metrics)}" for title, metrics in METRICS.items())
    return LIST.sub(lambda found: f"{found[1]}\n{tables}\n{found[2]}", page)


def metrics_table(metrics: tuple[Metric, ...]) -> str:
    """A table of metrics."""
    rows = [f"| `{each.name}` | {each.kind} | {labels_of(each)} | {each.help} |\n" for each in metrics]
    return "".join(["| name | type | labels | what |\n|---|---|---|---|\n", *rows])


def labels_of(metric: Metric) -> str:
    """The labels with their values, as far as these are known."""
    texts = []
    for place, label in enumerate(metric.labels):
        values = dict.fromkeys(known[place] for known in metric.known)
        texts.append(f"`{label}`" + (f": {', '.join(values)}" if values else ""))
    return "; ".join(texts)


if __name__ == "__main__":
    main()

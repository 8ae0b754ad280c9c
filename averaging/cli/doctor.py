"""`averaging doctor`: checks before a run what will not work, here and between two machines."""

from __future__ import annotations

import importlib
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from averaging.cli import options
from averaging.cli.running import NOT_DONE, CommandError, CommandOutput, Stop, reporting, run
from averaging.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from averaging.config import PeerConfig
    from averaging.doctor import Examination, Finding
    from averaging.tensors import Schema

STRATEGIES = ("diloco", "local_sgd", "gradient_averaging")

NO_RUN = "doctor"  # run id if the user gives none: all other options can be checked without one


@click.command("doctor", cls=options.PeerCommand)
@click.argument("file", type=options.CheckedPath(), metavar="[FILE.safetensors]", required=False)
@options.switch("--deep", "Measure the bandwidth to the peers of --join too, with at most 64 MiB each way.")
@options.peer_options
@options.option("--only", "Tensors of FILE, as for `averaging peer`.", "PATTERN", multiple=True)
@options.option("--exclude", "Tensors of FILE to leave out, as there.", "PATTERN", multiple=True)
@options.one_of(
    "--strategy", "Strategy of the training, compared with that of the peers.  [default: none]", *STRATEGIES
)
@options.output_options
def doctor_command(
    file: Path | None, *, deep: bool, strategy: str | None, as_json: bool, verbose: int, **given: Any
) -> None:
    r"""Checks what will not work before a run wastes time on it, and says what to do.

    It takes the options of a peer from the same places as `averaging peer`, and changes nothing. Each line begins with
    ✓, with ! for what may go wrong or cannot be checked, or with ✗ for what will not work, and ends with the remedy.

    \b
    This machine alone; the way to a peer of the run too; whether it averages the same tensors as FILE; how fast it is:
      averaging doctor --config run.toml
      averaging doctor --config run.toml --join a.example.org:4222 --join b.example.org:4222
      averaging doctor a.safetensors --run-id demo --join 192.0.2.7:4222
      averaging doctor --config run.toml --join a.example.org:4222 --deep

    While a peer calls back, the command listens at --listen unless a peer does already. It calls the addresses of
    --join, and connects to those at which these peers want to be dialled.

    Exit codes: 0 nothing with ✗ was found; 1 something will not work; 2 wrong usage or unreadable input.

    \b
    Events of --json, each with "event":
      finding    check, severity (ok, warning or failure), peer (of --join; empty for this machine), text, remedy;
                 figures, by names with their units, if something was measured
      done       failures, warnings
    """
    with reporting(verbose, as_json=as_json) as report:
        if not verbose:  # what reading certificates and tokens would warn of is a finding
            logging.getLogger("averaging").setLevel(logging.ERROR)
        config, run_known = read_options(given)
        _import()
        if deep and not config.join:
            raise click.UsageError("--deep measures the paths to other peers; give --join HOST:PORT as well.")
        if file is None and (given["only"] or given["exclude"]):
            raise click.UsageError("--only and --exclude are for the tensors of FILE; give it as well.")
        from averaging.doctor import Examination

        schema = None if file is None else _schema_of(file, config, given)
        _run(Examination(config=config, run_known=run_known, schema=schema, strategy=strategy or "", deep=deep), report)


def _import() -> None:
    """Imports what a peer needs, which fails if a package is missing, broken, or of another version."""
    try:
        importlib.import_module("averaging.peer")
    except Exception as error:  # protobuf has an error of its own for a version that does not fit
        text = f"a peer cannot be started here, since {type(error).__name__} is raised on import: {error}"
        raise CommandError(f"{text}; install averaging again, in an environment of its own") from None


def read_options(given: dict[str, Any]) -> tuple[PeerConfig, bool]:
    """The options of the peer, and whether the user has given a run id."""
    try:
        return options.peer_config(given), True
    except ConfigError as error:
        if error.option != "run_id" or "is missing" not in error.reason:
            raise
        return options.peer_config(given | {"run_id": NO_RUN}), False


def _schema_of(file: Path, config: PeerConfig, given: dict[str, Any]) -> Schema:
    """What `averaging peer FILE` would average."""
    from averaging.cli.files import check_can_be_averaged, read
    from averaging.protocol import parse_aggregation
    from averaging.tensors import describe

    tensors = read(file, copy=False).divided(file, given["only"], given["exclude"]).tensors
    check_can_be_averaged(file, tensors, allow_non_finite=True)
    return describe(
        tuple(tensors),
        tuple(tensors.values()),
        compression=config.compression,
        part_size_bytes=config.part_size_bytes,
        reply=config.reply_form,
        aggregation=parse_aggregation(config.aggregation),
    )


def _run(examination: Examination, report: CommandOutput) -> None:
    from averaging.doctor import Severity, examine

    counts, about = dict.fromkeys(Severity, 0), "none yet"

    def write(finding: Finding) -> None:
        """Writes a finding as JSON, or as a line under the machine that it is about."""
        nonlocal about
        counts[finding.severity] += 1
        event = {"event": "finding", **asdict(finding)}
        if not finding.figures:
            del event["figures"]
        heading = "" if finding.peer == about else f"{finding.peer or 'this machine'}\n"
        about = finding.peer
        remedy = f"\n{'':19}→ {finding.remedy}" if finding.remedy else ""
        report.emit(event, f"{heading}  {finding.severity.mark} {finding.check:<16} {finding.text}{remedy}")

    async def check(_: Stop) -> None:
        await examine(examination, write)

    run(check)
    failures, warnings = counts[Severity.FAILURE], counts[Severity.WARNING]
    what = f"{failures} will not work" if failures else "nothing that will not work was found"
    also = f", {warnings} may go wrong or could not be checked" if warnings else ""
    report.emit({"event": "done", "failures": failures, "warnings": warnings}, f"{what}{also}")
    if failures:
        raise click.exceptions.Exit(NOT_DONE)

"""`averaging plan`: reckons what a run will cost before it is started."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from averaging.cli.exits import failure_of
from averaging.cli.explain import read_receipts
from averaging.cli.options import KindType
from averaging.common import choice, number, parse_duration
from averaging.errors import ConfigError
from averaging.protocol import CHANGE_COMPRESSIONS, KEPT_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from averaging.plan import Estimate, RunPlan

COUNT = KindType(number(least=1, most=1e15, metavar="N"))
POSITIVE = KindType(number(above=0))

TABLE_COMPRESSIONS = ("none", "float16", "int8", "top_k")
"""The rows of the table for each strategy, beside what was asked for. `top_k` is for DiLoCo only."""


def _seconds_of_steps(context: click.Context, parameter: click.Parameter, value: str) -> tuple[float, ...]:
    """Reads `1.4`, or `1.4,1.4,5` with the seconds of each peer."""
    return tuple(POSITIVE.convert(part.strip(), parameter, context) for part in value.split(","))


def _density(context: click.Context, parameter: click.Parameter, value: str) -> float:
    """Reads `1/64` or `0.0156`."""
    try:
        return float(Fraction(value))
    except (ValueError, ZeroDivisionError):
        raise click.BadParameter(f"{value!r} is no number; write it as 1/64 or 0.0156", context, parameter) from None


def _sync_every(context: click.Context, parameter: click.Parameter, value: str) -> int | float:
    """Reads a number of steps, or the seconds of a time such as `120s`, as a float."""
    if value.isascii() and value.isdigit() and int(value) >= 1:
        return int(value)
    try:
        seconds = parse_duration(value)
    except ConfigError:
        seconds = 0.0
    if not seconds > 0:
        raise click.BadParameter(
            f"{value!r} is neither a number of steps, at least 1, nor a time such as 120s", context, parameter
        )
    return seconds


def _by_the_clock(given: dict[str, Any]) -> dict[str, Any]:
    """The steps of the fastest peer in a `--sync-every` of seconds, at which all peers come with what they have."""
    seconds = given["sync_every"]
    if isinstance(seconds, int):
        return {}
    if given["strategy"] == "gradient_averaging":
        raise click.UsageError("--sync-every of gradient_averaging is a number of batches, not a time.")
    fastest, fragments = min(given["step_seconds"]), given["fragments"]
    return {"sync_every": max(1, round(seconds / fastest / fragments)) * fragments, "step_seconds": (fastest,)}


@click.command("plan")
@click.option("--parameters", type=COUNT, required=True, metavar="N", help="Trained elements of the model, as 1.2e9.")
@click.option("--dtype", default="fp32", metavar="[fp64|fp32|fp16|bf16]", help="Their dtype.")
@click.option(
    "--strategy",
    default="diloco",
    type=click.Choice(["diloco", "local_sgd", "gradient_averaging"]),
    help="What is averaged.",
)
@click.option(
    "--sync-every",
    default="100",
    callback=_sync_every,
    metavar="H|SECONDS",
    help="Local steps between two rounds, or the time from one to the next, as 120s: then nobody waits for a slow "
    "peer. With gradient_averaging batches of a peer for a global step.",
)
@click.option("--compression", default="none", type=KindType(choice(CHANGE_COMPRESSIONS)), help="Code on the wire.")
@click.option(
    "--density", default="1/64", callback=_density, metavar="SHARE", help="Share of the elements that top_k sends."
)
@click.option(
    "--bits",
    default="2",
    type=click.Choice([str(bits) for bits in KEPT_BITS]),
    help="Bits of each of them.",
)
@click.option("--peers", default=8, type=click.IntRange(2, 4096), metavar="N", help="Peers of a group.")
@click.option(
    "--link",
    default="100Mbit/20ms",
    metavar="RATE/MS",
    help="Link of each peer and its round trip, as 300Mbit/40ms; the slower direction of the slowest peer.",
)
@click.option(
    "--step-seconds",
    default="1",
    callback=_seconds_of_steps,
    metavar="SECONDS[,SECONDS...]",
    help="Seconds of a local step, of all peers alike or of each.",
)
@click.option(
    "--delay",
    default=0,
    type=click.IntRange(min=0),
    metavar="D",
    help="Steps for which training goes on during a round; H for LocalSGD(overlap=True).",
)
@click.option("--fragments", default=1, type=click.IntRange(min=1), metavar="P", help="Pieces of the model (diloco).")
@click.option("--error-feedback", is_flag=True, help="Keep what the code drops for the next round.")
@click.option(
    "--statistics",
    default=2,
    type=click.IntRange(0, 16),
    metavar="N",
    help="Values that the optimizer keeps for each parameter: 2 for Adam, 1 for momentum.",
)
@click.option("--statistics-averaged", is_flag=True, help="They are averaged as well (local_sgd).")
@click.option("--share-state/--no-share-state", default=True, help="Whether newcomers may download the state.")
@click.option("--encrypted", is_flag=True, help="Connections use TLS.")
@click.option("--cores", default=1.0, type=POSITIVE, metavar="N", help="Processor cores of a peer for its rounds.")
@click.option("--price", type=KindType(number(least=0, most=1e9)), metavar="PRICE", help="Price of 10^9 sent bytes.")
@click.option(
    "--receipts",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE.jsonl",
    help="Compare with the receipts of a run, and say where they differ.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(price: float | None, receipts: Path | None, as_json: bool, **given: Any) -> None:
    r"""Reckons what a run will cost each peer: bytes, seconds, share of the time without training, memory, money.

    Nothing is started and nothing is called. The figures hold if all peers are there and no round fails.

    \b
    1.2 billion parameters between eight machines on lines of 300 Mbit/s:
      averaging plan --parameters 1.2e9 --dtype bf16 --strategy diloco --sync-every 100 --compression int8 \
          --peers 8 --link 300Mbit/40ms --step-seconds 1.4 --price 0.05

    \b
    The same with only the largest changes, in 2 bits each, which needs an eighth of the bytes:
      averaging plan --parameters 1.2e9 --dtype bf16 --sync-every 100 --compression top_k --density 1/64 \
          --peers 8 --link 300Mbit/40ms --step-seconds 1.4

    \b
    Three peers of which one is slow, and a run compared with its plan:
      averaging plan --parameters 1e8 --peers 3 --step-seconds 0.5,0.5,2
      averaging plan --parameters 1e8 --peers 3 --step-seconds 0.5 --receipts a.jsonl

    \b
    The same three peers, if they average every two minutes with the steps that each has made:
      averaging plan --parameters 1e8 --peers 3 --step-seconds 0.5,0.5,2 --sync-every 120s

    With --receipts the quantities that differ by more than 15 % have a remark on what to look at.

    Exit codes: 0 done; 2 wrong usage, or receipts that cannot be read.
    """
    from averaging.plan import PeerLink, RunPlan, StrategyKind, compare, estimate, parse_dtype
    from averaging.protocol import TopK

    given |= _by_the_clock(given) | {
        "parameters": int(given["parameters"]),
        "strategy": StrategyKind(given["strategy"]),
    }
    try:
        given["top_k"] = TopK(given.pop("density"), int(given.pop("bits")))
        planned = RunPlan(**given | {"dtype": parse_dtype(given["dtype"]), "link": PeerLink.parse(given["link"])})
        differences = compare(planned, read_receipts(receipts).receipts) if receipts else []
    except ConfigError as error:
        raise failure_of(error) from None
    result, rows = estimate(planned), _alternatives(planned)
    if as_json:
        table = [{"strategy": row.strategy, "compression": _code(row)} | _values(row, price) for row in rows]
        comparison = [
            {"what": each.what, "planned": each.planned, "measured": each.measured, "remark": each.remark}
            for each in differences
        ]
        click.echo(json.dumps(_values(planned, price) | {"table": table, "comparison": comparison}))
        return
    _show(planned, result, price)
    if differences:
        click.echo("\ncompared with the receipts (medians of the rounds that averaged):")
        for difference in differences:
            click.echo(f"  {difference}")
        return
    _show_table(rows, price)


def _alternatives(planned: RunPlan) -> list[RunPlan]:
    """The run with each strategy and some compressions, without the options that others lack."""
    from dataclasses import replace

    from averaging.plan import StrategyKind
    from averaging.protocol import CompressionType

    codes = dict.fromkeys([*(CHANGE_COMPRESSIONS[name] for name in TABLE_COMPRESSIONS), planned.compression])
    rows = []
    for strategy in StrategyKind:
        alike = (
            planned
            if strategy is planned.strategy
            else replace(
                planned,
                strategy=strategy,
                compression=CompressionType.NONE,
                fragments=1,
                delay=0,
                statistics_averaged=False,
            )
        )
        rows += [replace(alike, compression=code) for code in codes if alike.is_diloco or not code.is_sparse]
    return rows


def _code(row: RunPlan) -> str:
    """The shortest name of its compression."""
    return min((name for name, code in CHANGE_COMPRESSIONS.items() if code is row.compression), key=len)


def _values(planned: RunPlan, price: float | None) -> dict[str, Any]:
    """The estimate as JSON values."""
    from averaging.plan import estimate

    result = estimate(planned)
    values: dict[str, Any] = {
        "bytes_per_round": result.bytes_sent,
        "contributed_per_round": result.contributed,
        "coding_seconds": result.coding,
        "bytes_per_day": result.bytes_per_day,
        "rounds_per_day": result.rounds_per_day,
        "phases": dict(result.phases),
        "seconds": result.seconds,
        "share_not_training": result.share_not_training,
        "memory": dict(result.memory),
    }
    return values if price is None else values | {"cost_per_day": result.cost_per_day(price)}


def _show(planned: RunPlan, result: Estimate, price: float | None) -> None:
    """Prints the estimate."""
    from averaging.common import duration, size

    phases = ", ".join(f"{name} {duration(seconds)}" for name, seconds in result.phases.items())
    memory = "\n".join(f"  {size(count):>10}  {what}" for what, count in result.memory.items())
    cost = (
        "" if price is None else f"\ncost of a peer: {result.cost_per_day(price):.2f} a day at {price:g} for 10^9 bytes"
    )
    sparse = (
        f": {size(result.contributed)} of contributions, {size(result.bytes_sent - result.contributed)} of averages; "
        f"the code takes {duration(result.coding)} of a core"
        if planned.is_sparse
        else ""
    )
    overlapped = f", of which training goes on in {duration(result.seconds - result.waited)}" if planned.delay else ""
    click.echo(
        f"a round: {size(result.bytes_sent)} sent by each peer, and as much received{sparse}\n"
        f"a day: {result.rounds_per_day:.0f} rounds, {size(result.bytes_per_day)} each way{cost}\n"
        f"seconds of a round: {duration(result.seconds)} ({phases}){overlapped}\n"
        f"time without training: {result.share_not_training:.1%} at the fastest peer\n"
        f"memory of a peer: {size(sum(result.memory.values()))}, besides activations\n{memory}"
    )


def _show_table(rows: Sequence[RunPlan], price: float | None) -> None:
    """Prints the other strategies and compressions."""
    from averaging.common import duration, size
    from averaging.plan import estimate

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("strategy", "code"):
        table.add_column(name, no_wrap=True)
    costs = [] if price is None else ["cost/day"]
    for name in ("sent/round", "sent/day", "round", "waits", "memory", *costs):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        result = estimate(row)
        cells = [size(result.bytes_sent), size(result.bytes_per_day), duration(result.seconds)]
        cells += [f"{result.share_not_training:.1%}", size(sum(result.memory.values()))]
        cells += [] if price is None else [f"{result.cost_per_day(price):.2f}"]
        table.add_row(row.strategy, _code(row), *cells)
    click.echo("\nthe same run with other strategies and compressions:")
    Console(width=max(80, Console().width), highlight=False).print(table)

"""`averaging plan`: reckons what a run will cost before it is started."""

from __future__ import annotations

import json
from typing import Any

import click

from averaging.cli.options import KindType, count, one_of, option, switch
from averaging.common import choice, duration, number, size
from averaging.protocol import CHANGE_COMPRESSIONS

COUNT = KindType(number(least=1, most=1e15, metavar="N"))


@click.command("plan")
@option("--parameters", "Trained elements of the model, as 1.2e9.", "N", type=COUNT, required=True)
@option("--dtype", "Their dtype.", "[fp64|fp32|fp16|bf16]", default="fp32")
@one_of("--strategy", "What is averaged.", "diloco", "local_sgd", "gradient_averaging", default="diloco")
@count("--sync-every", "Local steps, or batches of a peer, between two rounds.", 100, metavar="H")
@option("--compression", "Code on the wire.", default="none", type=KindType(choice(CHANGE_COMPRESSIONS)))
@option("--peers", "Peers of a group.", "N", default=8, type=click.IntRange(2, 4096))
@option("--link", "Link and round trip of the slowest peer.", "RATE/MS", default="100Mbit/20ms")
@option("--step-seconds", "Seconds of a local step.", "SECONDS", default=1.0, type=KindType(number(above=0)))
@switch("--json", "Print one JSON object.", name="as_json")
def plan_command(*, as_json: bool, **given: Any) -> None:
    r"""Reckons what a run will cost each peer: bytes, seconds, share of the time without training, memory.

    Nothing is started and nothing is called. The figures hold if all peers are there and no round fails.

    \b
    1.2 billion parameters between eight machines on lines of 300 Mbit/s:
      averaging plan --parameters 1.2e9 --dtype bf16 --strategy diloco --sync-every 100 --compression int8 \
          --peers 8 --link 300Mbit/40ms --step-seconds 1.4
    """
    from averaging.plan import PeerLink, RunPlan, StrategyKind, estimate, parse_dtype

    given["dtype"], given["link"] = parse_dtype(given["dtype"]), PeerLink.parse(given["link"])
    given["parameters"], given["strategy"] = int(given["parameters"]), StrategyKind(given["strategy"])
    result = estimate(RunPlan(**given))
    if as_json:
        names = ("rounds_per_day", "phases", "seconds", "share_not_training", "delay", "memory")
        values = {name: getattr(result, name) for name in names}
        per_day = result.bytes_sent * result.rounds_per_day
        click.echo(json.dumps({"bytes_per_round": result.bytes_sent, "bytes_per_day": per_day, **values}))
        return
    phases = ", ".join(f"{name} {duration(seconds)}" for name, seconds in result.phases.items() if seconds)
    memory = "\n".join(f"  {size(count):>10}  {what}" for what, count in result.memory.items())
    hints = {"diloco": f"; none with delay={result.delay}", "local_sgd": "; none with overlap=True"}
    hint = hints.get(given["strategy"], "") if result.delay < given["sync_every"] else ""
    click.echo(
        f"a round: {size(result.bytes_sent)} sent by each peer, and as much received\n"
        f"a day: {result.rounds_per_day:.0f} rounds, {size(result.bytes_sent * result.rounds_per_day)} each way\n"
        f"seconds of a round: {duration(result.seconds)} ({phases})\n"
        f"time without training: {result.share_not_training:.1%}{hint}\n"
        f"memory of a peer: {size(sum(result.memory.values()))}, besides activations\n{memory}"
    )

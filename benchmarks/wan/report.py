"""The table and the verdicts of the WAN benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.allreduce.report import counted
from benchmarks.convergence.report import Verdict

LARGE_MIB = 64
"""Minimum size in MiB to which the targets apply."""

OF_LIMIT, UNEVEN_OVER = 0.90, 1.15
SPEEDUPS = {"fp16": 1.8, "int8": 3.3}


def seconds(system: Mapping[str, Any]) -> list[float]:
    """Seconds of the all-reduce, by round."""
    return [one["allreduce_seconds"] for one in counted(system)]


def times(system: Mapping[str, Any], other: Mapping[str, Any]) -> float | None:
    """Speed-up over another system: the median of the ratios round by round."""
    ratios = [
        theirs["allreduce_seconds"] / ours["allreduce_seconds"]
        for ours, theirs in zip(system["rounds"], other["rounds"], strict=False)
        if not (ours["warm_up"] or ours["failure"] or theirs["failure"])
    ]
    return statistics.median(ratios) if ratios else None


def verdicts(cases: Sequence[Mapping[str, Any]]) -> Iterator[Verdict]:
    """Returns the targets for the measurements."""
    for case in cases:
        if case["mib"] < LARGE_MIB:
            continue
        systems = case["systems"]
        stated = systems.get("averaging none, bandwidth stated")
        plain = systems.get("averaging none")
        if case["uneven"]:
            if stated and seconds(stated):
                over = statistics.median(seconds(stated)) / stated["optimum_seconds"]
                wanted = f"{case['title']}: with bandwidth stated, within {UNEVEN_OVER - 1:.0%} of the optimum"
                yield Verdict(wanted, f"{over - 1:+.0%}", over <= UNEVEN_OVER)
            continue
        if plain is None or not seconds(plain):
            continue
        part = plain["limit_seconds"] / statistics.median(seconds(plain))
        yield Verdict(f"{case['title']}: at least {OF_LIMIT:.0%} of the limit", f"{part:.0%}", part >= OF_LIMIT)
        for codec, wanted_times in SPEEDUPS.items():
            faster = times(systems[f"averaging {codec}"], plain) if f"averaging {codec}" in systems else None
            if faster is not None:
                wanted = f"{case['title']}: {codec} {wanted_times:g} times as fast as uncompressed"
                yield Verdict(wanted, f"{faster:.2f}", faster >= wanted_times)


def show(results: Mapping[str, Any]) -> bool:
    """Prints the tables. Returns whether all rounds, including the warm-up, had correct averages."""
    where, sound, failures = results["machine"], True, []
    table = Table(
        "system",
        title="Seconds per all-reduce: median (least to most)",
        caption=f"{where['processor']}, {where['cores']} cores, {where['memory_gib']} GiB, {where['system']}; "
        f"commit {results['commit'][:10]}{results['commit'][40:]}; of limit: the limit by the median; "
        "x uncompressed and x Gloo: times as fast, median of the ratios round by round; CPU s: of all peers; "
        "machine s: of all cores, with the kernel's, the relay's and what fills and checks the tensors",
    )
    for header in (
        "all-reduce",
        "limit",
        "of limit",
        "x uncompressed",
        "x Gloo",
        "whole step",
        "CPU s",
        "machine s",
        "rounds",
    ):
        table.add_column(header, justify="right")
    for case in results["cases"]:
        table.add_section()
        found = case["calibration"]
        rates = statistics.mean(found["all_links_mbit"])
        table.add_row(
            f"[bold]{case['title']}[/bold]\nplain TCP: one link {found['link_mbit']:.1f} Mbit/s, all {rates:.1f} each; "
            f"{found['tcp']['tcp_congestion_control']}; {found['cores_busy_before']:.1f} cores busy with something else"
        )
        for name, system in case["systems"].items():
            sound &= not system["broken"] and all(not one["failure"] for one in system["rounds"])
            failures += [f"{case['title']}, {name}: {one['failure']}" for one in system["rounds"] if one["failure"]]
            failures += [f"{case['title']}, {name}: broke: {system['broken']}"] if system["broken"] else []
            table.add_row("  " + name, *_row(case, system, results["rounds"]))
    console = Console()
    console = console if console.is_terminal else Console(width=170)  # the width of a pipe is unknown
    console.print(table)
    for verdict in verdicts(results["cases"]):
        console.print(f"{'met   ' if verdict.met else 'MISSED'}  {verdict.wanted}: {verdict.measured}")
    for failure in failures:
        print(failure)
    return sound


def _row(case: Mapping[str, Any], system: Mapping[str, Any], rounds: int) -> Sequence[str]:
    good = counted(system)
    if not good:
        return ("failed", *[""] * 7, f"0 of {rounds}")
    allowed, took = system["limit_seconds"], seconds(system)
    others = [case["systems"].get(other) for other in ("averaging none", "gloo")]
    return (
        f"{statistics.median(took):.3f} ({min(took):.3f} to {max(took):.3f})",
        f"{allowed:.3f}",
        f"{allowed / statistics.median(took):.0%}",
        *(_times(times(system, other)) if other else "" for other in others),
        f"{statistics.median(one['seconds'] for one in good):.3f}",
        f"{statistics.median(one['cpu_seconds'] for one in good):.2f}" if "cpu_seconds" in good[0] else "",
        f"{statistics.median(one['machine_busy_seconds'] for one in good):.2f}",
        f"{len(good)} of {rounds}",
    )


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

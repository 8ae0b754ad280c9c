"""The verdict: what the story promises, checked against what was measured. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from examples.posttrain.record import Kill, SiteRecord


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise, and whether it was kept."""

    kept: bool
    text: str


def on_groups(number: int, site: SiteRecord, waiting: int) -> Finding:
    """No group that the feed has acknowledged is lost, and none is used in two steps.

    Args:
        number: of the site, from 1.
        site: what it has reported.
        waiting: groups that wait in the feed at the end.
    """
    posted = {one for event in site.posted for one in event["ids"]}
    begun = {one for event in site.begun for one in event["ids"]}
    fetched = Counter(one for event in site.fetched for one in event["ids"])
    trained = Counter(one for event in site.steps for one in event["ids"])
    twice = sum(count > 1 for count in fetched.values()) + sum(count > 1 for count in trained.values())
    # A killed explorer may have posted without having noted it.
    lost = len(posted | fetched.keys()) - len(fetched) - waiting
    strange = len(fetched.keys() - begun) + len(trained.keys() - fetched.keys()) + site.wrong
    return Finding(
        twice == 0 and lost <= 0 and strange == 0,
        f"site {number}: {len(posted)} groups posted, {len(trained)} trained, {len(fetched) - len(trained)} at the "
        f"master and {waiting} in the feed at the end; {max(0, lost)} lost, {twice} used twice, {strange} unexpected",
    )


def on_versions(number: int, site: SiteRecord, explorers: int) -> list[Finding]:
    """The versions of an explorer only grow, and the last one is that of the trainers."""
    findings = []
    for process, events in sorted(site.versions.items()):
        versions = [event["version"] for event in events]
        grow = all(one <= other for one, other in pairwise(versions))
        ends = bool(versions) and versions[-1] == site.published
        findings.append(
            Finding(
                grow and ends,
                f"{process}: {len(versions)} versions, {'always newer' if grow else 'NOT always newer'}, the last is "
                f"{versions[-1]} of {site.published}",
            )
        )
    if len(findings) < explorers:
        findings.append(Finding(False, f"site {number}: only {len(findings)} of {explorers} explorers had weights"))
    return findings


def on_weights(sites: Sequence[SiteRecord], digests: Sequence[str]) -> Finding:
    """All sites hold the same bytes at the end."""
    alike = len(set(digests)) == 1 and all(site.finished is not None and site.finished["alike"] for site in sites)
    return Finding(alike, f"all sites hold the same bytes: {', '.join(digests)}")


def on_accuracy(start: float, end: float, alone: float, alone_all: float) -> list[Finding]:
    """The run has learned, and has gained from the other site.

    Args:
        start: share of prompts solved after the warm-up.
        end: the same at the end.
        alone: of one site that trains alone with the samples of one site.
        alone_all: of one site that trains alone with the samples of all sites, which takes it so much longer.
    """
    return [
        Finding(end > start, f"right answers rose from {start:.0%} after the warm-up to {end:.0%}"),
        Finding(
            end > alone - 0.05,
            f"one site alone reaches {alone:.0%} with its own samples and {alone_all:.0%} with the samples of both",
        ),
    ]


def on_kills(kills: Sequence[Kill], planned: int) -> list[Finding]:
    """Every killed part was at work again."""
    findings = [
        Finding(
            kill.seconds is not None,
            f"{kill.what} killed: "
            + ("was NOT at work again" if kill.seconds is None else f"at work again after {kill.seconds:.1f} s")
            + (f"; {kill.note}" if kill.note else ""),
        )
        for kill in kills
    ]
    if len(kills) < planned:
        findings.append(Finding(False, f"only {len(kills)} of {planned} kills took place before the training ended"))
    return findings

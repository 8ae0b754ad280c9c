"""`averaging doctor` in this process, beside peers of a test."""

import asyncio
from typing import Any

from averaging import PeerConfig
from averaging.doctor import Examination, Finding, Severity, examine


async def examined(*seeds: str, run_known: bool = True, **options: Any) -> list[Finding]:
    """All findings of one examination; `schema` and options of a peer."""
    extra = {name: options.pop(name) for name in ("schema", "strategy", "deep") if name in options}
    options.setdefault("run_id", "run")
    findings: list[Finding] = []
    examination = Examination(config=PeerConfig(join=seeds, **options), run_known=run_known, **extra)
    async with asyncio.timeout(60):
        await examine(examination, findings.append)
    return findings


def about(findings: list[Finding], check: str, peer: str | None = None) -> list[Finding]:
    return [each for each in findings if each.check == check and peer in (None, each.peer)]


def wrong(findings: list[Finding]) -> dict[str, str]:
    """The text and remedy of what will not work, by check."""
    return {each.check: f"{each.text} → {each.remedy}" for each in findings if each.severity is Severity.FAILURE}

"""A peer that only its own machine can reach is named at both sides, and no peer waits for it."""

from __future__ import annotations

import logging

import pytest

from tests.support.training_run import STRATEGIES, Run, Site, agree

SEEDS = ["192.0.2.1:1", "192.0.2.2:1"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_peer_with_a_loopback_address_delays_nobody(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    sites = [Site(SEEDS[0], [], 0.0), Site(SEEDS[1], SEEDS[:1], 0.5), Site("127.0.0.1:5", SEEDS[:1], 1.0)]
    run = Run(1, strategy, sites, until=20.0, group_wait=5.0)
    for site in run.simulate():
        others = set(SEEDS) - {site.name} if site is sites[2] else {"127.0.0.1:5"}
        assert others <= {name for name in (*SEEDS, "127.0.0.1:5") if f"averages with no peer at {name}" in caplog.text}
        late = [receipt for receipt in site.receipts[2:] if receipt.seconds > 2.0]
        assert late == []
    assert agree(sites[:2])
    assert all(len(receipt.members) == 2 for site in sites[:2] for receipt in site.receipts[2:])

"""What peers, averagers and commands tell of themselves to Prometheus and to probes."""

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from averaging import DecentralizedAverager, DiLoCo, PeerConfig, averager
from averaging.security import read_credentials
from averaging.strategies import RunStart
from averaging.training import of_rank
from tests.metrics.scraping import http_get, scrape
from tests.support.certificates import write
from tests.support.peers import average, enter, swarm
from tests.support.ports import free_port

ANY_PORT = "127.0.0.1:0"


def ones() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(1000)}


async def test_a_round_is_counted_and_nothing_that_identifies_a_peer_is_told() -> None:
    async with AsyncExitStack() as stack:
        peers = await swarm(stack, [ones(), ones(), ones()], metrics_listen=ANY_PORT, run_id="a-secret-name")
        receipts = await average(*peers)
        for peer, receipt in zip(peers, receipts, strict=True):
            page = await asyncio.to_thread(scrape, peer.metrics_endpoint)
            assert page["averaging_rounds_total"][("averaged",)] == 1
            assert sum(page["averaging_bytes_total"].values()) == receipt.bytes_sent + receipt.bytes_received
            assert page["averaging_waiting_seconds_total"][()] > 0
            assert page["averaging_round_duration_seconds_count"][("allreduce",)] == 1
            assert page["averaging_round_duration_seconds_sum"][("allreduce",)] == pytest.approx(
                receipt.phases["allreduce"]
            )
            assert page["averaging_state_version"][()] == receipt.state_version == 1
            assert page["averaging_peers"][()] == 3
            assert page["averaging_ready"][()] == 1
            assert page["averaging_last_average_timestamp_seconds"][()] >= receipt.started
            assert "averaging_certificate_expiry_timestamp_seconds" not in page
            _, text = await asyncio.to_thread(http_get, peer.metrics_endpoint, "/metrics")
            assert not [name for name in ("a-secret-name", *(each.endpoint for each in peers)) if name in text]


async def test_a_peer_that_still_joins_is_alive_and_not_ready() -> None:
    address = f"127.0.0.1:{free_port()}"
    nobody = f"127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        joining = asyncio.ensure_future(enter(stack, ones(), join=[nobody], join_timeout=60, metrics_listen=address))
        async with asyncio.timeout(30):
            while (await asyncio.to_thread(_probe, address, "/healthz"))[0] != 200:  # noqa: ASYNC110 - it starts
                await asyncio.sleep(0.01)
        assert await asyncio.to_thread(_probe, address, "/readyz") == (503, "it is joining its run, or leaving it\n")
        joining.cancel()
        await asyncio.wait({joining})


def _probe(address: str, path: str) -> tuple[int, str]:
    try:
        return http_get(address, path)
    except OSError as error:
        return 0, str(error)


async def test_the_expiry_of_the_certificate(tmp_path: Path) -> None:
    files = write(tmp_path, "127.0.0.1")
    async with AsyncExitStack() as stack:
        peer = await enter(stack, ones(), **files, metrics_listen=ANY_PORT)
        page = await asyncio.to_thread(scrape, peer.metrics_endpoint)
        tls = read_credentials(peer.config, time.time).tls
        assert tls is not None
        assert page["averaging_certificate_expiry_timestamp_seconds"][()] == tls.expires


def an_averager(**options: Any) -> DecentralizedAverager:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = DiLoCo(sync_every=2)
    return DecentralizedAverager(optimizer, model=model, strategy=strategy, run_id="averagers", **options)


def test_an_averager_is_ready_once_it_holds_the_state_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    address, seen = f"127.0.0.1:{free_port()}", []

    class Start(RunStart):
        def begin(self) -> None:
            seen.append(http_get(address, "/readyz"))
            seen.append(http_get(address, "/healthz"))
            super().begin()

    monkeypatch.setattr(averager, "RunStart", Start)
    with an_averager(metrics_listen=address) as opt:
        assert seen == [(503, "it takes over the state of its run\n"), (200, "ok\n")]
        assert opt.metrics_endpoint == address
        assert http_get(address, "/readyz") == (200, "ready\n")
        opt.step(batch_size=8)
        opt.step(batch_size=8)
        page = scrape(address)
        assert page["averaging_local_steps_total"][()] == 2
        assert page["averaging_samples_total"][()] == 16
        assert page["averaging_global_step"][()] == 1
    with pytest.raises(OSError, match="refused"):
        http_get(address, "/readyz")


@pytest.mark.parametrize(
    ("leads", "owns", "expected"),
    [(True, True, "127.0.0.1:9464"), (False, True, "127.0.0.1:9466"), (False, False, None)],
)
def test_each_rank_of_a_site_that_owns_a_shard_has_its_port(leads: bool, owns: bool, expected: str | None) -> None:
    rank: Any = SimpleNamespace(leads=leads, owns=owns, shard=2)
    config = PeerConfig(run_id="site", metrics_listen="127.0.0.1:9464")
    assert of_rank(config, rank, "127.0.0.1:4222").metrics_listen == expected

"""What peers, averagers and commands tell of themselves to Prometheus and to probes."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from averaging import BlockingPeer, DecentralizedAverager, DiLoCo, PeerConfig, averager
from averaging.errors import ListenError
from averaging.metrics import watchdog
from averaging.security import read_credentials
from averaging.strategies import RunStart
from averaging.training import of_rank
from tests.metrics.scraping import http_get, scrape
from tests.support.certificates import write
from tests.support.peers import average, enter, swarm
from tests.support.ports import free_port
from tests.support.processes import JsonProcess

ANY_PORT = "127.0.0.1:0"


def ones() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(1000)}


@pytest.mark.asyncio
async def test_a_round_is_counted() -> None:
    async with AsyncExitStack() as stack:
        peers = await swarm(stack, [ones(), ones(), ones()], metrics_listen=ANY_PORT)
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


@pytest.mark.asyncio
async def test_nothing_that_identifies_a_peer_is_told() -> None:
    async with AsyncExitStack() as stack:
        peers = await swarm(stack, [ones(), ones()], metrics_listen=ANY_PORT, run_id="a-secret-name")
        await average(*peers)
        _, page = await asyncio.to_thread(http_get, peers[0].metrics_endpoint, "/metrics")
        assert not [name for name in ("a-secret-name", *(peer.endpoint for peer in peers)) if name in page]


@pytest.mark.asyncio
async def test_it_is_off_by_default() -> None:
    async with AsyncExitStack() as stack:
        peer = await enter(stack, ones())
        assert peer.metrics_endpoint == ""
        assert "metrics" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.asyncio
async def test_a_taken_port_ends_the_start_and_leaves_nothing_open() -> None:
    async with AsyncExitStack() as stack:
        first = await enter(stack, ones(), metrics_listen=ANY_PORT)
        with pytest.raises(ListenError, match="metrics_listen"):
            await enter(stack, ones(), metrics_listen=first.metrics_endpoint)


@pytest.mark.asyncio
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


@pytest.mark.asyncio
async def test_the_expiry_of_the_certificate(tmp_path: Path) -> None:
    files = write(tmp_path, "127.0.0.1")
    async with AsyncExitStack() as stack:
        peer = await enter(stack, ones(), **files, metrics_listen=ANY_PORT)
        page = await asyncio.to_thread(scrape, peer.metrics_endpoint)
        tls = read_credentials(peer.config, time.time).tls
        assert tls is not None
        assert page["averaging_certificate_expiry_timestamp_seconds"][()] == tls.expires


def test_a_peer_names_the_gil_that_is_held_in_its_log_and_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """2 s in place of a minute."""
    monkeypatch.setattr(watchdog, "LOGGED_STALL", 1.0)
    with BlockingPeer(ones(), run_id="blocking", metrics_listen=ANY_PORT) as peer:
        before = scrape(peer.metrics_endpoint)["averaging_interpreter_stall_seconds_total"][()]
        ctypes.PyDLL(None).sleep(2)
        end = time.monotonic() + 60
        while (page := scrape(peer.metrics_endpoint))["averaging_interpreter_stall_seconds_total"][()] < before + 1:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert page["averaging_loop_lag_seconds"][()] > 1
    message = next(text for text in caplog.messages if "stood still" in text)
    assert "a thread kept the GIL" in message
    assert "thread MainThread is at " in message  # which has gone on to the next line meanwhile


def test_a_blocking_peer() -> None:
    with BlockingPeer(ones(), run_id="blocking", metrics_listen=ANY_PORT) as peer:
        assert http_get(peer.metrics_endpoint, "/readyz") == (200, "ready\n")


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


def test_the_command_tells_its_port(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(ones(), tmp_path / "a.safetensors")
    command = (
        "python",
        "-m",
        "averaging",
        "peer",
        str(tmp_path / "a.safetensors"),
        "--run-id",
        "demo",
        "--serve",
        "--json",
    )
    with JsonProcess(*command, "--metrics-listen", ANY_PORT) as process:
        ready = process.expect("ready")
        assert http_get(ready["metrics"], "/readyz") == (200, "ready\n")


@pytest.mark.parametrize(
    ("leads", "owns", "expected"),
    [(True, True, "127.0.0.1:9464"), (False, True, "127.0.0.1:9466"), (False, False, None)],
)
def test_each_rank_of_a_site_that_owns_a_shard_has_its_port(leads: bool, owns: bool, expected: str | None) -> None:
    rank: Any = SimpleNamespace(leads=leads, owns=owns, shard=2)
    config = PeerConfig(run_id="site", metrics_listen="127.0.0.1:9464")
    assert of_rank(config, rank, "127.0.0.1:4222").metrics_listen == expected

"""Followers, registers and model workers tell Prometheus and probes of themselves, too."""

import asyncio
from collections.abc import Callable

from averaging import WeightFollower, WeightPublisher
from averaging.elastic.register import GrpcRegister
from averaging.rl.workers import ModelWorker
from averaging.rpc import RpcChannel
from tests.metrics.scraping import http_get, scrape
from tests.support.processes import averaging_process
from tests.weights.test_weights import Publishing, state, stepped

ANY_PORT = "127.0.0.1:0"
Page = dict[str, dict[tuple[str, ...], float]]


async def eventually(endpoint: str, condition: Callable[[Page], bool]) -> Page:
    """The metrics, once they are as they should become."""
    async with asyncio.timeout(60):
        while not condition(page := await asyncio.to_thread(scrape, endpoint)):  # noqa: ASYNC110 - of a process
            await asyncio.sleep(0.05)
    return page


def test_a_follower_tells_how_old_its_weights_are() -> None:
    publisher, weights = WeightPublisher(), state()
    with (
        Publishing(publisher) as endpoint,
        WeightFollower(weights, join=[endpoint], metrics_listen=ANY_PORT) as follower,
    ):
        here = follower.metrics_endpoint
        assert http_get(here, "/readyz") == (503, "no version is in the model yet\n")
        publisher.publish_now(weights, 1)
        assert follower.update(60)
        assert http_get(here, "/readyz") == (200, "ready\n")
        with follower.locked():  # the application may do so for long
            publisher.publish_now(stepped(weights), 3)
            page = asyncio.run(eventually(here, lambda page: page["averaging_follower_staleness_seconds"][()] > 0))
        assert page["averaging_follower_staleness_versions"][()] == 2
        assert page["averaging_follower_version"][()] == 1
        assert page["averaging_follower_newest_version"][()] == 3
        assert page["averaging_follower_connected"][()] == 1
        assert page["averaging_follower_bytes_total"][("received",)] > 0


def test_the_command_register() -> None:
    with averaging_process("register", "--listen", ANY_PORT, "--metrics-listen", ANY_PORT) as process:
        ready = process.expect("ready")

        async def use() -> Page:
            async with RpcChannel(ready["endpoint"]) as channel:
                await GrpcRegister(channel).compare_and_set("job", b"12345", None)
            return await eventually(ready["metrics"], lambda page: page["averaging_register_entries"][()] == 1)

        page = asyncio.run(use())
        assert page["averaging_register_bytes"][()] == 5
        assert page["averaging_register_calls_total"] == {("compare_and_set",): 1, ("get",): 0}
        assert http_get(ready["metrics"], "/readyz") == (200, "ready\n")


async def test_a_model_worker() -> None:
    async with ModelWorker("a0", {}, listen=ANY_PORT, metrics_listen=ANY_PORT) as worker:
        page = await asyncio.to_thread(scrape, worker.metrics_endpoint)
        assert page["averaging_worker_attached"][()] == 0
        assert page["averaging_worker_samples"][()] == 0
        assert (await asyncio.to_thread(http_get, worker.metrics_endpoint, "/readyz"))[0] == 200

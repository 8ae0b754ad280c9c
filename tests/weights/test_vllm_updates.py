"""What a vLLM server is asked when an update fails at any of its steps. `tests/vllm` has the real one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from averaging.errors import StateError
from averaging.http_server import HttpServer, listening
from averaging.monitor.table import reader_lines
from averaging.rpc import RpcServer
from averaging.weights import VllmServer, WeightPublisher, WeightSnapshot, seal, view_state
from tests.metrics.scraping import scrape
from tests.support.processes import averaging_process

WHOLE = ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"]


class Engine:
    """Answers the routes of a vLLM server; each route in `failing` fails that many times."""

    def __init__(self, **failing: int) -> None:
        self.failing = failing
        self.calls: list[str] = []
        self.version: str | None = None
        self.paused = False

    async def answer(self, request: Request) -> Response:
        route = request.path_params["route"]
        if route == "is_paused":
            return JSONResponse({"is_paused": self.paused})
        self.calls.append(route)
        if self.failing.get(route, 0):
            self.failing[route] -= 1
            return JSONResponse({"error": "worker 1 of 2 has failed"}, status_code=500)
        if route == "pause":
            assert request.query_params["clear_cache"] == "true"
        self.paused = {"pause": True, "resume": False}.get(route, self.paused)
        if route == "finish_weight_update":
            self.version = (await request.json())["weight_version"]
        return JSONResponse({})


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[str]:
    routes = [Route("/{route}", engine.answer, methods=["GET", "POST"])]
    with listening("127.0.0.1:0") as listener:
        async with HttpServer(Starlette(routes=routes), listener, connections=20, seconds=60.0):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def snapshot(version: int) -> WeightSnapshot:
    return seal(view_state({"w": torch.ones(4)}), version, None)


@pytest.mark.parametrize("step", ["update_weights", "finish_weight_update"])
async def test_a_server_of_which_a_worker_may_have_a_part_stays_paused(step: str) -> None:
    engine = Engine(**{step: 2})
    async with serving(engine) as url, VllmServer(url, "127.0.0.1:0") as server:
        for _ in range(2):
            with pytest.raises(StateError, match="worker 1 of 2 has failed"):
                await server.load(snapshot(7))
            assert "resume" not in engine.calls
            assert (server.version, server.partial, engine.paused) == (None, 7, True)
            if step == "update_weights":
                assert engine.version == "unknown: a part of 7"
        await server.load(snapshot(8))
        assert engine.calls[-5:] == WHOLE
        assert (engine.version, server.version, server.partial, engine.paused) == ("8", 8, None, False)


@pytest.mark.parametrize("step", ["pause", "start_weight_update"])
async def test_a_server_that_has_all_of_a_version_goes_on_with_it(step: str) -> None:
    engine = Engine()
    async with serving(engine) as url, VllmServer(url, "127.0.0.1:0") as server:
        await server.load(snapshot(7))
        engine.failing[step] = 1
        with pytest.raises(StateError):
            await server.load(snapshot(8))
        assert engine.calls[-1] == "resume"
        assert (engine.version, server.version, server.partial) == ("7", 7, None)


async def test_what_a_process_has_left_paused_is_not_resumed_by_the_next_before_a_version_is_in() -> None:
    engine = Engine(update_weights=1)
    async with serving(engine) as url:
        async with VllmServer(url, "127.0.0.1:0") as server:
            with pytest.raises(StateError, match="stays paused until all workers have a whole version"):
                await server.load(snapshot(7))
        async with VllmServer(url, "127.0.0.1:0") as server:
            engine.failing["start_weight_update"] = 1
            with pytest.raises(StateError):
                await server.load(snapshot(7))
            assert "resume" not in engine.calls
            await server.load(snapshot(7))
        assert engine.calls[-5:] == WHOLE


async def test_the_run_and_the_metrics_name_the_version_of_which_an_engine_may_have_a_part() -> None:
    engine, publisher = Engine(update_weights=1 << 30), WeightPublisher()
    async with serving(engine) as url, RpcServer("127.0.0.1:0", [publisher]) as server:
        await publisher.publish({"w": torch.ones(4)}, 7)
        command = ["follow", server.endpoint, "--engine", f"vllm={url}", "--metrics-listen", "127.0.0.1:0"]
        with averaging_process(*command) as process:
            here = (await asyncio.to_thread(process.expect, "ready"))["metrics"]
            assert (await asyncio.to_thread(process.expect, "unloaded"))["partial"]
            (reader,) = publisher.readers()
            assert (reader.status, reader.version, reader.newest) == ("unknown: a part of 7", None, 7)
            assert "unknown: a part of 7" in reader_lines([("peer", reader)])[0]
            page = await asyncio.to_thread(scrape, here)
            assert page["averaging_follower_partial_version"][()] == 7
            assert "averaging_follower_version" not in page
            await publisher.publish({"w": torch.zeros(4)}, 8)  # received, and not loaded by all
            while (await asyncio.to_thread(process.expect, "unloaded"))["version"] < 8:
                pass
            (reader,) = publisher.readers()
            assert (reader.status, reader.version) == ("unknown: a part of 8", None)
            engine.failing.clear()
            assert (await asyncio.to_thread(process.expect, "loaded"))["version"] == 8
            (reader,) = publisher.readers()
            assert (reader.status, reader.version) == ("", 8)
            assert "version 8" in reader_lines([("peer", reader)])[0]
            while "averaging_follower_partial_version" in await asyncio.to_thread(scrape, here):
                pass  # a page is kept for a moment

"""`averaging follow --engine` with vLLM's own HTTP routes, and its worker behind them."""

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import served_worker
from tests.vllm.test_vllm_backend import Trainer, assert_serves

pytestmark = pytest.mark.vllm


class Engine:
    """What vLLM's routes call: passes each call to the worker, as the engine does to all workers."""

    def __init__(self, config: Any) -> None:
        self.worker = served_worker(config)
        self.calls: list[str] = []
        self.version: str | None = None
        self.paused = False

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert clear_cache
        self.calls.append(f"pause {mode}")
        self.paused = True

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append("init")
        await self._do(lambda: self.worker.init_weight_transfer_engine(request.init_info))

    async def start_weight_update(self) -> None:
        self.calls.append("start")
        await self._do(self.worker.start_weight_update)

    async def update_weights(self, request: Any) -> None:
        self.calls.append("update")
        await self._do(lambda: self.worker.update_weights(request.update_info))

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")
        await self._do(self.worker.finish_weight_update)
        self.version = weight_version or self.version

    async def update_weight_version(self, new_version: str) -> None:
        self.version = new_version

    async def get_weight_version(self) -> str | None:
        return self.version

    async def _do(self, call: Any) -> None:
        import asyncio

        await asyncio.to_thread(call)


class Server:
    """An HTTP server with vLLM's routes."""

    def __init__(self, config: Any, port: int = 0) -> None:
        import socket

        import uvicorn
        from fastapi import FastAPI
        from vllm.entrypoints.rl.online.api_router import router

        self.engine = Engine(config)
        app = FastAPI()
        app.state.engine_client = self.engine
        app.include_router(router)
        listener = socket.create_server(("127.0.0.1", port))
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, args=([listener],))
        self._thread.start()

    def served_version(self) -> str | None:
        with urllib.request.urlopen(f"{self.url}/weight_info", timeout=10) as answer:
            version: str | None = json.load(answer)["weight_version"]
        return version

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.engine.worker.weight_transfer_engine.shutdown()


class Follow:
    """`averaging follow --engine` in a process."""

    def __init__(self, *arguments: str) -> None:
        command = [str(Path(sys.executable).with_name("averaging")), "follow", *arguments, "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_for(self, event: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found: dict[str, Any] = json.loads(line)
            if found["event"] == event:
                return found
        _, errors = self.process.communicate(timeout=30)
        pytest.fail(f"no event {event!r}; the process ended with {self.process.returncode}: {errors}")

    def close(self) -> int:
        self.process.terminate()
        self.process.communicate(timeout=30)
        return self.process.returncode


@pytest.fixture
def trainer(checkpoint: Path) -> Iterator[Trainer]:
    trainer = Trainer(checkpoint)
    yield trainer
    trainer.close()


@pytest.fixture
def server(vllm_config: Any) -> Iterator[Server]:
    server = Server(vllm_config)
    yield server
    server.close()


def test_an_engine_serves_each_version(server: Server, vllm_config: Any, trainer: Trainer) -> None:
    trainer.publish(1)
    follow = Follow(trainer.server.endpoint, "--engine", f"vllm={server.url}")
    assert follow.wait_for("loaded")["version"] == 1
    assert server.served_version() == "1"
    trainer.change()
    trainer.publish(2)
    assert follow.wait_for("loaded")["version"] == 2
    assert server.served_version() == "2"
    assert_serves(server.engine.worker, vllm_config, trainer)
    update = ["pause wait", "start", "update", "finish", "resume"]
    assert server.engine.calls == ["init", *update, *update]
    assert follow.close() == 0


def test_an_engine_that_is_away_gets_the_newest_version(vllm_config: Any, trainer: Trainer) -> None:
    first = Server(vllm_config)
    trainer.publish(1)
    follow = Follow(trainer.server.endpoint, "--engine", f"vllm={first.url}", "--engine-pause", "keep")
    follow.wait_for("loaded")
    first.close()
    trainer.change()
    trainer.publish(2)
    assert "does not answer" in follow.wait_for("unloaded")["message"]
    again = Server(vllm_config, first.port)
    try:
        assert follow.wait_for("loaded")["version"] == 2
        assert again.engine.calls[:2] == ["init", "pause keep"]
        assert_serves(again.engine.worker, vllm_config, trainer)
    finally:
        assert follow.close() == 0
        again.close()


def test_an_engine_stays_paused_after_a_failed_update(server: Server, vllm_config: Any, trainer: Trainer) -> None:
    state = dict(trainer.model.state_dict())
    del state["lm_head.weight"]
    trainer.publisher.publish_now(state, 1)
    follow = Follow(trainer.server.endpoint, "--engine", f"vllm={server.url}", "--once")
    output, errors = follow.process.communicate(timeout=60)
    assert follow.process.returncode == 1
    assert f"{server.url} answered /update_weights with 500" in output + errors
    assert server.engine.calls[-1] == "finish"
    assert server.served_version() == "unknown: a part of 1"

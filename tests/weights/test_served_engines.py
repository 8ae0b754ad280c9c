"""`averaging follow --adapter` and `--engine sglang=`: servers with the routes of vLLM and SGLang, and their answers.

`tests/vllm` has the real routes of vLLM. Those of SGLang are as in `sglang/srt/entrypoints/http_server.py` of 0.5.23.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from averaging.cli import main
from averaging.common import ADAPTER_CONFIG, ADAPTER_ERROR, ADAPTER_FILE
from averaging.errors import ConfigError, StateError
from averaging.http_server import HttpServer, listening
from averaging.rl.rollouts.engine import EngineClient
from averaging.rpc import RpcServer
from averaging.weights import WeightPublisher, WeightSnapshot, seal, view_state
from averaging.weights.adapters import AdapterServer
from averaging.weights.engine_servers import SglangServer
from tests.support.gossip_swarm import until
from tests.support.model_folders import base_folder, load_folder
from tests.support.pages import ROOT
from tests.support.processes import averaging_process

NAME = "base_model.model.q.lora_A.weight"


def adapter(version: int, error: float = 0.0) -> dict[str, torch.Tensor]:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q"], ADAPTER_ERROR: error}
    text = json.dumps(config).encode().ljust(256)
    factors = {NAME: torch.full((2, 4), float(version)), NAME.replace("_A", "_B"): torch.ones(4, 2)}
    return {**factors, ADAPTER_CONFIG: torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def files_of(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


class Server:
    """What both engines have: models and adapters, and answers that are made of what they have loaded."""

    def __init__(self, prefix: str = "/v1") -> None:
        self.prefix = prefix  # of the routes for adapters
        self.adapters: dict[str, str] = {}
        self.calls: list[tuple[str, Any]] = []
        self.failing: dict[str, int] = {}
        self.begun, self.finish = asyncio.Event(), asyncio.Event()  # requests wait in progress until `finish` is set

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route(f"{self.prefix}/load_lora_adapter", self.load, methods=["POST"]),
            Route(f"{self.prefix}/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        cards = [{"id": name, "root": path, "parent": "base"} for name, path in self.adapters.items()]
        return JSONResponse({"object": "list", "data": [{"id": "base", "root": "/base", "max_model_len": 64}, *cards]})

    def refused(self, message: str, status: int) -> Response:
        error = {"message": message, "type": "InvalidUserInput", "param": None, "code": status}
        if self.prefix:
            return JSONResponse({"error": error}, status_code=status)
        return JSONResponse({"success": False, "error_message": message, "loaded_adapters": None}, status_code=400)

    def done(self, message: str) -> Response:
        return PlainTextResponse(message) if self.prefix else JSONResponse({"success": True, "error_message": None})

    async def load(self, request: Request) -> Response:
        asked = await request.json()
        self.calls.append(("load", asked["lora_name"]))
        if self.failing.get("load", 0):
            self.failing["load"] -= 1
            return self.refused("there is no room for it", 500)
        if asked["lora_name"] in self.adapters:
            return self.refused(f"The lora adapter '{asked['lora_name']}' has already been loaded.", 400)
        assert files_of(asked["lora_path"]) == {ADAPTER_FILE, ADAPTER_CONFIG}
        assert set(asked) == {"lora_name", "lora_path"}
        self.adapters[asked["lora_name"]] = asked["lora_path"]
        return self.done(f"Success: LoRA adapter '{asked['lora_name']}' added successfully.")

    async def unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        self.calls.append(("unload", name))
        if self.adapters.pop(name, None) is None:
            return self.refused(f"The lora adapter '{name}' cannot be found.", 404)
        return self.done("Success")

    async def complete(self, request: Request) -> Response:
        model = (await request.json())["model"]
        if model not in self.adapters:
            return self.refused(f"The model `{model}` does not exist.", 404)
        path = self.adapters[model]
        self.begun.set()
        await self.finish.wait()
        token = int(load_file(Path(path) / ADAPTER_FILE)[NAME][0, 0])  # again from its folder, as vLLM does
        choice = {"token_ids": [token], "finish_reason": "stop", "logprobs": {"token_logprobs": [0.0]}}
        return JSONResponse({"id": "1", "choices": [choice]})


@asynccontextmanager
async def serving(routes: list[Route]) -> AsyncIterator[str]:
    with listening("127.0.0.1:0") as listener:
        async with HttpServer(Starlette(routes=routes), listener, connections=20, seconds=60.0):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(("kind", "prefix"), [("vllm", "/v1"), ("sglang", "")])
async def test_each_version_has_a_name_of_its_own_and_the_last_ones_stay(
    kind: str, prefix: str, tmp_path: Path
) -> None:
    engine, publisher = Server(prefix), WeightPublisher()
    async with serving(engine.routes) as url, RpcServer("127.0.0.1:0", [publisher]) as trainer:
        await publisher.publish(adapter(1), 1)
        output = tmp_path / "folders"
        command = ["follow", trainer.endpoint, "--engine", f"{kind}={url}", "--adapter", "tune", "--keep", "2"]
        with averaging_process(*command, "--output", str(output)) as process:
            loaded = await asyncio.to_thread(process.expect, "loaded")
            assert (loaded["version"], list(engine.adapters)) == (1, ["tune-1"])
            rollouts = EngineClient(url)
            rollouts.adapter = "tune"
            begun = asyncio.create_task(rollouts.complete({"model": "base", "prompt": [1]}))
            await engine.begun.wait()
            for version in (2, 3, 4):
                await publisher.publish(adapter(version, error=0.25), version)
                while (await asyncio.to_thread(process.expect, "loaded"))["version"] < version:
                    pass
                assert sorted(engine.adapters) == [f"tune-{version - 1}", f"tune-{version}"][-version:]
                assert process.seen[-2]["error"] == 0.25
            engine.finish.set()
            completion, versions = await begun  # its adapter was unloaded meanwhile, and its folder has stayed
            assert (completion.choices[0].token_ids, versions) == ([1], [1])
            completion, versions = await rollouts.complete({"model": "base", "prompt": [1]})
            assert (completion.choices[0].token_ids, versions) == ([4], [4])
            await rollouts.close()
    assert sorted(path.name for path in output.iterdir()) == ["newest", *(f"version-{n}" for n in (1, 2, 3, 4))]
    config = json.loads((output / "newest" / ADAPTER_CONFIG).read_text())
    assert config == {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q"]}


def snapshot(version: int) -> WeightSnapshot:
    return seal(view_state({"w": torch.ones(4)}), version, None)


async def test_an_engine_that_was_started_again_or_has_names_of_another_run_gets_the_newest(tmp_path: Path) -> None:
    (tmp_path / ADAPTER_FILE).touch()
    (tmp_path / ADAPTER_CONFIG).touch()
    engine = Server()
    engine.adapters = dict.fromkeys(["tune-3", "tune-900", "tuned-4", "tune-x"], "/elsewhere")
    async with serving(engine.routes) as url, AdapterServer(url, kind="vllm", name="tune", keep=2) as server:
        await server.load(snapshot(3), tmp_path)
        assert sorted(engine.adapters) == ["tune-3", "tune-x", "tuned-4"]
        assert engine.adapters["tune-3"] == str(tmp_path)
        engine.calls.clear()
        await server.load(snapshot(3), tmp_path)  # after an answer that was lost
        assert engine.calls == []
        engine.adapters.clear()
        await server.load(snapshot(4), tmp_path)
        assert (list(engine.adapters), server.version, server.partial) == (["tune-4"], 4, None)
        engine.failing["load"] = 1
        with pytest.raises(StateError, match="answered /v1/load_lora_adapter with 500: .*there is no room for it"):
            await server.load(snapshot(5), tmp_path)
        assert (list(engine.adapters), server.version) == (["tune-4"], 4)
    async with (
        serving(engine.routes[:1]) as url,
        AdapterServer(url, kind="vllm", name="tune", keep=2) as server,
    ):
        with pytest.raises(StateError, match="has no route /v1/load_lora_adapter; start it with VLLM_ALLOW_RUNTIME"):
            await server.load(snapshot(5), tmp_path)
    with pytest.raises(ConfigError, match="letters, digits"):
        AdapterServer("http://127.0.0.1:1", kind="vllm", name="a/b", keep=2)


class Sglang:
    """SGLang's routes for weights. `failing` says how many updates fail after some workers have the new weights."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.paused, self.failing, self.version = False, 0, "default"
        self.weights: dict[str, torch.Tensor] = {}

    @property
    def routes(self) -> list[Route]:
        posted = ("pause_generation", "continue_generation", "update_weights_from_disk")
        return [
            Route("/model_info", self.model_info),
            *(Route(f"/{name}", getattr(self, name), methods=["POST"]) for name in posted),
        ]

    async def model_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.version, "model_path": "/base"})

    async def pause_generation(self, request: Request) -> Response:
        mode = (await request.json())["mode"]
        assert mode in ("abort", "retract", "in_place")
        self.calls.append(mode)
        self.paused = True
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: Request) -> Response:
        assert await request.json() == {}
        self.calls.append("continue")
        self.paused = False
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights_from_disk(self, request: Request) -> Response:
        asked = await request.json()
        assert asked.keys() == {"model_path", "weight_version"}
        self.calls.append("update")
        answer = {"success": not self.failing, "message": "", "num_paused_requests": 0}
        if self.failing:
            self.failing -= 1
            return JSONResponse({**answer, "message": "Failed to update weights: worker 1"}, status_code=400)
        self.weights, self.version = load_folder(Path(asked["model_path"])), asked["weight_version"]
        return JSONResponse(answer)


@pytest.mark.parametrize("page", ["adapters", "follow"])
async def test_the_commands_of_the_pages(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
    kind, is_adapter = ("vllm", True) if page == "adapters" else ("sglang", False)
    (command,) = (line for line in text.splitlines() if re.match(rf"averaging follow .*--engine {kind}=", line))
    engine: Any = Server() if is_adapter else Sglang()
    monkeypatch.chdir(tmp_path)
    base_folder(tmp_path / "base")
    publisher = WeightPublisher()
    async with serving(engine.routes) as url, RpcServer("127.0.0.1:0", [publisher]) as trainer:
        await publisher.publish(adapter(1) if is_adapter else {"w": torch.ones(4)}, 1)
        arguments = re.sub(r"\S+:4222", trainer.endpoint, re.sub(r"http://\S+", url, command)).split()[1:]
        with averaging_process(*arguments) as process:
            assert (await asyncio.to_thread(process.expect, "loaded"))["version"] == 1
        if is_adapter:
            assert engine.adapters == {"tune-1": str(tmp_path / "tune" / "version-1")}
        else:
            assert engine.version == "1"


@pytest.mark.parametrize(
    ("pause", "calls"),
    [
        ("wait", ["update", "continue"]),
        ("keep", ["retract", "update", "continue"]),
        ("abort", ["abort", "update", "continue"]),
    ],
)
async def test_sglang_reads_each_version_from_its_folder(pause: str, calls: list[str], tmp_path: Path) -> None:
    engine, publisher = Sglang(), WeightPublisher()
    base = base_folder(tmp_path / "base")
    async with serving(engine.routes) as url, RpcServer("127.0.0.1:0", [publisher]) as trainer:
        await publisher.publish({"w": torch.ones(4)}, 1)
        folders = ["--output", str(tmp_path / "now"), "--config", str(base), "--engine-pause", pause]
        with averaging_process("follow", trainer.endpoint, "--engine", f"sglang={url}", *folders) as process:
            for version in (1, 2):
                if version > 1:
                    await publisher.publish({"w": torch.full((4,), 2.0)}, 2)
                while (await asyncio.to_thread(process.expect, "loaded"))["version"] < version:
                    pass
                assert (engine.version, engine.paused, engine.calls) == (str(version), False, calls * version)
                assert engine.weights["w"][0] == version
            (reader,) = publisher.readers()
            assert reader.version == 2


async def test_sglang_stays_paused_until_it_has_a_whole_version(tmp_path: Path) -> None:
    folder = base_folder(tmp_path / "version-7", {"w": torch.ones(4)})
    engine = Sglang()
    engine.failing = 1
    async with serving(engine.routes) as url, SglangServer(url) as server:
        with pytest.raises(StateError, match="Failed to update weights: worker 1.*it stays paused"):
            await server.load(snapshot(7), folder)
        assert (engine.paused, server.version, server.partial) == (True, None, 7)
        await server.load(snapshot(7), folder)
        assert (engine.paused, server.version, server.partial, engine.version) == (False, 7, None, "7")
    async with SglangServer(url) as server:
        with pytest.raises(StateError, match="does not answer"):
            await server.load(snapshot(8), folder)
        assert server.partial is None, "nothing has begun"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--adapter", "tune"], "--adapter needs --engine"),
        (["--layout", "peft"], "Missing option '--output'"),
        (["--engine", "sglang=http://127.0.0.1:1"], "--output DIR with --config, or --adapter"),
        (["--engine", "other=http://127.0.0.1:1"], "must be vllm=http://HOST:PORT or sglang=http://HOST:PORT"),
        (["--engine", "vllm=http://127.0.0.1:1", "--layout", "peft"], "--layout needs --output"),
        (["--output", "now", "--layout", "peft", "--config", "."], "--config is for whole models"),
    ],
)
def test_wrong_options(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["follow", "127.0.0.1:1", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


async def test_rollouts_wait_for_an_engine_that_was_started_again(tmp_path: Path) -> None:
    save_file(adapter(5), tmp_path / ADAPTER_FILE)
    engine = Server()
    engine.finish.set()
    async with serving(engine.routes) as url:
        away: list[str] = []
        client = EngineClient(url, on_away=away.append)
        client.adapter = "tune"
        asked = asyncio.create_task(client.complete({"model": "base", "prompt": [1]}))
        await until(lambda: bool(away), within=60)
        assert "no version of the adapter tune is loaded" in away[0]
        engine.adapters = {"tune-5": str(tmp_path)}
        completion, versions = await asked
        assert (completion.choices[0].token_ids, versions, away[-1]) == ([5], [5], "")
        await client.close()

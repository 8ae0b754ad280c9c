"""`averaging follow --adapter` with vLLM's own routes for adapters, and its loader of adapters behind them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging import WeightPublisher
from averaging.rpc import EventLoopThread, RpcServer
from tests.vllm.conftest import served_model
from tests.vllm.test_vllm_server import Follow

pytestmark = pytest.mark.vllm

RANK = 16


class Engine:
    """What vLLM's routes call: passes adapters to the manager of a worker, as the engine does to all workers."""

    def __init__(self, config: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.config.lora import LoRAConfig
        from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

        self.model_config, self.renderer, self.input_processor = config.model_config, None, None
        config.lora_config = LoRAConfig(max_lora_rank=RANK, max_loras=2, max_cpu_loras=2, lora_dtype=torch.float32)
        model = served_model(config)
        with set_current_vllm_config(config):
            self.manager = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), model.embedding_modules)
            self.manager.create_lora_manager(model, config)

    async def add_lora(self, request: Any) -> bool:
        return await asyncio.to_thread(self.manager.add_adapter, request)

    async def remove_lora(self, adapter: int) -> bool:
        return bool(self.manager.remove_adapter(adapter))


class Server:
    """An HTTP server with vLLM's routes of models and adapters."""

    def __init__(self, config: Any) -> None:
        import uvicorn
        from fastapi import FastAPI
        from vllm.entrypoints.openai.models.api_router import router
        from vllm.entrypoints.openai.models.protocol import BaseModelPath
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels
        from vllm.entrypoints.serve.lora.api_router import attach_router

        self.engine = Engine(config)
        app = FastAPI()
        self.models = OpenAIServingModels(self.engine, [BaseModelPath("base", config.model_config.model)])
        app.state.openai_serving_models = self.models
        app.include_router(router)
        attach_router(app)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, args=([listener],))
        self._thread.start()

    def names(self) -> list[str]:
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as answer:
            return [model["id"] for model in json.load(answer)["data"]]

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def server(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    server = Server(vllm_config)
    yield server
    server.close()
    vllm_config.lora_config = None


def test_an_engine_has_the_last_versions_of_an_adapter(server: Server, checkpoint: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    from averaging.integrations.peft import LoRAAveraging

    targets = {"q_proj": "qkv_proj", "v_proj": "qkv_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
    config = LoraConfig(r=2, lora_alpha=8, target_modules=list(targets))
    strategy = LoRAAveraging(get_peft_model(LlamaForCausalLM.from_pretrained(checkpoint), config), 3)
    publisher = WeightPublisher(strategy.adapter_view(rank=RANK))
    trainer = RpcServer("127.0.0.1:0", [publisher])
    thread = EventLoopThread(trainer, "the trainer")
    output = ["--output", str(tmp_path / "tune")]
    follow = Follow(trainer.endpoint, "--engine", f"vllm={server.url}", "--adapter", "tune", "--keep", "2", *output)
    try:
        for version in (1, 2, 3):
            for correction in strategy._corrections:
                layer = correction.layer
                layer.b.data.normal_()
                correction.add(torch.randn(layer.shape.out, 4), torch.randn(4, layer.shape.into))
            publisher.publish_now(version=version)
            assert follow.wait_for("loaded")["version"] == version
            assert server.names() == ["base", *(f"tune-{n}" for n in range(max(1, version - 1), version + 1))]
            request = server.models.lora_requests[f"tune-{version}"]
            loaded = server.engine.manager._load_adapter(request)
            assert len(loaded.loras) == len(strategy._corrections)
            for correction in strategy._corrections:
                mine, theirs = correction.layer.product() + correction.matrix(), loaded.loras[correction.layer.name]
                product = theirs.lora_b @ theirs.lora_a * theirs.scaling
                torch.testing.assert_close(product, mine, rtol=1e-4, atol=1e-4)
    finally:
        assert follow.close() == 0
        thread.close()


def test_what_vllm_refuses_is_named(server: Server, checkpoint: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    from averaging.integrations.peft import LoRAAveraging

    model = get_peft_model(LlamaForCausalLM.from_pretrained(checkpoint), LoraConfig(r=2, target_modules=["q_proj"]))
    publisher = WeightPublisher(LoRAAveraging(model, 3).adapter_view(rank=2 * RANK))
    publisher.publish_now(version=1)
    trainer = RpcServer("127.0.0.1:0", [publisher])
    thread = EventLoopThread(trainer, "the trainer")
    output = ["--output", str(tmp_path / "tune")]
    follow = Follow(trainer.endpoint, "--engine", f"vllm={server.url}", "--adapter", "tune", *output)
    try:
        message = follow.wait_for("unloaded")["message"]
        assert f"LoRA rank {2 * RANK} is greater than max_lora_rank {RANK}" in message
    finally:
        follow.close()
        thread.close()

"""The backend of vLLM's weight transfer with the real vLLM, which `make test-vllm` runs on the CPU.

vLLM's wheel has no kernels for the CPU, so nothing is generated here. The models, their loaders, the reloading of
layers, the worker's methods of weight transfer and the HTTP routes are vLLM's own.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with grouped key and value heads, as transformers saves it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def vllm_config(checkpoint: Path) -> Iterator[Any]:
    """vLLM's configuration of this model, with one rank in this process."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    from vllm.config import DeviceConfig, ModelConfig, VllmConfig, WeightTransferConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    model = ModelConfig(
        model=str(checkpoint), tokenizer=str(checkpoint), skip_tokenizer_init=True, dtype="float32", enforce_eager=True
    )
    config = VllmConfig(
        model_config=model,
        device_config=DeviceConfig(device="cpu"),
        weight_transfer_config=WeightTransferConfig(backend="averaging"),
    )
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{checkpoint / 'ranks'}", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        yield config


def served_model(config: Any) -> Any:
    """vLLM's own model of the configuration, with fused tensors, without weights."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.models.llama import LlamaForCausalLM

    config.compilation_config.static_forward_context.clear()  # of the model before, in this process
    with set_current_vllm_config(config):
        model = LlamaForCausalLM(vllm_config=config)
    record_metadata_for_reloading(model)
    return model


def served_worker(config: Any) -> Any:
    """A worker of vLLM with that model: what it has after it has loaded a model on a GPU, as far as updates need it."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.v1.worker.gpu_worker import Worker

    model = served_model(config)
    worker: Any = object.__new__(Worker)
    worker.vllm_config, worker.parallel_config, worker.speculative_config = config, config.parallel_config, None
    worker.rank, worker.device = 0, torch.device("cpu")
    worker._weight_update_active = worker._weight_update_is_draft = False
    worker.model_runner = _Runner(model)
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        config.weight_transfer_config, config, worker.device, model
    )
    return worker


class _Runner:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def get_model(self) -> torch.nn.Module:
        return self.model

    def reset_lora_state(self) -> None:
        return

"""The backend `averaging` in vLLM's worker: versions, digests, fused tensors, failures."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging.rpc import EventLoopThread, RpcServer
from averaging.weights import WeightPublisher
from tests.vllm.conftest import served_model, served_worker

pytestmark = pytest.mark.vllm


class Trainer:
    """A run that trains the model, and its publisher."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import LlamaForCausalLM

        self.model = LlamaForCausalLM.from_pretrained(checkpoint)
        self.publisher = WeightPublisher()
        self.server = RpcServer("127.0.0.1:0", [self.publisher])
        self._thread = EventLoopThread(self.server, "the trainer")

    def publish(self, version: int) -> int:
        return self.publisher.publish_now(self.model.state_dict(), version)

    def change(self, *names: str) -> None:
        """A step that changes these tensors; all if none is named."""
        for name, parameter in self.model.named_parameters():
            if not names or name in names:
                parameter.data += 0.1 * torch.randn_like(parameter)

    def close(self) -> None:
        self._thread.close()


@pytest.fixture
def trainer(checkpoint: Path) -> Iterator[Trainer]:
    trainer = Trainer(checkpoint)
    yield trainer
    trainer.close()


@pytest.fixture
def worker(vllm_config: Any, trainer: Trainer) -> Iterator[Any]:
    """A worker that follows the trainer."""
    worker = served_worker(vllm_config)
    worker.init_weight_transfer_engine({"join": [trainer.server.endpoint]})
    yield worker
    worker.weight_transfer_engine.shutdown()


def update(worker: Any, version: int | None) -> None:
    """What the routes of an engine have each worker do."""
    worker.start_weight_update()
    worker.update_weights({"version": version, "timeout": 10.0})
    worker.finish_weight_update()


def assert_serves(worker: Any, config: Any, trainer: Trainer) -> None:
    """The worker's model is bit for bit what vLLM makes of the trainer's weights."""
    expected = served_model(config)
    expected.load_weights(list(trainer.model.state_dict().items()))
    served = dict(worker.get_model().named_parameters())
    wanted = dict(expected.named_parameters())
    assert served.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert not served[name].is_meta, name
        torch.testing.assert_close(served[name], parameter, rtol=0, atol=0, msg=name)


@contextmanager
def loaded_names(worker: Any) -> Iterator[list[str]]:
    """The tensors that are given to the model's loader."""
    names: list[str] = []
    model = worker.get_model()
    original = model.load_weights

    def load(weights: Sequence[tuple[str, torch.Tensor]]) -> Any:
        weights = list(weights)
        names.extend(name for name, _ in weights)
        return original(weights)

    model.load_weights = load
    try:
        yield names
    finally:
        del model.load_weights


def test_a_version_is_loaded_into_fused_tensors(worker: Any, vllm_config: Any, trainer: Trainer) -> None:
    trainer.publish(3)
    update(worker, 3)
    assert worker.weight_transfer_engine.version == 3
    assert_serves(worker, vllm_config, trainer)


def test_only_layers_that_have_changed_are_loaded_again(worker: Any, vllm_config: Any, trainer: Trainer) -> None:
    trainer.publish(1)
    update(worker, 1)
    layer = "model.layers.1"
    trainer.change(f"{layer}.self_attn.q_proj.weight", f"{layer}.input_layernorm.weight")
    trainer.publish(2)
    with loaded_names(worker) as names:
        update(worker, 2)
    qkv = {f"{layer}.self_attn.{part}_proj.weight" for part in "qkv"}
    assert set(names) == qkv | {f"{layer}.input_layernorm.weight"}
    assert_serves(worker, vllm_config, trainer)


def test_a_version_that_is_not_there_leaves_the_model_as_it_was(
    worker: Any, vllm_config: Any, trainer: Trainer
) -> None:
    trainer.publish(1)
    update(worker, 1)
    worker.start_weight_update()
    with pytest.raises(RuntimeError, match=r"version 5 has not arrived within 0\.2 s"):
        worker.update_weights({"version": 5, "timeout": 0.2})
    assert worker.weight_transfer_engine.version == 1
    assert_serves(worker, vllm_config, trainer)


def test_after_a_failure_everything_is_loaded_again(worker: Any, vllm_config: Any, trainer: Trainer) -> None:
    trainer.publish(1)
    update(worker, 1)
    trainer.change()
    trainer.publish(2)
    model = worker.get_model()
    original, count = model.load_weights, 0

    def fail(weights: Any) -> Any:
        nonlocal count
        count += 1
        if count == 5:
            raise OSError("out of memory")
        return original(weights)

    model.load_weights = fail
    worker.start_weight_update()
    with pytest.raises(OSError, match="out of memory"):
        worker.update_weights({"version": 2, "timeout": 10.0})
    del model.load_weights
    update(worker, 2)
    assert_serves(worker, vllm_config, trainer)


def test_a_run_of_another_model_is_refused_by_name(worker: Any, trainer: Trainer) -> None:
    trainer.publisher.publish_now({"encoder.weight": torch.zeros(3)}, 1)
    worker.start_weight_update()
    with pytest.raises(ValueError, match=r"does not take tensor 'encoder\.weight' of the run"):
        worker.update_weights({"version": 1, "timeout": 10.0})


def test_a_run_that_publishes_a_part_of_the_model_is_refused(worker: Any, trainer: Trainer) -> None:
    state = dict(trainer.model.state_dict())
    del state["lm_head.weight"]
    trainer.publisher.publish_now(state, 1)
    worker.start_weight_update()
    with pytest.raises(ValueError, match=r"the run does not publish lm_head\.weight"):
        worker.update_weights({"version": 1, "timeout": 10.0})

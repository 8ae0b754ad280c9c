"""Published versions of an adapter: plain peft, `averaging serve` and real followers have the peers' model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from averaging import ConfigError, WeightPublisher
from averaging.cli.files import AdapterFolder, VersionedFolders
from averaging.common import ADAPTER_CONFIG, ADAPTER_ERROR, split_adapter
from averaging.engine import load_model
from averaging.errors import TensorError
from averaging.integrations.peft import LoRAAveraging
from examples import adapters
from tests.engine.language_models import language_model, save_language_model
from tests.support.pages import ROOT, blocks_of
from tests.support.ports import free_port
from tests.support.processes import averaging_process
from tests.trainers.test_peft import Peers, adapted, base_of, logits_of
from tests.weights.test_weights import Publishing

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft asks for it
    pytest.mark.filterwarnings("ignore:Adapter 'default'"),  # peft takes the bias of lora_B for a broken factor
]

EXACT: Any = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.close()


def written(path: Path, state: dict[str, torch.Tensor], version: int = 1) -> Path:
    return VersionedFolders(path, AdapterFolder(), 2).write(version, state, {})[0]


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"modules_to_save": ["lm_head"]},
        {"bias": "lora_only"},
        {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
        {"rank_pattern": {"down_proj": 1}, "alpha_pattern": {"q_proj": 3}},
    ],
)
def test_plain_peft_has_the_model_of_the_peers(peers: Peers, tmp_path: Path, options: dict[str, Any]) -> None:
    for _ in range(2):
        peers.tune(adapted(2, base_of(attention_bias=True), **options))
    peers.meet()
    view = peers.strategies[0].adapter_view(rank=32)
    specs = {name: (tensor.shape, tensor.dtype) for name, tensor in view.state_dict().items()}
    for seed in range(3):  # the correction becomes dense
        peers.round(seed)
        state = view.state_dict()
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} == specs, "one layout"
        folder = written(tmp_path / "now", state, seed)
        plain = PeftModel.from_pretrained(base_of(attention_bias=True), folder)
        for model in peers.models:
            torch.testing.assert_close(logits_of(plain), logits_of(model), **EXACT)
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (32, 32, {})
        assert ADAPTER_ERROR not in config
    assert any(correction.dense is not None for correction in peers.strategies[0]._corrections)


def test_each_version_arrives_as_a_folder_of_peft_and_in_a_small_engine(peers: Peers, tmp_path: Path) -> None:
    """The whole way: rounds, the publisher on the peer's port, and both commands in processes of their own."""
    save_language_model(tmp_path / "base", seed=0)
    asked: Any = {"prompt": [7, 8], "max_tokens": 4, "temperature": 0, "logprobs": 0}
    for _ in range(2):
        peers.tune(
            get_peft_model(language_model(seed=0), LoraConfig(r=2, target_modules=["q_proj", "v_proj"])),
            services=lambda strategy: [WeightPublisher(strategy.adapter_view(rank=32))],
        )
    peers.meet()
    endpoint = peers.averagers[0].endpoint
    follow = averaging_process("follow", endpoint, "--layout", "peft", "--output", str(tmp_path / "tune"))
    serve = averaging_process("serve", str(tmp_path / "base"), "--follow", endpoint, "--listen", "127.0.0.1:0")
    with follow, serve:
        follow.expect("ready")
        url = serve.expect("ready")["url"]
        for version in (1, 2):
            peers.round(version)
            while follow.expect("written")["version"] < version:
                pass
            assert follow.seen[-1]["error"] == 0
            plain = PeftModel.from_pretrained(
                AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "tune" / "newest"
            )
            words = torch.tensor([[5, 6, 7]])
            with torch.no_grad():
                expected = [model.eval()(input_ids=words).logits for model in (plain, *peers.models)]
            for logits in expected[1:]:
                torch.testing.assert_close(logits, expected[0], **EXACT)
            while serve.expect("version")["version"] < version:
                pass
            client = OpenAI(base_url=f"{url}/v1", api_key="none")
            answer: Any = client.completions.create(model="base", extra_body={"return_token_ids": True}, **asked)
            assert answer.weight_version == str(version)
            tokens = answer.choices[0].token_ids
            with torch.no_grad():
                logits = plain(input_ids=torch.tensor([[7, 8, *tokens]])).logits[0, 1:-1]
            own = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
            torch.testing.assert_close(torch.tensor(answer.choices[0].logprobs.token_logprobs), own, **EXACT)


def test_a_cut_names_its_error(peers: Peers, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        peers.tune()
    peers.meet()
    for seed in range(4):
        peers.round(seed)
        strategy = peers.strategies[0]
        state = strategy.adapter_view(rank=3).state_dict()
        config, tensors = split_adapter(state)
        lost = whole = best = 0.0
        for correction in strategy._corrections:
            name = f"base_model.model.{correction.layer.name}"
            matrix = (correction.layer.product() + correction.matrix()).double()
            product = tensors[f"{name}.lora_B.weight"].double() @ tensors[f"{name}.lora_A.weight"].double()
            lost += float((matrix - product).square().sum())
            best += float(torch.linalg.svdvals(matrix)[3:].square().sum())
            whole += float(matrix.square().sum())
        assert config[ADAPTER_ERROR] == pytest.approx((lost / whole) ** 0.5, rel=0.01)
        assert lost**0.5 <= 1.02 * best**0.5, "no factors of this rank are nearer"
    assert config[ADAPTER_ERROR] > 0.001
    with safe_open(written(tmp_path / "now", state) / "adapter_model.safetensors", framework="pt") as file:
        assert float(file.metadata()[ADAPTER_ERROR]) == config[ADAPTER_ERROR]
    with torch.no_grad():
        strategy._layers[0].b[0, 0] = torch.nan  # a training that diverges is not ended by its publisher
    assert any(bool(tensor.isnan().any()) for tensor in strategy.adapter_view(rank=3).state_dict().values())
    with pytest.raises(ConfigError, match="rank must be a whole number"):
        strategy.adapter_view(rank=0)


def test_a_version_has_less_than_a_fiftieth_of_the_bytes_of_a_model_of_100_million_parameters() -> None:
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32000}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=12, tie_word_embeddings=True))
    parameters = sum(parameter.numel() for parameter in base.parameters())
    assert parameters > 100e6
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))
    publisher = WeightPublisher(LoRAAveraging(model, 50).adapter_view(rank=8))
    publisher.publish_now(version=1)
    newest = publisher._store.newest
    assert newest is not None
    assert newest.manifest.layout.nbytes < 4 * parameters / 50


def test_the_commands_of_the_page_give_a_folder_that_plain_peft_loads(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "adapters.md").read_text()
    train, follow = (block.text.split() for block in blocks_of(page) if block.title.startswith("Terminal"))
    endpoint = f"127.0.0.1:{free_port()}"
    arguments = [word.replace("127.0.0.1:4222", endpoint) for word in train[1:]]
    command = [sys.executable, *arguments, "--steps", "40", "--output", str(tmp_path / "trained")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout is not None
            assert any("Version 2 is published" in line for line in trainer.stdout)
            arguments = [word.replace("127.0.0.1:4222", endpoint) for word in follow[1:]]
            arguments[arguments.index("tune")] = str(tmp_path / "tune")
            with averaging_process(*arguments) as process:
                assert process.expect("written")["version"] == 2
                assert process.wait() == 0
            trainer.send_signal(signal.SIGINT)
            trainer.communicate(timeout=100)
        finally:
            trainer.kill()
    assert trainer.returncode == 0
    plain = PeftModel.from_pretrained(adapters.base_of(0), tmp_path / "tune" / "newest")
    trained = LlamaForCausalLM.from_pretrained(tmp_path / "trained" / "merged")
    torch.testing.assert_close(logits_of(plain), logits_of(trained), **EXACT)


def test_what_is_no_adapter_is_refused(tmp_path: Path) -> None:
    save_language_model(tmp_path / "base")
    engine = load_model(tmp_path / "base")
    wrong = adapted()
    with pytest.raises(TensorError, match=r"is \[2, 48\] in the run and \[2, 64\] in"):
        engine.load(LoRAAveraging(wrong, 3).adapter_view(rank=2).state_dict(), 1)
    (tmp_path / "base" / "model.safetensors").unlink()
    with pytest.raises(TensorError, match="has no weights of its base"):
        load_model(tmp_path / "base", bare=True).load(LoRAAveraging(wrong, 3).adapter_view(rank=2).state_dict(), 1)
    publisher = WeightPublisher()
    publisher.publish_now({"w": torch.ones(4)}, 1)
    arguments = ("--layout", "peft", "--output", str(tmp_path / "tune"))
    with Publishing(publisher) as endpoint, averaging_process("follow", endpoint, *arguments) as follow:
        assert "publishes no adapter but a model" in follow.expect("error")["message"]
        assert follow.wait() == 1

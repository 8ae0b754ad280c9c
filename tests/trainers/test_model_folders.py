"""What `averaging follow --config` and `averaging export` write, read by the real transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

from averaging import WeightPublisher
from averaging.cli import main
from tests.support.processes import averaging_process
from tests.weights.test_weights import Publishing

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),  # torch.compile
]

WORDS = torch.arange(16).view(2, 8)


def model_of(seed: int, **options: Any) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**(sizes | options))).eval()


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=WORDS).logits
    return logits


@pytest.mark.parametrize("with_weights", [True, False])
def test_a_followed_model_is_loaded_while_the_next_version_is_written(tmp_path: Path, with_weights: bool) -> None:
    base, output = tmp_path / "base", tmp_path / "now"
    model_of(0).save_pretrained(base)  # its output layer is tied to the embeddings
    if not with_weights:
        (base / "model.safetensors").unlink()
    model = model_of(1)
    publisher = WeightPublisher(torch.compile(model))  # type: ignore[arg-type]
    publisher.publish_now(version=1)
    given = ("--output", str(output), "--config", str(base), "--max-shard-bytes", "9000")
    with Publishing(publisher) as endpoint, averaging_process("follow", endpoint, *given) as process:
        process.expect("written")
        held = (output / "newest").resolve()
        logits = logits_of(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        publisher.publish_now(version=2)
        assert process.expect("written")["version"] == 2
        assert (held / "model.safetensors.index.json").exists()
        loaded, told = GPT2LMHeadModel.from_pretrained(held, output_loading_info=True)
        assert not told["missing_keys"]
        assert not told["unexpected_keys"]
        assert torch.equal(logits_of(loaded), logits)
        assert torch.equal(logits_of(GPT2LMHeadModel.from_pretrained(output / "newest")), logits_of(model))
        assert AutoConfig.from_pretrained(output / "newest").n_embd == 16


def test_a_checkpoint_of_a_wrapped_and_partly_frozen_model(tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = model_of(0)
    model.save_pretrained(base)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight.add_(1.0)
    trained = {"_orig_mod.module.transformer.h.1.mlp.c_fc.weight": model.transformer.h[1].mlp.c_fc.weight.detach()}
    tied = {"_orig_mod.module.lm_head.weight": model.lm_head.weight.detach()}
    torch.save({"model": trained | tied}, tmp_path / "l.pt")
    given = ["export", str(tmp_path / "l.pt"), "--config", str(base), "--output", str(tmp_path / "model")]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 0, result.output
    loaded, told = GPT2LMHeadModel.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not told["missing_keys"]
    assert torch.equal(logits_of(loaded), logits_of(model))

"""A small random model of transformers with a tokenizer made on the spot, and how it learns from scored answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

CHARACTERS = "0123456789="
"""What the model can read and write, beside the three special tokens."""

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ message['content'] }}={% else %}"
    "{{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""The chat template: a question, a sign, and the answer."""


def make_tokenizer() -> Any:
    """A token for each character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<end>", "<unknown>", *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, "<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )
    fast.chat_template = TEMPLATE
    return fast


def write_model(folder: Path, seed: int) -> int:
    """Writes a random Llama of two layers with its tokenizer, as `save_pretrained` does; returns its parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def tensors_of(groups: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The sequences of all groups, padded to one length.

    Returns:
        "tokens" and "trained" [sequences, tokens], the second with 1 at tokens that the model has written; "logprob" of
        those, of the same shape; and "advantage" [sequences] within each group, as of GRPO (arXiv:2402.03300).
    """
    sequences = [tokens for group in groups for tokens in group["tokens"]]
    masks = [mask for group in groups for mask in group["masks"]]
    logprobs = [each for group in groups for each in group["inference_logprobs"]]
    width = max(map(len, sequences))
    advantages = []
    for group in groups:
        scores = torch.tensor(group["scores"], dtype=torch.float32)
        advantages.append((scores - scores.mean()) / (scores.std() + 1e-4))
    return {
        "tokens": torch.tensor([each + [0] * (width - len(each)) for each in sequences]),
        "trained": torch.tensor([[float(m != -100) for m in each] + [0.0] * (width - len(each)) for each in masks]),
        "logprob": torch.tensor([each + [0.0] * (width - len(each)) for each in logprobs]),
        "advantage": torch.cat(advantages),
    }


def policy_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The clipped policy gradient over the tokens that the model has written."""
    logits = model(input_ids=batch["tokens"][:, :-1]).logits.float()
    logprob = logits.log_softmax(-1).gather(2, batch["tokens"][:, 1:, None]).squeeze(2)
    trained, gain = batch["trained"][:, 1:], batch["advantage"][:, None]
    ratio = ((logprob - batch["logprob"][:, 1:]) * trained).exp()
    gained = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    return -(gained * trained).sum() / trained.sum().clamp(min=1)

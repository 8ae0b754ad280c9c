"""A small random model of transformers with a tokenizer of bytes, as a folder."""

from pathlib import Path
from typing import Any

import torch

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def language_model(seed: int = 0) -> Any:
    """A Llama with 2 layers for 259 tokens; its output layer is tied to the embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    )
    return LlamaForCausalLM(config).eval()


def byte_tokenizer(template: str | None = TEMPLATE) -> Any:
    """A token for each byte, and three special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {each: number for number, each in enumerate([*alphabet, "<s>", "</s>", "<pad>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = template
    return fast


def save_language_model(folder: Path, seed: int = 0, template: str | None = TEMPLATE) -> Any:
    """Writes both into a folder; returns the model."""
    model = language_model(seed)
    model.save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    return model

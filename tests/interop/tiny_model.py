"""Creates a model and a tokenizer without a download: `python tiny_model.py FOLDER`, with the Python of atroposlib."""

import sys
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = {"<unk>": 0, "<s>": 1, "</s>": 2} | {str(number): number for number in range(3, 64)}


def main(folder: str) -> None:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    kind: Any = PreTrainedTokenizerFast
    kind(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])

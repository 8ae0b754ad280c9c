"""A tokenizer that is made on the spot, with what transformers wants beside it. Needs transformers."""

import json
from pathlib import Path

WORDS = [*"0123456789", "yes", "no", "<user>", "<assistant>"]
PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"
TOKENS = [PAD, END, UNKNOWN, *WORDS]
IDS = {token: number for number, token in enumerate(TOKENS)}

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} "
    "{% if message.role == 'assistant' %}<end> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def write_tokenizer(folder: Path) -> str:
    """Writes a tokenizer of whole words to a folder, and a config.json. Returns the folder's name."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel(IDS, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, eos_token=END, pad_token=PAD, chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(TOKENS)}))
    return str(folder)

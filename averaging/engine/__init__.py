"""A small server of a language model with OpenAI's API, which follows a run. docs/how-to/serve.md is the guide.

Read in this order: `batching` (what is to be generated, and what goes together), `text` (tokens as text, stop
strings), `generation` (the model of transformers), `engine` (the thread that generates and takes new weights),
`run_weights` (from where they come), `messages` (the JSON), `server` (the routes). Only `generation` imports
transformers.
"""

from __future__ import annotations

from pathlib import Path

from averaging.engine.batching import Generated, GenerationRequest, Sampling, TextPiece, TokenLogprob
from averaging.engine.engine import Engine, NewWeights, TextModel
from averaging.engine.server import EngineLimits, EngineServer

__all__ = [
    "Engine",
    "EngineLimits",
    "EngineServer",
    "Generated",
    "GenerationRequest",
    "NewWeights",
    "Sampling",
    "TextModel",
    "TextPiece",
    "TokenLogprob",
    "load_model",
]


def load_model(folder: str | Path, *, device: str = "cpu", dtype: str = "auto", bare: bool = False) -> TextModel:
    """Loads a causal language model of transformers with its tokenizer.

    Args:
        folder: as `save_pretrained` writes it.
        device: such as "cpu" or "cuda".
        dtype: of the weights, for example "bfloat16"; "auto" takes that of the folder.
        bare: whether the weights come from a run, so that the folder need not have them.

    Raises:
        ConfigError: it is no such folder, or the device does not exist.
        ModuleNotFoundError: transformers is not installed; `pip install 'averaging[serve]'`.
    """
    from averaging.engine.generation import LanguageModel

    return LanguageModel(Path(folder), device=device, dtype=dtype, bare=bare)

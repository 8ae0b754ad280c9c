"""A small server of a language model with OpenAI's API, which follows a run. docs/how-to/follow.md is the guide.

Read in this order: `messages` (the JSON, stop strings), `generation` (the model of
transformers), `engine` (the thread that generates and takes new weights),
`server` (the routes). Only `generation` imports transformers.
"""

from __future__ import annotations

from pathlib import Path

from averaging.engine.engine import TextModel as TextModel, Unfollowed as Unfollowed, VersionLoaded as VersionLoaded
from averaging.engine.messages import GenerationJob as GenerationJob, TextPiece as TextPiece
from averaging.engine.server import EngineServer as EngineServer


def load_model(folder: str | Path, *, device: str = "cpu", dtype: str = "auto", bare: bool = False) -> TextModel:
    """Loads a causal language model of transformers with its tokenizer.

    Args:
        folder: as `save_pretrained` writes it.
        device: such as "cpu" or "cuda".
        dtype: of the weights, for example "bfloat16"; "auto" takes that of the folder.
        bare: whether the weights come from a run, so that the folder need not have them.

    Raises:
        ConfigError: it is no such folder, or the device does not exist.
        ModuleNotFoundError: transformers is not installed; `pip install '.[serve]'`.
    """
    from averaging.engine.generation import LanguageModel

    return LanguageModel(Path(folder), device=device, dtype=dtype, bare=bare)

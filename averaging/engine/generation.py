"""A model of transformers with its tokenizer: it is loaded, takes new weights, and generates batches."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as progress

from averaging.common import VERSION_KEY, listed, plain_state
from averaging.engine.batching import Generated, GenerationRequest, TextPiece, TokenLogprob
from averaging.engine.text import TokenText
from averaging.errors import ConfigError, EngineError, StateError, TensorError

LEAST_LOGPROB = -9999.0
"""Stands for the logarithm of 0, which JSON cannot express."""


class LanguageModel:
    """A causal language model and its tokenizer.

    Args:
        folder: as `save_pretrained` of transformers writes it. It may lack weights if `bare`.
        device: such as "cpu" or "cuda".
        dtype: of the weights; "auto" takes that of the folder.
        bare: whether the weights come from elsewhere, so that the folder need not have them.

    Attributes:
        version: the version in the folder's metadata, later that of `load`; None if it has none.
        context: tokens that a sequence may have, with its prompt; 0 if the configuration names no limit.
        vocabulary: number of token ids.
        has_template: whether the tokenizer has a chat template.

    Raises:
        ConfigError: it is no such folder, or the device does not exist.
    """

    def __init__(self, folder: Path, *, device: str = "cpu", dtype: str = "auto", bare: bool = False) -> None:
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{folder} has no config.json; give the folder of a model, as save_pretrained of transformers writes it"
            )
        self.folder = folder
        self._has_weights = any(path.suffix in (".safetensors", ".bin") for path in folder.iterdir())
        if not (self._has_weights or bare):
            raise ConfigError(f"{folder} has no weights; give the folder of a whole model, or the run to follow")
        if not sys.stderr.isatty():
            progress.disable_progress_bar()
        try:
            self.model = self._loaded(dtype).to(device).eval()
            # One to encode, another one to decode: they are used by two threads.
            self._encoder = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._decoder = copy.deepcopy(self._encoder)
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, AssertionError) as error:
            raise ConfigError(f"{folder} cannot be served on {device}: {_first_line(error)}") from error
        config = self.model.config.get_text_config()
        self.context = int(getattr(config, "max_position_embeddings", 0) or 0)
        self.vocabulary = int(config.vocab_size)
        self.version = _version_of(folder) if self._has_weights else None
        self._ends = _end_tokens(self.model.generation_config, config, self._encoder)
        # Nothing of the folder's own sampling is mixed into that of a request.
        self.model.generation_config = GenerationConfig()

    def _loaded(self, dtype: str) -> Any:
        wanted: Any = dtype if dtype == "auto" else getattr(torch, dtype)
        if self._has_weights:
            return AutoModelForCausalLM.from_pretrained(self.folder, local_files_only=True, dtype=wanted)
        config = AutoConfig.from_pretrained(self.folder, local_files_only=True)
        return AutoModelForCausalLM.from_config(config, **({} if dtype == "auto" else {"dtype": wanted}))

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self._encoder.chat_template)

    # Weights

    def load(self, tensors: Mapping[str, torch.Tensor], version: int) -> int:
        """Copies the tensors of a version into the model. All are checked before the first one is written.

        Returns:
            How many tensors of the model are not among them, and stay as they are in the folder.

        Raises:
            TensorError: they are those of another model.
            StateError: a value is not finite, or too large for the type of the model.
        """
        given, own = plain_state(tensors), plain_state(self.model.state_dict())
        for name, tensor in given.items():
            if name not in own:
                raise TensorError(
                    f"the run publishes {listed([name])!r}, which the model in {self.folder} does not have; serve the "
                    "model that the run trains"
                )
            if tensor.shape != own[name].shape:
                raise TensorError(
                    f"{name!r} is {list(tensor.shape)} in the run and {list(own[name].shape)} in {self.folder}; serve "
                    "the model that the run trains"
                )
            if tensor.is_floating_point() and not tensor.to(own[name].dtype).float().isfinite().all():
                raise StateError(
                    f"{name!r} of version {version} has a value that is not finite as {own[name].dtype}, so that the "
                    "version is not loaded"
                )
        written = {own[name].data_ptr() for name in given}
        missing = [name for name, tensor in own.items() if tensor.data_ptr() not in written]  # tied ones are there
        if missing and not self._has_weights:
            raise TensorError(f"neither the run nor {self.folder} has {listed(missing)}")
        with torch.no_grad():
            for name, tensor in given.items():
                own[name].copy_(tensor)
        self.version = version
        return len(missing)

    # Text

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Returns the token ids of a text, with those that the tokenizer adds if `special`."""
        return tuple(self._encoder(text, add_special_tokens=special)["input_ids"])

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
        """Returns the token ids of a conversation.

        Args:
            messages: each with "role" and "content".
            options: further arguments of the template.

        Raises:
            EngineError: the tokenizer has no template, or that refuses the messages.
        """
        if not self.has_template:
            raise EngineError(
                "the tokenizer of this model has no chat template; use /v1/completions, or serve a folder with "
                "chat_template.jinja",
                400,
            )
        try:
            text = self._encoder.apply_chat_template(list(messages), tokenize=False, **options)
        except Exception as error:  # whatever the template raises
            raise EngineError(
                f"the model's chat template refuses the messages: {_first_line(error)}", 400, "messages"
            ) from None
        return self.encode(text, special=False)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Returns the text of token ids."""
        text: str = self._decoder.decode(
            list(tokens), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return text

    # Generation

    @torch.inference_mode()
    def generate(self, batch: Sequence[Generated]) -> None:
        """Generates all sequences of a batch, see `next_batch`, and hands each piece to its request.

        Raises:
            EngineError: it failed.
        """
        rows = [
            _SequenceRow(self, each, index, prompt)
            for each in batch
            for index, prompt in enumerate(prompt for prompt in each.request.prompts for _ in range(each.request.n))
        ]
        most = max(each.request.max_tokens for each in batch)
        width = max(len(row.prompt) for row in rows)
        pad = next(iter(self._ends), 0)
        tokens = torch.full((len(rows), width), pad, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for number, row in enumerate(rows):
            tokens[number, width - len(row.prompt) :] = torch.tensor(row.prompt)
            mask[number, width - len(row.prompt) :] = 1
        steps = _Steps(rows, self._ends)
        seed = batch[0].request.seed
        if seed is not None:
            torch.manual_seed(seed)
        try:
            self.model.generate(
                tokens.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                generation_config=_generation_config(batch[0].request, most, pad),
                logits_processor=[steps.see],
                stopping_criteria=[steps],
            )
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise EngineError(f"no memory for {len(rows)} sequences at once; send fewer or shorter ones", 503) from None
        except RuntimeError as error:
            raise EngineError(f"the model failed: {_first_line(error)}", 500) from error
        finally:
            if seed is not None:
                torch.seed()


def _generation_config(request: GenerationRequest, most: int, pad: int) -> Any:
    sampling = request.sampling
    if sampling.temperature == 0:
        return GenerationConfig(max_new_tokens=most, do_sample=False, pad_token_id=pad)
    return GenerationConfig(
        max_new_tokens=most,
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p or None,
        pad_token_id=pad,
    )


class _SequenceRow:
    """One sequence of a batch."""

    def __init__(self, model: LanguageModel, generated: Generated, index: int, prompt: tuple[int, ...]) -> None:
        request = generated.request
        self.prompt, self.top = prompt, request.top_logprobs
        self._generated, self._index = generated, index
        self._text = TokenText(
            lambda tokens: model.decode(tokens, skip_special=request.skip_special),
            request.stop,
            include_stop=request.include_stop,
        )
        self._left = request.max_tokens
        self.done = False

    def add(self, token: int, logprob: TokenLogprob | None, ends: frozenset[int]) -> None:
        """Takes the next token."""
        if self._generated.cancelled:
            self.done = True
        if self.done:
            return
        request = self._generated.request
        text, self._left = self._text.add(token), self._left - 1
        reason = None
        is_end = token in request.stop_tokens or (token in ends and not request.ignore_eos)
        if self._text.stopped_by is not None or is_end:
            reason = "stop"
        elif not self._left:
            reason = "length"
        if reason is not None:
            self.done = True
            text += self._text.finish()
            reason = "stop" if self._text.stopped_by is not None else reason
        logprobs = () if logprob is None else (logprob,)
        self._generated.take(TextPiece(self._index, text, (token,), logprobs, reason, self._text.stopped_by))


class _Steps:
    """Sees each step of `generate`: the logits before anything changes them, and then the chosen tokens.

    It is a stopping criterion and not a streamer of transformers, which gets the tokens of a batch without being able
    to end single ones, and on a GPU a step later.
    """

    def __init__(self, rows: Sequence[_SequenceRow], ends: frozenset[int]) -> None:
        self._rows, self._ends = rows, ends
        self._wanted = max((row.top for row in rows if row.top is not None), default=None)
        self._logprobs: torch.Tensor | None = None

    def see(self, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Remembers the model's log-probabilities. It is the first of the logits processors.

        Raises:
            EngineError: the model computes no numbers, of which the most probable token would still be one.
        """
        if logits.isnan().any():
            raise EngineError("the model computes values that are not numbers; its weights cannot be used", 500)
        if self._wanted is not None:
            self._logprobs = torch.log_softmax(logits.float(), -1)
        return logits

    def __call__(self, tokens: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Takes the tokens of a step; returns which rows are done."""
        chosen = tokens[:, -1]
        logprobs = self._of(chosen)
        for row, token, logprob in zip(self._rows, chosen.tolist(), logprobs, strict=True):
            row.add(token, logprob, self._ends)
        return torch.tensor([row.done for row in self._rows], device=tokens.device)

    def _of(self, chosen: torch.Tensor) -> list[TokenLogprob | None]:
        if self._wanted is None or self._logprobs is None:
            return [None] * len(self._rows)
        own = self._logprobs.gather(1, chosen[:, None]).squeeze(1).tolist()
        best, which = self._logprobs.topk(min(self._wanted, self._logprobs.shape[1]), dim=1)
        tops = [list(zip(*each, strict=True)) for each in zip(which.tolist(), best.tolist(), strict=True)]
        return [
            None
            if row.top is None
            else TokenLogprob(token, _finite(logprob), tuple((each, _finite(value)) for each, value in top[: row.top]))
            for row, token, logprob, top in zip(self._rows, chosen.tolist(), own, tops, strict=True)
        ]


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _end_tokens(generation: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text: what the folder says in any of its three files."""
    ends: set[int] = set()
    for given in (generation.eos_token_id, config.eos_token_id, tokenizer.eos_token_id):
        ends |= set() if given is None else set(given) if isinstance(given, list | tuple) else {given}
    return frozenset(ends)


def _version_of(folder: Path) -> int | None:
    """The version that `averaging follow --layout hf` has written into the metadata of a folder."""
    found: set[str] = set()
    try:
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                found.add((file.metadata() or {}).get(VERSION_KEY, ""))
        return int(found.pop()) if len(found) == 1 else None
    except (SafetensorError, OSError, ValueError):
        return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""A model of transformers with its tokenizer: it is loaded, takes new weights, and generates batches."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as progress

from averaging.common import ADAPTER_CONFIG, listed, plain_state, split_adapter
from averaging.engine.messages import GenerationJob, TextPiece, TokenText
from averaging.errors import ConfigError, EngineError, StateError, TensorError

LEAST_LOGPROB = -9999.0  # stands for the logarithm of 0, which JSON cannot express
# What of an adapter's configuration changes the model, and nothing that would run a method on the base's weights.
ADAPTER_FIELDS = (
    *("r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("bias", "lora_bias", "fan_in_fan_out", "modules_to_save"),
)
GREEDY = 1e-5  # a lower temperature takes the most probable token


class LanguageModel:
    """A causal language model and its tokenizer, see `load_model` for the arguments."""

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
        self.context = int(getattr(config, "max_position_embeddings", 0) or 0)  # of a sequence; 0 if there is no limit
        self.vocabulary = int(config.vocab_size)
        self.version: int | None = None  # of the weights that were loaded last; None for those of the folder
        self._ends = _end_tokens(self.model.generation_config, config, self._encoder)
        # Nothing of the folder's own sampling is mixed into that of a request.
        self.model.generation_config = GenerationConfig()

    def _loaded(self, dtype: str) -> Any:
        wanted: Any = dtype if dtype == "auto" else getattr(torch, dtype)
        if self._has_weights:
            return AutoModelForCausalLM.from_pretrained(self.folder, local_files_only=True, dtype=wanted)
        config = AutoConfig.from_pretrained(self.folder, local_files_only=True)
        return AutoModelForCausalLM.from_config(config, **({} if dtype == "auto" else {"dtype": wanted}))

    def load(self, tensors: Mapping[str, torch.Tensor], version: int) -> int:
        """Copies the tensors of a version into the model. All are checked before the first one is written.

        Returns:
            How many tensors of the model are not among them, and stay as they are in the folder.

        Raises:
            TensorError: they are those of another model.
            StateError: a value is not finite, or too large for the type of the model.
        """
        given, own = plain_state(tensors), plain_state(self.model.state_dict())
        if ADAPTER_CONFIG in given:
            given, own = self._adapter(tensors)
        for name, tensor in given.items():
            if name not in own:
                text = f"the run publishes {listed([name])!r}, which the model in {self.folder} does not have"
                raise TensorError(f"{text}; serve the model that the run trains")
            if tensor.shape != own[name].shape:
                text = f"{name!r} is {list(tensor.shape)} in the run and {list(own[name].shape)} in {self.folder}"
                raise TensorError(f"{text}; serve the model that the run trains")
            if tensor.is_floating_point() and not tensor.to(own[name].dtype).float().isfinite().all():
                raise StateError(
                    f"{name!r} of version {version} has a value that is not finite as {own[name].dtype}, so that the "
                    "version is not loaded"
                )
        written = {own[name].data_ptr() for name in given}
        whole = self.model.state_dict()
        missing = [name for name, tensor in whole.items() if tensor.data_ptr() not in written]  # tied ones are there
        if missing and not self._has_weights:
            raise TensorError(f"neither the run nor {self.folder} has {listed(missing)}")
        with torch.no_grad():
            for name, tensor in given.items():
                own[name].copy_(tensor)
        self.version = version
        return len(missing)

    def _adapter(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The tensors of a published adapter, and by the same names those of the model, which the first one adapts."""
        try:
            from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
        except ImportError:
            raise TensorError("the run publishes an adapter, which needs peft; run: pip install '.[peft]'") from None
        config, given = split_adapter(tensors)
        if not self._has_weights:
            raise TensorError(f"the run publishes an adapter, and {self.folder} has no weights of its base")
        if not hasattr(self.model, "peft_config"):
            wanted = {name: config[name] for name in ADAPTER_FIELDS if name in config}
            try:
                self.model = get_peft_model(self.model, LoraConfig(**wanted)).eval()
            except (ValueError, TypeError, RuntimeError) as error:
                text = f"the adapter of the run does not fit the model in {self.folder}: {_first_line(error)}"
                raise TensorError(f"{text}; serve the base that the run trains") from None
        return given, get_peft_model_state_dict(self.model, save_embedding_layers=False)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._encoder(text)["input_ids"])

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
        """The token ids of messages with "role" and "content". `options` are for the template."""
        if not self._encoder.chat_template:
            raise EngineError("the tokenizer of this model has no chat template; use /v1/completions", 400)
        if taken := options.keys() & {"chat_template", "conversation", "documents", "return_dict", "tools"}:
            raise EngineError(f"chat_template_kwargs cannot have {min(taken)}", 400, "chat_template_kwargs")
        try:
            given = {**options, "tokenize": False, "add_generation_prompt": True}
            text = self._encoder.apply_chat_template(list(messages), **given)
        except Exception as error:  # whatever the template raises
            text = f"the model's chat template refuses the messages: {_first_line(error)}"
            raise EngineError(text, 400, "messages") from None
        return tuple(self._encoder(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        text: str = self._decoder.decode(
            list(tokens), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return text

    @torch.inference_mode()
    def generate(self, batch: Sequence[GenerationJob]) -> None:
        """Generates all sequences of a batch, see `next_batch`, and hands each piece to its job."""
        rows = [
            _SequenceRow(self, job, index, prompt, self._ends)
            for job in batch
            for index, prompt in enumerate(prompt for prompt in job.prompts for _ in range(job.asked.n))
        ]
        width, pad = max(len(row.prompt) for row in rows), next(iter(self._ends), 0)
        tokens = torch.full((len(rows), width), pad, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for number, row in enumerate(rows):
            tokens[number, width - len(row.prompt) :] = torch.tensor(row.prompt)
            mask[number, width - len(row.prompt) :] = 1
        steps, asked = _Steps(rows), batch[0].asked
        sampling: dict[str, Any] = {"do_sample": False}
        if asked.temperature >= GREEDY:
            sampling = {"do_sample": True, "temperature": asked.temperature, "top_p": asked.top_p}
            sampling |= {"top_k": max(0, asked.top_k), "min_p": asked.min_p or None}
        if asked.seed is not None:
            torch.manual_seed(asked.seed)
        try:
            self.model.generate(
                tokens.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                generation_config=GenerationConfig(
                    max_new_tokens=max(job.max_tokens for job in batch), pad_token_id=pad, **sampling
                ),
                logits_processor=[steps.see],
                stopping_criteria=[steps],
            )
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise EngineError(f"no memory for {len(rows)} sequences at once; send fewer or shorter ones", 503) from None
        except RuntimeError as error:
            raise EngineError(f"the model failed: {_first_line(error)}", 500) from error
        finally:
            if asked.seed is not None:
                torch.seed()  # the next batch must not repeat what follows this seed


class _SequenceRow:
    def __init__(
        self, model: LanguageModel, job: GenerationJob, index: int, prompt: tuple[int, ...], ends: frozenset[int]
    ) -> None:
        asked = job.asked
        self.prompt, self.done = prompt, False
        self._job, self._index, self._left = job, index, job.max_tokens
        self._ends = ends | set(asked.stop_token_ids)
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        self._text = TokenText(lambda tokens: model.decode(tokens, skip_special=asked.skip_special_tokens), stop)

    def add(self, token: int, logprob: float) -> None:
        self.done = self.done or self._job.cancelled
        if self.done:
            return
        text, self._left = self._text.add(token), self._left - 1
        reason = "stop" if token in self._ends else None if self._left else "length"
        if reason is not None:
            text += self._text.finish()
        if self._text.stopped_by is not None:
            reason = "stop"
        self.done = reason is not None
        logprobs = (logprob,) if self._job.wants_logprobs else ()
        self._job.take(TextPiece(self._index, text, (token,), logprobs, reason, self._text.stopped_by))


class _Steps:
    """Sees each step of `generate`: the logits before anything changes them, and then the chosen tokens.

    It is a stopping criterion and not a streamer of transformers, which gets the tokens of a batch without being able
    to end single ones, and on a GPU a step later.
    """

    def __init__(self, rows: Sequence[_SequenceRow]) -> None:
        self._rows = rows
        self._logprobs = torch.empty(0)

    def see(self, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Remembers the model's log-probabilities. It is the first of the logits processors."""
        # Of values that are not numbers one would still be taken for the most probable.
        if logits.isnan().any():
            raise EngineError("the model computes values that are not numbers; its weights cannot be used", 500)
        self._logprobs = torch.log_softmax(logits.float(), -1)
        return logits

    def __call__(self, tokens: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Takes the tokens of a step; returns which rows are done."""
        chosen = tokens[:, -1:]
        logprobs = self._logprobs.gather(1, chosen).clamp(min=LEAST_LOGPROB)
        for row, token, logprob in zip(self._rows, chosen[:, 0].tolist(), logprobs[:, 0].tolist(), strict=True):
            row.add(token, logprob)
        return torch.tensor([row.done for row in self._rows], device=tokens.device)


def _end_tokens(generation: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text: what the folder says in any of its three files."""
    ends: set[int] = set()
    for given in (generation.eos_token_id, config.eos_token_id, tokenizer.eos_token_id):
        ends |= set() if given is None else set(given) if isinstance(given, list | tuple) else {given}
    return frozenset(ends)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""The JSON of requests and answers: OpenAI's, and where that lacks something, vLLM's. Pure.

A field that would change the result and is not implemented is refused, and so is an unknown one: an answer that ignores
it would be wrong without a word.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from averaging.engine.batching import GenerationRequest, Sampling, TextPiece, TokenLogprob
from averaging.errors import EngineError

MAX_STOPS, MAX_STOP_TOKENS, MAX_TOP, MAX_MESSAGES = 16, 64, 20, 4096
"""Stop strings and stop tokens of a request, tokens whose log-probabilities are given, messages of a conversation."""

CHARACTERS_PER_TOKEN = 64
"""More than tokens have on average in any text; only long runs of spaces come near it."""

COMPLETION_TOKENS = 16
"""The limit of a completion that names none, as OpenAI has it."""

Json = dict[str, Any]

Text = Annotated[str, msgspec.Meta(max_length=256)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
TokenIds = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a stream.

    Attributes:
        include_usage: whether the last chunk has the usage.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class RequestFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that both kinds of request have. None is as if a field was left out."""

    model: Text
    n: Count | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: Stop | Annotated[list[Stop], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_STOP_TOKENS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None

    NEUTRAL: ClassVar[Mapping[str, Sequence[object]]] = {
        "presence_penalty": [0],
        "frequency_penalty": [0],
        "repetition_penalty": [1],
        "length_penalty": [1],
        "logit_bias": [{}],
        "min_tokens": [0],
        "bad_words": [[]],
        "allowed_token_ids": [],
        "prompt_logprobs": [],
        "use_beam_search": [False],
        "best_of": [1],
        "response_format": [{"type": "text"}],
        "structured_outputs": [],
        "truncate_prompt_tokens": [],
    }
    """Values of fields that are not implemented which change nothing."""


class ChatRequest(RequestFields, kw_only=True, forbid_unknown_fields=True):
    """A request of `/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[Text, str | int | float | bool | None], msgspec.Meta(max_length=64)] | None = (
        None
    )

    NEUTRAL: ClassVar[Mapping[str, Sequence[object]]] = {
        **RequestFields.NEUTRAL,
        "tools": [[]],
        "tool_choice": ["none", "auto"],
        "functions": [[]],
        "function_call": ["none", "auto"],
        "modalities": [["text"]],
        "audio": [],
        "prediction": [],
        "web_search_options": [],
        "verbosity": ["medium"],
        "echo": [False],
        "reasoning_effort": [],
    }


class CompletionRequest(RequestFields, kw_only=True, forbid_unknown_fields=True):
    """A request of `/v1/completions`."""

    prompt: str | list[Any]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP)] | None = None

    NEUTRAL: ClassVar[Mapping[str, Sequence[object]]] = {**RequestFields.NEUTRAL, "echo": [False], "suffix": [""]}


WITHOUT_MEANING = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_salt"),
    *("request_id", "priority", "spaces_between_special_tokens", "parallel_tool_calls"),
)
"""Fields that are accepted and change nothing."""

MAX_NEUTRAL = 256
"""Characters of the value of a field that is not implemented; a longer one is none of `NEUTRAL`."""

AnyRequest = TypeVar("AnyRequest", bound=RequestFields)


def parse_request(body: bytes | bytearray, kind: type[AnyRequest]) -> AnyRequest:
    """Reads a request. What the fields without meaning hold is not decoded, and so costs neither memory nor time.

    Raises:
        EngineError: it is malformed, or needs what is not implemented.
    """
    collects = gc.isenabled()
    gc.disable()  # a body may have a million lists, and collections among them take most of the time, in all threads
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name in WITHOUT_MEANING:
            fields.pop(name, None)
        for name, neutral in kind.NEUTRAL.items():
            value = bytes(fields.pop(name, b"null"))
            if len(value) > MAX_NEUTRAL or msgspec.json.decode(value) not in (None, *neutral):
                text = f"{name} is not implemented here; leave it out"
                raise EngineError(text, 400, name, code="unsupported_parameter")
        request = msgspec.json.decode(msgspec.json.encode(fields), type=kind)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"the request is not valid: {error}", 400) from None
    finally:
        if collects:
            gc.enable()
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise EngineError("top_logprobs needs logprobs: true", 400, "top_logprobs")
    return request


@dataclass(frozen=True, slots=True)
class ServedName:
    """The name under which a model is served, with which each version has a name of its own.

    Attributes:
        name: means the newest version.
    """

    name: str

    def of(self, version: int | None) -> str:
        """The name of a version."""
        return self.name if version is None else f"{self.name}@{version}"

    def version_in(self, model: str) -> int | None:
        """Returns the version that a request names; None if it takes any.

        Raises:
            EngineError: it names another model.
        """
        if model == self.name:
            return None
        name, at, version = model.rpartition("@")
        if at and name == self.name and version.isascii() and version.isdigit() and len(version) < 19:
            return int(version)
        raise EngineError(
            f"there is no model {model!r} here; {self.name!r} is served, and {self.name}@N if it has version N",
            404,
            "model",
            code="model_not_found",
        )


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a request may ask for.

    Attributes:
        sequences: sequences that are generated at once, over all prompts.
        max_tokens: tokens of a sequence.
        context: tokens of a sequence with its prompt.
        vocabulary: number of token ids.
    """

    sequences: int
    max_tokens: int
    context: int
    vocabulary: int


def check_length(characters: int, limits: RequestLimits, parameter: str) -> None:
    """Refuses a text that is too long before it is turned into tokens, which would take seconds.

    Raises:
        EngineError: it has more characters than all tokens of a sequence could have.
    """
    most = limits.context * CHARACTERS_PER_TOKEN
    if characters > most:
        raise EngineError(
            f"the prompt has {characters} characters, and {limits.context} tokens have at most {most}",
            400,
            parameter,
            code="context_length_exceeded",
        )


def generation_of(
    request: RequestFields, prompts: Sequence[tuple[int, ...]], version: int | None, limits: RequestLimits
) -> GenerationRequest:
    """Returns what is to be generated.

    Raises:
        EngineError: it is more than the limits allow.
    """
    n = request.n or 1
    if n * len(prompts) > limits.sequences:
        raise EngineError(
            f"{n * len(prompts)} sequences at once, more than {limits.sequences}; ask for fewer, or start the server "
            "with a larger --batch",
            400,
            "n",
        )
    for prompt in prompts:
        if not prompt:
            raise EngineError("the prompt has no tokens", 400, "prompt")
        if max(prompt) >= limits.vocabulary:
            raise EngineError(f"token {max(prompt)} is not among the model's {limits.vocabulary} tokens", 400, "prompt")
    room = limits.context - max(map(len, prompts))
    if room < 1:
        raise EngineError(
            f"the prompt has {limits.context - room} tokens, and with the answer there may be {limits.context}",
            400,
            "messages" if isinstance(request, ChatRequest) else "prompt",
            code="context_length_exceeded",
        )
    stop = request.stop or ()
    return GenerationRequest(
        prompts=tuple(prompts),
        n=n,
        max_tokens=_max_tokens(request, room, limits),
        sampling=_sampling(request),
        seed=request.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_tokens=frozenset(request.stop_token_ids or ()),
        include_stop=bool(request.include_stop_str_in_output),
        ignore_eos=bool(request.ignore_eos),
        skip_special=request.skip_special_tokens is not False,
        top_logprobs=_top_logprobs(request),
        version=version,
    )


def _max_tokens(request: RequestFields, room: int, limits: RequestLimits) -> int:
    given, name = request.max_tokens, "max_tokens"
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        given, name = request.max_completion_tokens, "max_completion_tokens"
    if given is None:
        default = limits.max_tokens if isinstance(request, ChatRequest) else COMPLETION_TOKENS
        return min(default, limits.max_tokens, room)
    if given > limits.max_tokens:
        raise EngineError(
            f"{name} is {given}, more than {limits.max_tokens}; ask for fewer, or start the server with a larger "
            "--max-tokens",
            400,
            name,
        )
    if given > room:
        raise EngineError(
            f"{name} is {given}, and after the prompt there is room for {room} of {limits.context} tokens",
            400,
            name,
            code="context_length_exceeded",
        )
    return given


def _sampling(request: RequestFields) -> Sampling:
    temperature = 1.0 if request.temperature is None else request.temperature
    if temperature < 1e-5:
        return Sampling(temperature=0.0)
    top_p = 1.0 if request.top_p is None else request.top_p
    if top_p == 0:
        raise EngineError("top_p must be above 0; temperature 0 takes the most probable token", 400, "top_p")
    top_k = 0 if request.top_k is None else max(0, request.top_k)
    return Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=request.min_p or 0.0)


def _top_logprobs(request: RequestFields) -> int | None:
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    return request.logprobs if isinstance(request, CompletionRequest) else None


def prompts_of(
    request: CompletionRequest, encode: Callable[[str], tuple[int, ...]], limit: int
) -> list[tuple[int, ...]]:
    """Returns the token ids of each prompt: a text, token ids, or a list of either.

    Raises:
        EngineError: it is none of these, or has more than `limit` prompts.
    """
    prompt = request.prompt
    prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    if len(prompts) > limit:
        text = f"{len(prompts)} prompts, more than {limit}; start the server with a larger --batch"
        raise EngineError(text, 400, "prompt")
    found = []
    for each in prompts:
        if isinstance(each, str):
            found.append(encode(each))
            continue
        try:
            found.append(tuple(msgspec.convert(each, TokenIds)))
        except ValueError:
            raise EngineError(
                "prompt must be a text, a list of token ids, or a list of these, without empty ones", 400, "prompt"
            ) from None
    return found


def messages_of(request: ChatRequest) -> list[dict[str, Any]]:
    """Returns the messages with their content as text.

    Raises:
        EngineError: a message is malformed, or its content is not text.
    """
    return [_message(message) for message in request.messages]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise EngineError("only text is served; leave out the other parts of the messages", 400, "messages")
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(message.get("role"), str) or not isinstance(content, str | None):
        raise EngineError("each message needs a role and a content, which is text", 400, "messages")
    return {**message, "content": "" if content is None else content}


def template_options(request: ChatRequest) -> dict[str, Any]:
    """Returns the arguments of the chat template.

    Raises:
        EngineError: they contradict each other, or are the server's.
    """
    options: dict[str, Any] = dict(request.chat_template_kwargs or {})
    if taken := options.keys() & {"conversation", "chat_template", "tokenize", "tools", "documents", "return_dict"}:
        raise EngineError(f"chat_template_kwargs cannot have {min(taken)}", 400, "chat_template_kwargs")
    proceeds = bool(request.continue_final_message)
    generation = not proceeds if request.add_generation_prompt is None else request.add_generation_prompt
    if proceeds and generation:
        raise EngineError("continue_final_message needs add_generation_prompt: false", 400, "continue_final_message")
    return options | {"add_generation_prompt": generation, "continue_final_message": proceeds}


# Answers


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """How tokens are shown in one answer.

    Attributes:
        decode: the text of token ids.
        token_ids: whether the answer has them.
        as_ids: whether tokens beside log-probabilities are written as "token_id:7".
    """

    decode: Callable[[Sequence[int]], str]
    token_ids: bool
    as_ids: bool

    def token(self, token: int) -> str:
        """A token as text."""
        return f"token_id:{token}" if self.as_ids else self.decode([token])


class AnswerForm:
    """Writes the answers of one kind of request.

    Args:
        style: how tokens are shown.
        prompts: token ids of each prompt.
        n: sequences of each prompt.
        head: what each answer and chunk begins with: id, model and so on.
    """

    object = chunk_object = ""

    def __init__(self, style: AnswerStyle, prompts: Sequence[tuple[int, ...]], n: int, head: Json) -> None:
        self._style, self._prompts, self._n, self._head = style, prompts, n, head

    def first_chunks(self) -> list[Json]:
        """What a stream begins with."""
        return []

    def whole(self, sequences: Sequence[Sequence[TextPiece]]) -> Json:
        """The answer to a request that is not streamed, from the pieces of each sequence."""
        choices = []
        for index, pieces in enumerate(sequences):
            merged = TextPiece(
                index,
                "".join(piece.text for piece in pieces),
                tuple(token for piece in pieces for token in piece.tokens),
                tuple(logprob for piece in pieces for logprob in piece.logprobs),
                pieces[-1].finish_reason,
                pieces[-1].stop_reason,
            )
            choices.append(self._choice(merged))
        tokens = sum(len(piece.tokens) for pieces in sequences for piece in pieces)
        return {**self._head, "object": self.object, "choices": choices, "usage": self.usage(tokens)}

    def chunk(self, piece: TextPiece, logprobs: bool) -> Json:
        """A chunk of a stream."""
        raise NotImplementedError

    def last_chunk(self, tokens: int) -> Json:
        """The chunk with the usage."""
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": self.usage(tokens)}

    def usage(self, tokens: int) -> Json:
        """How many tokens there were."""
        prompt = sum(map(len, self._prompts))
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def _choice(self, merged: TextPiece) -> Json:
        raise NotImplementedError

    def _ids(self, piece: TextPiece) -> Json:
        return {"token_ids": list(piece.tokens)} if self._style.token_ids else {}

    def _end(self, piece: TextPiece) -> Json:
        return {"index": piece.index, "finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}


class ChatForm(AnswerForm):
    """The answers of `/v1/chat/completions`."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def first_chunks(self) -> list[Json]:
        """The role of each choice, and the prompt's token ids once."""
        prompt = {"prompt_token_ids": list(self._prompts[0])} if self._style.token_ids else {}
        delta = {"role": "assistant", "content": ""}
        return [
            {
                **self._head,
                "object": self.chunk_object,
                **(prompt if index == 0 else {}),
                "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}],
            }
            for index in range(self._n)
        ]

    def whole(self, sequences: Sequence[Sequence[TextPiece]]) -> Json:
        prompt = {"prompt_token_ids": list(self._prompts[0])} if self._style.token_ids else {}
        return {**super().whole(sequences), **prompt}

    def chunk(self, piece: TextPiece, logprobs: bool) -> Json:
        choice = {
            **self._end(piece),
            "delta": {"content": piece.text},
            "logprobs": self._logprobs(piece) if logprobs else None,
            **self._ids(piece),
        }
        return {**self._head, "object": self.chunk_object, "choices": [choice]}

    def _choice(self, merged: TextPiece) -> Json:
        return {
            **self._end(merged),
            "message": {"role": "assistant", "content": merged.text, "refusal": None},
            "logprobs": self._logprobs(merged) if merged.logprobs else None,
            **self._ids(merged),
        }

    def _logprobs(self, piece: TextPiece) -> Json:
        content = []
        for each in piece.logprobs:
            top = [self._entry(token, logprob) for token, logprob in each.top]
            content.append({**self._entry(each.token, each.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        text = self._style.token(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class CompletionForm(AnswerForm):
    """The answers of `/v1/completions`."""

    object = chunk_object = "text_completion"

    def __init__(self, style: AnswerStyle, prompts: Sequence[tuple[int, ...]], n: int, head: Json) -> None:
        super().__init__(style, prompts, n, head)
        self._offsets = [0] * (len(prompts) * n)
        self._begun: set[int] = set()

    def chunk(self, piece: TextPiece, logprobs: bool) -> Json:
        return {**self._head, "object": self.chunk_object, "choices": [self._of(piece, logprobs)]}

    def _choice(self, merged: TextPiece) -> Json:
        return self._of(merged, bool(merged.logprobs))

    def _of(self, piece: TextPiece, logprobs: bool) -> Json:
        prompt = {}
        if self._style.token_ids and piece.index not in self._begun:
            prompt = {"prompt_token_ids": list(self._prompts[piece.index // self._n])}
        self._begun.add(piece.index)
        return {
            **self._end(piece),
            "text": piece.text,
            "logprobs": self._logprobs(piece) if logprobs else None,
            **prompt,
            **self._ids(piece),
        }

    def _logprobs(self, piece: TextPiece) -> Json:
        tokens, offsets = [self._style.token(each.token) for each in piece.logprobs], []
        for token in tokens:
            offsets.append(self._offsets[piece.index])
            self._offsets[piece.index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [each.logprob for each in piece.logprobs],
            "top_logprobs": [self._top(each) for each in piece.logprobs],
            "text_offset": offsets,
        }

    def _top(self, each: TokenLogprob) -> Json:
        """The most probable tokens, and the chosen one if it is not among them."""
        return {self._style.token(token): logprob for token, logprob in (*each.top, (each.token, each.logprob))}


def error_body(error: EngineError) -> Json:
    """An error in OpenAI's form."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.parameter, "code": error.code}}

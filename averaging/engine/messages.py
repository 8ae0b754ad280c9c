"""The JSON of requests and answers: OpenAI's, and where that lacks something, vLLM's.

A field that would change the result and is not implemented is refused, and so is an unknown one: an answer that ignores
it would be wrong without a word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Annotated, Any, TypeVar

import msgspec

from averaging.errors import EngineError

WITHOUT_MEANING = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_salt"}
# Values of fields that are not implemented which change nothing, beside null, false, 0 and what is empty.
NEUTRAL = {"best_of": 1, "repetition_penalty": 1, "tool_choice": "auto", "response_format": {"type": "text"}}

Json = dict[str, Any]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Asked(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: Name
    n: Count = 1
    max_tokens: Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.0  # 0 takes the most probable token
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = 0  # 0 and -1 for all tokens
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: Stop | Annotated[list[Stop], msgspec.Meta(max_length=16)] = []
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=64)] = []
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: dict[Name, bool] = {}  # include_usage
    return_token_ids: bool = False


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    role: Name
    content: str | list[TextPart] = ""
    name: str | None = None
    reasoning_content: str | None = None

    def for_template(self) -> Json:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {**msgspec.to_builtins(self), "content": content}


class ChatRequest(Asked, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    chat_template_kwargs: Annotated[dict[Name, str | int | float | bool], msgspec.Meta(max_length=64)] = {}

    def limit(self, room: int) -> int:
        return self.max_completion_tokens or self.max_tokens or room


class CompletionRequest(Asked, kw_only=True, forbid_unknown_fields=True):
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], msgspec.Meta(min_length=1)]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=1)] | None = None  # in any case of the chosen tokens alone

    def limit(self, room: int) -> int:
        return self.max_tokens or min(16, room)  # as OpenAI has it

    def prompts(self, limit: int) -> list[Any]:
        """The prompts, at most `limit`: each a text, or token ids."""
        if isinstance(self.prompt, str) or all(isinstance(each, int) for each in self.prompt):
            return [self.prompt]
        if len(self.prompt) > limit or any(isinstance(each, int) for each in self.prompt):
            text = f"prompt must be a text, a list of token ids, or a list of up to {limit} of these"
            raise EngineError(text, 400, "prompt")
        return self.prompt


AnyRequest = TypeVar("AnyRequest", bound=Asked)


def parse_request(body: bytes | bytearray, kind: type[AnyRequest]) -> AnyRequest:
    """Reads a request. A field that is null is as if it was left out; one with a meaning that is unknown is refused."""
    try:
        fields = _without_nulls(msgspec.json.decode(body, type=Json))
        for name in fields.keys() - set(kind.__struct_fields__):
            if not fields[name] or name in WITHOUT_MEANING or fields[name] == NEUTRAL.get(name):
                del fields[name]
        return msgspec.convert(fields, kind)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"the request cannot be served: {error}", 400) from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class TextPiece:
    # What has been added to a sequence.
    index: int  # of the sequence in its request: those of the first prompt come first
    text: str = ""  # what has become final
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # of each token in the model, before temperature and top_p; () if not asked for
    finish_reason: str | None = None  # "stop" or "length" with the last piece
    stop_reason: str | None = None  # the stop string that ended the sequence

    @classmethod
    def joined(cls, pieces: Sequence[TextPiece]) -> TextPiece:
        text = "".join(piece.text for piece in pieces)
        tokens = tuple(token for piece in pieces for token in piece.tokens)
        logprobs = tuple(logprob for piece in pieces for logprob in piece.logprobs)
        last = pieces[-1]
        return cls(last.index, text, tokens, logprobs, last.finish_reason, last.stop_reason)


@dataclass(slots=True, eq=False, kw_only=True)
class GenerationJob:
    # A request while it waits and is generated.
    asked: ChatRequest | CompletionRequest
    prompts: Sequence[tuple[int, ...]]  # token ids
    max_tokens: int  # of each sequence
    network: str = ""  # whose it is, see `network_of`
    take: Callable[[TextPiece | EngineError], object] = lambda piece: None  # called in the thread that generates
    cancelled: bool = False  # nobody wants it any more; then it ends at the next token
    version: int | None = None  # of the weights that generate it, once it has begun

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.asked.n

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts))

    @property
    def sampling(self) -> tuple[object, ...]:
        """Jobs with equal values can be generated together."""
        return self.asked.temperature, self.asked.top_p, self.asked.top_k, self.asked.min_p

    @property
    def wants_logprobs(self) -> bool:
        return self.asked.logprobs is not None and self.asked.logprobs is not False


class AnswerWriter:
    """Writes the answer to a job, as a whole or in chunks. Make it once the job has its version."""

    def __init__(self, job: GenerationJob, model: str, decode: Callable[[Sequence[int]], str]) -> None:
        self._job, self._decode = job, decode
        self._is_chat = isinstance(job.asked, ChatRequest)
        self._head: Json = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "weight_version": version_name(job.version),
        }
        self._begun = set[int]()

    def whole(self, sequences: Sequence[Sequence[TextPiece]]) -> Json:
        joined = [TextPiece.joined(pieces) for pieces in sequences]
        usage = self._usage(sum(len(each.tokens) for each in joined))
        return {**self._with([self._choice(each, "message") for each in joined]), "usage": usage}

    def chunk(self, piece: TextPiece) -> Json:
        return self._with([self._choice(piece, "delta")], ".chunk")

    def usage_chunk(self, tokens: int) -> Json:
        return {**self._with([], ".chunk"), "usage": self._usage(tokens)}

    def _with(self, choices: list[Json], chunk: str = "") -> Json:
        kind = f"chat.completion{chunk}" if self._is_chat else "text_completion"
        answer = {**self._head, "object": kind, "choices": choices}
        if self._is_chat and self._job.asked.return_token_ids:
            answer["prompt_token_ids"] = self._job.prompts[0]
        return answer

    def _choice(self, piece: TextPiece, kind: str) -> Json:
        asked, is_first = self._job.asked, piece.index not in self._begun
        self._begun.add(piece.index)
        choice: Json = {"index": piece.index, "finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        choice["logprobs"] = self._logprobs(piece) if self._job.wants_logprobs else None
        if self._is_chat:  # clients put the roles of all chunks together
            choice[kind] = {**({"role": "assistant"} if is_first else {}), "content": piece.text}
        else:
            choice["text"] = piece.text
        if asked.return_token_ids:
            choice["token_ids"] = piece.tokens
            if is_first and not self._is_chat:
                choice["prompt_token_ids"] = self._job.prompts[piece.index // asked.n]
        return choice

    def _logprobs(self, piece: TextPiece) -> Json:
        tokens = [self._decode([token]) for token in piece.tokens]
        if not self._is_chat:
            return {"tokens": tokens, "token_logprobs": piece.logprobs}
        pairs = zip(tokens, piece.logprobs, strict=True)
        shared: Json = {"top_logprobs": []}
        return {"content": [{"token": t, "logprob": p, "bytes": list(t.encode()), **shared} for t, p in pairs]}

    def _usage(self, tokens: int) -> Json:
        prompt = sum(map(len, self._job.prompts))
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def version_name(version: int | None) -> str | None:
    """A version as vLLM writes it."""
    return None if version is None else str(version)


def error_body(error: EngineError) -> Json:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.parameter, "code": error.code}}


INCOMPLETE = "\ufffd"  # what a decoder gives for bytes that are not a whole character yet


class TokenText:
    """Turns tokens into text piece by piece.

    Bytes of an unfinished character, and as much text as may be the beginning of a stop string, are kept back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, stop
        self._margin = max(map(len, stop), default=1) - 1
        self._tokens: list[int] = []
        # The tokens from `_start` on are decoded together, because a token's text depends on those before it, such as
        # the space of a word. The text of those before `_end` has been taken.
        self._start = self._end = 0
        self._kept = ""
        self.stopped_by: str | None = None  # the stop string that has ended the text, which is without it

    def add(self, token: int) -> str:
        """Returns the text that has become final with a token."""
        self._tokens.append(token)
        return self._release(self._new_text(final=False), final=False)

    def finish(self) -> str:
        """Returns the rest of the text, after the last token."""
        return "" if self.stopped_by is not None else self._release(self._new_text(final=True), final=True)

    def _new_text(self, *, final: bool) -> str:
        before = self._decode(self._tokens[self._start : self._end])
        now = self._decode(self._tokens[self._start :])
        if len(now) <= len(before) or (now.endswith(INCOMPLETE) and not final):
            return ""
        self._start, self._end = self._end, len(self._tokens)
        return now[len(before) :]

    def _release(self, new: str, *, final: bool) -> str:
        text = self._kept + new
        found = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            place, self.stopped_by = min(found, key=lambda each: each[0])
            self._kept = ""
            return text[:place]
        ready = len(text) if final else max(0, len(text) - self._margin)
        self._kept = text[ready:]
        return text[:ready]

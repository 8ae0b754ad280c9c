"""A model without torch for tests of the server: a token is a byte, and the next one is always the last one plus 1."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from averaging.engine import GenerationJob, TextPiece
from averaging.errors import StateError, TensorError


class CountingModel:
    """Counts on from the last token of the prompt. It ends a sequence at "~".

    Attributes:
        batches: the jobs of each batch, in order.
        go: while this is clear, nothing is generated.
    """

    def __init__(self, version: int | None = None) -> None:
        self.version = version
        self.context, self.vocabulary = 64, 128
        self.batches: list[list[GenerationJob]] = []
        self.go, self.begun = threading.Event(), threading.Event()
        self.go.set()

    def load(self, tensors: Mapping[str, torch.Tensor], version: int) -> int:
        if "w" not in tensors:
            raise TensorError("another model")
        if not tensors["w"].isfinite().all():
            raise StateError(f"'w' of version {version} has a value that is not finite")
        self.version = version
        return 0

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> tuple[int, ...]:
        return self.encode("".join(message["content"] for message in messages))

    def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        return bytes(tokens).decode(errors="replace")

    def generate(self, batch: Sequence[GenerationJob]) -> None:
        self.batches.append(list(batch))
        self.begun.set()
        self.go.wait()
        for job in batch:
            for index, prompt in enumerate(prompt for prompt in job.prompts for _ in range(job.asked.n)):
                for count in range(1, job.max_tokens + 1):
                    if job.cancelled:
                        break
                    token = prompt[-1] + count
                    end = "stop" if token == ord("~") else "length" if count == job.max_tokens else None
                    job.take(TextPiece(index, chr(token), (token,), (-0.5,) if job.wants_logprobs else (), end))
                    if end:
                        break

"""A small byte-level transformer, and its input from text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the model.

    Attributes:
        layers: number of transformer blocks.
        width: width of the embedding; a multiple of `heads`.
        heads: number of attention heads.
        context: number of bytes that the model sees at once.
    """

    layers: int
    width: int
    heads: int
    context: int


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with pre-normalisation and a residual connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)
        # Small at first, so that the sum over the blocks does not grow with their number (GPT-2).
        for last in (self.out, self.down):
            nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * size.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [batch, length, width] to the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        changed: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return changed


class LanguageModel(nn.Module):
    """Predicts each byte of a text from the bytes before it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Maps bytes [batch, length] to logits [batch, length, 256]."""
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        logits: torch.Tensor = self.norm(self.blocks(x)) @ self.bytes.weight.T
        return logits

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in bits per byte of windows [batch, context + 1]."""
        logits = self(windows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()) / math.log(2)

    @torch.no_grad()
    def evaluate(self, windows: torch.Tensor) -> float:
        """Like `loss`, for a few windows at a time."""
        chunks = torch.split(windows, 32)
        return sum(self.loss(chunk).item() * len(chunk) for chunk in chunks) / len(windows)


def read(files: tuple[Path, ...]) -> torch.Tensor:
    """Returns all bytes of the files, concatenated, as uint8 [bytes]."""
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def windows(text: torch.Tensor, count: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """Returns random windows of the text, [count, context + 1]."""
    starts = torch.randint(len(text) - context, (count, 1), generator=generator)
    return text[starts + torch.arange(context + 1)].long()

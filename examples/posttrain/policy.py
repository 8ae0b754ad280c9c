"""The task and the policy: a small transformer sorts digits, and a rule says whether it did.

A sequence is a prompt of `DIGITS` digits, a sign, and the answer of `DIGITS` digits.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

DIGITS = 6
SIGN = 10
VOCABULARY = 11
LENGTH = 2 * DIGITS + 1
"""Tokens in a sequence."""


class Block(nn.Module):
    """One layer of a transformer, with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is [batch, tokens, width]."""
        batch, tokens, width = x.shape
        parts = self.attention(self.norm_1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        changed: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return changed


class Policy(nn.Module):
    """Logits of the next token; about 110,000 parameters."""

    def __init__(self, seed: int, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens` is int64 [batch, tokens]; returns [batch, tokens, `VOCABULARY`]."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def prompts_of(count: int, generator: torch.Generator) -> torch.Tensor:
    """Random prompts, int64 [count, DIGITS + 1]."""
    digits = torch.randint(0, 10, (count, DIGITS), generator=generator)
    return torch.cat([digits, torch.full((count, 1), SIGN)], dim=1)


def solved(prompts: torch.Tensor) -> torch.Tensor:
    """The prompts with the right answers, [count, LENGTH]."""
    return torch.cat([prompts, prompts[:, :DIGITS].sort(dim=1).values], dim=1)


@torch.no_grad()
def generate(policy: Policy, prompts: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Appends answers to the prompts: sampled, or the most likely digits without a generator."""
    sequences = prompts
    for _ in range(DIGITS):
        logits = policy(sequences)[:, -1, :10]
        if generator is None:
            following = logits.argmax(dim=1, keepdim=True)
        else:
            following = torch.multinomial(logits.softmax(dim=1), 1, generator=generator)
        sequences = torch.cat([sequences, following], dim=1)
    return sequences


def rewards_of(sequences: torch.Tensor) -> torch.Tensor:
    """The rule, float32 [count]: the share of digits at their place, and 1 more if all are."""
    right = sequences[:, DIGITS + 1 :] == sequences[:, :DIGITS].sort(dim=1).values
    return right.float().mean(dim=1) + right.all(dim=1).float()


def accuracy(policy: Policy, prompts: torch.Tensor) -> float:
    """The share of prompts that the policy sorts without a mistake, if it always takes the most likely digit."""
    return float((rewards_of(generate(policy, prompts, None)) == 2).float().mean())


def logprobs_of(policy: nn.Module, sequences: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the digits of the answers, float32 [count, DIGITS]."""
    logits = policy(sequences[:, :-1])[:, DIGITS:, :10]
    found = logits.log_softmax(dim=2).gather(2, sequences[:, DIGITS + 1 :, None])
    logprobs: torch.Tensor = found.squeeze(2)
    return logprobs


def advantages_of(rewards: torch.Tensor) -> torch.Tensor:
    """How much better each answer of a group is than its mean, in standard deviations; `rewards` is [groups, size].

    The advantage of group relative policy optimization, GRPO (Shao et al., 2024, arXiv:2402.03300).
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-4)


def policy_loss(
    policy: nn.Module, sequences: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """The clipped policy gradient, with the log-probabilities `old` of the policy that has generated."""
    ratio = (logprobs_of(policy, sequences) - old).exp()
    gain = advantages[:, None]
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


def warm_up(policy: Policy, steps: int, seed: int) -> None:
    """A short supervised training, which leaves much to learn."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    for _ in range(steps):
        loss = -logprobs_of(policy, solved(prompts_of(64, generator))).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

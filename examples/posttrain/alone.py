"""One site alone, as a measure: one process that generates and trains in turn, with the same warm-up."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from examples.posttrain.policy import (
    Policy,
    accuracy,
    advantages_of,
    generate,
    logprobs_of,
    policy_loss,
    prompts_of,
    rewards_of,
)
from examples.posttrain.story import GROUP_SIZE, GROUPS


def train_alone(policy: Policy, steps: int, seed: int, test: torch.Tensor) -> Iterator[float]:
    """Yields the share of the test's prompts solved, after each `steps` steps."""
    training = steps_alone(policy, GROUPS, GROUP_SIZE, 4e-4, seed)
    while True:
        for _ in range(steps):
            next(training)
        yield accuracy(policy, test)


def steps_alone(policy: Policy, groups: int, group_size: int, lr: float, seed: int) -> Iterator[None]:
    """Trains the policy by one step each."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
    while True:
        prompts = prompts_of(groups, generator).repeat_interleave(group_size, dim=0)
        sequences = generate(policy, prompts, generator)
        with torch.no_grad():
            old = logprobs_of(policy, sequences)
        rewards = rewards_of(sequences).view(groups, group_size)
        loss = policy_loss(policy, sequences, old, advantages_of(rewards).flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield

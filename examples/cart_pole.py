"""The task of the explorers' example: a pole on a cart, and a policy that learns to balance it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

EPISODE_STEPS = 200
"""An episode ends when the pole falls, or after this number of steps, which is also the highest reward."""

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
"""m/s², kg, kg, m, N, and s per step, as in Barto, Sutton and Anderson 1983."""

MAX_POSITION, MAX_ANGLE = 2.4, 12 * math.pi / 180
"""Beyond these an episode has ended: m and rad."""


def policy_of(seed: int) -> torch.nn.Sequential:
    """Returns a policy: from position, speed, angle and angular speed to the logits of left and right."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))


@dataclass(frozen=True, slots=True)
class Episodes:
    """Some episodes of one version of the policy.

    Attributes:
        states: steps × episodes × 4.
        actions: steps × episodes; 0 for left, 1 for right.
        log_probs: The log-probability of each action when it was chosen; steps × episodes.
        alive: Whether the episode had not ended before this step; steps × episodes.
    """

    states: torch.Tensor
    actions: torch.Tensor
    log_probs: torch.Tensor
    alive: torch.Tensor

    @property
    def reward(self) -> float:
        """The mean number of steps for which the pole stayed up."""
        return float(self.alive.sum(0).float().mean())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by name."""
        return {name: getattr(self, name).contiguous() for name in ("states", "actions", "log_probs", "alive")}


@torch.no_grad()
def explore(policy: torch.nn.Module, count: int) -> Episodes:
    """Plays `count` episodes at the same time."""
    state = 0.1 * torch.rand(count, 4) - 0.05
    alive = torch.ones(count, dtype=torch.bool)
    played: list[tuple[torch.Tensor, ...]] = []
    while alive.any() and len(played) < EPISODE_STEPS:
        log_probs = torch.log_softmax(policy(state), 1)
        action = torch.multinomial(log_probs.exp(), 1).squeeze(1)
        played.append((state, action, chosen(log_probs, action), alive))
        state = moved(state, action)
        alive = alive & (state[:, 0].abs() < MAX_POSITION) & (state[:, 2].abs() < MAX_ANGLE)
    return Episodes(*(torch.stack(tensors) for tensors in zip(*played, strict=True)))


def chosen(log_probs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Returns the log-probability of each action that was chosen."""
    return log_probs.gather(1, actions.unsqueeze(1)).squeeze(1)


def moved(state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Returns the states after one step."""
    _, speed, angle, turning = state.unbind(1)
    sine, cosine, mass = angle.sin(), angle.cos(), CART + POLE
    push = (FORCE * (2 * action - 1) + POLE * HALF_LENGTH * turning**2 * sine) / mass
    turn = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4 / 3 - POLE * cosine**2 / mass))
    drive = push - POLE * HALF_LENGTH * turn * cosine / mass
    change = torch.stack([speed, drive, turning, turn], 1)
    return state + SECONDS * change


def learn(policy: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: list[Episodes], passes: int = 4) -> None:
    """Improves the policy with episodes of this and recent versions (PPO with clipped ratios)."""
    parts = [advantages_of(episodes) for episodes in batch]
    states, actions, log_probs, advantages = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    for _ in range(passes):
        now = torch.log_softmax(policy(states), 1)
        ratio = (chosen(now, actions) - log_probs).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        entropy = -(now.exp() * now).sum(1)
        loss = -gain.mean() - 0.01 * entropy.mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def advantages_of(episodes: Episodes) -> tuple[torch.Tensor, ...]:
    """Returns states, actions, log-probabilities, and how much longer than the mean the pole stayed up after each."""
    alive = episodes.alive.float()
    left = alive.flip(0).cumsum(0).flip(0)
    mean = (left * alive).sum(1, keepdim=True) / alive.sum(1, keepdim=True)
    kept = episodes.alive
    return episodes.states[kept], episodes.actions[kept], episodes.log_probs[kept], (left - mean)[kept]

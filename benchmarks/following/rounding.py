"""Bytes of the differences between versions of a policy that learns by reinforcement, by learning rate and rounding.

The policy and its task are those of `examples.posttrain`, with 420,000 parameters: groups of answers are sampled,
scored by a rule, and AdamW makes a step of policy gradient. Each step is a version.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from averaging.weights.differences import Bytes, encode
from averaging.weights.layout import PIECE_BYTES
from examples.posttrain.alone import steps_alone
from examples.posttrain.policy import Policy, warm_up

LEARNING_RATES = (1e-6, 1e-5, 1e-4)
GROUPS, GROUP_SIZE = 8, 8
SETTLING, STEPS = 8, 8
"""Steps before and during the measurement: the averages of AdamW take some steps to have their usual size."""

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""From the weights: what is published."""

ROUNDINGS: dict[str, Rounding] = {
    "float32": lambda weights: weights.clone(),
    "bfloat16": lambda weights: weights.bfloat16(),
}


def difference(new: torch.Tensor, old: torch.Tensor) -> int:
    """Bytes of the encoded difference of a tensor."""
    after, before = (each.reshape(-1).view(torch.uint8).numpy() for each in (new, old))
    return sum(_piece(after[start:], before[start:], new.itemsize) for start in range(0, len(after), PIECE_BYTES))


def _piece(new: Bytes, old: Bytes, itemsize: int) -> int:
    return len(encode(new[:PIECE_BYTES], old[:PIECE_BYTES], itemsize)[1])


def measure_rounding(seed: int = 0) -> list[dict[str, Any]]:
    """For each learning rate and rounding: bytes of a difference, and elements that changed, as shares of bfloat16."""
    torch.manual_seed(seed)
    begun = Policy(seed, width=128, layers=2, heads=4)
    warm_up(begun, 40, seed)
    found = []
    for rate in LEARNING_RATES:
        policy = copy.deepcopy(begun)
        published: dict[str, dict[str, torch.Tensor]] = {name: {} for name in ROUNDINGS}
        lengths: dict[str, list[int]] = {name: [] for name in ROUNDINGS}
        changed: dict[str, list[int]] = {name: [] for name in ROUNDINGS}
        elements = sum(each.numel() for each in policy.parameters())
        for number, _ in zip(
            range(SETTLING + STEPS), steps_alone(policy, GROUPS, GROUP_SIZE, rate, seed), strict=False
        ):
            for name, rounding in ROUNDINGS.items():
                before = published[name]
                now = {key: rounding(each.detach()) for key, each in policy.named_parameters()}
                if number >= SETTLING:
                    lengths[name].append(sum(difference(now[key], before[key]) for key in now))
                    changed[name].append(sum(int(np.count_nonzero((now[key] != before[key]).numpy())) for key in now))
                published[name] = now
        found += [
            {
                "learning_rate": rate,
                "rounding": name,
                "share_of_bfloat16": statistics.median(lengths[name]) / (2 * elements),
                "changed": statistics.median(changed[name]) / elements,
            }
            for name in ROUNDINGS
        ]
    return found


def rounding_table(found: list[dict[str, Any]]) -> str:
    """As Markdown. PULSE (arXiv 2602.03839) reports 1 to 2 % of the elements changed, and 14 GB in 108 MB: 0.8 %."""
    lines = [f"| learning rate | {' | '.join(ROUNDINGS)} |", f"|---|{'---|' * len(ROUNDINGS)}"]
    for rate in LEARNING_RATES:
        same = {each["rounding"]: each for each in found if each["learning_rate"] == rate}
        cells = [f"{same[name]['share_of_bfloat16']:.2%} ({same[name]['changed']:.1%})" for name in ROUNDINGS]
        lines.append(f"| {rate:g} | {' | '.join(cells)} |")
    return "\n".join(lines)

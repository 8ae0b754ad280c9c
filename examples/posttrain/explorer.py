"""An explorer: it follows the weights of its site, answers prompts, scores the answers and posts them to the feed.

python -m examples.posttrain.explorer STORY SITE NUMBER LIFE
"""

from __future__ import annotations

import hashlib
import sys
import time

import torch

from averaging import WeightFollower
from averaging.rl.feed import FeedEnvironment, RegisterEnv, ScoredData
from examples.posttrain.policy import DIGITS, LENGTH, Policy, generate, logprobs_of, prompts_of, rewards_of
from examples.posttrain.story import GROUP_SIZE, GROUPS, RUN_ID, Events, Story, local

AT_ONCE = 8
"""Groups in one post."""

PACE = 1.0
"""Seconds that a post takes at least: as if the policy were larger, so that a restarted site misses little."""

AHEAD = 2 * GROUPS
"""Groups in the feed's queue above which explorers wait: older answers are worth less."""


def digest_of(policy: Policy) -> str:
    """Of the weights, 16 hexadecimal digits."""
    found = hashlib.sha256()
    for name, tensor in sorted(policy.state_dict().items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    """Explores until it is ended."""
    story, site, number, life = Story.read(sys.argv[1]), *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    name = f"{site + 1}.{number}"
    events, addresses = Events(story.path, f"site-{site + 1}-explorer-{number}"), story.sites[site]
    generator = torch.Generator().manual_seed(1000 * (10 * site + number) + life)
    policy = Policy(story.seed)
    config = RegisterEnv(max_token_length=LENGTH + 1, desired_name=name, weight=1.0, group_size=GROUP_SIZE)
    with (
        WeightFollower(policy, join=[local(addresses.publisher)], run_id=RUN_ID, join_timeout=300.0) as weights,
        FeedEnvironment(f"http://{local(addresses.feed)}", config, weights=weights) as feed,
    ):
        weights.update(timeout=300.0)
        count = 0
        following = time.monotonic()
        while True:
            if weights.update() or not count:
                events.add("version", version=weights.version, digest=digest_of(policy))
            if time.monotonic() < following or feed.status().queue_size >= AHEAD:
                time.sleep(0.1)
                continue
            following = time.monotonic() + PACE
            prompts = prompts_of(AT_ONCE, generator).repeat_interleave(GROUP_SIZE, dim=0)
            with torch.no_grad():
                sequences = generate(policy, prompts, generator)
                logprobs = logprobs_of(policy, sequences)
            rewards = rewards_of(sequences)
            ids = [f"{name}.{life}-{count + one}" for one in range(AT_ONCE)]
            count += AT_ONCE
            of_group = [torch.split(tensor, GROUP_SIZE) for tensor in (sequences, logprobs, rewards)]
            groups = [scored(*one) for one in zip(*of_group, ids, strict=True)]
            events.add("posting", ids=ids)
            feed.post(*groups, key=ids[0])
            events.add(
                "posted",
                ids=ids,
                version=weights.version,
                reward=rewards.mean().item(),
                right=(rewards == 2).float().mean().item(),
            )


def scored(sequences: torch.Tensor, logprobs: torch.Tensor, rewards: torch.Tensor, name: str) -> ScoredData:
    """One group, as the feed takes it."""
    tokens = sequences.tolist()
    return ScoredData(
        tokens=tokens,
        masks=[[-100] * (DIGITS + 1) + one[DIGITS + 1 :] for one in tokens],
        scores=rewards.tolist(),
        inference_logprobs=logprobs.tolist(),
        group_overrides={"id": name},
    )


if __name__ == "__main__":
    main()

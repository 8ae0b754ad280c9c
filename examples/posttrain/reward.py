"""The reward's model worker: it fetches scored groups from the site's feed, and scores them once more by the rule.

    python -m examples.posttrain.reward STORY SITE

Explorers are not trusted: a group whose posted scores are not those of the rule is reported.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Sequence

import torch

from averaging.rl.feed import BatchFeed, Registration
from averaging.rl.workers import Backend, ModelWorker, Sample, SampleBatch
from examples.posttrain.policy import LENGTH, rewards_of
from examples.posttrain.story import GROUP_SIZE, GROUPS, RUN_ID, Events, Story, local

KEPT = 8 * GROUPS
"""Groups that are kept in case that the master asks for them once more."""


class FeedDataset:
    """The batches of the feed as a dataset of one sample for each group."""

    def __init__(self, url: str, events: Events) -> None:
        registration = Registration(
            wandb_group=RUN_ID,
            wandb_project=RUN_ID,
            batch_size=GROUPS * GROUP_SIZE,
            max_token_len=LENGTH + 1,
            checkpoint_dir="",
            save_checkpoint_interval=1,
            starting_step=0,
            num_steps=-1,
        )
        self._feed = BatchFeed(url, registration, poll=0.1)
        self._events = events
        self._batches: queue.Queue[list[Sample]] = queue.Queue(maxsize=1)
        self._kept: dict[str, Sample] = {}
        self._fetched = 0
        threading.Thread(target=self._fetch, daemon=True).start()

    def place(self, dp_rank: int, dp_size: int) -> None:
        """See `Dataset`."""

    @property
    def size(self) -> int:
        """See `Dataset`: as many as explorers make."""
        return 1 << 30

    @property
    def epoch(self) -> int:
        """See `Dataset`."""
        return 0

    def fetch(self, count: int) -> list[Sample]:
        """See `Dataset`. It waits for explorers."""
        samples = self._batches.get()
        self._kept |= {sample.id: sample for sample in samples}
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        return samples

    def load(self, ids: Sequence[str]) -> list[Sample]:
        """See `Dataset`."""
        return [self._kept[one] for one in ids if one in self._kept]

    def _fetch(self) -> None:
        for batch in self._feed:
            samples = []
            for group in batch.groups:
                tokens = torch.tensor(group["tokens"])
                logprobs = torch.tensor(group["inference_logprobs"])
                if rewards_of(tokens).tolist() != group["scores"]:
                    self._events.add("wrong scores", id=group["group_overrides"]["id"])
                samples.append(Sample(group["group_overrides"]["id"], {"sequence": tokens, "logprob": logprobs}))
            self._events.add("fetched", step=batch.step, ids=[sample.id for sample in samples])
            self._batches.put(samples)


class Rule(Backend):
    """The reward model is a rule."""

    def inference(self, batch: SampleBatch, step: int) -> dict[str, list[torch.Tensor]]:
        """The reward of each answer of each group."""
        return {"reward": [rewards_of(sequences) for sequences in batch["sequence"]]}


def main() -> None:
    """Serves until it is ended."""
    story, site = Story.read(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    addresses = story.sites[site]
    dataset = FeedDataset(f"http://{local(addresses.feed)}", Events(story.path, f"site-{site + 1}-reward"))
    ModelWorker("reward", {"reward": Rule()}, dataset=dataset, listen=local(addresses.reward)).run()


if __name__ == "__main__":
    main()

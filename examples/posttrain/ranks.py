"""One rank of a site, started by torchrun: it trains its part of the policy with FSDP2. Rank 0 is the actor's worker.

    torchrun --max-restarts=20 --rdzv-backend=averaging … -m examples.posttrain.ranks STORY SITE

Each node holds the whole policy in two shards, and a second node holds it once more (HSDP). So a site that loses a node
goes on, and its shards remain those of the other site.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from averaging import DecentralizedAverager, DiLoCo, WeightPublisher
from averaging.rl.workers import Backend, ModelWorker, SampleBatch
from averaging.rpc import EventLoopThread, RpcServer
from examples.posttrain.policy import Policy, advantages_of, policy_loss
from examples.posttrain.story import RUN_ID, Events, Story, local

SHARDS = 2
"""Shards of the policy: the processes of one node."""


OUTER = partial(torch.optim.SGD, lr=0.8, momentum=0.3, nesterov=True)
"""Gentler than the default of DiLoCo, since a round follows after few steps, and rewards are noisy."""


class Trainer:
    """The training of one rank. All ranks call the same methods in the same order."""

    def __init__(self, story: Story, site: int) -> None:
        self.story, self.site = story, site
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.events = Events(story.path, f"site-{site + 1}-rank-{self.rank}")
        self.policy = Policy(story.seed)
        self.policy.load_state_dict(load_file(story.warm))
        mesh = init_device_mesh("cpu", (self.size // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard"))
        for block in self.policy.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.policy, mesh=mesh)
        own = story.sites[site]
        self.averager = DecentralizedAverager(
            torch.optim.AdamW(self.policy.parameters(), lr=4e-4),
            model=self.policy,
            run_id=RUN_ID,
            listen=local(own.averager),
            join=[local(other.averager) for other in story.sites],
            strategy=DiLoCo(sync_every=story.sync_every, outer=OUTER),
            process_group=dist.group.WORLD,
            group_wait=60.0,
        )
        self.events.add("ready", pid=os.getpid(), rank=self.rank, world=self.size, local_step=self.averager.local_step)

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights; the policy is small, so every rank may hold them for a moment."""
        found = self.policy.state_dict()
        return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in found.items()}

    def train(self, batch: Mapping[str, torch.Tensor]) -> float:
        """One step on this rank's part of the batch; returns the loss."""
        part = {name: tensor.chunk(self.size)[self.rank] for name, tensor in batch.items()}
        loss = policy_loss(self.policy, part["sequence"], part["logprob"], part["advantage"])
        self.averager.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.averager.step()
        return loss.item()

    @property
    def is_done(self) -> bool:
        """Whether this site has made all its steps."""
        return self.averager.local_step >= self.story.steps

    def finish(self) -> None:
        """Makes the weights of all sites equal, and saves them."""
        finish = self.averager.finish(120.0)
        weights = self.weights()
        if self.rank == 0:
            save_file(weights, self.story.final(self.site))
            self.events.add("finished", digest=finish.digest, alike=finish.alike, text=str(finish))

    def follow(self) -> None:
        """Does what rank 0 does."""
        while True:
            shared: list[Any] = [None]
            dist.broadcast_object_list(shared, src=0)
            if shared[0] is None:
                self.finish()
            else:
                self.train(shared[0])
            self.weights()


class Actor(Backend):
    """What the master has rank 0 do. The other ranks get each batch from rank 0."""

    def __init__(self, trainer: Trainer, publisher: WeightPublisher) -> None:
        self._trainer, self._publisher = trainer, publisher

    def train_step(self, batch: SampleBatch, step: int) -> dict[str, float]:
        """One step of the site, on groups of scored answers."""
        trainer, averager = self._trainer, self._trainer.averager
        stats = {} if trainer.is_done else self._train(batch)
        if trainer.is_done:  # perhaps from the start: it took over the state of a site that was
            dist.broadcast_object_list([None], src=0)
            trainer.finish()
            self._publisher.publish_now(trainer.weights(), averager.local_step + 1)
            trainer.events.add("published", version=averager.local_step + 1)
        return stats | {"done": float(trainer.is_done)}

    def _train(self, batch: SampleBatch) -> dict[str, float]:
        trainer, averager = self._trainer, self._trainer.averager
        rewards = batch.stacked("reward")
        data = {
            "sequence": torch.cat(list(batch["sequence"])),
            "logprob": torch.cat(list(batch["logprob"])),
            "advantage": advantages_of(rewards).flatten(),
        }
        dist.broadcast_object_list([data], src=0)
        loss = trainer.train(data)
        self._publisher.publish_now(trainer.weights(), averager.local_step)
        receipt = averager.last_receipt
        return {
            "loss": loss,
            "reward": rewards.mean().item(),
            "local_step": averager.local_step,
            "rounds": averager.global_step or 0,
            "sites": len(receipt.members) if receipt is not None and receipt.averaged else 1,
            "ranks": trainer.size,
        }


def main() -> None:
    """Trains until torchrun ends this process."""
    story, site = Story.read(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    trainer = Trainer(story, site)
    first = trainer.weights()
    if trainer.rank:
        trainer.follow()
        return
    addresses = story.sites[site]
    publisher = WeightPublisher(run_id=RUN_ID)
    publisher.publish_now(first, trainer.averager.local_step)
    server = EventLoopThread(RpcServer(local(addresses.publisher), [publisher]), "the publisher")
    ModelWorker("actor", {"actor": Actor(trainer, publisher)}, listen=local(addresses.actor)).run()
    server.close()


if __name__ == "__main__":
    main()

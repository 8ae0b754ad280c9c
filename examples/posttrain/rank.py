"""One rank of the site, started by torchrun: it trains its part of the model with FSDP2 on the batches of the feed.

    torchrun --rdzv-backend=averaging … -m examples.posttrain.rank STORY

After each step rank 0 publishes the weights, whose version is the number of the step. A site that is started again goes
on from its last checkpoint, and the feed delivers the batches after it once more.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from averaging import DecentralizedAverager, LocalSGD, WeightPublisher
from averaging.rl.feed import Batch, BatchFeed, Registration
from averaging.rpc import EventLoopThread, RpcServer
from examples.posttrain.model import policy_loss, tensors_of
from examples.posttrain.story import CHECKPOINT_STEPS, GROUP_SIZE, GROUPS, MAX_TOKENS, RUN_ID, Events, Story, local


class Trainer:
    """The training of one rank. All ranks call the same methods in the same order."""

    def __init__(self, story: Story) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._story = story
        self.model = AutoModelForCausalLM.from_pretrained(story.model, dtype=torch.float32, local_files_only=True)
        self.step = self._resume()
        mesh = init_device_mesh("cpu", (self.size,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.averager = DecentralizedAverager(
            torch.optim.AdamW(self.model.parameters(), lr=3e-3),
            model=self.model,
            run_id=RUN_ID,
            listen=local(story.ports.averager),
            strategy=LocalSGD(sync_every=50),  # with other sites, if some join
            process_group=dist.group.WORLD,
            group_wait=1.0,
        )

    def _resume(self) -> int:
        """Loads the last checkpoint, and returns its step; 0 without one."""
        if not self._story.checkpoint.exists():
            return 0
        tensors = load_file(self._story.checkpoint)
        step = int(tensors.pop("step"))
        self.model.load_state_dict(tensors)
        return step

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights; the model is small, so every rank may hold them for a moment."""
        state = self.model.state_dict()
        return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}

    def train(self, batch: Batch) -> float:
        """One step on this rank's sequences; returns the loss."""
        part = {name: tensor.chunk(self.size)[self.rank] for name, tensor in tensors_of(batch.groups).items()}
        loss = policy_loss(self.model, part)
        self.averager.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.averager.step()
        self.step = batch.step
        return loss.item()

    def save(self, weights: dict[str, torch.Tensor]) -> None:
        """Writes a checkpoint in one step."""
        new = self._story.checkpoint.with_suffix(".new")
        save_file({**weights, "step": torch.tensor(self.step)}, new)
        new.replace(self._story.checkpoint)


def summary_of(batch: Batch) -> dict[str, Any]:
    """What is reported of a batch."""
    scores = [score for group in batch.groups for score in group["scores"]]
    return {
        "reward": sum(scores) / len(scores),
        "versions": sorted({version for versions in batch.versions for version in versions}),
        "unversioned": sum(not versions for versions in batch.versions),
        "ages": [age for age in batch.ages if age is not None],
        "batch": hashlib.sha256(json.dumps(batch.groups).encode()).hexdigest()[:16],
    }


def main() -> None:
    """Trains until the last step."""
    story = Story.read(Path(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    trainer = Trainer(story)
    events = Events(story.path, f"rank-{trainer.rank}")
    publisher = WeightPublisher(run_id=RUN_ID)
    weights = trainer.weights()
    server = None
    if trainer.rank == 0:
        publisher.publish_now(weights, trainer.step)
        server = EventLoopThread(RpcServer(local(story.ports.publisher), [publisher]), "the publisher")
    events.add("ready", rank=trainer.rank, pid=os.getpid(), world=trainer.size, step=trainer.step)
    registration = Registration(
        wandb_group="posttrain",
        wandb_project="posttrain",
        batch_size=GROUPS * GROUP_SIZE,
        max_token_len=MAX_TOKENS,
        checkpoint_dir=str(story.path),
        save_checkpoint_interval=CHECKPOINT_STEPS,
        starting_step=trainer.step,
        num_steps=story.steps,
    )
    with BatchFeed(f"http://{local(story.ports.feed)}", registration, weights=publisher, poll=0.05) as feed:
        for batch in feed:
            loss = trainer.train(batch)
            weights = trainer.weights()
            if trainer.rank:
                continue
            publisher.publish_now(weights, trainer.step)
            if trainer.step % CHECKPOINT_STEPS == 0:
                trainer.save(weights)
            events.add("step", step=trainer.step, loss=loss, **summary_of(batch))
    finish = trainer.averager.finish(30.0)
    if server is not None:
        digest = publisher.digest
        events.add("finished", version=publisher.version, digest=digest and digest.hex(), text=str(finish))
        while publisher.followers:  # the engine takes the last version, and is ended by the driver
            time.sleep(0.2)
        server.close()


if __name__ == "__main__":
    main()

"""The processes beside those that train: `python -m tests.endurance.workers '{"role": …}'`.

- `follower` follows the published weights: it prints `version` with the digest of the model's bytes;
- `synchronizer` serves the weights to the explorers;
- `learner` trains the batches of the feed, each exactly once over all of its lives, and sets the weights after each:
  it prints `batch` with the numbers of its groups, and `version`;
- `explorer` follows the weights and posts groups: it prints `version`, and `posted` with the number of a group.
"""

from tests.endurance import hooked  # isort: skip  # before everything that reads the clock

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from averaging import TLSFiles, WeightFollower
from averaging.errors import AveragingError
from averaging.rl.feed import BatchFeed, FeedEnvironment, RegisterEnv, Registration, ScoredData
from averaging.rl.synchronizer import RunningStatus, Synchronizer, SynchronizerConfig
from averaging.rl.synchronizer.remote import RemoteSynchronizer
from averaging.rpc import RpcServer, read_credentials
from tests.endurance.trainer import Model, tell

PAUSE = 0.5
GROUP_SIZE, GROUPS = 2, 2
"""Sequences of a group, and groups of a batch."""

SIZE = 10_000


def tls_of(files: dict[str, str]) -> TLSFiles:
    return TLSFiles(files["tls_ca"], files["tls_cert"], files["tls_key"])


async def serve(options: dict[str, Any]) -> None:
    """Serves a synchronizer, whose version survives it."""
    files = options["files"]
    credentials = read_credentials(tls=tls_of(files), token_file=files["token_file"])
    folder = Path(options["folder"]) / "synchronizer"
    folder.mkdir(exist_ok=True)
    config = SynchronizerConfig(checkpoint_dir=str(folder), silence_timeout=10.0)
    async with (
        Synchronizer(config=config) as synchronizer,
        RpcServer(options["listen"], [synchronizer], advertise=options["advertise"], credentials=credentials),
    ):
        tell("ready", version=synchronizer.model_version)
        await asyncio.Event().wait()


@asynccontextmanager
async def connected(options: dict[str, Any]) -> AsyncIterator[RemoteSynchronizer]:
    files = options["files"]
    connection = Synchronizer.connect(
        options["synchronizer"], name=options["name"], tls=tls_of(files), token_file=files["token_file"]
    )
    async with connection as synchronizer:
        yield synchronizer


def save(path: Path, step: int) -> None:
    """Replaces the file of the last trained step as a whole."""
    new = path.with_suffix(".new")
    with new.open("w") as file:
        file.write(str(step))
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


async def learn(options: dict[str, Any]) -> None:
    """Trains batch after batch."""
    checkpoint = Path(options["folder"]) / "learner"
    registration = Registration(
        wandb_group="endurance",
        wandb_project="endurance",
        batch_size=GROUP_SIZE * GROUPS,
        max_token_len=64,
        checkpoint_dir="",
        save_checkpoint_interval=1,
        starting_step=int(checkpoint.read_text()) if checkpoint.exists() else 0,
        num_steps=-1,
    )
    feed = BatchFeed(options["feed"], registration, retry_timeout=3600.0, **options["files"], timeout=10.0)
    tell("ready", step=registration.starting_step)
    weights = asyncio.create_task(set_weights(options, steps := asyncio.Queue[int](1)))
    while True:
        batch = await asyncio.to_thread(next, feed)
        tell("batch", step=batch.step, groups=[group["tokens"][0][0] for group in batch.groups])
        save(checkpoint, batch.step)
        if steps.full():
            steps.get_nowait()
        steps.put_nowait(batch.step)
        if weights.done():
            weights.result()


async def set_weights(options: dict[str, Any], steps: asyncio.Queue[int]) -> None:
    """Sets the weights of each step as long as the synchronizer can be reached."""
    while True:
        try:
            async with connected(options) as synchronizer:
                await synchronizer.set_trainer_status(RunningStatus.RUNNING)
                while True:
                    step = await steps.get()
                    state = {"w": torch.full((SIZE,), float(step))}
                    version = await synchronizer.set_model_state_dict(state, step)
                    tell("version", version=version, digest=str(step))
        except AveragingError as error:
            tell("failure", message=f"weights: {error}")
            await asyncio.sleep(PAUSE)


async def explore(options: dict[str, Any]) -> None:
    """Gets the weights and posts groups."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(get_weights(options))
        tasks.create_task(post_groups(options))


async def get_weights(options: dict[str, Any]) -> None:
    version, told = 0, False
    while True:
        try:
            async with connected(options) as synchronizer:
                await synchronizer.set_explorer_status(RunningStatus.RUNNING)
                if not told:
                    tell("ready")
                    told = True
                while True:
                    await synchronizer.wait_new_model_state_dict(version)
                    state, found = await synchronizer.get_model_state_dict()
                    if isinstance(state, dict) and found != version:
                        values = sorted(set(state["w"].tolist()))
                        tell("version", version=found, digest=",".join(f"{value:.0f}" for value in values[:3]))
                        version = found
                    else:
                        await asyncio.sleep(PAUSE)
        except AveragingError as error:
            tell("failure", message=f"weights: {error}")
            await asyncio.sleep(PAUSE)


async def post_groups(options: dict[str, Any]) -> None:
    environment = FeedEnvironment(
        options["feed"],
        RegisterEnv(max_token_length=64, desired_name=options["name"], weight=1.0, group_size=GROUP_SIZE),
        key=options["name"],
        **options["files"],
        timeout=10.0,
        retry_timeout=3600.0,
    )
    number = (1000 * options["slot"] + options["life"]) * 100_000
    while True:
        number += 1
        tokens = [[number] * 3 for _ in range(GROUP_SIZE)]
        group = ScoredData(tokens=tokens, masks=tokens, scores=[0.5] * GROUP_SIZE)
        await asyncio.to_thread(environment.post, group, key=str(number))
        tell("posted", group=number)
        await asyncio.sleep(2 * PAUSE)


async def follow(options: dict[str, Any]) -> None:
    await asyncio.to_thread(follow_weights, options)


def follow_weights(options: dict[str, Any]) -> None:
    model, files = Model(options["slots"]), options["files"]
    security: dict[str, Any] = {"tls": tls_of(files), "token_file": files["token_file"]}
    with WeightFollower(model, join=[options["join"]], run_id="gradients", join_timeout=60.0, **security) as weights:
        tell("ready")
        while True:
            try:
                changed = weights.update(timeout=1.0)
            except AveragingError as error:
                tell("failure", message=str(error))
                continue
            if changed:
                found = hashlib.sha256(b"".join(part.detach().numpy().tobytes() for part in model.parameters()))
                tell("version", version=weights.version, digest=found.hexdigest()[:16])


def main() -> None:
    hooked.obey()
    torch.set_num_threads(1)
    options = json.loads(sys.argv[1])
    roles = {"synchronizer": serve, "learner": learn, "explorer": explore, "follower": follow}
    asyncio.run(roles[options["role"]](options))


if __name__ == "__main__":
    main()

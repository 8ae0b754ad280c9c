"""The master of a site: it drives the reward and the actor, step by step, and goes on when the actor comes back.

python -m examples.posttrain.master STORY SITE
"""

from __future__ import annotations

import sys
import time

from averaging.errors import WorkerError
from averaging.rl.workers import Call, MasterWorker, Model, Plan
from examples.posttrain.story import GROUPS, Events, Story, local

AGAIN = 0.5
"""Seconds until a step that has failed is tried again."""


def plan_of(actor: str, reward: str) -> Plan:
    """The reward is computed by a rule (`rew_inf`), then the actor trains."""
    return Plan(
        workers={"actor": actor, "reward": reward},
        models=(Model("actor", ("actor",)), Model("reward", ("reward",))),
        calls=(
            Call("rew_inf", "reward", "inference", inputs=("sequence",), outputs=("reward",)),
            Call("actor_train", "actor", "train_step", inputs=("sequence", "logprob", "reward")),
        ),
        batch_size=GROUPS,
        data_keys=("sequence", "logprob"),
    )


def main() -> None:
    """Makes steps until the actor has made all of its own."""
    story, site = Story.read(sys.argv[1]), int(sys.argv[2])
    events, addresses = Events(story.path, f"site-{site + 1}-master"), story.sites[site]
    with MasterWorker(plan_of(local(addresses.actor), local(addresses.reward)), attach_timeout=120.0) as master:
        while True:
            try:
                master.initialize()
                result = master.step()
            except WorkerError as error:
                events.add("waits", reason=str(error))
                time.sleep(AGAIN)
                continue
            stats = result.stats["actor_train"]
            if "local_step" in stats:
                events.add("step", ids=result.samples, **stats)
            if stats["done"]:
                return


if __name__ == "__main__":
    main()

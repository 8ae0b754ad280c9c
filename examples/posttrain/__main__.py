"""Decentralized post-training: two elastic sites learn to sort digits by reinforcement, and survive kills.

    python -m examples.posttrain

Each site is a torchrun job of two nodes with FSDP2, whose steps a master drives. Two explorers of each site follow its
weights, answer prompts, and post scored answers to the site's feed. The sites average with DiLoCo. On the way an
explorer, a rank, a whole node and a feed are killed. At the end the promises are checked against what was measured.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import httpx
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from examples.children import ending_children
from examples.command_line import positive
from examples.outputs import write_plot
from examples.posttrain.alone import train_alone
from examples.posttrain.explorer import digest_of
from examples.posttrain.kills import Kills
from examples.posttrain.plot import draw
from examples.posttrain.policy import Policy, accuracy, prompts_of, warm_up
from examples.posttrain.processes import EXPLORERS, Processes
from examples.posttrain.record import Record
from examples.posttrain.screen import Screen
from examples.posttrain.story import Story, free_sites, local
from examples.posttrain.telling import StoryError, tell_in
from examples.posttrain.verdict import Finding, on_accuracy, on_groups, on_kills, on_versions, on_weights

SITES = 2

WARM_UP = 40
"""Supervised steps before the story begins."""

TESTED = 1000
"""Prompts by which accuracy is measured."""

PATIENCE = 150.0
"""Seconds without a step of any site, or without the end of what was killed, after which the story fails."""


@ending_children()
def main(arguments: list[str] | None = None) -> None:
    """Runs the story. Exits with 1 if a promise was not kept."""
    parser = argparse.ArgumentParser(prog="python -m examples.posttrain", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=positive, default=240, help="local steps of each site (%(default)s)")
    parser.add_argument("--sync-every", type=positive, default=10, help="local steps between two rounds (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a short run: 160 steps, a round every 5")
    parser.add_argument("--seed", type=int, default=0, help="of policy and prompts (%(default)s)")
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/posttrain"), help="for logs, plot and weights (%(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.sync_every = 160, 5
    torch.set_num_threads(1)
    directory = options.directory.resolve()

    def tell_it(console: Console) -> list[Finding]:
        sites = free_sites(SITES)
        return tell(Story(str(directory), options.steps, options.sync_every, options.seed, sites), console)

    tell_in(directory, parser.prog, tell_it, f"plot: {directory / 'posttrain.png'}")


def tell(story: Story, console: Console) -> list[Finding]:
    """Runs the story and returns the verdict.

    Raises:
        StoryError: a process has ended by itself, or nothing happens any more.
    """
    record = Record(story.path / "events", SITES)
    file = story.write()
    with Screen(record, story.steps, console) as screen:
        policy = Policy(story.seed)
        warm_up(policy, WARM_UP, story.seed)
        save_file(policy.state_dict(), story.warm)
        test = prompts_of(TESTED, torch.Generator().manual_seed(story.seed + 1))
        start = accuracy(policy, test)
        screen.say(f"the policy solves {start:.0%} after a warm-up of {WARM_UP} supervised steps")
        with Processes(story, file) as processes:
            for site in range(SITES):
                processes.start_site(site)
            screen.say(f"{SITES} sites start: nodes, feeds, masters, rewards and explorers")
            kills = Kills(processes, record, screen, story.steps)
            follow(story, record, screen, kills, processes)
            waiting = settle(story, record, processes)
        screen.say("both sites have ended; one site trains alone, for comparison")
        alone = train_alone(policy, story.steps, story.seed, test)
        of_one, of_all = next(alone), next(alone)
    finals = [Policy(story.seed) for _ in range(SITES)]
    for site, final in enumerate(finals):
        final.load_state_dict(load_file(story.final(site)))
    write_plot(story.path / "posttrain.png", lambda file: draw(record, file))
    return [
        *on_accuracy(start, accuracy(finals[0], test), of_one, of_all),
        on_weights(record.sites, [digest_of(final) for final in finals]),
        *(one for number, site in enumerate(record.sites, 1) for one in on_versions(number, site, EXPLORERS)),
        *(on_groups(number, site, waiting[number - 1]) for number, site in enumerate(record.sites, 1)),
        *on_kills(record.kills, kills.count),
    ]


def follow(story: Story, record: Record, screen: Screen, kills: Kills, processes: Processes) -> None:
    """Carries out the kills until both sites have ended and all explorers have their last version."""
    moved, last = time.monotonic(), 0
    while True:
        time.sleep(0.2)
        record.update()
        kills.update()
        screen.update()
        if ended := processes.ended():
            raise StoryError(ended)
        steps = sum(len(site.steps) + len(site.versions) for site in record.sites)
        if steps > last:
            moved, last = time.monotonic(), steps
        if time.monotonic() > moved + PATIENCE:
            raise StoryError(f"nothing has happened for {PATIENCE:.0f} s; the logs are in {story.path / 'logs'}")
        ends = [
            len(site.versions) == EXPLORERS
            and all(one[-1]["version"] == site.published for one in site.versions.values())
            for site in record.sites
        ]
        if all(ends) and kills.idle:
            return


def settle(story: Story, record: Record, processes: Processes) -> list[int]:
    """Ends the explorers, and returns how many groups wait in the feeds once nothing moves any more."""
    for name in processes.names("explorer"):
        processes.kill(name)
    before: tuple[int, ...] = ()
    while True:
        record.update()
        waiting = [waiting_at(site.feed) for site in story.sites]
        now = (*waiting, *(len(site.fetched) for site in record.sites))
        if now == before:
            return waiting
        before = now
        time.sleep(1.0)


def waiting_at(port: int) -> int:
    """Groups in the queue of a feed."""
    return int(httpx.get(f"http://{local(port)}/status", timeout=10, trust_env=False).json()["queue_size"])


if __name__ == "__main__":
    main()

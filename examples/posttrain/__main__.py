"""Post-training on text from end to end: a random model learns to answer, and its parts are killed on the way.

    python -m examples.posttrain

A small model of transformers with a tokenizer that is made on the spot is trained by an elastic site of two ranks with
FSDP2. `averaging serve` follows its weights, `averaging rollouts` asks the engine the questions of an environment of
verifiers and scores the answers, and `averaging feed` hands them to the site in batches. All on this machine's CPU.
The engine, the feed and a rank are killed; at the end the promises are checked against what was measured.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.text import Text

from examples.children import ending_children
from examples.command_line import positive
from examples.outputs import claim, clear
from examples.posttrain.model import write_model
from examples.posttrain.processes import ENGINE, FEED, Processes
from examples.posttrain.story import MAX_STALENESS, MODEL_NAME, EventReader, Story, local, new_ports
from examples.posttrain.verdict import (
    Finding,
    Step,
    mean_reward,
    on_answers,
    on_batches,
    on_kills,
    on_reward,
    on_versions,
    on_weights,
)

PATIENCE = 120.0
"""Seconds without a step after which the story fails."""

LOOK = 0.2
"""Seconds between two looks at what the processes report."""

PROGRESS = 5.0
"""Seconds between two lines of progress."""

AWAY = 3.0
"""Seconds until what was killed is started again."""


class StoryError(Exception):
    """The story cannot go on."""


@ending_children()
def main(arguments: list[str] | None = None) -> None:
    """Runs the story. Exits with 1 if a promise was not kept."""
    parser = argparse.ArgumentParser(prog="python -m examples.posttrain", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=positive, default=70, help="steps of the training (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a short run: 50 steps")
    parser.add_argument("--seed", type=int, default=0, help="of the model's random weights (%(default)s)")
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/posttrain"), help="for logs and weights (%(default)s)"
    )
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # some terminals' encodings lack "…"
    console = Console(highlight=False)
    directory = options.directory.resolve()
    story = Story(str(directory), 50 if options.quick else options.steps, options.seed, new_ports())
    try:
        claim(directory)
        if story.file.exists():
            clear(directory)
        for name in ("events", "logs"):
            (directory / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"{parser.prog}: cannot write to {directory}: {error.strerror}; give another --directory")
    try:
        findings = Telling(story, console).tell()
    except KeyboardInterrupt:
        console.print("Stopped; all processes have ended.")
        sys.exit(130)
    except StoryError as error:
        sys.exit(f"{parser.prog}: {error}")
    console.print()
    for finding in findings:
        verdict = "kept  " if finding.kept else "BROKEN"
        console.print(f"{verdict}  {finding.text}", style="" if finding.kept else "bold red", soft_wrap=True)
    sys.exit(not all(finding.kept for finding in findings))


class Telling:
    """One run of the story."""

    def __init__(self, story: Story, console: Console) -> None:
        self._story, self._console = story, console
        self._began = time.monotonic()
        self._said = self._moved = self._began
        self._events = EventReader(story.path)
        self._steps: list[Step] = []
        self._ready: dict[str, Any] = {}  # the last start of rank 1
        self._finished: dict[str, Any] | None = None
        self._kills: dict[str, float] = {}

    def tell(self) -> list[Finding]:
        """Runs it, and returns the verdict.

        Raises:
            StoryError: a process has ended by itself, or nothing happens any more.
        """
        story = self._story
        story.write()
        parameters = write_model(story.model, story.seed)
        self._say(f"a random model with {parameters:,} parameters is in {story.model}")
        with Processes(story) as processes:
            processes.start_site()
            processes.start_feed()
            processes.start_engine()
            processes.start_rollouts()
            self._say("site, feed, engine and rollouts start")
            self._at(processes, 0.3)
            known = self._steps[-1].step + MAX_STALENESS  # no engine had newer weights when it was killed
            newer = lambda _: max(self._steps[-1].versions, default=0) > known  # noqa: E731
            self._kill(processes, "the engine", lambda: processes.kill(ENGINE), processes.start_engine, newer)
            self._at(processes, 0.5)
            stepped = lambda since: self._steps[-1].at > since  # noqa: E731
            self._kill(processes, "the feed", lambda: processes.kill(FEED), processes.start_feed, stepped)
            self._at(processes, 0.7)
            restarted = lambda since: self._steps[-1].at > self._ready["at"] > since  # noqa: E731
            self._kill(processes, "a rank", self._kill_rank, None, restarted)
            self._until(processes, lambda: self._finished is not None)
            finished = self._finished or {}
            served = self._served(processes, finished["version"])
            self._say(f"the engine serves the last version, {served['weight_version']}")
            answers = dict(self._answers())
        return [
            on_reward(self._steps),
            on_answers(answers),
            on_versions(self._steps),
            on_batches(self._steps, story.steps),
            on_weights(finished, served),
            *on_kills(self._kills),
        ]

    def _at(self, processes: Processes, part: float) -> None:
        """Waits until that part of the steps is made."""
        self._until(processes, lambda: bool(self._steps) and self._steps[-1].step >= part * self._story.steps)

    def _kill(
        self,
        processes: Processes,
        what: str,
        kill: Callable[[], None],
        start: Callable[[], None] | None,
        works: Callable[[float], bool],
    ) -> None:
        """Kills something, starts it again, and waits until it works.

        Args:
            processes: of the story.
            what: for the reader.
            kill: kills it.
            start: starts it again; None if it is started again without that.
            works: is asked with the time of its start, in seconds since the epoch.
        """
        killed, since = time.monotonic(), time.time()
        self._say(f"step {self._steps[-1].step}: {what} is killed without warning (SIGKILL)", "bold red")
        kill()
        if start is not None:
            self._until(processes, lambda: time.monotonic() > killed + AWAY)
            start()
            since = time.time()
        self._until(processes, lambda: works(since))
        self._kills[what] = time.monotonic() - killed
        self._say(f"{what} is at work again after {self._kills[what]:.1f} s", "green")

    def _kill_rank(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._ready["pid"], signal.SIGKILL)

    def _until(self, processes: Processes, condition: Callable[[], bool]) -> None:
        while not condition():
            time.sleep(LOOK)
            self._update()
            if ended := processes.ended():
                raise StoryError(ended)
            if self._finished is None and time.monotonic() > self._moved + PATIENCE:
                raise StoryError(f"no step for {PATIENCE:.0f} s; the logs are in {self._story.path / 'logs'}")

    def _update(self) -> None:
        for event in self._events.new():
            match event["event"]:
                case "ready" if event["rank"]:
                    self._ready = event
                    self._say(f"the site trains with {event['world']} ranks, from step {event['step']}")
                case "finished":
                    self._finished = event
                case "step":
                    self._moved = time.monotonic()
                    self._steps.append(Step.of(event))
        if self._steps and time.monotonic() > self._said + PROGRESS:
            self._said = time.monotonic()
            last = self._steps[-8:]
            ages = [age for step in last for age in step.ages]
            self._say(
                f"step {last[-1].step:3} of {self._story.steps}: reward {mean_reward(last):.2f} of 1, answers of "
                f"version {last[-1].shown_versions}, {max(ages, default=0)} versions old at most"
            )

    def _served(self, processes: Processes, version: int) -> dict[str, Any]:
        """What the engine says of its weights, once it has the last version."""
        info: dict[str, Any] = {}

        def is_last() -> bool:
            info.update(self._engine("GET", "/weight_info"))
            return bool(info["weight_version"] == str(version))

        self._until(processes, is_last)
        return info

    def _answers(self) -> Iterator[tuple[str, str]]:
        """The most probable answer of the engine to each question."""
        for digit in "0123456789":
            asked = {
                "model": MODEL_NAME,
                "messages": [{"role": "user", "content": digit}],
                "temperature": 0,
                "max_tokens": 3,
            }
            yield digit, self._engine("POST", "/v1/chat/completions", asked)["choices"][0]["message"]["content"]

    def _engine(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        url = f"http://{local(self._story.ports.engine)}{path}"
        answer: dict[str, Any] = httpx.request(method, url, json=body, timeout=30, trust_env=False).json()
        return answer

    def _say(self, line: str, style: str = "") -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        self._console.print(Text(f"{minutes}:{seconds:02}  {line}", style), soft_wrap=True)


if __name__ == "__main__":
    main()

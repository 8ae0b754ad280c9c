"""Post-training on text from end to end: a random model learns to answer, and its engine is killed on the way.

    python -m examples.posttrain_text

A small model of transformers with a tokenizer that is made on the spot is trained by an elastic site of two ranks with
FSDP2. `averaging serve` follows its weights, `averaging rollouts` asks the engine the questions of an environment of
verifiers and scores the answers, and `averaging feed` hands them to the site in batches. All on this machine's CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.text import Text

from examples.children import ending_children
from examples.command_line import positive
from examples.posttrain.story import local
from examples.posttrain.telling import StoryError, tell_in
from examples.posttrain.verdict import Finding
from examples.posttrain_text.model import write_model
from examples.posttrain_text.processes import ENGINE, TextProcesses
from examples.posttrain_text.story import MAX_STALENESS, MODEL_NAME, Story, new_ports
from examples.posttrain_text.verdict import Step, findings_of

PATIENCE = 120.0
"""Seconds without a step after which the story fails."""

LOOK = 0.2
"""Seconds between two looks at what the processes report."""

PROGRESS = 5.0
"""Seconds between two lines of progress."""

AWAY = 3.0
"""Seconds until the killed engine is started again."""


@dataclass
class Record:
    """What the ranks have reported.

    Attributes:
        steps: the steps of the training.
        finished: the end at rank 0; None before.
    """

    steps: list[Step] = field(default_factory=list)
    finished: dict[str, Any] | None = None


@ending_children()
def main(arguments: list[str] | None = None) -> None:
    """Runs the story. Exits with 1 if a promise was not kept."""
    parser = argparse.ArgumentParser(prog="python -m examples.posttrain_text", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=positive, default=70, help="steps of the training (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a short run: 50 steps")
    parser.add_argument("--seed", type=int, default=0, help="of the model's random weights (%(default)s)")
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/posttrain_text"), help="for logs and weights (%(default)s)"
    )
    options = parser.parse_args(arguments)
    directory = options.directory.resolve()
    steps = 50 if options.quick else options.steps

    def tell(console: Console) -> list[Finding]:
        return Telling(Story(str(directory), steps, options.seed, new_ports()), console).tell()

    tell_in(directory, parser.prog, tell)


class Telling:
    """One run of the story."""

    def __init__(self, story: Story, console: Console) -> None:
        self._story, self._console = story, console
        self._record, self._began = Record(), time.monotonic()
        self._read = 0  # bytes of the events of rank 0
        self._said = self._moved = self._began

    def tell(self) -> list[Finding]:
        """Runs it, and returns the verdict.

        Raises:
            StoryError: a process has ended by itself, or nothing happens any more.
        """
        story = self._story
        story.write()
        parameters = write_model(story.model, story.seed)
        self._say(f"a random model with {parameters:,} parameters is in {story.model}")
        with TextProcesses(story) as processes:
            processes.start_site()
            processes.start_feed()
            processes.start_engine()
            processes.start_rollouts()
            self._say("site, feed, engine and rollouts start")
            self._until(processes, lambda: len(self._record.steps) >= 0.4 * story.steps)
            version = self._record.steps[-1].step
            killed = time.monotonic()
            processes.kill(ENGINE)
            self._say(f"the engine is killed without warning (SIGKILL) at step {version}", "bold red")
            self._until(processes, lambda: time.monotonic() > killed + AWAY)
            processes.start_engine()
            self._until(processes, self._trains_newer_than(version + MAX_STALENESS))
            away = time.monotonic() - killed
            self._say(f"the engine is back: after {away:.1f} s its answers are trained again", "green")
            self._until(processes, lambda: self._record.finished is not None)
            finished = self._record.finished or {}
            served = self._served(processes, finished["version"])
            self._say(f"the engine serves the last version, {served['weight_version']}")
            answers = dict(self._answers())
        return findings_of(self._record.steps, finished, served, answers, away)

    def _trains_newer_than(self, version: int) -> Callable[[], bool]:
        """Whether a step was trained on answers of newer weights, which no engine had when it was killed."""
        return lambda: any(max(step.versions, default=0) > version for step in self._record.steps[-3:])

    def _until(self, processes: TextProcesses, condition: Callable[[], bool]) -> None:
        while not condition():
            time.sleep(LOOK)
            self._update()
            if ended := processes.ended():
                raise StoryError(ended)
            if self._record.finished is None and time.monotonic() > self._moved + PATIENCE:
                raise StoryError(f"no step for {PATIENCE:.0f} s; the logs are in {self._story.path / 'logs'}")

    def _update(self) -> None:
        for event in self._new_events():
            if event["event"] == "ready":
                self._say(f"the site trains with {event['world']} ranks, from step {event['step']}")
            elif event["event"] == "finished":
                self._record.finished = event
            elif event["event"] == "step":
                self._moved = time.monotonic()
                self._record.steps.append(Step.of(event))
        if self._record.steps and time.monotonic() > self._said + PROGRESS:
            self._said = time.monotonic()
            last = self._record.steps[-8:]
            reward = sum(step.reward for step in last) / len(last)
            ages = [age for step in last for age in step.ages]
            self._say(
                f"step {last[-1].step:3} of {self._story.steps}: reward {reward:.2f} of 1, answers of version "
                f"{last[-1].shown_versions}, {max(ages, default=0)} versions old at most"
            )

    def _new_events(self) -> Iterator[dict[str, Any]]:
        file = self._story.path / "events" / "rank-0.jsonl"
        if file.exists():
            with file.open("rb") as lines:
                lines.seek(self._read)
                content = lines.read()
            whole = content[: content.rfind(b"\n") + 1]  # a killed process may leave half a line
            self._read += len(whole)
            yield from map(json.loads, whole.splitlines())

    def _served(self, processes: TextProcesses, version: int) -> dict[str, Any]:
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

"""The verdict of the post-training story, and how it reads what its processes report."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from examples.posttrain.story import EventReader, Events
from examples.posttrain.verdict import Step, on_answers, on_batches, on_kills, on_reward, on_versions, on_weights


def steps(rewards: Sequence[float], unversioned: int = 0, age: int = 1) -> list[Step]:
    return [
        Step(float(number), number, reward, [number], unversioned, [age], f"batch {number}")
        for number, reward in enumerate(rewards, 1)
    ]


RISING = steps([0.01 * number for number in range(60)])


def test_the_verdict_finds_what_is_broken() -> None:
    assert on_reward(RISING).kept
    assert not on_reward(steps([0.3] * 60)).kept
    assert on_versions(RISING).kept
    assert not on_versions(steps([0.3], unversioned=1)).kept
    assert not on_versions(steps([0.3], age=5)).kept
    assert on_answers({str(digit): str((digit + 1) % 10) for digit in range(10)}).kept
    assert not on_answers({str(digit): "1" for digit in range(10)}).kept
    assert on_weights({"version": 60, "digest": "ab"}, {"digest": "ab"}).kept
    assert not on_weights({"version": 60, "digest": "ab"}, {"digest": "cd"}).kept
    assert [finding.kept for finding in on_kills({"the engine": 9.0, "the feed": 301.0})] == [True, False]


def test_batches_that_are_missing_or_used_twice_break_the_promise() -> None:
    assert on_batches(RISING, 60).kept
    assert on_batches([*RISING[:35], *RISING[30:]], 60).kept  # a restart: five steps are made again
    assert not on_batches(RISING[1:], 60).kept
    assert not on_batches(RISING, 61).kept
    assert not on_batches([*RISING, replace(RISING[-1], batch="another one")], 60).kept
    assert not on_batches([*RISING[:-1], replace(RISING[-1], batch="batch 3")], 60).kept


def test_events_are_read_once_and_half_a_line_waits(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    reader = EventReader(tmp_path)
    for process in ("rank-1", "rank-0"):
        Events(tmp_path, process).add("ready", process=process)
    file = tmp_path / "events" / "rank-0.jsonl"
    line = file.read_text()
    file.write_text(line + line[:10])
    assert [event["process"] for event in reader.new()] == ["rank-1", "rank-0"]  # in the order of time
    assert reader.new() == []
    file.write_text(line + line)
    assert [event["process"] for event in reader.new()] == ["rank-0"]

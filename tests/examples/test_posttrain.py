"""The pure parts of the post-training example: the rule, the advantages, the verdict, and reading events."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from averaging.errors import ConfigError
from examples.posttrain.__main__ import main
from examples.posttrain.master import plan_of
from examples.posttrain.policy import (
    DIGITS,
    Policy,
    advantages_of,
    generate,
    logprobs_of,
    policy_loss,
    prompts_of,
    rewards_of,
    solved,
)
from examples.posttrain.record import Kill, Record, SiteRecord
from examples.posttrain.story import Story, free_sites
from examples.posttrain.verdict import on_accuracy, on_groups, on_kills, on_versions, on_weights


def test_the_rule_counts_digits_at_their_place() -> None:
    prompts = prompts_of(3, torch.Generator().manual_seed(0))
    right = solved(prompts)
    assert rewards_of(right).tolist() == [2.0] * 3
    wrong = right.clone()
    wrong[0, -1] = (wrong[0, -1] + 1) % 10
    assert rewards_of(wrong)[0].item() == pytest.approx((DIGITS - 1) / DIGITS)


def test_generation_keeps_the_prompt_and_is_repeatable() -> None:
    policy, prompts = Policy(0), prompts_of(4, torch.Generator().manual_seed(0))
    first, again = (generate(policy, prompts, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(first[:, : DIGITS + 1], prompts)
    assert first.max() < 11


def test_advantages_are_relative_to_the_group() -> None:
    rewards = torch.tensor([[0.0, 2.0], [1.0, 1.0]])
    advantages = advantages_of(rewards)
    assert torch.allclose(advantages.mean(dim=1), torch.zeros(2))
    assert advantages[0, 1] > 0
    assert advantages[1].tolist() == [0.0, 0.0]


def test_the_loss_makes_a_better_answer_more_likely() -> None:
    policy, prompts = Policy(0), prompts_of(2, torch.Generator().manual_seed(0))
    sequences = generate(policy, prompts, torch.Generator().manual_seed(1))
    old = logprobs_of(policy, sequences).detach()
    torch.autograd.backward(policy_loss(policy, sequences, old, torch.tensor([1.0, -1.0])))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.01 * parameter.grad)
        new = logprobs_of(policy, sequences)
    assert new[0].sum() > old[0].sum()
    assert new[1].sum() < old[1].sum()


def record_of(*, posted: str, fetched: list[str], trained: list[str]) -> SiteRecord:
    """Groups are letters; each string of a list is one batch or step."""
    site = SiteRecord()
    site.begun = site.posted = [{"ids": list(posted)}]
    site.fetched = [{"ids": list(batch)} for batch in fetched]
    site.steps = [{"ids": list(step)} for step in trained]
    return site


@pytest.mark.parametrize(
    ("site", "waiting", "kept"),
    [
        (record_of(posted="abcd", fetched=["ab", "cd"], trained=["ab", "cd"]), 0, True),
        (record_of(posted="abcd", fetched=["ab"], trained=["ab"]), 2, True),
        (record_of(posted="abcd", fetched=["ab"], trained=[]), 2, True),
        (record_of(posted="abcd", fetched=["ab"], trained=["ab"]), 1, False),  # lost
        (record_of(posted="abcd", fetched=["ab", "bc"], trained=["ab"]), 1, False),  # fetched twice
        (record_of(posted="abcd", fetched=["ab", "cd"], trained=["ab", "ab"]), 0, False),  # trained twice
        (record_of(posted="ab", fetched=["ab", "x"], trained=["ab"]), 0, False),  # nobody posted it
        (record_of(posted="abcd", fetched=["ab"], trained=["cd"]), 2, False),  # trained and not fetched
    ],
)
def test_groups_that_are_lost_or_used_twice_break_the_promise(site: SiteRecord, waiting: int, kept: bool) -> None:
    assert on_groups(1, site, waiting).kept == kept


@pytest.mark.parametrize(("versions", "kept"), [([1, 2, 5], True), ([1, 3, 2, 5], False), ([1, 2], False)])
def test_versions_only_grow_and_end_with_the_last(versions: list[int], kept: bool) -> None:
    site = SiteRecord(published=5, versions={"explorer": [{"version": version} for version in versions]})
    [finding] = on_versions(1, site, 1)
    assert finding.kept == kept
    assert not all(finding.kept for finding in on_versions(1, site, 2))


def test_the_rest_of_the_verdict() -> None:
    ended = SiteRecord(finished={"alike": True})
    assert on_weights([ended, ended], ["aa", "aa"]).kept
    assert not on_weights([ended, ended], ["aa", "bb"]).kept
    assert not on_weights([ended, SiteRecord()], ["aa", "aa"]).kept
    assert [one.kept for one in on_accuracy(0.5, 0.7, 0.6, 0.8)] == [True, True]
    assert [one.kept for one in on_accuracy(0.5, 0.4, 0.6, 0.8)] == [False, False]
    kills = [Kill("a rank", 0, 10.0, 12.0), Kill("a node", 0, 20.0)]
    assert [one.kept for one in on_kills(kills, 3)] == [True, False, False]


def test_events_are_read_once_and_half_a_line_waits(tmp_path: Path) -> None:
    record = Record(tmp_path, 2)
    file = tmp_path / "site-2-master.jsonl"
    line = json.dumps({"at": 1.0, "event": "step", "ids": [], "local_step": 3, "rounds": 1})
    file.write_text(line + "\n" + line[:10])
    record.update()
    record.update()
    assert [site.local_step for site in record.sites] == [0, 3]
    assert len(record.sites[1].steps) == 1
    file.write_text(line + "\n" + line + "\n")
    record.update()
    assert len(record.sites[1].steps) == 2


def test_a_story_is_read_as_it_was_written(tmp_path: Path) -> None:
    story = Story(str(tmp_path), 10, 5, 0, free_sites(2))
    assert Story.read(str(story.write())) == story
    ports = [port for site in story.sites for port in (site.averager, site.averager + 1, site.feed, site.actor)]
    assert len(set(ports)) == len(ports)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main(["--directory", str(tmp_path / "file" / "inside")])
    assert "give another --directory" in str(ended.value)


def test_the_plan_has_two_calls_in_a_row() -> None:
    plan = plan_of("127.0.0.1:1", "127.0.0.1:2")
    assert [[call.name for call in level] for level in plan.levels] == [["rew_inf"], ["actor_train"]]
    with pytest.raises(ConfigError):
        plan.worker_of("critic")

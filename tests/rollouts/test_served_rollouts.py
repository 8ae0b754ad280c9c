"""Rollouts with the real `averaging serve`, whose weights change, and the real verifiers and feed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from averaging import WeightPublisher
from averaging.rl.rollouts import RolloutOptions, Rollouts, TruncatedMode, runner
from tests.engine.language_models import language_model, save_language_model
from tests.feed.feeds import Feed
from tests.rollouts.engines import Trainer
from tests.support.processes import averaging_process
from tests.weights.test_weights import Publishing

pytestmark = [pytest.mark.integrations, pytest.mark.asyncio, pytest.mark.timeout(300)]

GROUPS = 3


@torch.no_grad()
def logprobs_of(model: Any, tokens: list[int]) -> list[float]:
    """The model's log-probability of each token after the first."""
    logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1).tolist()


async def test_each_sample_has_the_version_and_the_logprobs_of_the_weights_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "ATTEMPTS", 20)
    save_language_model(tmp_path / "tiny")
    models = {version: language_model(seed=version) for version in (5, 6)}
    publisher = WeightPublisher()
    publisher.publish_now(models[5].state_dict(), 5)
    with (
        Publishing(publisher) as endpoint,
        averaging_process("serve", str(tmp_path / "tiny"), "--follow", endpoint, "--listen", "127.0.0.1:0") as server,
        Feed(tmp_path / "feed.sqlite") as feed,
        Trainer(feed.url, 2) as trainer,
    ):
        url = server.expect("ready")["url"].removesuffix("/v1")
        assert server.expect("version")["version"] == 5
        for version in models:
            if version == 6:
                publisher.publish_now(models[6].state_dict(), 6)
                assert server.expect("version")["version"] == 6
            options = RolloutOptions(
                environment="tests.rollouts.turns",
                environment_args={"turns": 2},
                engine=url,
                feed=feed.url,
                tokenizer=str(tmp_path / "tiny"),
                group_size=2,
                max_groups=GROUPS,
                truncated=TruncatedMode.TRAIN,
                # A byte that is no text by itself is another token in the next prompt; such rollouts are repeated.
                sampling={"max_tokens": 1, "temperature": 1.0},
            )
            await Rollouts(options).run()
        groups = trainer.wait(2 * GROUPS)
    assert [group["version"] for group in groups] == [5] * GROUPS + [6] * GROUPS
    for group in groups:
        for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            expected = [1.0, *logprobs_of(models[group["version"]], tokens)]
            assert sum(mask != -100 for mask in masks) >= 2
            for mask, given, wanted in zip(masks, logprobs, expected, strict=True):
                assert given == (1.0 if mask == -100 else pytest.approx(wanted, abs=1e-4))

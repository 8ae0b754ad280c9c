"""The processes of the story: the site, the feed, the engine, and what makes rollouts."""

from __future__ import annotations

from examples.posttrain.processes import ChildProcesses
from examples.posttrain.story import local
from examples.posttrain_text.story import (
    ANSWER_TOKENS,
    ENVIRONMENT,
    GROUP_SIZE,
    MAX_STALENESS,
    MODEL_NAME,
    RUN_ID,
    Story,
)

RANKS = 2
"""Processes of the site."""

SITE, FEED, ENGINE, ROLLOUTS = "site", "feed", "engine", "rollouts"


class TextProcesses(ChildProcesses):
    """All processes of the story."""

    def __init__(self, story: Story) -> None:
        super().__init__(story.path / "logs")
        self._story = story

    def may_end(self, name: str) -> bool:
        """The site ends after its last step."""
        return name == SITE

    def start_site(self) -> None:
        """Starts torchrun with the ranks; it starts them again if one fails."""
        self.start(
            SITE,
            "torch.distributed.run",
            "--nnodes=1",
            f"--nproc-per-node={RANKS}",
            "--rdzv-backend=averaging",
            f"--rdzv-endpoint={local(self._story.ports.rendezvous)}",
            "--rdzv-id=site",
            "--max-restarts=3",
            "--monitor-interval=0.2",
            "-m",
            "examples.posttrain_text.rank",
            str(self._story.file),
        )

    def start_feed(self) -> None:
        """Starts the feed, which refuses answers of old weights."""
        listen, store = f"--listen={local(self._story.ports.feed)}", f"--store={self._story.path / 'feed.sqlite'}"
        self.start(FEED, "averaging", "feed", listen, store, f"--max-staleness={MAX_STALENESS}", "--json")

    def start_engine(self) -> None:
        """Starts the engine, which follows the site."""
        self.start(
            ENGINE,
            "averaging",
            "serve",
            str(self._story.model),
            f"--name={MODEL_NAME}",
            f"--follow={local(self._story.ports.publisher)}",
            f"--run-id={RUN_ID}",
            f"--listen={local(self._story.ports.engine)}",
            "--batch=64",
            "--json",
        )

    def start_rollouts(self) -> None:
        """Starts what lets the engine answer the environment's questions, and posts the scored answers."""
        self.start(
            ROLLOUTS,
            "averaging",
            "rollouts",
            f"--environment={ENVIRONMENT}",
            f"--engine=http://{local(self._story.ports.engine)}",
            f"--feed=http://{local(self._story.ports.feed)}",
            f"--tokenizer={self._story.model}",
            f"--group-size={GROUP_SIZE}",
            f"--max-tokens={ANSWER_TOKENS}",
            "--truncated=train",
            "--concurrency=64",
            "--json",
        )

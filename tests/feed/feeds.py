"""Feed servers and ranks in separate processes, and test data for them."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from averaging.rl.feed import Batch, RegisterEnv, Registration, ScoredData
from tests.support.ports import free_address
from tests.support.processes import DEADLINE, JsonProcess, averaging_process


class Feed:
    """`averaging feed` as a context manager. It can be killed, and started again at the same address."""

    def __init__(self, store: Path, *options: str, listen: str | None = None) -> None:
        self._arguments = ["feed", "--store", str(store), *options]
        self._listen = listen or free_address()
        self._stack = ExitStack()
        self.start()

    def start(self) -> None:
        self.process = self._stack.enter_context(averaging_process(*self._arguments, "--listen", self._listen))
        self.url = str(self.process.expect("ready")["url"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def registration(batch_size: int = 4, **changes: Any) -> Registration:
    fields: dict[str, Any] = {
        "wandb_group": "group",
        "wandb_project": "project",
        "batch_size": batch_size,
        "max_token_len": 64,
        "checkpoint_dir": "checkpoints",
        "save_checkpoint_interval": 1,
        "starting_step": 0,
        "num_steps": 1000,
    }
    return Registration(**fields | changes)


def environment(group_size: int = 2, **changes: Any) -> RegisterEnv:
    fields: dict[str, Any] = {"max_token_length": 64, "desired_name": "env", "weight": 1.0, "group_size": group_size}
    return RegisterEnv(**fields | changes)


def a_group(name: int, size: int = 2, length: int = 3) -> ScoredData:
    """Returns a group whose tokens are its name."""
    tokens = [[name] * length for _ in range(size)]
    return ScoredData(tokens=tokens, masks=[[-100, *sequence[1:]] for sequence in tokens], scores=[0.5] * size)


def names(batch: Batch) -> list[int]:
    """Returns the names of the groups in a batch."""
    return [group["tokens"][0][0] for group in batch.groups]


def a_rank(
    rank: int, ranks: int, store: Path, url: str, registered: Registration, members: Sequence[int] = (), **options: Any
) -> JsonProcess:
    """Starts `feed_rank`, which iterates over a feed as one of `ranks` ranks or of the group `members`."""
    arguments = {"rank": rank, "ranks": ranks, "store": str(store), "url": url, "options": options, "members": members}
    arguments["registration"] = {name: getattr(registered, name) for name in registered.__struct_fields__}
    return JsonProcess("python", "-m", "tests.feed.rank", json.dumps(arguments))


__all__ = ["DEADLINE", "Feed", "a_group", "a_rank", "environment", "names", "registration"]

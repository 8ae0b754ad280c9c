"""Where a synchronizer gets states besides `set_model_state_dict`: the checkpoints of a trainer, and a peer."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from averaging.config import FilePath
from averaging.errors import ConfigError, StateError
from averaging.peer import Peer
from averaging.rl.synchronizer.coordination import MAX_VERSION
from averaging.rl.synchronizer.modules import POLL_SECONDS
from averaging.rl.synchronizer.state_stream import StateDict
from averaging.tensors import in_thread

NAME = "synchronizer_version.txt"

LATEST = "latest_state_dict_iteration.txt"
"""In it, a trainer writes the step of its newest checkpoint for explorers."""


logger = logging.getLogger("averaging.rl.synchronizer")


def read_number(path: Path) -> int | None:
    """Returns the number in a file; None if there is none, or it cannot be read now."""
    numbers = _read_numbers(path)
    return numbers[0] if len(numbers) == 1 else None


def _read_numbers(path: Path) -> list[int]:
    try:
        numbers = [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []
    return numbers if all(0 <= number <= MAX_VERSION for number in numbers) else []


class CheckpointFolder:
    """A trainer's checkpoints, and beside them the version of the synchronizer, so that it never goes back.

    The file `NAME` has the highest version that may have been handed out, and the step of the trainer that has it. It
    is written before such a version is handed out.

    Attributes:
        path: The folder; None if there is none, so that nothing is kept.
        version: The highest version that may have been handed out; 0 if none was.
        step: The step of that version; None if it is not known, as in the files of version 0.2.
    """

    def __init__(self, path: FilePath | None) -> None:
        self.path = None if path is None else Path(path)
        self.version, self.step = 0, None
        if self.path is not None and (self.path / NAME).exists():
            numbers = _read_numbers(self.path / NAME)
            if len(numbers) not in (1, 2):
                raise ConfigError(
                    f"{self.path / NAME} should hold the last version as a number; restore it, or write the version "
                    "into it"
                )
            self.version, self.step = numbers[0], numbers[1] if len(numbers) == 2 else None

    async def reserve(self, version: Callable[[], int], step: int | None) -> None:
        """Writes a version and its step to disk before it is handed out.

        The version may become a higher one while a lower one is written, so it is asked for again.
        """
        while self.path is not None and (wanted := version()) > self.version:
            try:
                await in_thread(partial(_write, self.path, f"{wanted}\n" if step is None else f"{wanted} {step}\n"))
            except OSError as error:
                raise StateError(f"the version cannot be kept in {self.path}: {error}; the former one stays") from None
            self.version = max(self.version, wanted)

    def weights(self, step: int | None) -> Path | None:
        return None if self.path is None or step is None else self.path / f"global_step_{step}" / "actor"


def _write(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path, temporary = folder / NAME, folder / f".{NAME}.tmp"
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


async def find_checkpoints(
    folder: Path, present: Callable[[], int | None], hand_out: Callable[[int], Awaitable[object]]
) -> None:
    """Calls `hand_out` for each new checkpoint that a trainer announces in its folder, again while it raises an error.

    A checkpoint of an earlier step is new too: the trainer has gone back to it. That of the `present` state is not.
    """
    seen, failed = None, None
    while True:
        step = await in_thread(lambda: read_number(folder / LATEST))
        if step is not None and step != seen:
            try:
                if step != present():
                    await hand_out(step)
                seen = step
            except (ConfigError, StateError) as error:
                if step != failed:
                    logger.warning("the checkpoint of step %d is not handed out: %s", step, error)
                failed = step
        await asyncio.sleep(POLL_SECONDS)


async def follow_peer(peer: Peer, publish: Callable[[StateDict, int], Awaitable[object]]) -> None:
    """Calls `publish` with a copy of the peer's tensors for each of its versions that is seen."""
    names = [spec.name for spec in peer.schema.tensors]

    def copy() -> StateDict:
        with peer.tensors() as tensors:
            return {name: tensor.cpu().clone() for name, tensor in zip(names, tensors, strict=True)}

    followed = -1
    while True:
        if peer.version > followed:
            followed = peer.version
            await publish(await in_thread(copy), followed)
        await asyncio.sleep(POLL_SECONDS)

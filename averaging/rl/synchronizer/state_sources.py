"""Where a synchronizer gets states besides `set_model_state_dict`: the checkpoints of a trainer, and a peer."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from averaging.errors import ConfigError, StateError
from averaging.peer import Peer
from averaging.rl.synchronizer.coordination import MAX_VERSION
from averaging.rl.synchronizer.modules import POLL_SECONDS
from averaging.rl.synchronizer.state_stream import StateDict
from averaging.tensors import in_thread

# Keeps the version of a synchronizer in its checkpoint folder, so that a restarted one does not go back.
#
# The file has the highest version that may have been handed out, and the step of the trainer that has it. It is written
# before such a version is handed out.


NAME = "synchronizer_version.txt"

LATEST = "latest_state_dict_iteration.txt"
"""In it, a trainer writes the step of its newest checkpoint for explorers."""


def read_number(path: Path) -> int | None:
    """Returns the number in a file; None if there is none, or it cannot be read now."""
    numbers = _read_numbers(path)
    return numbers[0] if numbers is not None and len(numbers) == 1 else None


def _read_numbers(path: Path) -> list[int] | None:
    try:
        numbers = [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return None
    return numbers if all(0 <= number <= MAX_VERSION for number in numbers) else None


def read_version(folder: Path) -> tuple[int, int | None]:
    """Returns the version that a former synchronizer has kept in `folder`, 0 if there was none, and its step.

    The step is None if it is not known, as in the files of version 0.2.

    Raises:
        ConfigError: The file is damaged or cannot be read.
    """
    path = folder / NAME
    if not path.exists():
        return 0, None
    numbers = _read_numbers(path)
    if numbers is None or len(numbers) not in (1, 2):
        raise ConfigError(f"{path} should hold the last version as a number; restore it, or write the version into it")
    return numbers[0], numbers[1] if len(numbers) == 2 else None


def write_version(folder: Path, version: int, step: int | None) -> None:
    """Writes the version and its step to disk.

    Raises:
        OSError: The file cannot be written; the former one stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, temporary = folder / NAME, folder / f".{NAME}.tmp"
    with temporary.open("w") as file:
        file.write(f"{version}\n" if step is None else f"{version} {step}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


logger = logging.getLogger("averaging.rl.synchronizer")


async def find_checkpoints(
    folder: Path, present: Callable[[], int | None], found: Callable[[int], Awaitable[object]]
) -> None:
    """Calls `found` for each new checkpoint that a trainer announces in its folder.

    A checkpoint of an earlier step is new too: the trainer has gone back to it.

    Args:
        folder: The folder.
        present: Returns the step of the present state, whose checkpoint is not new; None if there is no state.
        found: Called with the step; again each second while it raises a StateError.
    """
    seen, failed = None, None
    while True:
        step = await in_thread(lambda: read_number(folder / LATEST))
        if step is not None and step != seen:
            try:
                if step != present():
                    await found(step)
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

"""Where a synchronizer gets states besides `set_model_state_dict`: the checkpoints of a trainer, and a peer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from averaging import Peer
from averaging.common.threads import in_thread
from averaging.errors import ConfigError, StateError
from averaging.synchronizer.modules import POLL_SECONDS
from averaging.synchronizer.state_stream import StateDict
from averaging.synchronizer.version_file import LATEST, read_number

logger = logging.getLogger("averaging.synchronizer")


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

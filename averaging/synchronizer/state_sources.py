"""Where a synchronizer gets states besides `set_model_state_dict`: the checkpoints of a trainer, and a peer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from averaging import Peer
from averaging.common.threads import in_thread
from averaging.errors import StateError
from averaging.synchronizer.modules import POLL_SECONDS
from averaging.synchronizer.state_stream import StateDict
from averaging.synchronizer.version_file import LATEST, read_number

logger = logging.getLogger("averaging.synchronizer")


async def find_checkpoints(folder: Path, seen: int, found: Callable[[int], Awaitable[object]]) -> None:
    """Calls `found` for each new checkpoint that a trainer announces in its folder.

    Args:
        folder: The folder.
        seen: Only checkpoints of later steps are new.
        found: Called with the step.
    """
    while True:
        step = await in_thread(lambda: read_number(folder / LATEST))
        if step is not None and step > seen:
            seen = step
            try:
                await found(step)
            except StateError as error:
                logger.warning("%s", error)
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

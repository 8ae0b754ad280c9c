"""What the network of simulations has in common with a real one."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from typing import cast

import numpy as np

from averaging.protocol import AveragingData, WireTensor
from averaging.testing.transport import MemoryNetwork
from averaging.transport import AveragingService


class Reducer:
    """Reads the parts of a sender once it is allowed to."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()

    async def aggregate_part(self, parts: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        await self.reads.wait()
        async for part in parts:
            yield part


async def test_what_was_sent_does_not_change_with_the_tensors_of_its_sender() -> None:
    network, reducer = MemoryNetwork(random.Random(1)), Reducer()
    receiver, sender = network.transport("receiver:1"), network.transport("sender:1")
    await receiver.serve(cast(AveragingService, reducer), None)
    tensor = np.ones(3, np.float32)
    sent = asyncio.Event()

    async def parts() -> AsyncGenerator[AveragingData, None]:
        yield AveragingData(tensor_part=WireTensor(tensor.data.cast("B"), (3,), "float32"))
        sent.set()

    async def send() -> list[float]:
        replies = [reply.tensor_part async for reply in sender.aggregate_part("receiver:1", parts())]
        assert replies[0] is not None
        return [float(value) for value in np.frombuffer(replies[0].buffer, np.float32)]

    async with asyncio.TaskGroup() as tasks:
        replied = tasks.create_task(send())
        await sent.wait()
        tensor[:] = 7.0
        reducer.reads.set()
    assert replied.result() == [1.0, 1.0, 1.0]
    await receiver.close()

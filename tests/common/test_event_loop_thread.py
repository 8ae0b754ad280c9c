"""The thread in which a peer lives."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from averaging.common import EventLoopThread


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Torch computes with two threads, as by default on two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_it_computes_alone_and_other_threads_as_before(two_threads: None) -> None:
    async def count() -> tuple[int, int]:
        return torch.get_num_threads(), await asyncio.to_thread(torch.get_num_threads)

    thread = EventLoopThread(nullcontext(), "a peer")
    try:
        # Work on whole tensors is in threads of its own, which have all cores.
        assert thread.run(count()) == (1, 2)
        counts = [torch.get_num_threads()]
        later = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert counts == [2, 2]
    finally:
        thread.close()

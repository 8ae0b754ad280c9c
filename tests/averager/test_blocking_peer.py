"""`BlockingPeer`: rounds and states without asyncio, over real sockets."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from averaging import BlockingPeer, ClosedError, Outcome, PeerConfig


def test_two_scripts_average_and_a_third_downloads() -> None:
    config = PeerConfig(run_id="sync", group_size=2)
    first, second = torch.zeros(3), torch.full((3,), 2.0)
    with (
        BlockingPeer({"w": first}, config=config) as a,
        BlockingPeer({"w": second}, config=config, join=[a.endpoint]) as b,
    ):
        with ThreadPoolExecutor() as pool:
            receipts = list(pool.map(lambda peer: peer.average(weight=1.0, gather="hello"), (a, b)))
        assert [receipt.outcome for receipt in receipts] == [Outcome.AVERAGED] * 2
        with a.tensors() as (mine,), b.tensors() as (theirs,):
            assert torch.equal(mine, torch.ones(3))
            assert torch.equal(theirs, mine)
        assert a.peers == b.peers == {a.endpoint, b.endpoint}
        assert a.status.endpoint == a.endpoint
        a.commit()
        third = torch.zeros(3)
        with BlockingPeer([third], run_id="sync", join=[a.endpoint]) as newcomer:
            assert newcomer.download_state().version == a.version == newcomer.version
            assert torch.equal(third, torch.ones(3))
    assert not any("run 'sync'" in thread.name for thread in threading.enumerate())  # not "asyncio_0" of another test
    with pytest.raises(ClosedError):
        a.average()

"""Peers that look their seeds up: over real sockets, with names and files that change."""

import asyncio
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging import Peer
from averaging.discovery.gossip import GossipDiscovery
from averaging.discovery.gossip.membership import GossipSettings
from averaging.errors import JoinError
from averaging.peer import PeerContext, lifecycle
from averaging.seeds import FoundSeeds
from tests.support.certificates import write
from tests.support.peers import average, enter
from tests.support.ports import free_address, free_port

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), value)}


class FastGossip(GossipDiscovery):
    """So that what takes ten seconds takes one."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        fast = GossipSettings(look_up_interval=0.1, retry_interval=0.2, exchange_interval=0.1)
        super().__init__(*arguments, **options | {"settings": fast})


async def sees(peer: Peer, other: Peer) -> None:
    async with asyncio.timeout(30), aclosing(peer.discovery.watch(f"{peer.run_id}.peers")) as changes:
        async for entries in changes:
            if other.endpoint in entries:
                return


async def test_the_first_peer_of_a_name_starts_the_run_and_the_second_joins_it(tmp_path: Path) -> None:
    """With certificates for the name alone, as all addresses of it have in Kubernetes."""
    files: dict[str, Any] = {**write(tmp_path, "localhost")}
    port = free_port()
    told: list[FoundSeeds] = []
    join, listen = [f"dns:localhost:{port}"], f"localhost:{port}"
    async with AsyncExitStack() as stack:
        first = await enter(
            stack,
            tensors(1.0),
            join=join,
            listen=listen,
            context=PeerContext(on_found=told.append),
            group_size=2,
            **files,
        )
        second = await enter(stack, tensors(3.0), join=join, listen="localhost:0", group_size=2, **files)
        receipts = await average(first, second)
        assert all(receipt.averaged for receipt in receipts)
        assert f"127.0.0.1:{port}" in told[0].own
        assert told[0].addresses == ()
        assert f"127.0.0.1:{port}" in second.seeds


async def test_a_peer_that_is_alone_reads_its_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both started alone, and the file names one of them later."""
    monkeypatch.setattr(lifecycle, "GossipDiscovery", FastGossip)
    path = tmp_path / "seeds"
    own, other = free_address(), free_address()
    path.write_text(own)
    async with AsyncExitStack() as stack:
        first = await enter(stack, tensors(), join=[f"file:{path}"], listen=own)
        second = await enter(stack, tensors(), listen=other)
        assert second.endpoint not in first.peers
        path.write_text(f"{own}\n{other}\n")
        await sees(first, second)
        assert list(first.seeds) == [other]


async def test_an_address_that_a_file_names_no_longer_is_not_waited_for(tmp_path: Path) -> None:
    """A peer that was killed is in the file still, until its owner removes it: then this peer starts a run."""
    path, dead = tmp_path / "seeds", free_address()
    path.write_text(dead)
    own = free_address()

    def remove_it(_: object) -> None:
        path.write_text(own)

    async with Peer(
        tensors(),
        run_id="run",
        join=[f"file:{path}"],
        listen=own,
        join_timeout=20.0,
        context=PeerContext(on_joining=remove_it),
    ) as peer:
        assert list(peer.seeds) == []
        assert f"file:{path} has no other peer" in peer.discovery.diagnose().isolation


async def test_a_client_waits_for_a_peer_although_its_source_names_none(tmp_path: Path) -> None:
    """It could not start a run."""
    path = tmp_path / "seeds"
    path.write_text("# soon")
    with pytest.raises(JoinError, match="is empty"):
        async with Peer(tensors(), run_id="run", mode="client", join=[f"file:{path}"], join_timeout=0.5):
            pass


async def test_an_etcd_that_is_away_ends_the_join_with_its_reason() -> None:
    where = f"{free_address()},{free_address()}"
    with pytest.raises(JoinError, match=r"no member answers .*check the address, and that etcd serves there"):
        async with Peer(tensors(), run_id="run", join=[f"etcd://{where}/runs/gpt"], join_timeout=0.5):
            pass

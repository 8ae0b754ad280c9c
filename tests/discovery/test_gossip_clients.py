"""Clients, which accept no connections, gossip through a member; in virtual time."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from averaging.discovery.gossip import GossipDiscovery
from averaging.discovery.gossip.membership import GossipSettings
from averaging.errors import CallRefusedError
from averaging.protocol.messages import Digest, Record
from tests.support.gossip_swarm import KEY, RUN, GossipSwarm, everywhere, in_an_hour, joined, members, now, until
from tests.support.simulated import in_virtual_time


@in_virtual_time
async def test_a_client_reads_and_stores_through_a_member_and_through_another_when_that_dies() -> None:
    async with GossipSwarm(27) as swarm:
        peers = await swarm.grow(8)
        host = swarm.start(None, ["peer-0:1"])
        await joined(host)
        client = host.discovery
        assert members(client) == {f"peer-{number}:1" for number in range(8)}
        await asyncio.sleep(1)
        await peers[3].store(KEY, "peer-3:1", b"", in_an_hour())
        await until(everywhere([client], KEY, {"peer-3:1"}), within=0.5)
        await client.store(KEY, "from-client:1", b"", in_an_hour())
        await until(everywhere([*peers, client], KEY, {"peer-3:1", "from-client:1"}), within=1)
        for _ in range(4):  # whomever it follows is dead in the end
            followed = client._members.stream_source
            assert followed is not None
            await swarm.kill(followed)
            name = f"after-{followed}"
            await next(iter(swarm.hosts.values())).discovery.store(KEY, name, b"", in_an_hour())
            await until(lambda name=name: name in client.get(KEY), within=10)  # type: ignore[misc]
            await until(lambda: client._members.stream_source is not None, within=10)
        await swarm.stop(host.transport.endpoint)
        rest = [one.discovery for one in swarm.hosts.values()]
        await until(lambda: not any(peer.knows("from-client:1") for peer in rest), within=3)


@in_virtual_time
async def test_a_client_leaves_a_member_that_falls_silent() -> None:
    async with GossipSwarm(28) as swarm:
        peers = await swarm.grow(3)
        host = swarm.start(None, ["peer-0:1"])
        await joined(host)
        await until(lambda: host.discovery._members.stream_source is not None, within=1)
        followed = host.discovery._members.stream_source
        assert followed is not None
        swarm.network.freeze(followed)
        other = next(peer for name, peer in zip(swarm.hosts, peers, strict=False) if name != followed)
        await other.store(KEY, "a:1", b"", in_an_hour())
        await until(everywhere([host.discovery], KEY, {"a:1"}), within=8)
        await until(lambda: host.discovery._members.stream_source not in (None, followed), within=25)
        for number in range(2, 20):  # no exchange comes as soon
            await other.store(KEY, f"a:{number}", b"", in_an_hour())
            await until(lambda number=number: f"a:{number}" in host.discovery.get(KEY), within=0.5)  # type: ignore[misc]
        swarm.network.thaw(followed)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("refuses", [False, True])
@in_virtual_time
async def test_a_client_backs_off_from_a_member_that_gives_it_no_stream(
    monkeypatch: pytest.MonkeyPatch, begins: bool, refuses: bool
) -> None:
    """Also if it answers exchanges: it may not implement `Subscribe`, or a proxy may cut its streams."""
    asked: list[float] = []

    async def end(peer: GossipDiscovery, digest: Digest) -> AsyncGenerator[tuple[Record, ...], None]:
        asked.append(now())
        if begins:
            yield ()
        if refuses:
            raise CallRefusedError("peer-0:1", "does not serve this")

    monkeypatch.setattr(GossipDiscovery, "subscribe", end)
    async with GossipSwarm(28) as swarm:
        await swarm.grow(1)
        await joined(swarm.start(None, ["peer-0:1"]))
        await asyncio.sleep(20)
    assert 5 < len(asked) < 25


@in_virtual_time
async def test_a_client_that_reads_too_slowly_is_cut_off() -> None:
    async with GossipSwarm(29, settings=GossipSettings(stream_backlog=10, max_streams=1)) as swarm:
        (peer,) = await swarm.grow(1)
        stranger = swarm.network.transport("stranger:1")
        async with aclosing(stranger.subscribe("peer-0:1", Digest(RUN, "", 0))) as stream:
            assert len(await anext(stream)) == 1
            with pytest.raises(CallRefusedError, match="try another peer"):
                async with aclosing(stranger.subscribe("peer-0:1", Digest(RUN, "", 0))) as second:
                    await anext(second)
            for number in range(11):
                await peer.store(KEY, f"a:{number}", b"", in_an_hour())
            with pytest.raises(CallRefusedError, match="too slow"):
                async for _ in stream:
                    pass
        await asyncio.sleep(1)
        async with aclosing(stranger.subscribe("peer-0:1", Digest(RUN, "", 0))) as stream:
            assert len(await anext(stream)) == 12

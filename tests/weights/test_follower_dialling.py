"""Which addresses a follower dials: those of the user, and those at which a peer can be."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
import torch

from averaging.errors import ProtocolViolationError
from averaging.rpc import RpcHandler, RpcServer
from averaging.weights.layout import Shard, version_message
from averaging.weights.receiver import FollowerOptions, ModelReceiver
from averaging.weights.snapshot import begin_copy, seal
from averaging.weights.store import FETCH, FOLLOW, Store
from averaging.wire import weights_pb2 as wire

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

LIMIT = 20.0


class Naming:
    """A publisher of the first part of a model, which names an endpoint for the second one."""

    def __init__(self, endpoint: str) -> None:
        snapshot = seal(begin_copy({"w": torch.ones(3)}), 1, None)
        shards = Shard("", snapshot.manifest.digest), Shard(endpoint, bytes(32))
        self._store = Store(bases=1)
        self._snapshot = replace(snapshot, manifest=replace(snapshot.manifest, shards=shards))
        self._store.add(self._snapshot)

    async def _follow(self, _: wire.FollowRequest) -> AsyncGenerator[wire.Version, None]:
        yield version_message(self._snapshot.manifest)
        await asyncio.Event().wait()

    def rpc_handlers(self) -> list[RpcHandler]:
        return [FOLLOW.streams(self._follow), FETCH.streams(self._store.send)]


@pytest.mark.parametrize(
    "endpoint",
    ["169.254.169.254:80", "[fd00:ec2::254]:80", "0.0.0.0:80", "224.0.0.1:80", "[::ffff:169.254.169.254]:80"],
)
async def test_a_part_is_not_dialled_where_no_peer_can_be(endpoint: str) -> None:
    async with RpcServer("127.0.0.1:0", [Naming(endpoint)]) as server:
        options = FollowerOptions(join=[server.endpoint], run_id="")
        async with ModelReceiver(options) as follower:
            async with asyncio.timeout(LIMIT):
                assert not await follower.wait_newer(None, None)
            assert isinstance(follower.failure, ProtocolViolationError)
            assert f"{endpoint} is not dialled" in str(follower.failure)

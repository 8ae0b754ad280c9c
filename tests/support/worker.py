"""A peer in a process of its own that averages on command and can be made to die at a named step.

Run as `python -m tests.support.worker '{"run_id": ..., "value": ..., ...}'`; it prints JSON lines and reads one
command a line on stdin: `average`, `reset` (to the values of the start), `download` or `quit`.
"""

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, TypeVar

import torch

from averaging import AveragingError, CompressionType, Mode, Peer
from averaging.config import AUTO
from averaging.discovery.gossip.gossip_discovery import peers_key
from averaging.peer import PeerContext
from averaging.protocol.group import ReplyForm, donors_key
from averaging.protocol.messages import AveragingData, DownloadData, JoinRequest, MessageFromLeader, Resume
from averaging.transport.base import AveragingService, GossipService
from averaging.transport.direct import DirectTransport
from averaging.transport.grpc import GrpcTransport
from tests.support.tuned import tuned

T = TypeVar("T")

SIZE = 600_000
"""Elements of the tensor: 2.3 MiB, so that every shard has parts enough to die in the middle of."""


class FatalTransport(DirectTransport):
    """Kills its own process, as a power cut would, once `fatal_step` has happened `after` times; or stops it.

    Without `direct_listen` it has no direct lane.
    """

    def __init__(
        self,
        *args: Any,
        fatal_step: str,
        after: int,
        sends: str = "SIGKILL",
        direct_listen: str | None = None,
        max_part_bytes: int = 1 << 20,
        **options: Any,
    ) -> None:
        super().__init__(*args, direct_listen=direct_listen or AUTO, max_part_bytes=max_part_bytes, **options)
        self._has_lane = direct_listen is not None
        self._fatal_step, self._left, self._signal = fatal_step, after, signal.Signals[sends]

    async def bind(self) -> str:
        return await (super().bind() if self._has_lane else GrpcTransport.bind(self))

    def prepare_lane(self, endpoint: str) -> None:
        if self._has_lane:
            super().prepare_lane(endpoint)

    def _step(self, step: str) -> None:
        if step == self._fatal_step:
            self._left -= 1
            if self._left == -1:
                os.kill(os.getpid(), self._signal)

    async def counted(self, step: str, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        async with aclosing(items):
            async for item in items:
                self._step(step)
                yield item

    async def counted_messages(self, step: str, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
        async for item in items:
            self._step(step)
            yield item

    def aggregate_part(
        self, endpoint: str, messages: AsyncIterator[AveragingData]
    ) -> AsyncGenerator[AveragingData, None]:
        return super().aggregate_part(endpoint, self.counted_messages("sending", messages))

    async def serve(self, averaging: AveragingService, gossip: GossipService | None) -> None:
        await super().serve(_Watched(averaging, self), gossip)


class _Watched:
    """A service whose streams count as steps."""

    def __init__(self, service: AveragingService, transport: FatalTransport) -> None:
        self._service, self._transport = service, transport
        self.get_status, self.get_schema = service.get_status, service.get_schema
        self.watch_rounds = service.watch_rounds

    def join_group(self, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        return self._transport.counted("leading", self._service.join_group(request))

    def aggregate_part(self, messages: AsyncIterator[AveragingData]) -> AsyncGenerator[AveragingData, None]:
        return self._service.aggregate_part(self._transport.counted_messages("reducing", messages))

    def download_state(self, resume: Resume | None, caller: str) -> AsyncGenerator[DownloadData, None]:
        return self._transport.counted("donating", self._service.download_state(resume, caller))


def tell(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


async def enough_donors(peer: Peer, count: int) -> None:
    """Waits until so many others offer a state that is worth downloading."""
    async with aclosing(peer.discovery.watch(donors_key(peer.run_id))) as changes:
        async for _ in changes:
            if sum(priority > 0 for priority, _ in peer.donors) >= count:
                return


async def enough_peers(peer: Peer, count: int) -> None:
    """Waits until so many are known, this one included: who joined at the same moment is told of a little later."""
    async with aclosing(peer.discovery.watch(peers_key(peer.run_id))) as changes:
        async for _ in changes:
            if len(peer.peers) >= count:
                return


async def main(options: dict[str, Any]) -> None:
    value, version = options.pop("value"), options.pop("version", None)
    donors, known = options.pop("donors", 0), options.pop("known", 1)
    weight = options.pop("weight", 1.0)
    step, after, sends = options.pop("fatal_step", ""), options.pop("after", 0), options.pop("sends", "SIGKILL")
    listen, advertise = options.pop("listen", "127.0.0.1:0"), options.pop("advertise", None)
    options["mode"] = Mode[options.pop("mode", "NODE")]
    options["compression"] = CompressionType[options.pop("compression", "NONE")]
    options["reply_form"] = ReplyForm(options.pop("reply_form", "average"))
    tensor = torch.full((SIZE,), float(value)) + torch.arange(SIZE) % 7
    start = tensor.clone()
    transport = FatalTransport(
        None if options["mode"] is Mode.CLIENT else listen,
        advertise,
        max_message_bytes=8 << 20,
        fatal_step=step,
        after=after,
        sends=sends,
        direct_listen=options.pop("direct_listen", None),
        direct_advertise=options.pop("direct_advertise", None),
        max_part_bytes=1 << 17,
    )
    commands: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, lambda: commands.put_nowait(sys.stdin.readline().strip()))
    async with Peer(
        {"w": tensor}, context=PeerContext(transport=transport), **tuned({"part_size_bytes": 1 << 16, **options})
    ) as peer:
        if version is not None:
            await peer.commit(version)
        await enough_peers(peer, known)
        tell("ready", endpoint=peer.endpoint)
        while (command := await commands.get()) not in ("quit", ""):
            try:
                if command == "average":
                    receipt = await peer.average(weight=weight)
                    tell(
                        "receipt",
                        outcome=receipt.outcome,
                        reason=receipt.reason,
                        members=receipt.members,
                        lanes=[account.lane for account in receipt.accounts if account.endpoint != receipt.endpoint],
                        dropped=[dropped.endpoint for dropped in receipt.dropped],
                        reasons=[dropped.reason for dropped in receipt.dropped],
                        allreduce_seconds=receipt.allreduce_seconds,
                        kept_local=receipt.kept_local,
                        seconds=receipt.seconds,
                        digest=hashlib.sha256(tensor.numpy().data).hexdigest(),
                        # What was added to the arithmetic pattern: one value if all elements were treated alike.
                        values=sorted(set((tensor - torch.arange(SIZE) % 7).mul(1e3).round().div(1e3).tolist())),
                    )
                elif command == "reset":
                    with peer.tensors() as tensors:
                        tensors[0][:] = start
                    tell("reset")
                elif command == "download":
                    await enough_donors(peer, donors)
                    state = await peer.download_state()
                    tell("state", version=state.version, first=tensor[0].item())
            except AveragingError as error:
                tell("failure", message=str(error), first=tensor[0].item())
    tell("left")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))

"""Runs of light peers, which only tell their status, on real sockets; also as a process of its own:

python -m tests.monitor.monitored COUNT [FILES_OF_TLS_AS_JSON TOKEN_FILE]
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from averaging.config import TLSFiles
from averaging.receipts import (
    Account,
    DropCode,
    Dropped,
    Outcome,
    PeerStatus,
    Receipt,
    Role,
    Totals,
    TrainingProgress,
    WeightReader,
)
from averaging.rpc import read_credentials
from averaging.security.credentials import Credentials
from averaging.transport.grpc import GrpcTransport
from tests.support.grpc_fakes import STATUS, FakePeer

ROUND_SECONDS = 0.5
"""Seconds between the rounds of a light peer."""


class LightPeer(FakePeer):
    """Tells a status that changes with time, and counts the calls."""

    def __init__(self, number: int, run_id: str = "demo") -> None:
        super().__init__()
        self.number, self.run_id = number, run_id
        self.endpoint = ""
        self.others: tuple[str, ...] = ()
        self.started_at = time.time() - 60
        self.calls: list[float] = []
        self.changes: dict[str, object] = {}

    def receipt(self, number: int) -> Receipt:
        members = (self.others or (self.endpoint,))[-8:]
        dropped = (Dropped(members[-1], "connection lost", DropCode.CONNECTION_LOST),) if number % 10 == 9 else ()
        return Receipt(
            round=number,
            outcome=Outcome.AVERAGED,
            group_id=number.to_bytes(8),
            members=members,
            dropped=dropped,
            seconds=0.4,
            allreduce_seconds=0.3,
            bytes_sent=1 << 20,
            bytes_received=1 << 19,
            run_id=self.run_id,
            endpoint=self.endpoint,
            started=self.started_at + number * ROUND_SECONDS,
            role=Role.LEADER if self.number == 0 else Role.FOLLOWER,
            accounts=tuple(
                Account(name, lane="direct", bytes_sent=1 << 20, bytes_received=1 << 19) for name in members[:2]
            ),
            phases={"looking": 0.1, "allreduce": 0.3},
        )

    def get_status(self, receipts: int = 0, after_round: int = 0, peers: bool = False) -> PeerStatus:
        self.calls.append(time.monotonic())
        rounds = 1 + int((time.time() - self.started_at) / ROUND_SECONDS)
        totals = Totals()
        for number in (1, rounds):
            totals = totals.plus(self.receipt(number))
        totals = replace(totals, rounds={Outcome.AVERAGED: rounds}, dropped={DropCode.CONNECTION_LOST: rounds // 10})
        first = max(after_round, rounds - receipts) + 1
        status = replace(
            STATUS,
            endpoint=self.endpoint,
            run_id=self.run_id,
            started=self.started_at,
            looking=self.number % 3 == 0,
            leader="",
            group_id=b"",
            members=(),
            last_round=self.receipt(rounds),
            rounds=rounds,
            state_version=rounds,
            training=TrainingProgress("DiLoCo", "training", 100 * rounds, rounds, 3.0, 1, rounds, 32.0, 2.0, 64.0),
            waiting_for=self.others[-1:] if self.number % 3 == 0 else (),
            receipts=tuple(self.receipt(number) for number in range(first, rounds + 1)) if receipts else (),
            peers=self.others if peers else (),
            totals=totals,
            readers=(WeightReader("follower", "192.0.2.9:4300", "", rounds - 1, rounds),) if self.number == 0 else (),
        )
        return replace(status, **self.changes)  # type: ignore[arg-type]


class LightRun:
    """The light peers of one run, and their transports."""

    def __init__(self, peers: list[LightPeer], transports: list[GrpcTransport]) -> None:
        self.peers, self.transports = peers, transports

    @property
    def endpoint(self) -> str:
        """The address of the first peer."""
        return self.peers[0].endpoint


@asynccontextmanager
async def light_run(
    count: int, credentials: Credentials | None = None, run_id: str = "demo"
) -> AsyncIterator[LightRun]:
    """`count` light peers that know each other, on loopback."""
    async with AsyncExitStack() as stack:
        run = LightRun([], [])
        for number in range(count):
            transport = GrpcTransport("127.0.0.1:0", max_message_bytes=16 << 20, credentials=credentials)
            peer = LightPeer(number, run_id)
            peer.endpoint = await transport.bind()
            stack.push_async_callback(transport.close)
            await transport.serve(peer, None)
            run.peers.append(peer)
            run.transports.append(transport)
        for peer in run.peers:
            peer.others = tuple(each.endpoint for each in run.peers)
        yield run


async def _main(count: int, files: str = "", token_file: str = "") -> None:
    credentials = None
    if files:
        tls = json.loads(files)
        named = TLSFiles(tls["tls_ca"], tls["tls_cert"], tls["tls_key"])
        credentials = read_credentials(tls=named, token_file=token_file)
    async with light_run(count, credentials) as run:
        print(json.dumps({"event": "ready", "endpoint": run.endpoint}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), *sys.argv[2:]))

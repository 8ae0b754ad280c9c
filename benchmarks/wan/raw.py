"""Plain TCP between the peers of the WAN benchmark: the rate of the emulated links without any library.

`Raw` sends the bytes of an all-reduce in its pattern; it alternates with the libraries. `calibrate` is a program of its
own that sends as much as possible to all others for some seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from math import ceil
from typing import Self

import torch

from benchmarks.wan.limits import MIB, WIRE

PORT = 9000
CHUNK = bytes(1 << 18)
CONNECT_LIMIT = 60.0

STREAMS = 3
"""Minimum connections to and from each peer in a calibration, because the system's largest window may limit one."""


def connect(
    rank: int, hosts: Sequence[str], port: int = PORT
) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """Opens one connection from this peer to each other peer, and accepts one from each of them."""
    others = [other for other in range(len(hosts)) if other != rank]
    with socket.create_server((hosts[rank], port)) as server, ThreadPoolExecutor(1) as pool:
        server.settimeout(CONNECT_LIMIT)

        def accept() -> dict[int, socket.socket]:
            accepted = {}
            for _ in others:
                peer, _ = server.accept()
                accepted[peer.recv(1)[0]] = peer
            return accepted

        incoming = pool.submit(accept)
        outgoing = {}
        for other in others:
            outgoing[other] = _dial(hosts[other], port)
            outgoing[other].sendall(bytes([rank]))
        return outgoing, incoming.result()


def _dial(host: str, port: int) -> socket.socket:
    """Retries until the other peer listens."""
    end = time.monotonic() + CONNECT_LIMIT
    while True:
        try:
            return socket.create_connection((host, port), timeout=CONNECT_LIMIT)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


class Raw:
    """A `System` of benchmarks.allreduce.systems that does not sum."""

    packages = ()
    address = ""

    def __init__(self, options: argparse.Namespace, hosts: Sequence[str], parts: Sequence[float]) -> None:
        self.tensors: Sequence[torch.Tensor] = []
        nbytes, mine = options.mib * MIB * WIRE[options.codec], parts[options.rank]
        self._sizes = {rank: round(nbytes * (mine + part)) for rank, part in enumerate(parts) if rank != options.rank}
        self._rank, self._hosts = options.rank, hosts
        self._pool = ThreadPoolExecutor(2 * len(hosts))

    async def __aenter__(self) -> Self:
        self._outgoing, self._incoming = await asyncio.to_thread(connect, self._rank, self._hosts)
        return self

    async def __aexit__(self, *error: object) -> None:
        for one in (*self._outgoing.values(), *self._incoming.values()):
            one.close()
        self._pool.shutdown()

    def writing(self) -> AbstractContextManager[object]:
        return nullcontext()

    async def average(self) -> float:
        begun, loop = time.perf_counter(), asyncio.get_running_loop()
        sends = [loop.run_in_executor(self._pool, _send, self._outgoing[rank], n) for rank, n in self._sizes.items()]
        takes = [loop.run_in_executor(self._pool, _receive, self._incoming[rank], n) for rank, n in self._sizes.items()]
        await asyncio.gather(*sends, *takes)
        return time.perf_counter() - begun


def _send(to: socket.socket, nbytes: int) -> None:
    chunk = memoryview(CHUNK)
    while nbytes:
        nbytes -= to.send(chunk[:nbytes])


def _receive(source: socket.socket, nbytes: int) -> None:
    buffer = memoryview(bytearray(len(CHUNK)))
    while nbytes:
        got = source.recv_into(buffer[:nbytes])
        if not got:
            raise ConnectionError("the other peer is gone")
        nbytes -= got


def calibrate(rank: int, hosts: Sequence[str], senders: int, seconds: float) -> float:
    """Returns the bytes/s that this peer receives in the second half of `seconds`, when TCP has reached its rate."""
    lines = [connect(rank, hosts, PORT + number) for number in range(ceil(STREAMS / (len(hosts) - 1)))]
    outgoing = [one for line, _ in lines for one in line.values()]
    incoming = [one for _, line in lines for one in line.values()]
    received = [0] * len(incoming)

    def take(index: int, source: socket.socket) -> None:
        buffer = bytearray(len(CHUNK))
        while got := source.recv_into(buffer):
            received[index] += got

    def give(to: socket.socket) -> None:
        if rank < senders:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                to.sendall(CHUNK)
        to.close()

    threads = [threading.Thread(target=take, args=pair) for pair in enumerate(incoming)]
    threads += [threading.Thread(target=give, args=(one,)) for one in outgoing]
    for thread in threads:
        thread.start()
    time.sleep(seconds / 2)
    before, then = sum(received), time.monotonic()
    time.sleep(seconds / 2)
    rate = (sum(received) - before) / (time.monotonic() - then)
    for thread in threads:
        thread.join()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--hosts", nargs="+", required=True)
    parser.add_argument("--senders", type=int, required=True, help="so many peers, from rank 0 on, send")
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    json.dump({"received": calibrate(options.rank, options.hosts, options.senders, options.seconds)}, sys.stdout)


if __name__ == "__main__":
    main()

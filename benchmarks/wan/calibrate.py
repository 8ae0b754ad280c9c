"""Plain TCP between the peers of the WAN benchmark: the rate of the emulated links without any library.

Prints the bytes/s that this peer receives while the first `--senders` peers send as much as possible to all others, in
the second half of `--seconds`, when TCP has reached its rate.
"""

import argparse
import json
import socket
import sys
import threading
import time
from collections.abc import Sequence
from math import ceil

PORT = 9000
CHUNK = bytes(1 << 18)
CONNECT_LIMIT = 60.0

STREAMS = 3
"""Minimum connections to and from each peer, because the system's largest window may limit one."""


def connect(rank: int, hosts: Sequence[str], port: int) -> tuple[list[socket.socket], list[socket.socket]]:
    """Opens one connection from this peer to each other peer, and accepts one from each of them."""
    others = [host for other, host in enumerate(hosts) if other != rank]
    with socket.create_server((hosts[rank], port), backlog=len(hosts)) as server:
        server.settimeout(CONNECT_LIMIT)
        outgoing = [_dial(host, port) for host in others]
        return outgoing, [server.accept()[0] for _ in others]


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


def calibrate(rank: int, hosts: Sequence[str], senders: int, seconds: float) -> float:
    lines = [connect(rank, hosts, PORT + number) for number in range(ceil(STREAMS / (len(hosts) - 1)))]
    outgoing = [one for line, _ in lines for one in line]
    incoming = [one for _, line in lines for one in line]
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
    parser.add_argument("--senders", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    json.dump({"received": calibrate(options.rank, options.hosts, options.senders, options.seconds)}, sys.stdout)


if __name__ == "__main__":
    main()

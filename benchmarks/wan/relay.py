"""Delay for an emulated long link: a TUN device that returns every packet after a fixed time.

The kernel's own delay (`netem`) is not in every kernel, and this needs none. It works on packets, so it delays any
protocol, does not limit the rate and does not reorder. It is fast enough because packets come as batched by the kernel
(up to 64 KiB for TCP, with open checksums as on a real offloading card).

Run it in a network namespace that routes traffic into the device. It prints `ready` when the device exists and, for
each line on stdin, its cost so far and its maximum lateness since the last one. It ends at the end of stdin.
"""

import argparse
import fcntl
import gc
import json
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
OFFLOADS = 0x01 | 0x02 | 0x04 | 0x08
"""TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6, TUN_F_TSO_ECN: packets are read and written before TCP segments them."""

LARGEST = 66_000
"""Bytes per read: the largest IP packet, which is a batch to the device, and its segmentation header."""

AT_ONCE = 64
"""Packets to read before due packets are checked again."""


class DelayQueue:
    """Delays packets by a fixed time, in order.

    Args:
        delay: seconds until a packet is due.
    """

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._packets: deque[tuple[float, bytes]] = deque()
        self.late = 0.0
        """Maximum time between a packet's due time and its removal, in seconds."""

    def __len__(self) -> int:
        return len(self._packets)

    def put(self, now: float, packet: bytes) -> None:
        self._packets.append((now + self._delay, packet))

    def take(self, now: float) -> bytes | None:
        """Returns the first packet if it is due."""
        if not self._packets or self._packets[0][0] > now:
            return None
        due, packet = self._packets.popleft()
        self.late = max(self.late, now - due)
        return packet

    def wait(self, now: float) -> float | None:
        """Returns the seconds until the first packet is due; None if there is none."""
        return max(0.0, self._packets[0][0] - now) if self._packets else None


def open_tun(name: str) -> int:
    """Creates the device and returns its non-blocking file."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(file, TUNSETOFFLOAD, OFFLOADS)
    return file


def relay(tun: int, queue: DelayQueue) -> None:
    """Runs until stdin ends."""
    clock = time.monotonic
    while True:
        readable, _, _ = select.select([tun, 0], [], [], queue.wait(clock()))
        if 0 in readable:
            if not os.read(0, 1024):
                return
            print(json.dumps({"late_ms": queue.late * 1000, "cpu_seconds": time.process_time()}), flush=True)
            queue.late = 0.0
        if tun in readable:
            for _ in range(AT_ONCE):
                try:
                    packet = os.read(tun, LARGEST)
                except BlockingIOError:
                    break
                queue.put(clock(), packet)
        now = clock()
        while (due := queue.take(now)) is not None:
            try:
                os.write(tun, due)
            except OSError:  # the device is down, or the packet cannot be returned: it is lost
                print("a packet was lost", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="delay0", help="name of the TUN device (delay0)")
    parser.add_argument("--delay", type=float, required=True, help="seconds, one way")
    options = parser.parse_args()
    # Highest priority, because the computation of the peers must not add to the delay.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()  # there are no reference cycles here
    tun = open_tun(options.device)
    print("ready", flush=True)
    relay(tun, DelayQueue(options.delay))


if __name__ == "__main__":
    main()

"""The limits in seconds that the links of the WAN benchmark allow, and the settings."""

from collections.abc import Sequence
from dataclasses import dataclass

from averaging.allreduce.partition import shares
from averaging.protocol.group import Member

WIRE = {"none": 1.0, "fp16": 1 / 2, "int8": 1 / 4}
"""Bytes on the wire per byte of float32."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Emulated links: Mbit/s of each peer's in each direction, the round trip in seconds, and the default sizes."""

    name: str
    mbits: tuple[float, ...]
    rtt: float
    mib: tuple[int, ...]

    @property
    def uneven(self) -> bool:
        return len(set(self.mbits)) > 1

    def __str__(self) -> str:
        links = f"{len(self.mbits)} peers, {self.mbits[0]:g} Mbit/s"
        if self.uneven:
            links += f", one peer {min(self.mbits):g} Mbit/s"
        return f"{links}, {self.rtt * 1000:g} ms"


SETTINGS = {
    one.name: one
    for one in (
        Setting("100x40", (100,) * 4, 0.040, (16, 64)),
        Setting("300x50", (300,) * 4, 0.050, (64,)),
        Setting("1000x50", (1000,) * 4, 0.050, (64, 256)),
        Setting("pair", (1000, 1000), 0.050, (64, 256)),
        Setting("uneven", (1000, 1000, 1000, 100), 0.050, (64,)),
    )
}


def equal_shares(peers: int) -> list[float]:
    return [1 / peers] * peers


def best_shares(rates: Sequence[float]) -> list[float]:
    """Returns the shares that the library gives to peers with these bandwidths; they sum to 1."""
    members = [Member(f"peer{rank}:1", bandwidth=rate) for rank, rate in enumerate(rates)]
    found = shares(members)
    return [share / sum(found) for share in found]


def transfer(nbytes: float, rates: Sequence[float], parts: Sequence[float]) -> float:
    """Returns the seconds in which the slowest link carries its part of a butterfly all-reduce, per direction.

    Peer i sends the other peers their parts, and each of them the average of its own share s_i, and receives as much:
    nbytes · (1 - s_i + (n - 1) · s_i). With equal shares that is 2 · nbytes · (n - 1) / n.

    Args:
        nbytes: size of all tensors on the wire.
        rates: rate of each peer's link in bytes/s.
        parts: share of each peer; they sum to 1.
    """
    return max(nbytes * (1 + (len(rates) - 2) * part) / rate for part, rate in zip(parts, rates, strict=True))


def limit(nbytes: float, rates: Sequence[float], parts: Sequence[float], rtt: float) -> float:
    """Returns `transfer` plus two round trips, for the first part and the last average."""
    return transfer(nbytes, rates, parts) + 2 * rtt


def queue_bytes(mbit: float, rtt: float) -> tuple[int, int]:
    """Returns the burst and the queue length of a link for `tbf`.

    The burst must hold the kernel's largest batch of packets, 64 KiB and their headers, and 2 ms of the link, because
    the machine may not serve it more often. The queue is one round trip of the link.
    """
    rate = mbit * 1e6 / 8
    return max(72_000, round(rate * 0.002)), max(150_000, round(rate * rtt))

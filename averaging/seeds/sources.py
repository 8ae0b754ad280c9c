"""Asks one source of seeds once: a name, a file, a key of etcd, or the environment of a Slurm job."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path

from averaging.common import CLIENT_PREFIX, SeedSource, format_address, is_endpoint
from averaging.errors import AveragingError, ConfigError
from averaging.security import Credentials
from averaging.transport.grpc import EtcdCluster, RpcChannel

RESOLVE_SECONDS = 3.0  # time limit for the look-up of a name
MAX_SEEDS = 1024  # addresses of one source that are looked at; further ones are left out. One that answers is enough
MAX_FILE_BYTES = 1 << 20

NODES = "SLURM_JOB_NODELIST"
"""Variable with the nodes of the job; `NODES_HET_GROUP_n` has those of component n of a heterogeneous job."""


class SeedsNotFoundError(Exception):
    """A source gave no addresses now; it is asked again. The message has the reason and the remedy."""


async def resolve_name(name: str, port: int) -> list[str]:
    """Returns all addresses of a host name as HOST:PORT, in an order that does not change."""
    try:
        async with asyncio.timeout(RESOLVE_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise SeedsNotFoundError(
            f"the look-up of {name} took longer than {RESOLVE_SECONDS:g} s; check the name servers of this machine"
        ) from None
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SeedsNotFoundError(
            f"the name {name} does not resolve ({reason}); check it with `getent hosts {name}`"
        ) from None
    return sorted({format_address(str(where[0]), port) for *_, where in found})


def read_seed_file(path: str) -> list[str]:
    """Returns the addresses in a file: one HOST:PORT a line; `#` begins a comment."""
    try:
        if Path(path).exists() and not Path(path).is_file():  # a pipe would block
            raise SeedsNotFoundError(f"{path} is no file; write one HOST:PORT a line into a file")
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        lines = content.decode().splitlines()
    except OSError as error:
        raise SeedsNotFoundError(f"{path} cannot be read: {error.strerror}; check the name of the file") from None
    except UnicodeError:
        raise SeedsNotFoundError(f"{path} is not text; write one HOST:PORT a line") from None
    if len(content) > MAX_FILE_BYTES:
        raise SeedsNotFoundError(f"{path} has more than {MAX_FILE_BYTES} bytes; write one HOST:PORT a line")
    addresses = []
    for number, line in enumerate(lines, 1):
        address = line.partition("#")[0].strip()
        if address and (address.startswith(CLIENT_PREFIX) or not is_endpoint(address)):
            raise SeedsNotFoundError(
                f"line {number} of {path} is {address[:100]!r} and no address; write one HOST:PORT a line"
            )
        if address:
            addresses.append(address)
    if not addresses:
        raise SeedsNotFoundError(f"{path} is empty; write the addresses of peers into it, one HOST:PORT a line")
    return addresses


# Slurm


def read_slurm_nodes(environ: Mapping[str, str], port: int) -> list[str]:
    """Returns the nodes of this Slurm job, those of all components if it is heterogeneous, as HOST:PORT."""
    components = sorted(name for name in environ if name.startswith(f"{NODES}_HET_GROUP_"))
    lists = [environ[name] for name in (components or [NODES]) if environ.get(name)]
    if not lists:
        raise ConfigError(
            f"slurm:{port} needs the variable {NODES}, which is not set: this is no process of a Slurm job. Start it "
            "with srun or sbatch, or name peers as HOST:PORT",
            "join",
        )
    hosts = (host for each in lists for host in expand_hostlist(each))
    return [format_address(host, port) for host in dict.fromkeys(hosts)]


_ITEM = re.compile(r"(?:[^,\[\]]|\[[0-9,-]+\])+")
_PART = re.compile(r"\[([0-9,-]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def expand_hostlist(text: str) -> list[str]:
    """Expands a list of nodes as Slurm writes it: `a,node[01-03,7]` is a, node01, node02, node03, node7."""
    items = _ITEM.findall(text)
    if ",".join(items) != text:
        raise ConfigError(f"{text[:200]!r} is not a list of nodes of Slurm, such as node[01-16]", "join")
    names: list[str] = []
    for item in items:
        parts = [_numbers(numbers) if numbers else (word,) for numbers, word in _PART.findall(item)]
        for name in product(*parts):
            if len(names) == MAX_SEEDS:
                return names
            names.append("".join(name))
    return names


def _numbers(text: str) -> tuple[str, ...]:
    return tuple(number for part in text.split(",") for number in _range(part))[:MAX_SEEDS]


def _range(text: str) -> Iterator[str]:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ConfigError(f"[{text[:200]}] is not a range of nodes of Slurm, such as [01-16]", "join")
    first, last = match[1], match[2] or match[1]
    for number in range(int(first), min(int(last), int(first) + MAX_SEEDS - 1) + 1):
        yield f"{number:0{len(first)}d}"


def own_node(environ: Mapping[str, str] = os.environ) -> str:
    return environ.get("SLURMD_NODENAME", "")


LEASE_SECONDS, RENEW_SECONDS = 9.0, 3.0
"""Time for which an address stays after the death of its peer, and the interval at which the lease is renewed. A peer
that was killed and starts again alone finds its old address gone before the default `join_timeout` ends."""

CALL_SECONDS = 3.0
LEAVE_SECONDS = 1.0  # time limit for the removal of this peer's address when it leaves


class EtcdSeeds:
    """Reads the addresses under the key, and writes this peer's own."""

    def __init__(
        self, source: SeedSource, credentials: Credentials, most: int, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._prefix, self._most = f"{source.name}/".encode(), most
        self._monotonic = monotonic
        channels = [RpcChannel(member, credentials=Credentials(tls=credentials.tls)) for member in source.members]
        self._cluster = EtcdCluster(channels, CALL_SECONDS)
        self._lease: int | None = None
        self._renewed = 0.0
        self._busy = asyncio.Lock()  # the loop that renews, and a look-up, may publish at the same time

    async def read(self) -> list[str]:
        """Returns the addresses; what is no address is left out."""
        found = await self._cluster.list_values(self._prefix, self._most)
        return [address for pair in found.values if (address := _address(pair.value))]

    async def publish(self, endpoint: str) -> None:
        """Writes the address of this peer, or renews its lease if that is due."""
        async with self._busy:
            now = self._monotonic()
            if self._lease is not None and now < self._renewed + RENEW_SECONDS:
                return
            if self._lease is None or not await self._cluster.keep_alive(self._lease):
                self._lease = None
                lease = await self._cluster.grant(LEASE_SECONDS)
                await self._cluster.change({self._prefix + endpoint.encode(): endpoint.encode()}, lease)
                self._lease = lease
            self._renewed = now

    async def close(self) -> None:
        """Removes the address of this peer, if etcd answers in time, and closes the connections."""
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(AveragingError, TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self._cluster.revoke(lease)
        await self._cluster.close()


def _address(value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeError:
        return ""
    return text if is_endpoint(text) and not text.startswith(CLIENT_PREFIX) else ""

"""One peer with one system, controlled by `benchmarks.allreduce`, `benchmarks.wan` or `benchmarks.recovery`.

Each library is imported only where it is measured, so that this runs in hivemind's environment, too.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib
import os
import platform
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from math import prod, sqrt
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.distributed

from benchmarks.workers import serve

LIMIT = 120.0
"""Seconds within which a system must have averaged."""

PERIOD = 262_147
"""Period of the values; a prime, so that a part in the wrong place is noticed."""

LARGEST = 4.0
"""Magnitude of the values. They are multiples of 1/1024, so that float32 adds those of all peers exactly."""

Shapes = list[tuple[int, ...]]


def shapes(kind: str, kib: int) -> Shapes:
    """Returns shapes of `kib` KiB of float32: as many equal tensors as `kind` says, or the 148 of a GPT-2, 12 layers.

    GPT-2 small has 475 MiB. Its width, context and vocabulary are scaled alike; the vocabulary takes the remainder.
    """
    if kind != "gpt2":
        return [(kib * 2**8 // int(kind),)] * int(kind)
    scale = sqrt(kib / 1024 / 475)
    width, context = round(768 * scale), round(1024 * scale)
    norm: Shapes = [(width,), (width,)]
    layer: Shapes = []
    for inner, outer in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
        layer += [(inner, outer), (outer,)]
    rest: Shapes = [(context, width), *(norm + layer[:4] + norm + layer[4:]) * 12, *norm]
    vocabulary = (kib * 2**8 - sum(map(prod, rest))) // width
    return [(vocabulary, width), *rest]


class System(Protocol):
    """A measured system, an async context manager."""

    tensors: Sequence[torch.Tensor]
    address: str
    """Address at which the other ranks find rank 0."""
    packages: Sequence[str]

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...

    def writing(self) -> AbstractContextManager[object]:
        """Guards writes to the tensors."""
        ...

    async def average(self) -> float:
        """Averages the tensors with the other peers; returns the seconds of the all-reduce itself.

        Raises:
            RuntimeError: fewer peers than `--least` were averaged.
        """
        ...


class Averaging:
    """This library with its default options and the given ones."""

    packages = ("averaging", "grpcio", "protobuf")

    def __init__(self, options: argparse.Namespace, **more: Any) -> None:
        from averaging.common.malloc import keep_freed_memory
        from averaging.peer.peer import Peer

        keep_freed_memory()  # as `averaging peer` does
        self.tensors = [torch.empty(shape) for shape in shapes(options.tensors, options.kib)]
        self._count, self._least = options.peers, options.least or options.peers
        if options.listen:  # without TLS, which Gloo has not either
            more |= {"listen": options.listen, "insecure": True, "bandwidth": options.bandwidth}
        if options.group_wait:
            more["group_wait"] = options.group_wait
        self._peer = Peer(
            self.tensors,
            run_id="benchmark",
            join=[options.join] if options.join else [],
            group_size=options.peers,
            min_group_size=self._least,
            compression=options.codec,
            **more,
        )

    async def __aenter__(self) -> Self:
        await self._peer.__aenter__()
        self.address = self._peer.endpoint
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._peer.__aexit__(*error)

    def writing(self) -> AbstractContextManager[object]:
        return self._peer.replacing()

    async def average(self) -> float:
        receipt = await self._peer.average()
        partly = self._least == self._count and (receipt.dropped or receipt.kept_local)
        if not receipt.averaged or partly or len(receipt.members) < self._least:
            raise RuntimeError(str(receipt))
        return receipt.allreduce_seconds


def sealed(options: argparse.Namespace) -> Averaging:
    """This library with TLS, so that direct connections are encrypted."""
    return Averaging(options, **tls_files(options.files))


def over_grpc(options: argparse.Namespace) -> Averaging:
    """This library with all parts over gRPC."""
    return Averaging(options, direct_listen=None)


def tls_files(folder: Path) -> dict[str, Path]:
    """Returns the options of a peer for TLS; `write_certificates` has made the files."""
    return {"tls_ca": folder / "ca.pem", "tls_cert": folder / "peer.pem", "tls_key": folder / "peer.key"}


def write_certificates(folder: Path) -> None:
    """Makes an authority, and a certificate for all peers of this machine."""
    from averaging.security.credentials import issue, make_authority

    now = datetime.datetime.now(datetime.UTC)
    authority = make_authority("benchmark", now, 1)
    own = issue(authority, "peer", ["127.0.0.1"], now, 1)
    contents = (authority.certificate, own.certificate, own.key)
    for file, content in zip(tls_files(folder).values(), contents, strict=True):
        file.write_bytes(content)


class Gloo:
    """torch.distributed, with all tensors at once. Its peers meet through a file."""

    packages = ()

    def __init__(self, options: argparse.Namespace) -> None:
        self.tensors = [torch.empty(shape) for shape in shapes(options.tensors, options.kib)]
        self._count, self._rank, self.address = options.peers, options.rank, options.join

    async def __aenter__(self) -> Self:
        torch.distributed.init_process_group("gloo", self.address, rank=self._rank, world_size=self._count)
        return self

    async def __aexit__(self, *error: object) -> None:
        torch.distributed.destroy_process_group()

    def writing(self) -> AbstractContextManager[object]:
        return nullcontext()

    async def average(self) -> float:
        begun = time.perf_counter()
        reductions = [torch.distributed.all_reduce(tensor, async_op=True) for tensor in self.tensors]
        for tensor, reduction in zip(self.tensors, reductions, strict=True):
            if reduction is not None:
                reduction.wait()
            tensor.div_(self._count)
        return time.perf_counter() - begun


class Hivemind:
    """hivemind 1.1.12: its averager and its DHT, each in a process of its own, and its daemon."""

    packages = ("hivemind", "numpy", "protobuf")

    def __init__(self, options: argparse.Namespace) -> None:
        if tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4):
            raise RuntimeError(f"hivemind needs numpy < 2.4, not {version('numpy')}: its codecs fail silently with it")
        # not installed where types are checked, so everything is Any
        hivemind = importlib.import_module("hivemind")
        codecs = {"none": hivemind.compression.NoCompression, "fp16": hivemind.compression.Float16Compression}
        self._least = options.least or options.peers
        self._dht = hivemind.DHT(
            host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=[options.join] if options.join else [], start=True
        )
        self.address = str(self._dht.get_visible_maddrs()[0])
        self._averager: Any = hivemind.averaging.DecentralizedAverager(
            [torch.zeros(shape) for shape in shapes(options.tensors, options.kib)],
            self._dht,
            prefix="benchmark",
            target_group_size=options.peers,
            min_group_size=max(2, self._least),
            compression=codecs[options.codec](),
            start=True,
            **({"min_group_wait": options.group_wait} if options.group_wait else {}),
        )
        with self._averager.get_tensors() as tensors:
            self.tensors = tensors

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._averager.shutdown()
        self._dht.shutdown()

    def writing(self) -> AbstractContextManager[object]:
        guard: AbstractContextManager[object] = self._averager.get_tensors()
        return guard

    async def average(self) -> float:
        step = self._averager.step(timeout=LIMIT / 2, wait=False)
        while not (step.began_allreduce or step.done()):  # noqa: ASYNC110 - hivemind has no event for this
            await asyncio.sleep(0.002)
        begun = time.perf_counter()
        members = step.result(LIMIT)
        if members is None or len(members) < self._least:
            raise RuntimeError(f"the group was {members}")
        return time.perf_counter() - begun


SYSTEMS = {"averaging": Averaging, "sealed": sealed, "grpc": over_grpc, "gloo": Gloo, "hivemind": Hivemind}


def error_bound(codec: str, peers: int) -> float:
    """Returns the largest error that float32 sums and the compression, in both directions, may cause."""
    largest = LARGEST + peers - 1
    steps = {"none": 0.0, "fp16": 2**-11, "bf16": 2**-8, "int8": 1 / 254}
    return largest * (2 * steps[codec] * 1.01 + peers * 2**-23)


class Truth:
    """Values that every peer can compute: the same random ones everywhere, plus the peer's rank."""

    def __init__(self, peers: int) -> None:
        random = torch.Generator().manual_seed(0)
        steps = int(LARGEST * 1024)
        self._pattern = torch.randint(-steps, steps + 1, (PERIOD,), generator=random) / 1024
        self._mean = self._pattern + (peers - 1) / 2

    def fill(self, tensors: Sequence[torch.Tensor], rank: int) -> None:
        for piece, place in _pieces(tensors):
            torch.add(self._pattern[place], rank, out=piece)

    def error(self, tensors: Sequence[torch.Tensor]) -> float:
        """Returns the largest distance to the true mean; infinite if a value is NaN."""
        errors = [(piece - self._mean[place]).abs_().max() for piece, place in _pieces(tensors) if piece.numel()]
        return float(torch.stack(errors).nan_to_num(nan=float("inf")).max())


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, slice]]:
    """Returns views of the tensors' elements, in order, and the position of each in the period."""
    position = 0
    for tensor in tensors:
        flat = tensor.detach().view(-1)
        end = position + flat.numel()
        cuts = [position, *range((position // PERIOD + 1) * PERIOD, end, PERIOD), end]
        for start, stop in pairwise(cuts):
            first = start % PERIOD
            yield flat[start - position : stop - position], slice(first, first + stop - start)
        position = end


def process_tree() -> list[int]:
    """Returns this process and all its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
        children.setdefault(parent, []).append(int(stat.parent.name))
    tree = [os.getpid()]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the process and its descendants, without files and shared memory."""

    held: int
    peak: int

    @classmethod
    def now(cls) -> Memory:
        held, peak = 0, 0
        for pid in process_tree():
            status = Path(f"/proc/{pid}/status").read_text()
            kib = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE)}
            if kib:  # a process that has just ended has none
                held += kib["RssAnon"] * 1024
                peak += (kib["VmHWM"] - kib["RssFile"] - kib["RssShmem"]) * 1024
        return cls(held, peak)

    @staticmethod
    def forget_peak() -> None:
        for pid in process_tree():
            Path(f"/proc/{pid}/clear_refs").write_text("5")


class CpuTime:
    """CPU time of the process and its descendants since now; to look for them costs more than a small round."""

    def __init__(self) -> None:
        self._processes = process_tree()
        self._before = self._total()

    @property
    def seconds(self) -> float:
        return self._total() - self._before

    def _total(self) -> float:
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self._processes)  # see clock_getcpuclockid(3)


class Role:
    """The commands."""

    def __init__(self, system: System, options: argparse.Namespace) -> None:
        self._system, self._rank, self._truth = system, options.rank, Truth(options.peers)
        self._idle: Memory | None = None

    async def fill(self) -> None:
        """Writes new values, and begins to count memory and CPU time."""
        with self._system.writing():
            self._truth.fill(self._system.tensors, self._rank)
        Memory.forget_peak()
        self._before = Memory.now()
        self._idle = self._idle or self._before
        self._cpu = CpuTime()

    async def average(self) -> dict[str, Any]:
        failure, allreduce_seconds, begun = "", 0.0, time.perf_counter()
        try:
            async with asyncio.timeout(LIMIT):
                allreduce_seconds = await self._system.average()
        except Exception as error:  # of any library: the round counts as failed
            failure = f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "allreduce_seconds": allreduce_seconds, "failure": failure, "ended": time.time()}

    async def check(self) -> dict[str, Any]:
        """All peers have finished, so this includes the whole round."""
        assert self._idle is not None, "nothing was filled"
        cpu_seconds, after = self._cpu.seconds, Memory.now()
        return {
            "cpu_seconds": cpu_seconds,
            "peak_bytes": after.peak - self._idle.held,
            "error": self._truth.error(self._system.tensors),
        }


@asynccontextmanager
async def playing(options: argparse.Namespace) -> AsyncIterator[tuple[Role, dict[str, Any]]]:
    make: Any = SYSTEMS[options.system]
    system: System = make(options)
    async with system:
        versions = {"python": platform.python_version()}
        versions |= {name: version(name) for name in ("torch", *system.packages)}
        yield Role(system, options), {"address": system.address, "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    for name in ("rank", "peers", "kib"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--tensors", default="4")
    parser.add_argument("--codec", default="none")
    parser.add_argument("--files", type=Path, help="folder of the certificates")
    parser.add_argument("--join", default="", help="address of rank 0; for Gloo the URL of a file")
    parser.add_argument("--least", type=int, help="peers that a round must have averaged (all)")
    parser.add_argument("--group-wait", type=float, help="seconds for which a leader waits for peers")
    parser.add_argument("--listen", help="address of this library's peer")
    parser.add_argument("--bandwidth", type=float, help="that this library's peer states, in bytes/s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    serve(playing(options))


if __name__ == "__main__":
    main()

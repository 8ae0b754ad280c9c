"""The systems of the all-reduce benchmark behind one interface. Each library is imported only where it is measured."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.distributed

from benchmarks.allreduce.bare import Bare
from benchmarks.allreduce.shapes import shapes

LIMIT = 120.0
"""Seconds within which a system must have averaged."""


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
        """Averages the tensors with all peers; returns the seconds of the all-reduce itself.

        Raises:
            RuntimeError: not all peers were averaged.
        """
        ...


class Averaging:
    """This library with its default options and the given ones."""

    packages = ("averaging", "grpcio", "protobuf")

    def __init__(self, options: argparse.Namespace, **peer_options: Any) -> None:
        from averaging.common.malloc import keep_freed_memory
        from averaging.peer.peer import Peer

        keep_freed_memory()  # as `averaging peer` does
        self.tensors = [torch.empty(shape) for shape in shapes(options.tensors, options.kib)]
        self._count = options.peers
        self._peer = Peer(
            self.tensors,
            run_id="benchmark",
            join=[options.join] if options.join else [],
            group_size=options.peers,
            min_group_size=options.peers,
            compression=options.codec,
            **peer_options,
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
        if not receipt.averaged or receipt.dropped or receipt.kept_local or len(receipt.members) != self._count:
            raise RuntimeError(str(receipt))
        return receipt.allreduce_seconds


class InPlace(Averaging):
    """This library with averages written as they arrive, which excludes sharing the state."""

    def __init__(self, options: argparse.Namespace, **peer_options: Any) -> None:
        super().__init__(options, in_place=True, share_state=False, **peer_options)


class Sealed(InPlace):
    """The same with TLS, so that direct connections are encrypted."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, **tls_files(options.files))


class OverGrpc(InPlace):
    """The same with all parts over gRPC."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, direct_listen=None)


class OverGrpcTls(InPlace):
    """The same with TLS."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, direct_listen=None, **tls_files(options.files))


def tls_files(folder: Path) -> dict[str, Path]:
    """Returns the options of a peer for TLS; `write_certificates` has made the files."""
    return {"tls_ca": folder / "ca.pem", "tls_cert": folder / "peer.pem", "tls_key": folder / "peer.key"}


def write_certificates(folder: Path) -> None:
    """Makes an authority, and a certificate for all peers of this machine."""
    from averaging.security.ca import issue, make_authority

    now = datetime.datetime.now(datetime.UTC)
    authority = make_authority("benchmark", now, 1)
    own = issue(authority, "peer", ["127.0.0.1"], now, 1)
    for file, content in zip(
        tls_files(folder).values(), (authority.certificate, own.certificate, own.key), strict=True
    ):
        file.write_bytes(content)


class Gloo:
    """torch.distributed, with all tensors at once."""

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
        self._count = options.peers
        self._dht = hivemind.DHT(
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            initial_peers=[options.join] if options.join else [],
            start=True,
        )
        self.address = str(self._dht.get_visible_maddrs()[0])
        self._averager: Any = hivemind.averaging.DecentralizedAverager(
            [torch.zeros(shape) for shape in shapes(options.tensors, options.kib)],
            self._dht,
            prefix="benchmark",
            target_group_size=options.peers,
            min_group_size=options.peers,
            compression=codecs[options.codec](),
            start=True,
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
        if members is None or len(members) != self._count:
            raise RuntimeError(f"the group was {members}")
        return time.perf_counter() - begun


SYSTEMS = {
    "averaging": Averaging,
    "direct": InPlace,
    "direct_sealed": Sealed,
    "grpc": OverGrpc,
    "grpc_tls": OverGrpcTls,
    "bare": Bare,
    "gloo": Gloo,
    "hivemind": Hivemind,
}

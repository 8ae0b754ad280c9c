"""The two ends of a weight sync group: a trainer sends its weights to explorers with a collective of torch.distributed.

The group is separate from the default group of the process, so both may be used together. A receiver returns all
weights of one version or raises.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch._C import _distributed_c10d as c10d

from averaging.common import format_address, is_own, loopback_here, parse_address
from averaging.errors import ConfigError, StateError
from averaging.rl.synchronizer.state_stream import Meta, StateDict, meta_of
from averaging.tensors import DTYPES, in_thread

LOOK_SECONDS = 0.02
"""Interval at which a member looks whether the others have joined."""

CONNECT_SECONDS = 2.0
"""Time limit of one try to reach the first member."""

_TRANSFER_SECONDS = 0.0005
"""Interval at which a member looks whether a tensor has come. Between GPUs of one machine it takes no longer."""

_NCCL_PATIENCE = timedelta(days=1)
"""Added to the time limit of NCCL, after which it would end this process. The members have their own."""

_DIGEST_BYTES = 32

T = TypeVar("T")


class _CollectiveMember:
    def __init__(self, backend: str = "gloo", device: torch.device | str = "cpu") -> None:
        if backend not in ("gloo", "nccl"):
            raise ConfigError(f"backend {backend!r} of a weight sync group must be gloo or nccl")
        self._backend = backend
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._group: Any = None  # of c10d
        self._timeout = 0.0
        self._leaving = threading.Event()

    def is_alive(self) -> bool:
        return True

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, world_size: int, group_name: str, timeout: float, rank: int
    ) -> None:
        """Joins a group, and leaves the former one. It returns when all members have joined.

        Args:
            master_address: Host of rank 0, the trainer.
            master_port: Port of rank 0, at which members meet.
            world_size: Number of members.
            group_name: The same at all members.
            timeout: Seconds for the set-up, and later for each transfer.
            rank: 0 for the trainer.

        Raises:
            StateError: The others did not join in time, or `teardown_weight_sync_group` was called meanwhile.
        """
        await self.teardown_weight_sync_group()
        self._leaving = leaving = threading.Event()
        self._timeout = timeout
        end = time.monotonic() + timeout

        def wait_until(ready: Callable[[], bool]) -> None:
            while not ready():
                if leaving.wait(LOOK_SECONDS):
                    raise StateError("the set-up of the weight sync group was given up")
                if time.monotonic() > end:
                    raise StateError(f"not all {world_size} members joined within {timeout:g} s")

        def join() -> Any:
            # A store that waits for its first member cannot be interrupted, so it is created when that is there.
            wait_until(lambda: rank == 0 or _own_address(master_address, master_port) is not None)
            limit = timedelta(seconds=timeout)
            store = c10d.TCPStore(
                master_address, master_port, world_size, is_master=rank == 0, timeout=limit, wait_for_workers=False
            )
            # Nor can the group: it is created when all members are at the store.
            joined = [f"{group_name}/joined/{number}" for number in range(world_size)]
            store.set(joined[rank], "1")
            wait_until(lambda: store.check(joined))
            own = _own_address(master_address, master_port)
            return self._new_group(c10d.PrefixStore(group_name, store), rank, world_size, limit, own)

        try:
            self._group = await _interruptible(join, leaving)
        except (RuntimeError, ValueError) as error:
            where = format_address(master_address, master_port)
            raise StateError(f"the weight sync group at {where}: {error}") from None

    def _new_group(self, store: Any, rank: int, world_size: int, limit: timedelta, own: str | None) -> Any:
        if self._backend == "gloo":
            if own is None or not is_own(own) or os.environ.get("GLOO_SOCKET_IFNAME"):
                return c10d.ProcessGroupGloo(store, rank, world_size, limit)
            # By default gloo looks up this machine's name, which may be unknown, or that of a loopback address.
            gloo = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # torch tells it to nobody
            gloo._timeout, gloo._devices = limit, [c10d.ProcessGroupGloo.create_device(hostname=own)]
            return c10d.ProcessGroupGloo(store, rank, world_size, gloo)
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = limit + _NCCL_PATIENCE
        with _errors_stay_here():
            return c10d.ProcessGroupNCCL(store, rank, world_size, options)

    async def teardown_weight_sync_group(self) -> None:
        """Leaves the group. A set-up or a transfer in progress ends with an error."""
        self._leaving.set()
        group, self._group = self._group, None
        if group is not None:
            await in_thread(group.abort if hasattr(group, "abort") else group.shutdown)

    async def _in_group(self, action: Callable[[Callable[[torch.Tensor], None]], T]) -> T:
        """Runs `action` in a thread, with a function that broadcasts one tensor from rank 0."""
        group, leaving = self._group, self._leaving
        if group is None:
            raise StateError("there is no weight sync group; coordinate_weight_sync_setup() makes one")

        def broadcast(raw: torch.Tensor) -> None:
            travelling = raw if raw.device == self._device else raw.to(self._device)
            work = group.broadcast(travelling, 0)
            end = time.monotonic() + self._timeout
            while not work.is_completed():  # a wait with a time limit would end the group
                if leaving.wait(_TRANSFER_SECONDS):
                    raise StateError("this member left the weight sync group during a transfer")
                if time.monotonic() > end:
                    raise StateError(f"the other members did nothing for {self._timeout:g} s during a transfer")
            work.wait()  # raises what has happened; the values are those of this thread's stream from now on
            if travelling is not raw:
                raw.copy_(travelling)

        try:
            return await _interruptible(lambda: action(broadcast), leaving)
        except RuntimeError as error:
            raise StateError(f"a member of the weight sync group was lost: {error}") from None


class WeightSender(_CollectiveMember):
    """The trainer's end of a weight sync group.

    ```python
    sender = WeightSender(model.state_dict)
    await synchronizer.add_module(sender, member="trainer")
    await synchronizer.coordinate_weight_sync_setup()
    version = await synchronizer.ready_to_nccl_sync("trainer", step, member="trainer")
    if version is not None:
        await sender.send(version)
    ```

    Args:
        state_dict: Returns the weights; called for each transfer.
        host: The host at which the explorers reach this process; loopback if None.
        backend: `gloo`, or `nccl` for tensors on `device`.
        device: Where tensors are while they travel; the CPU for gloo.
    """

    def __init__(
        self,
        state_dict: Callable[[], Mapping[str, torch.Tensor]],
        host: str | None = None,
        backend: str = "gloo",
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(backend, device)
        self._state_dict = state_dict
        self._host = host or parse_address(loopback_here("127.0.0.1:0"))[0].strip("[]")

    def get_weight_sync_info(self) -> tuple[str, int, Meta]:
        """Returns the address and a free port for the members to meet, and the meta of the weights."""
        both = socket.has_dualstack_ipv6()  # the port is free for IPv4 and IPv6, as far as this machine has them
        family = socket.AF_INET6 if both else socket.AF_INET
        with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as listener:
            port = int(listener.getsockname()[1])
        return self._host, port, meta_of(dict(self._state_dict()))

    async def send(self, version: int) -> None:
        """Sends the weights to all explorers of the group, which call `receive` at the same time.

        Raises:
            StateError: A member was lost, or there is no group. Set it up again.
        """
        state = dict(self._state_dict())

        def send(broadcast: Callable[[torch.Tensor], None]) -> None:
            broadcast(torch.tensor([version]))
            digest = hashlib.sha256()
            for tensor in state.values():
                raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                digest.update(raw.cpu().numpy().data)
                if raw.numel():
                    broadcast(raw)
            broadcast(torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8))

        await self._in_group(send)


class WeightReceiver(_CollectiveMember):
    """The explorer's end of a weight sync group; see `WeightSender` for the arguments.

    ```python
    version = await synchronizer.ready_to_nccl_sync("explorer", 0)
    if version is not None:
        model.load_state_dict(await receiver.receive(version))
    ```
    """

    def __init__(self, backend: str = "gloo", device: torch.device | str = "cpu") -> None:
        super().__init__(backend, device)
        self._meta: Meta = []

    async def set_state_dict_meta(self, state_dict_meta: Meta) -> None:
        """Takes the names, dtypes and shapes that the trainer will send."""
        self._meta = state_dict_meta

    async def receive(self, version: int) -> StateDict:
        """Receives the weights of `version`, while the trainer calls `send`.

        Returns:
            The weights on the CPU; all of one version.

        Raises:
            StateError: A member was lost, or there is no group.
            StateError: The trainer sent another version, or the digest is wrong.
        """
        meta = list(self._meta)

        def receive(broadcast: Callable[[torch.Tensor], None]) -> StateDict:
            sent = torch.zeros(1, dtype=torch.int64)
            broadcast(sent)
            state: StateDict = {}
            digest = hashlib.sha256()
            for name, dtype, shape in meta:
                tensor = state[name] = torch.empty(shape, dtype=DTYPES[dtype])
                raw = tensor.reshape(-1).view(torch.uint8)
                if raw.numel():
                    broadcast(raw)
                digest.update(raw.numpy().data)
            sent_digest = torch.zeros(_DIGEST_BYTES, dtype=torch.uint8)
            broadcast(sent_digest)
            if sent.item() != version:
                raise StateError(f"the trainer sent version {sent.item()}, not {version}; ask for the next one")
            if bytes(sent_digest.numpy()) != digest.digest():
                raise StateError(f"the weights of version {version} arrived with another digest; ask for the next ones")
            return state

        return await self._in_group(receive)


async def _interruptible(action: Callable[[], T], leaving: threading.Event) -> T:
    """Runs `action` in a thread; a cancellation sets `leaving`, which makes it raise soon."""

    def run() -> tuple[T] | Exception:
        try:
            return (action(),)
        except Exception as error:
            return error  # after a cancellation nobody would see it raised

    def give_up() -> bool:
        leaving.set()
        return False

    result = await in_thread(run, give_up)
    if isinstance(result, Exception):
        raise result
    return result[0]


@contextmanager
def _errors_stay_here() -> Iterator[None]:
    """Inside, a group of NCCL is made that only tells its errors: else torch ends the process when a member is lost."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _own_address(host: str, port: int) -> str | None:
    """The address of this machine from which it calls rank 0 (of rank 0: at which it is called); None if it cannot."""
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS) as connection:
            return str(connection.getsockname()[0])
    except OSError:
        return None

"""Transfers of tensors between workers, of which one is hostile: slow, endless, or sending something else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
import torch

from averaging.errors import (
    AveragingError,
    ConfigError,
    ProtocolViolationError,
    TensorError,
    WorkerError,
)
from averaging.rl.workers import DataManager, KeySpec, SampleBatch
from averaging.rl.workers.parameters import MIN_BYTES_PER_SECOND, SILENCE_SECONDS, Pace, ParameterExchange
from averaging.rl.workers.payload import Realloc, Step, WorkerChannels
from averaging.rpc import TensorMessage, tensor_messages
from averaging.testing import virtual_time
from averaging.wire.workers_pb2 import FetchDataRequest, NamedTensor

Messages = Callable[[], AsyncGenerator[NamedTensor, None]]


class Hostile:
    """A channel to a worker that answers every request with the same messages."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    def stream(self, method: Any, request: Any) -> AsyncGenerator[Any, None]:
        return self._messages()

    async def close(self) -> None:
        pass


def fetch(messages: Messages, *, keys: dict[str, KeySpec] | None = None) -> float:
    """Fetches the tensor `k` of the samples `s` and `t`. Returns the seconds that it took."""

    async def main() -> float:
        channels = WorkerChannels(lambda _: Hostile(messages))
        manager = DataManager("b", channels, {"a": "a:1"}, keys)
        await manager.redistribute([Step("bcast", "a", ["a"], ["b"], [["s", "t"]], ["k"])])
        return asyncio.get_running_loop().time()

    return virtual_time.run(main())


def take(messages: Messages) -> None:
    """Takes the parameter `weight` of three numbers."""

    async def main() -> None:
        exchange = ParameterExchange("b", WorkerChannels(lambda _: Hostile(messages)))
        exchange.endpoints = {"a": "a:1"}
        await exchange.take(Realloc("transfer", "actor", "ref", 1.0, origin="a"), {"weight": torch.zeros(3)})

    virtual_time.run(main())


def named(sample: str, key: str, tensor: torch.Tensor, dtype: str = "float32") -> list[NamedTensor]:
    return [NamedTensor(id=sample, key=key, dtype=dtype, tensor=one) for one in tensor_messages(tensor)]


def at_once(*messages: NamedTensor) -> Messages:
    async def stream() -> AsyncGenerator[NamedTensor, None]:
        for message in messages:
            yield message

    return stream


def dripping(nbytes: int, chunk: int, seconds: float) -> Messages:
    """A tensor whose chunks come one by one, and then another one at once."""

    async def stream() -> AsyncGenerator[NamedTensor, None]:
        first, *others = tensor_messages(torch.zeros(nbytes, dtype=torch.int8), chunk_bytes=chunk)
        yield NamedTensor(id="s", key="k", dtype="int8", tensor=first)
        for other in others:
            await asyncio.sleep(seconds)
            yield NamedTensor(tensor=other)
        for message in named("t", "k", torch.zeros(1, dtype=torch.int8), "int8"):
            yield message

    return stream


def test_a_source_that_drips_is_given_up() -> None:
    with pytest.raises(WorkerError, match=r"a sent \d+ bytes of tensors in 60 s; at least 983040 are expected"):
        fetch(dripping(10_000, 1, 59.0))


def test_a_burst_buys_no_time() -> None:
    """After the first chunk of 8 MiB bytes come one by one."""

    async def stream() -> AsyncGenerator[NamedTensor, None]:
        nbytes = 8 << 20
        first = TensorMessage(size=[nbytes], dtype="int8", chunks=1001, buffer=bytes(nbytes - 1000))
        yield NamedTensor(id="s", key="k", dtype="int8", tensor=first)
        for _ in range(1000):
            await asyncio.sleep(1.0)
            yield NamedTensor(tensor=TensorMessage(buffer=b"1"))

    with pytest.raises(WorkerError, match="bytes of tensors in 60 s"):
        fetch(stream)


def test_a_slow_but_honest_link_is_not_given_up() -> None:
    """Twice the minimum rate, for 20 minutes."""
    chunk = 1 << 20
    assert fetch(dripping(40 * chunk, chunk, chunk / (2 * MIN_BYTES_PER_SECOND))) > 1200


def test_a_silent_source_is_given_up() -> None:
    async def late() -> AsyncGenerator[NamedTensor, None]:
        await asyncio.sleep(61.0)
        yield NamedTensor()

    with pytest.raises(WorkerError, match="a sent no tensors for 60 s"):
        fetch(late)


def test_the_pace_against_a_sum_over_windows() -> None:
    pace = Pace(10.0)
    pace.add(1, 9.0)  # the first message may take a window
    assert pace.left == 10.0
    enough = 10 * MIN_BYTES_PER_SECOND
    for _ in range(9):
        pace.add(enough // 10, 1.0)
    assert pace.left == pytest.approx(1.0)
    pace.add(enough, 0.5)
    assert pace.left == 10.0


@pytest.mark.parametrize(
    ("messages", "error", "text"),
    [
        (named("s", "k", torch.zeros(1)) * 2, ProtocolViolationError, "'k' of sample 's' without a request"),
        (named("u", "k", torch.zeros(1)), ProtocolViolationError, "'k' of sample 'u' without a request"),
        (named("s", "x", torch.zeros(1)), ProtocolViolationError, "'x' of sample 's' without a request"),
        (named("s", "k", torch.zeros(2)), TensorError, r"is float32\[2\]; the plan says float32\[1\]"),
        (named("s", "k", torch.zeros(1), "int64"), TensorError, r"is int64\[1\]; the plan says float32\[1\]"),
        (named("s", "k", torch.zeros(1), "int128"), ProtocolViolationError, "unknown dtype 'int128'"),
        (named("s", "k", torch.zeros(1)), ProtocolViolationError, "did not send 1 of 2 tensors"),
    ],
)
def test_what_is_not_wanted_is_refused(messages: list[NamedTensor], error: type[AveragingError], text: str) -> None:
    with pytest.raises(error, match=text):
        fetch(at_once(*messages), keys={"k": KeySpec("float32", (1,))})


def test_a_tensor_of_another_shape_is_refused_at_its_first_chunk() -> None:
    """Otherwise it would take 4 GiB first."""
    head = TensorMessage(size=[1 << 30], dtype="float32", chunks=1 << 10, buffer=b"1")
    with pytest.raises(TensorError, match="the plan says"):
        fetch(at_once(NamedTensor(id="s", key="k", dtype="float32", tensor=head)), keys={"k": KeySpec("float32", (1,))})
    with pytest.raises(TensorError, match=r"'weight' is torch.float32\[1073741824\] at the source"):
        take(at_once(NamedTensor(key="weight", dtype="float32", tensor=head)))


def test_parameters_that_the_target_does_not_have_are_refused() -> None:
    with pytest.raises(TensorError, match="only one of the two models has the parameter 'other'"):
        take(at_once(*named("", "other", torch.zeros(3))))
    with pytest.raises(ProtocolViolationError, match="sent the parameter 'weight' twice"):
        take(at_once(*named("", "weight", torch.zeros(3)) * 2))
    take(at_once(*named("", "weight", torch.zeros(3))))


@pytest.mark.parametrize("missing", ["never there", "removed"])
def test_who_asks_for_a_tensor_that_does_not_come_is_answered(missing: str) -> None:
    async def main() -> float:
        manager = DataManager("a", WorkerChannels(lambda _: Hostile(at_once())))
        manager.update(SampleBatch(["s"], {"k": [torch.zeros(1)]}))
        request = FetchDataRequest(ids=["s", "t"], keys=["k"])
        replies = asyncio.ensure_future(anext(manager.serve(request)))
        await asyncio.sleep(1.0)
        if missing == "removed":
            manager.remove(["s"])
            manager.update(SampleBatch(["t"], {"k": [torch.zeros(1)]}))
        with pytest.raises(WorkerError, match="a does not hold 'k' of sample"):
            await replies
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == pytest.approx(SILENCE_SECONDS if missing == "never there" else 1.0)


def test_who_asks_for_parameters_that_are_not_published_is_answered() -> None:
    async def main() -> None:
        exchange = ParameterExchange("a", WorkerChannels(lambda _: Hostile(at_once())))
        with pytest.raises(WorkerError, match="a has published no parameters for the transfer transfer"):
            await exchange.take(Realloc("transfer", "actor", "ref", 1.0, origin="a"), {})

    virtual_time.run(main())


def test_the_number_of_transfers_before_a_request_is_bounded() -> None:
    async def main() -> None:
        manager = DataManager("b", WorkerChannels(lambda _: Hostile(at_once())), {"a": "a:1"})
        steps = [Step("bcast", "a", ["a"], ["b"], [["s"]], ["k"])]
        with pytest.raises(ProtocolViolationError, match="4097 transfers before one request; 4096 are allowed"):
            await manager.redistribute(steps * 4097)

    virtual_time.run(main())


def test_the_parameters_that_wait_for_takers_are_bounded() -> None:
    """Each pair of names keeps a copy of the model."""
    exchange = ParameterExchange("a", WorkerChannels(lambda _: Hostile(at_once())))

    def publish(target: str) -> None:
        exchange.publish(Realloc(f"to {target}", "actor", target, 1.0, takers=1), {"weight": torch.zeros(1)})

    async def main() -> None:
        for number in range(64):
            publish(str(number))
        publish("0")  # replaces one
        with pytest.raises(ConfigError, match="holds parameters for 64 models"):
            publish("64")

    virtual_time.run(main())

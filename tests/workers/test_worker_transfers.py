"""Transfers of tensors between workers: silent sources, and what was not requested."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
import torch

from averaging.errors import ProtocolViolationError, TensorError, WorkerError
from averaging.rl.workers import DataManager, SampleBatch
from averaging.rl.workers.data_manager import SILENCE_SECONDS, blend
from averaging.rl.workers.requests import Step
from averaging.rpc import TensorMessage, tensor_messages
from averaging.testing import virtual_time
from averaging.wire.workers_pb2 import FetchDataRequest, NamedTensor

Messages = Callable[[], AsyncGenerator[NamedTensor, None]]


class Hostile:
    """A channel to a worker that answers every request with the same messages."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    async def call(self, method: Any, request: Any, timeout: float) -> Any:
        raise NotImplementedError

    def stream(self, method: Any, request: Any) -> AsyncGenerator[Any, None]:
        return self._messages()

    async def close(self) -> None:
        pass


def fetch(messages: Messages) -> float:
    """Fetches the tensor `k` of the samples `s` and `t`. Returns the seconds that it took."""

    async def main() -> float:
        manager = DataManager("b", lambda _: Hostile(messages))
        manager.endpoints = {"a": "a:1"}
        await manager.redistribute([Step("bcast", "a", ["a"], ["b"], [["s", "t"]], ["k"])])
        return asyncio.get_running_loop().time()

    return virtual_time.run(main())


def named(sample: str, key: str, tensor: torch.Tensor, dtype: str = "float32") -> list[NamedTensor]:
    return [NamedTensor(id=sample, key=key, dtype=dtype, tensor=one) for one in tensor_messages(tensor)]


def at_once(*messages: NamedTensor) -> Messages:
    async def stream() -> AsyncGenerator[NamedTensor, None]:
        for message in messages:
            yield message

    return stream


def test_a_silent_source_is_given_up() -> None:
    async def late() -> AsyncGenerator[NamedTensor, None]:
        await asyncio.sleep(61.0)
        yield NamedTensor()

    with pytest.raises(WorkerError, match="a sent no tensors for 60 s"):
        fetch(late)


half = TensorMessage(size=[2], dtype="int8", chunks=2, buffer=b"1")


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (named("s", "k", torch.zeros(1)) * 2, "a sent 2 tensors, not the 2 requested ones"),
        (named("s", "k", torch.zeros(1)) + named("u", "k", torch.zeros(1)), "not the 2 requested ones"),
        (named("s", "k", torch.zeros(1)) + named("t", "x", torch.zeros(1)), "not the 2 requested ones"),
        (named("s", "k", torch.zeros(1)), "a sent 1 tensors, not the 2 requested ones"),
        (named("s", "k", torch.zeros(1), "int128"), "unknown dtype 'int128'"),
        ([NamedTensor(id="s", key="k", dtype="int8", tensor=half)], "an incomplete tensor"),
    ],
)
def test_what_is_not_wanted_is_refused(messages: list[NamedTensor], text: str) -> None:
    with pytest.raises(ProtocolViolationError, match=text):
        fetch(at_once(*messages))


@pytest.mark.parametrize("missing", ["never there", "removed"])
def test_who_asks_for_a_tensor_that_does_not_come_is_answered(missing: str) -> None:
    async def main() -> float:
        manager = DataManager("a", lambda _: Hostile(at_once()))
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


def test_parameters_that_are_not_published_in_time() -> None:
    async def main() -> None:
        manager = DataManager("a", lambda _: Hostile(at_once()))
        with pytest.raises(WorkerError, match="a does not hold anything of sample transfer"):
            await manager.parameters_of("a", "transfer")
        with pytest.raises(WorkerError, match="tensors of 'z', which is not in its plan"):
            await manager.parameters_of("z", "transfer")

    virtual_time.run(main())


def test_blend() -> None:
    target = {"w": torch.tensor([4.0, 8.0]), "n": torch.tensor([1])}
    source = {"w": torch.tensor([8.0, 0.0]), "n": torch.tensor([5])}
    for eta, expected in ((0.0, ([4.0, 8.0], 1)), (0.25, ([5.0, 6.0], 5)), (1.0, ([8.0, 0.0], 5))):
        blended = {name: tensor.clone() for name, tensor in target.items()}
        blend(blended, source, eta, "ref")
        assert (blended["w"].tolist(), int(blended["n"])) == expected
    for other, text in (
        ({"w": source["w"]}, "only one of the two models has the parameter 'n'"),
        (source | {"n": torch.tensor([5.0])}, r"'n' is torch.float32\[1\] at the source and torch.int64\[1\]"),
        (source | {"n": torch.tensor([5, 6])}, r"'n' is torch.int64\[2\] at the source and torch.int64\[1\]"),
    ):
        with pytest.raises(TensorError, match=text):
            blend(target, other, 1.0, "ref")
        assert target["w"].tolist() == [4.0, 8.0]

"""Copies between a GPU and the host: chunks, streams, page-locked memory, and what reads them."""

import threading

import pytest
import torch

from averaging.protocol import CompressionType
from averaging.tensors import HostCopies, SharedTensors, StagedTensor, Write, encode, host_memory, sent
from averaging.tensors.staging import CHUNK_BYTES
from tests.gpu.device_runs import CODES
from tests.gpu.device_states import check_committed_states

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)

SLEEP = 1_000_000_000
"""Cycles of a kernel that does nothing: about half a second."""


def busy(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    large = torch.randn(3 * CHUNK_BYTES // 4 + 5, device=GPU)
    shapes = [torch.randn(3, 5, device=GPU).t(), torch.randn(7, device=GPU).to(torch.bfloat16)]
    return [large, *shapes, torch.empty(0, device=GPU), torch.randn(4), torch.randn(11, device=GPU).to(torch.float64)]


def test_the_memory_is_page_locked() -> None:
    held = tensors()
    for copy, tensor in zip(host_memory(held, [tensor.dtype for tensor in held]), held, strict=True):
        assert copy.shape == tensor.shape
        assert copy.dtype == tensor.dtype
        assert not copy.numel() or copy.is_pinned()


@pytest.mark.parametrize("keep", [True, False])
def test_copies_are_those_of_the_moment(keep: bool) -> None:
    """They hold what was queued before `begin`, although the device computes it later, and nothing of what follows."""
    held = tensors()
    copies = HostCopies(held)
    expected = [tensor.cpu() * 2 for tensor in held]
    for _ in range(2):
        busy(SLEEP // 4)
        for tensor in held:
            tensor.mul_(2)
        copies.begin(keep=keep)
        if keep:
            for tensor in held:
                tensor.zero_()
        copies.wait()
        assert all(map(torch.equal, copies.copies, expected))
        for tensor, value in zip(held, expected, strict=True):
            tensor.copy_(value / 2)


def test_copies_are_in_the_dtype_of_their_memory() -> None:
    short = torch.randn(1000, device=GPU).to(torch.bfloat16)
    into = torch.zeros(1000)
    copies = HostCopies([short], [into])
    copies.begin()
    copies.wait()
    assert torch.equal(into, short.cpu().float())


def test_training_is_not_held_up_by_copies() -> None:
    """`begin` returns while the device still computes what is copied."""
    held = [torch.randn(1 << 22, device=GPU)]
    copies = HostCopies(held)
    copies.begin()
    copies.wait()
    torch.cuda.synchronize()
    busy(SLEEP)
    copies.begin(keep=True)
    assert not copies.has(0, 1)
    copies.wait()
    assert copies.has(0, 1 << 22)


def test_another_thread_reads_what_a_stream_of_its_own_has_computed() -> None:
    shared = SharedTensors({"w": torch.zeros(1 << 20, device=GPU)})
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream), shared.locked() as (tensor,):
        busy(SLEEP // 2)
        tensor.fill_(3.0)
    found: list[torch.Tensor] = []

    def read() -> None:
        (staged,) = shared.flat()
        assert isinstance(staged, StagedTensor)
        found.append(staged.whole().clone())

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert torch.equal(found[0], torch.full((1 << 20,), 3.0))


@pytest.mark.parametrize("how", list(Write))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_results_are_written_as_on_the_cpu(how: Write, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    memory = torch.randn(4000).to(dtype)
    sides = []
    for device in (torch.device("cpu"), GPU):
        whole = memory.clone().to(device)
        held = {"whole": whole, "turned": torch.ones(50, 20, dtype=dtype, device=device).t(), "tied": whole[:4000]}
        sides.append(SharedTensors(held))
    changes = [(0, 5, 2000), (0, 3000, 7), (1, 0, 1000), (2, 1000, 3000)]
    pieces = [(number, start, torch.randn(count)) for number, start, count in changes]
    for shared in sides:
        shared.write(pieces, how)
    for one, other in zip(sides[0].tensors, sides[1].tensors, strict=True):
        assert torch.equal(one, other.cpu())


def test_what_is_sent_may_be_overwritten_at_once() -> None:
    values = host_memory([torch.empty(1 << 22, device=GPU)] * 3, [torch.float32] * 3)
    for number, value in enumerate(values):
        value.fill_(number + 1)
    arrived = []
    busy(SLEEP // 2)
    for value, tensor in zip(values, sent(values, [torch.empty(0, device=GPU)] * 3), strict=True):
        value.fill_(-1)
        arrived.append(tensor)
    assert [(tensor.min().item(), tensor.max().item()) for tensor in arrived] == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


@pytest.mark.parametrize("code", ["none", *CODES])
def test_a_tensor_on_the_gpu_is_encoded_to_the_same_bytes(code: str) -> None:
    torch.manual_seed(2)
    tensor = torch.randn(123, 77)
    compression = CompressionType[code.upper()]
    assert bytes(encode(tensor.to(GPU), compression).buffer) == bytes(encode(tensor, compression).buffer)


def test_memory_is_freed() -> None:
    """What is taken for a copy on the device goes back; the host's memory is unlocked with its tensors."""
    held = [torch.randn(1 << 22, device=GPU) for _ in range(4)]
    copies = HostCopies(held)
    copies.begin(keep=True)
    copies.wait()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        copies.begin(keep=True)
        copies.wait()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


async def test_newcomers_get_what_was_committed() -> None:
    await check_committed_states(GPU, 3 * CHUNK_BYTES // 4 + 1)

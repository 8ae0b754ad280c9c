"""Whole peers on real gRPC and gossip, in one process: modes, tensors of all kinds, the lock, bad input."""

import asyncio
import gc
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging import Outcome, Peer
from averaging.allreduce import AllReduce, RoundResult
from averaging.allreduce.reducer_side import ReducerSide
from averaging.allreduce.round_tally import RoundTally
from averaging.allreduce.sender_side import SenderSide
from averaging.allreduce.shard_reducer import ShardReducer
from averaging.config import NonFinite
from averaging.errors import ClosedError, ConfigError, JoinError, RoundError, TensorError
from averaging.peer.topics import ErrorFeedback
from averaging.protocol.group import ReplyForm, donors_key, group_key
from averaging.state.manifest import Snapshots, State
from averaging.tensors.shared_tensors import SharedTensors
from tests.support.certificates import write
from tests.support.peers import average, enter, swarm, told
from tests.support.ports import free_port


async def test_nothing_that_goes_through_many_bytes_stops_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others ask this peer meanwhile whether it lives."""
    inline: list[str] = []
    in_threads: set[str] = set()

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def noted(*args: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                inline.append(name)
            else:
                in_threads.add(name)
            return original(*args)

        monkeypatch.setattr(owner, name, noted)

    monkeypatch.setattr("averaging.tensors.shared_tensors.INLINE_BYTES", 0)
    monkeypatch.setattr("averaging.state.manifest.INLINE_BYTES", 0)
    heavy = {
        SharedTensors: ["check_finite", "flat", "write", "copy_from"],
        ErrorFeedback: ["inputs", "sent"],
        Snapshots: ["_copy_once", "_seal"],
    }
    for owner, names in heavy.items():
        for name in names:
            watch(owner, name)
    tensors = [{"x": torch.full((3000, 4), value).t()} for value in (1.0, 3.0)]
    async with AsyncExitStack() as stack:
        peers = await swarm(stack, tensors, compression="int8")
        topics = [peer.topic("steps", mine, error_feedback=True) for peer, mine in zip(peers, tensors, strict=True)]
        async with asyncio.timeout(60):
            receipts = await asyncio.gather(*(peer.average(topic) for peer, topic in zip(peers, topics, strict=True)))
        assert all(receipt.averaged for receipt in receipts)
        torch.testing.assert_close(tensors[0]["x"], torch.full((4, 3000), 2.0))
        await peers[0].commit()
        await told(peers[1], donors_key("run"), peers[0].endpoint)
        tensors[1]["x"].zero_()
        await peers[1].download_state()
        assert torch.equal(tensors[1]["x"], tensors[0]["x"])
    assert inline == []
    assert in_threads == {name for names in heavy.values() for name in names}


@pytest.mark.parametrize("nbytes", [0, 1 << 20])
async def test_the_modes_of_autograd_hold_in_a_thread_too(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("averaging.tensors.shared_tensors.INLINE_BYTES", nbytes)
    bias = torch.zeros(3, requires_grad=True)

    def take_over(state: State) -> None:
        bias.add_(1.0)

    async with AsyncExitStack() as stack:
        with torch.inference_mode():
            tensors = [{"x": torch.full((100,), value)} for value in (1.0, 3.0)]
            peers = await swarm(stack, tensors)
            assert all(receipt.averaged for receipt in await average(*peers))
        with torch.no_grad():
            peer = await stack.enter_async_context(
                Peer({"x": torch.zeros(100)}, run_id="run", join=[peers[0].endpoint])
            )
            await told(peer, donors_key("run"), peers[0].endpoint)
            await peer.download_state(take_over, [peers[0].endpoint])
    assert bias.tolist() == [1.0] * 3


async def test_a_commit_while_a_result_is_written_is_the_version_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("averaging.tensors.shared_tensors.INLINE_BYTES", 0)
    writing, go_on = threading.Event(), threading.Event()
    write = SharedTensors.write
    tensors = [{"x": torch.full((100,), value)} for value in (1.0, 3.0)]

    def held(shared: SharedTensors, *args: Any) -> None:
        if shared.tensors[0].data_ptr() == tensors[0]["x"].data_ptr():
            writing.set()
            go_on.wait(60)
        write(shared, *args)

    monkeypatch.setattr(SharedTensors, "write", held)
    async with AsyncExitStack() as stack:
        peers = await swarm(stack, tensors)
        averaging = asyncio.create_task(average(*peers))
        assert await asyncio.to_thread(writing.wait, 60)
        committing = asyncio.create_task(peers[0].commit())
        await asyncio.sleep(0)  # until it waits for the lock
        go_on.set()
        await asyncio.gather(averaging, committing)
        assert [peer.version for peer in peers] == [2, 1]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
async def test_a_round_is_gone_without_the_garbage_collector(
    inline_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds averages, which may be as large as the tensors."""
    monkeypatch.setattr("averaging.tensors.shared_tensors.INLINE_BYTES", inline_bytes)
    loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor()
    loop.set_default_executor(threads)
    before = rounds_in_memory()  # other tests hold errors, whose tracebacks hold rounds
    async with AsyncExitStack() as stack:
        receipts = await average(*await swarm(stack, [{"x": torch.full((3000,), value)} for value in (1.0, 3.0)]))
        assert all(receipt.averaged for receipt in receipts)
        # A thread lets go of what it has worked on a moment after its result is there, but before it ends.
        loop.set_default_executor(ThreadPoolExecutor())
        await asyncio.to_thread(threads.shutdown)
        assert rounds_in_memory() <= before


def rounds_in_memory() -> set[int]:
    kinds = (AllReduce, RoundResult, RoundTally, ReducerSide, SenderSide, ShardReducer)
    return {id(found) for found in gc.get_objects() if type(found) in kinds}


async def test_a_peer_that_others_cannot_dial_is_notified_as_well_as_they() -> None:
    async with AsyncExitStack() as stack:
        options: dict[str, Any] = {"group_size": 2, "part_size_bytes": 1024, "stall_timeout": 1.0}
        founder = await enter(stack, {"w": torch.zeros(1000)}, **options)
        hidden = await enter(
            stack, {"w": torch.ones(1000)}, join=[founder.endpoint], advertise="127.0.0.1:1", insecure=True, **options
        )
        leading = asyncio.create_task(founder.average())
        await told(hidden, group_key("run", ""), founder.endpoint)  # so that it asks, and need not be asked
        [by_hidden] = await average(hidden)
        async with asyncio.timeout(60):
            by_founder = await leading
        [lost] = by_founder.dropped
        assert lost.reason.startswith("connection refused")
        [lost] = by_hidden.dropped
        assert lost.reason.startswith("sent nothing")
        assert lost.reason.endswith("can it reach 127.0.0.1:1?")


def awkward(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of all shapes, dtypes and layouts that can be averaged."""
    random = torch.Generator().manual_seed(seed)
    matrix = torch.randn(40, 30, generator=random)
    return {
        "scalar": torch.randn((), generator=random),
        "empty": torch.zeros(0, 5),
        "half": torch.randn(33, generator=random).half(),
        "bfloat": torch.randn(33, generator=random).bfloat16(),
        "double": torch.randn(7, 3, generator=random).double(),
        "transposed": matrix.t(),
        "strided": torch.randn(50, generator=random)[::3],
        "parameter": torch.nn.Parameter(torch.randn(5, generator=random)),
    }


@pytest.mark.parametrize("reply", list(ReplyForm))
async def test_tensors_of_all_kinds(reply: ReplyForm) -> None:
    everybody = [awkward(seed) for seed in range(3)]
    expected = {name: sum(t[name].detach().double() for t in everybody) / 3 for name in everybody[0]}
    async with AsyncExitStack() as stack:
        await average(*await swarm(stack, everybody, reply_form=reply, part_size_bytes=1024))
    for tensors in everybody:
        for name, tensor in tensors.items():
            precision = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(tensor.dtype, 1e-6)
            torch.testing.assert_close(tensor.detach().double(), expected[name], rtol=precision, atol=precision)


async def test_the_lock_keeps_a_result_out_until_it_is_released() -> None:
    tensors = [{"w": torch.zeros(4)}, {"w": torch.full((4,), 2.0)}]
    async with AsyncExitStack() as stack:
        # The look for NaN takes the lock too, before the round; here the lock is to matter at its end.
        peers = await swarm(stack, tensors, non_finite=NonFinite.ALLOW)
        with peers[0].tensors() as locked:
            averaging = asyncio.create_task(peers[0].average())
            await average(peers[1])
            assert tensors[1]["w"].tolist() == [1.0] * 4
            assert locked[0].tolist() == [0.0] * 4
            assert not averaging.done()
        assert (await averaging).averaged
    assert tensors[0]["w"].tolist() == [1.0] * 4


async def test_a_lock_that_is_held_for_too_long_fails_the_round_and_is_no_error() -> None:
    async with AsyncExitStack() as stack:
        peer = await enter(stack, {"w": torch.zeros(4)}, round_timeout=0.05)
        with peer.tensors():
            receipt = await peer.average()
        assert receipt.outcome is Outcome.FAILED
        assert (
            receipt.reason
            == "the application held the tensors' lock for 0.05 s; release it sooner, or raise round_timeout"
        )
        assert (await peer.average()).outcome is Outcome.NO_GROUP


@pytest.mark.parametrize("name", ["gradients.0", "g" * 65])
def test_a_topic_has_a_name_that_discovery_can_carry(name: str) -> None:
    with pytest.raises(ConfigError, match="no dot and at most 64 characters"):
        Peer({"w": torch.zeros(3)}, run_id="run").topic(name, {"g": torch.zeros(3)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_nan_and_infinity_are_refused_before_anything_is_sent(value: float) -> None:
    async with AsyncExitStack() as stack:
        bad = torch.zeros(2, 3)
        bad[1, 2] = value
        peer = await enter(stack, {"fine": torch.zeros(2), "bad": bad})
        with pytest.raises(TensorError, match=r"'bad' holds .* at flat index 5"):
            await peer.average()


async def test_nan_is_averaged_where_it_is_allowed() -> None:
    tensors = [{"w": torch.tensor([float("nan"), 1.0])}, {"w": torch.tensor([0.0, 3.0])}]
    async with AsyncExitStack() as stack:
        await average(*await swarm(stack, tensors, non_finite=NonFinite.ALLOW))
    for tensor in tensors:
        assert tensor["w"].isnan().tolist() == [True, False]
        assert tensor["w"][1].item() == 2.0


async def test_a_round_that_cannot_be_prepared_fails_at_this_peer_and_goes_on_without_it() -> None:
    def refuse(gathered: Mapping[str, Any]) -> None:
        raise RoundError(f"no room for {len(gathered)} members")

    tensors = [{"w": torch.full((3000,), float(number))} for number in range(3)]
    async with AsyncExitStack() as stack:
        peers = await swarm(stack, tensors, group_size=3, part_size_bytes=1024)
        refusing = peers[0].average(prepare=refuse)
        receipts = await asyncio.gather(refusing, *(peer.average() for peer in peers[1:]))
    assert not receipts[0].averaged
    assert "no room for 3 members" in receipts[0].reason
    assert tensors[0]["w"].tolist() == [0.0] * 3000
    # Each third had another reducer, and that of this peer is gone.
    assert set(tensors[1]["w"].tolist()) == {1.0, 1.5}


@pytest.mark.parametrize("options", [{"weight": -1}, {"weight": float("nan")}, {"gather": object()}])
async def test_arguments_of_average_that_cannot_work(options: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        peer = await enter(stack, {"w": torch.zeros(1)})
        with pytest.raises(ConfigError):
            await peer.average(**options)


async def test_only_one_average_at_a_time() -> None:
    async with AsyncExitStack() as stack:
        peer = await enter(stack, {"w": torch.zeros(1)})
        first = asyncio.create_task(peer.average())
        await told(peer, group_key("run", ""), peer.endpoint)
        with pytest.raises(RoundError, match="in progress"):
            await peer.average()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not peer.status.looking


async def test_a_peer_that_is_closed_ends_its_average_first() -> None:
    async with AsyncExitStack() as stack:
        other = await enter(stack, {"w": torch.zeros(1)})
        async with Peer({"w": torch.zeros(1)}, run_id="run", join=[other.endpoint], round_timeout=5.0) as peer:
            averaging = asyncio.create_task(peer.average())
            endpoint = peer.endpoint
            await told(other, group_key("run", ""), endpoint)
        assert averaging.done()
        with pytest.raises(ClosedError, match="closed while it averaged"):
            await averaging
        assert endpoint not in other.peers


async def test_who_reaches_only_itself_under_another_name_has_joined_nobody() -> None:
    port = free_port()
    own = f"localhost:{port}"
    options: dict[str, Any] = {"listen": f"127.0.0.1:{port}", "join_timeout": 1.0}
    async with AsyncExitStack() as stack:
        with pytest.raises(JoinError, match="it has the name of the peer that asks"):
            await enter(stack, {"w": torch.zeros(1)}, join=[own, "127.0.0.1:9"], **options)
        founder = await enter(stack, {"w": torch.zeros(1)}, join=[own], **options)  # as without anybody to join
        other = await enter(stack, {"w": torch.zeros(1)}, join=[founder.endpoint])
        assert other.peers >= {founder.endpoint}


@pytest.mark.parametrize("what", ["run", "token", "no token", "a token here only", "authority", "TLS"])
async def test_a_wrong_run_token_or_authority_fails_at_once(tmp_path: Path, what: str) -> None:
    def token(name: str, text: str) -> dict[str, Any]:
        path = tmp_path / name
        path.touch(mode=0o600)
        path.write_text(text)
        return {"token_file": path}

    listens: dict[str, Any] = {"run_id": "one"}
    joins: dict[str, Any] = {"run_id": "one", "join_timeout": 3600.0}  # it does not wait for so long
    if what == "run":
        joins["run_id"] = "two"
    elif what == "a token here only":
        joins |= token("right", "0123456789abcdef")
    elif "token" in what:
        listens |= token("right", "0123456789abcdef")
        joins |= {} if what == "no token" else token("wrong", "fedcba9876543210")
    else:
        joins |= write(tmp_path, "127.0.0.1")
        if what == "authority":
            listens |= write(tmp_path / "foreign", "127.0.0.1", of="foreign")
    words = {
        "run": "belongs to run 'one', not to 'two'; give both peers the same run id",
        "token": "its run does not accept this peer's token",
        "no token": "its run requires a token, and this peer has none",
        "a token here only": "has no token, and this peer has one: give token_file to all peers of the run, or to none",
        "authority": "its certificate was not issued by this peer's certificate authority",
        "TLS": "it does not speak TLS",
    }
    async with AsyncExitStack() as stack:
        first = await enter(stack, {"w": torch.zeros(1)}, **listens)
        with pytest.raises(JoinError, match=words[what]) as raised:
            await enter(stack, {"w": torch.zeros(1)}, join=[first.endpoint], **joins)
        assert raised.value.refused


async def test_peers_at_the_loopback_address_of_ipv6(tmp_path: Path) -> None:
    """With a certificate for it; parts go the direct way."""
    options: dict[str, Any] = {"listen": "[::1]:0", "group_size": 2, **write(tmp_path, "::1")}
    async with AsyncExitStack() as stack:
        first = await enter(stack, {"w": torch.zeros(3)}, **options)
        second = await enter(stack, {"w": torch.ones(3)}, join=[first.endpoint], **options)
        assert first.endpoint.startswith("[::1]:")
        receipts = await average(first, second)
    assert [receipt.averaged for receipt in receipts] == [True, True]

"""Downloads between our peers and those that know the wire contract alone, in both directions."""

import asyncio
from typing import Any

import pytest
import torch
from msgspec import msgpack

from averaging.errors import StateError
from averaging.state.manifest import ExtraState, State
from tests.foreign.driver import Foreign, ForeignPeer, Message, Ours, gather, our_peer, whole_numbers

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("nothing_is_left_behind"),
]

SILENCE = 2.0
"""Seconds after which a donor is given up that says nothing more. A test waits them out; a donor that lives, on a busy
machine, must not."""

SHAPES = {"w": (300000,), "b": (10, 10), "s": (), "e": (0, 3)}


def named(seed: int) -> dict[str, torch.Tensor]:
    return dict(zip(SHAPES, whole_numbers(seed, *SHAPES.values()), strict=True))


def as_found(tensors: dict[str, torch.Tensor]) -> list[Message]:
    """What a reader finds in a download of these."""
    return [
        {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "buffer": tensor.reshape(-1).view(torch.uint8).numpy().tobytes(),
        }
        for tensor in tensors.values()
    ]


# Our peer as the donor


async def test_our_state_with_its_metadata_and_without(foreign: Foreign) -> None:
    reader = await foreign.client()
    tensors = {"w": whole_numbers(1, (300000,))[0], "b": torch.randn(10, 10).t()}
    extra = {"h": torch.randn(3).to(torch.bfloat16), "n": torch.tensor(7), "e": torch.empty(0, 3)}
    async with our_peer(tensors, extra_state=lambda: ExtraState(extra, {"step": 3})) as us:
        await us.peer.commit(12)
        found = await reader.download(donor=us.endpoint)
    expected = as_found(tensors | extra)
    assert found["plain"] == expected
    assert found["state"]["version"] == 12
    assert found["state"]["user"] == {"step": 3}
    assert list(found["state"]["tensors"]) == ["w", "b", "h", "n", "e"]
    assert list(found["state"]["tensors"].values()) == expected


async def test_what_is_not_committed_is_not_donated(foreign: Foreign) -> None:
    reader, follower = await foreign.client(), await foreign.peer()
    async with our_peer([torch.ones(8)]) as us, us.averaging():
        assert await us.asks_to_join(follower, gather(), endpoint="127.0.0.1:9") == "ACCEPTED"  # a round is running
        with us.peer.tensors() as (tensor,):
            tensor.add_(1)
        assert (await reader.download(donor=us.endpoint))["plain"] == as_found({"": torch.ones(8)})
        await us.peer.commit()
        found = await reader.download(donor=us.endpoint)
        assert found["plain"] == as_found({"": torch.full((8,), 2.0)})
        assert found["state"]["version"] == 1
        await us.peer.commit(0)
        assert (await reader.download(donor=us.endpoint))["state"]["version"] == 1


async def test_a_state_that_is_not_shared_is_empty(foreign: Foreign) -> None:
    reader = await foreign.client()
    async with our_peer(share_state=False) as us:
        assert await reader.download(donor=us.endpoint) == {"state": {}, "plain": []}
        assert us.endpoint not in us.discovery.get("run.all_averagers")


# A foreign donor


async def pack(foreign: Foreign, tensors: dict[str, torch.Tensor], **options: Any) -> list[Message]:
    packed = [
        {"name": name, "shape": list(tensor.shape), "buffer": tensor.numpy().tobytes()}
        for name, tensor in tensors.items()
    ]
    arguments = {"tensors": packed, "version": 7, "user": {"lr": 0.5}, "in_hex": False, "apart": False} | options
    messages: list[Message] = await foreign.call("pack_state", **arguments)
    return messages


async def offer(us: Ours, donor: ForeignPeer, messages: list[Message], priority: float, *, hangs: bool = False) -> None:
    await donor.offer(messages=messages, hangs=hangs)
    await us.declare_donor(donor.endpoint, priority)


@pytest.mark.parametrize("in_hex", [False, True])
@pytest.mark.parametrize("apart", [False, True])
async def test_a_foreign_state(foreign: Foreign, apart: bool, in_hex: bool) -> None:
    donor = await foreign.peer()
    ours, theirs = named(1), named(2) | {"momentum": torch.randn(5)}
    seen: list[State] = []
    async with our_peer(ours) as us:
        await offer(us, donor, await pack(foreign, theirs, apart=apart, in_hex=in_hex), 7.0)
        assert (7.0, donor.endpoint) in us.peer.donors
        state = await us.peer.download_state(seen.append)
        assert us.peer.version == 7
    assert seen == [state]
    assert state.version == 7
    assert state.user == {"lr": 0.5}
    assert list(state.tensors) == list(theirs)
    assert all(torch.equal(state.tensors[name], tensor) for name, tensor in theirs.items())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def changed(messages: list[Message], **metadata: Any) -> list[Message]:
    """With other metadata."""
    told = msgpack.decode(messages[0]["metadata"]) | metadata
    return [messages[0] | {"metadata": msgpack.encode(told)}, *messages[1:]]


def first_tensor(messages: list[Message], **fields: Any) -> list[Message]:
    """With another first chunk."""
    return [messages[0] | {"tensor_part": messages[0]["tensor_part"] | fields}, *messages[1:]]


def told(messages: list[Message], field: str) -> Any:
    return msgpack.decode(messages[0]["metadata"])[field]


BROKEN_STATES: dict[str, Any] = {
    "nothing": lambda good: [],
    "no metadata": lambda good: [{"tensor_part": good[0]["tensor_part"]}, *good[1:]],
    "unreadable metadata": lambda good: [good[0] | {"metadata": b"\xc1"}, *good[1:]],
    "ends in a tensor": lambda good: good[:3],
    "a wrong digest": lambda good: changed(good, digest=[b"\0" * 32, *told(good, "digest")[1:]]),
    "a changed byte": lambda good: first_tensor(good, buffer=b"\xff" + good[0]["tensor_part"]["buffer"][1:]),
    "a tensor too many": lambda good: [*good, good[-1]],
    "a chunk twice": lambda good: [*good[:2], good[1], *good[2:]],
    "another shape than announced": lambda good: first_tensor(good, size=[3]),
    "a compressed tensor": lambda good: first_tensor(good, compression="FLOAT16"),
    "other tensors than ours": lambda good: changed(good, tensors=told(good, "tensors")[::-1]),
    "a tensor without end": lambda good: changed(
        good, tensors=[*told(good, "tensors"), ["x", "float32", [1 << 40]]], digest=[*told(good, "digest"), b"\0" * 32]
    ),
}


@pytest.mark.parametrize("broken", BROKEN_STATES)
async def test_the_next_donor_is_asked_after_a_broken_one(foreign: Foreign, broken: str) -> None:
    bad, good = await foreign.peer(), await foreign.peer()
    ours, theirs = named(1), named(2)
    before = {name: tensor.clone() for name, tensor in ours.items()}
    applied: list[State] = []
    async with our_peer(ours) as us:
        messages = await pack(foreign, theirs)
        await offer(us, bad, BROKEN_STATES[broken](await pack(foreign, named(3), version=9)), 9.0)
        with pytest.raises(StateError, match=bad.endpoint):
            await us.peer.download_state(applied.append)
        assert applied == []
        assert us.peer.version == 0
        assert all(torch.equal(tensor, before[name]) for name, tensor in ours.items())
        await offer(us, good, messages, 7.0)
        state = await us.peer.download_state(applied.append)
        assert state.version == us.peer.version == 7
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("sent", [0, 2])
async def test_the_next_donor_is_asked_after_a_silent_one(foreign: Foreign, sent: int) -> None:
    bad, good = await foreign.peer(), await foreign.peer()
    ours, theirs = named(1), named(2)
    async with our_peer(ours, stall_timeout=SILENCE) as us:
        messages = await pack(foreign, theirs)
        await offer(us, bad, messages[:sent], 9.0, hangs=True)
        await offer(us, good, messages, 7.0)
        assert (await us.peer.download_state()).version == 7
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


async def test_the_next_donor_is_asked_after_those_that_are_gone(foreign: Foreign) -> None:
    gone, good = await foreign.peer(), await foreign.peer()
    async with our_peer(named(1)) as us:
        await offer(us, gone, [], 9.0)
        await us.declare_donor("client::1", 8.0)
        await us.declare_donor("nonsense", 8.0)
        await offer(us, good, await pack(foreign, named(2)), 7.0)
        await gone.close()
        assert (await us.peer.download_state()).version == 7


async def test_without_any_donor_nothing_changes() -> None:
    async with our_peer(named(1)) as us:
        with pytest.raises(StateError, match="no peer shares its state"):
            await us.peer.download_state()


async def test_a_download_that_is_cancelled_changes_nothing(foreign: Foreign) -> None:
    donor = await foreign.peer()
    ours = named(1)
    before = {name: tensor.clone() for name, tensor in ours.items()}
    async with our_peer(ours) as us:
        messages = await pack(foreign, named(2))
        await offer(us, donor, messages[:-1], 9.0, hangs=True)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await us.peer.download_state()
        assert us.peer.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.items())

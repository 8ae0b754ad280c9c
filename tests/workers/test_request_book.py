"""What a worker remembers of requests, the order of a flush, and data of messages."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.errors import ProtocolViolationError
from averaging.rl.workers import Handle, HookName, Payload
from averaging.rl.workers.executor import flush_order
from averaging.rl.workers.master_session import Next, RequestBook
from averaging.rl.workers.payload import (
    Compute,
    Realloc,
    Step,
    Transfer,
    convert,
    decode_payload,
    encode_payload,
    pack,
    unpack,
)
from averaging.wire import workers_pb2


def request(name: str, handle: str = Handle.GENERATE, **more: object) -> Payload:
    payload = Payload("worker", handle, name)
    for key, value in more.items():
        setattr(payload, key, value)
    return payload


def test_blocking_requests_wait_for_a_flush_and_others_run_at_once() -> None:
    book = RequestBook()
    assert book.receive(request("1")) is Next.QUEUED
    assert book.receive(request("2", Handle.FETCH)) is Next.RUN
    assert book.receive(request("3", Handle.TRAIN_STEP)) is Next.QUEUED
    assert book.receive(request("4", Handle.FLUSH)) is Next.FLUSH
    assert [one.request_id for one in book.flushed()] == ["1", "3"]
    assert book.flushed() == []


def test_a_request_that_arrives_again_runs_once() -> None:
    book = RequestBook()
    book.receive(request("1"))
    assert book.receive(request("1")) is Next.NOTHING  # while it waits
    book.flushed()
    assert book.receive(request("1")) is Next.NOTHING  # while it runs
    assert book.finish(Payload("worker", Handle.GENERATE, "1"))
    assert book.receive(request("1")) is Next.NOTHING  # until its reply is received
    book.forget(["1"])
    assert len(book) == 0


def test_syn_and_ack() -> None:
    book = RequestBook()
    waiting = request("1", no_syn=False, syn_reply_id="s", ack_reply_id="a")
    assert book.receive(waiting) is Next.SYN
    assert book.syn(waiting).request_id == "s"
    assert book.flushed() == []
    assert book.acked("other") is None
    found = book.acked("a")
    assert found is waiting
    assert book.begin(found) is Next.QUEUED
    assert book.acked("a") is None


def test_a_master_that_attaches_again_gets_the_replies_that_it_waits_for() -> None:
    book = RequestBook()
    for name in ("done", "running", "unwanted", "also unwanted"):
        book.receive(request(name))
    book.flushed()
    book.finish(Payload("worker", Handle.GENERATE, "done"))
    book.finish(Payload("worker", Handle.GENERATE, "also unwanted"))
    book.receive(request("queued"))
    book.receive(request("syn", no_syn=False, syn_reply_id="s", ack_reply_id="a"))
    known, replies = book.attach(["done", "running", "queued", "syn", "never arrived"])
    assert set(known) == {"done", "running", "queued", "syn"}
    assert [one.request_id for one in replies] == ["s", "done"]
    assert book.finish(Payload("worker", Handle.GENERATE, "running"))
    assert not book.finish(Payload("worker", Handle.GENERATE, "unwanted"))
    book.forget(["done", "running", "queued"])
    known, replies = book.attach([])
    assert (known, replies, len(book)) == ([], [], 0)


def test_a_request_that_is_not_wanted_any_longer_does_not_wait() -> None:
    book = RequestBook()
    book.receive(request("1"))
    book.forget(["1"])
    assert book.flushed() == []


def queued(call: str, mesh: int = 1, *hooks: str, handle: str = Handle.INFERENCE, takers: int = 0) -> Payload:
    """A request; `empty` with takers publishes parameters, and without takes them."""
    payload = request(call, handle, data=pack(Compute(call, "model", mesh)))
    payload.post_hooks, payload.post_hook_data = list(hooks), [b""] * len(hooks)
    if handle == Handle.EMPTY:
        realloc = Realloc("t", "actor", "ref", 1.0, origin="" if takers else "w0", takers=takers)
        payload.post_hooks, payload.post_hook_data = [HookName.PARAM_REALLOC], [pack(realloc)]
    return payload


def test_the_order_of_a_flush_does_not_depend_on_the_order_of_arrival() -> None:
    requests = [
        queued("source/publish", handle=Handle.EMPTY, takers=1),
        queued("b", 1),
        queued("a", 2),
        queued("c", 2, "save"),
        queued("actor_train", 8, "average", "save"),
        queued("critic_train", 1, "average"),
        queued("target/take", handle=Handle.EMPTY),
    ]
    for arrival in itertools.permutations(requests):
        assert sorted(arrival, key=flush_order) == requests


def test_the_order_of_rounds_does_not_depend_on_the_mesh() -> None:
    """A site with more workers for the actor enters the rounds in the same order."""
    for actor, critic in ((1, 2), (2, 1)):
        ordered = sorted([queued("critic", critic, "average"), queued("actor", actor, "average")], key=flush_order)
        assert [payload.request_id for payload in ordered] == ["actor", "critic"]


def test_a_payload_survives_its_message() -> None:
    payload = Payload(
        "actor@dp0-tp0-pp0",
        Handle.TRAIN_STEP,
        "id",
        syn_reply_id="s",
        ack_reply_id="a",
        no_syn=False,
        send_time=1.5,
        data=Compute("actor_train", "actor", 2, 3, ["x"], ["answer"], []),
        pre_hooks=["data_transfer"],
        pre_hook_data=[Transfer([Step("bcast", "a", ["a"], ["b"], [["x"]], ["answer"])])],
        post_hooks=["param_realloc", "offload"],
        post_hook_data=[Realloc("t", "actor", "ref", 0.25, takers=1), None],
    )
    raw = encode_payload(payload).SerializeToString()
    found = decode_payload(workers_pb2.Payload.FromString(raw))
    assert convert(found.data, Compute) == payload.data
    assert convert(found.pre_hook_data[0], Transfer) == payload.pre_hook_data[0]
    assert convert(found.post_hook_data[0], Realloc) == payload.post_hook_data[0]
    for name in ("handler", "handle_name", "request_id", "syn_reply_id", "ack_reply_id", "no_syn", "send_time"):
        assert getattr(found, name) == getattr(payload, name)
    assert found.post_hooks == payload.post_hooks


@given(st.binary(max_size=60))
def test_data_of_strangers_is_refused_in_order(raw: bytes) -> None:
    for kind in (Compute, Transfer, Realloc):
        with suppress(ProtocolViolationError):
            unpack(raw, kind)


def test_what_is_no_request() -> None:
    with pytest.raises(ProtocolViolationError, match="2 hooks and data for 1"):
        decode_payload(workers_pb2.Payload(pre_hooks=["a", "b"], pre_hook_data=[b"\xc0"]))
    with pytest.raises(ProtocolViolationError, match="is no Compute"):
        convert({"call": 3}, Compute)
    with pytest.raises(ProtocolViolationError, match="is no Step"):
        unpack(pack({"comm_type": "bcast"}), Step)


def test_the_data_of_requests_that_wait_is_bounded() -> None:
    book, megabyte = RequestBook(), bytes(1 << 20)
    assert {book.receive(request(str(n), data=megabyte)) for n in range(128)} == {Next.QUEUED}
    assert book.receive(request("more", data=b"1")) is Next.TOO_MANY
    book.forget(["0"])
    assert book.receive(request("more", data=megabyte)) is Next.QUEUED
    book.flushed()
    assert book.receive(request("another", pre_hook_data=[b"1"])) is Next.TOO_MANY  # also while they run
    book.finish(Payload("worker", Handle.GENERATE, "1"))
    waiting = request("unacked", data=megabyte, no_syn=False, syn_reply_id="s", ack_reply_id="a")
    assert book.receive(waiting) is Next.SYN
    assert book.acked("a", go_on=False) is None
    assert book.receive(request("last", data=megabyte)) is Next.QUEUED
    book.attach([])
    for name in ("2", "3"):
        book.finish(Payload("worker", Handle.GENERATE, name))
    assert {book.receive(request(f"new {n}", data=megabyte)) for n in range(3)} == {Next.QUEUED}
    assert book.receive(request("one more", data=b"1")) is Next.TOO_MANY


@pytest.mark.parametrize("eta", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_share_of_parameters_out_of_range_is_refused(eta: float) -> None:
    with pytest.raises(ProtocolViolationError, match="is no Realloc"):
        unpack(pack(Realloc("t", "actor", "ref", eta)), Realloc)


def test_names_and_depth_are_bounded() -> None:
    with pytest.raises(ProtocolViolationError, match="is no Compute"):
        unpack(pack(Compute("c", "actor", inputs=["x"] * 257)), Compute)
    with pytest.raises(ProtocolViolationError, match="is no Compute"):
        unpack(b"\x81\xa1x" + b"\x91" * 100_000, Compute)

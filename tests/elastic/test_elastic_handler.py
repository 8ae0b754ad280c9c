"""The rendezvous handler as torch's agent calls it, with real registers; nodes are threads here, which is quick."""

import os
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

from averaging import ConfigError
from averaging.elastic import backend, handler
from averaging.elastic.handler import AveragingRendezvousHandler, create_handler
from averaging.elastic.register import MemoryRegister, RegisterService
from averaging.elastic.rendezvous_state import Seal
from averaging.elastic.session import RegisterSession
from averaging.errors import PeerUnreachableError
from averaging.rpc import EventLoopThread, RpcServer
from tests.support.certificates import token_file, write
from tests.support.ports import free_address

QUICK = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 3, "join_timeout": 30}

LIMIT = 30.0


class Nodes:
    """Handlers, shut down at the end."""

    def __init__(self, stack: ExitStack) -> None:
        self.endpoint = free_address()
        self._stack = stack
        self._pool = stack.enter_context(ThreadPoolExecutor())

    def node(self, least: int = 1, most: int = 2, run_id: str = "job", **conf: Any) -> AveragingRendezvousHandler:
        endpoint = conf.pop("endpoint", self.endpoint)
        parameters = RendezvousParameters("averaging", endpoint, run_id, least, most, **(QUICK | conf))
        handler = create_handler(parameters)
        assert isinstance(handler, AveragingRendezvousHandler)
        self._stack.callback(handler.shutdown)
        return handler

    def join(self, handler: AveragingRendezvousHandler) -> Future[RendezvousInfo]:
        return self._pool.submit(handler.next_rendezvous)

    def meet(self, *handlers: AveragingRendezvousHandler) -> list[RendezvousInfo]:
        return [future.result(LIMIT) for future in [self.join(handler) for handler in handlers]]

    def register(self, register: MemoryRegister | None = None, endpoint: str | None = None) -> EventLoopThread:
        thread = EventLoopThread(RpcServer(endpoint or self.endpoint, [RegisterService(register)]), "a register")
        self._stack.callback(thread.close)
        return thread


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(stack)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_torchrun_finds_the_backend_by_its_name() -> None:
    parameters = RendezvousParameters("averaging", "localhost:0", "job", 1, 1)
    rendezvous_handler_registry.register("averaging", create_handler)
    handler = rendezvous_handler_registry.create_handler(parameters)
    try:
        assert handler.get_backend() == "averaging"
        assert handler.get_run_id() == "job"
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
    finally:
        assert handler.shutdown()


def test_two_nodes_meet_at_the_one_that_the_endpoint_names_and_a_late_one_is_seen(nodes: Nodes) -> None:
    first, second = nodes.node(2, 3), nodes.node(2, 3)
    infos = nodes.meet(first, second)
    assert sorted((info.rank, info.world_size) for info in infos) == [(0, 2), (1, 2)]
    infos[0].store.set("key", "value")
    assert infos[1].store.get("key") == b"value"
    assert {info.store.timeout.total_seconds() for info in infos} == {300.0}  # type: ignore[attr-defined] # stub lacks it
    before = infos[0].bootstrap_store_info
    assert infos[1].bootstrap_store_info == before
    late = nodes.node(2, 3)
    joined = nodes.join(late)
    wait_for(lambda: first.num_nodes_waiting() == 1 and second.num_nodes_waiting() == 1)
    infos = [*nodes.meet(first, second), joined.result(LIMIT)]
    assert sorted((info.rank, info.world_size) for info in infos) == [(0, 3), (1, 3), (2, 3)]
    places = [info.bootstrap_store_info for info in infos]
    assert places[0] == places[1] == places[2] != before
    infos[2].store.set("key", "other")
    assert infos[0].store.get("key") == b"other"


def test_a_register_that_loses_everything_gets_it_back(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    register = nodes.register()
    # A busy machine delays heartbeats and writes.
    patient: dict[str, Any] = {"is_host": False, "keep_alive_max_attempt": 30, "close_timeout": 120}
    first, second = nodes.node(**patient), nodes.node(**patient)
    nodes.meet(first, second)
    register.close()
    wait_for(lambda: first.num_nodes_waiting() == 0 and "Training goes on" in caplog.text)
    assert second.num_nodes_waiting() == 0
    nodes.register()
    wait_for(lambda: first.num_nodes_waiting() == 0 and "brought back" in caplog.text)
    assert first._state_holder.state.participants.keys() == second._state_holder.state.participants.keys()
    late = nodes.node(1, 2, **patient)  # there are two already, so it waits as a spare
    spare = nodes.join(late)
    wait_for(lambda: first.num_nodes_waiting() == 0 and len(first._state_holder.state.redundancy_list) == 1)
    first.set_closed()
    with pytest.raises(Exception, match="closed"):
        spare.result(LIMIT)


def test_the_register_moves_to_another_process_of_the_same_machine(nodes: Nodes) -> None:
    host, other = nodes.node(), nodes.node()
    nodes.meet(host, other)
    host._thread.close()  # as if its process had died
    wait_for(lambda: other.num_nodes_waiting() == 0 and other._this_node in other._state_holder.state.participants)
    assert nodes.meet(other)[0].world_size == 1


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def test_without_a_token_a_local_user_executes_nothing(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody can seal without a token, and write to a register of this machine."""
    monkeypatch.setattr(backend, "REFUSED_FOR", 1.0)
    store, path = MemoryRegister(), tmp_path / "executed"
    register = nodes.register(store)
    for part in ("state", "store"):
        key = f"elastic/job/{part}"
        value = Seal(key, ()).close(
            pickle.dumps(Bomb(path)),
            version=1,
            sent=time.time(),
            writer="a",
            world="--nnodes=1:2" if part == "state" else "",
            nonce=bytes(16),
        )
        assert register.run(store.compare_and_set(key, value.raw, None)).done
    with pytest.raises(RendezvousStateError, match="not the state of a rendezvous"):
        nodes.node(is_host=False).next_rendezvous()
    assert not path.exists()


def test_a_job_without_an_id_has_a_register_of_its_own(nodes: Nodes) -> None:
    with pytest.raises(ConfigError, match="a job of several nodes needs --rdzv-id=NAME"):
        nodes.node(2, 3, run_id="none")
    first = nodes.node(1, 2, run_id="none")
    nodes.meet(first)
    with pytest.raises(ConfigError, match=r"is shared: .*Give --rdzv-id=NAME.*--rdzv-endpoint=localhost:0"):
        nodes.node(1, 2, run_id="none")
    assert first.num_nodes_waiting() == 0
    other = nodes.node(1, 2, run_id="none", endpoint=free_address())
    assert [info.world_size for info in nodes.meet(first, other)] == [1, 1]
    first.shutdown()
    assert nodes.meet(nodes.node(1, 2, run_id="none"))[0].world_size == 1


def test_a_job_without_an_id_is_refused_at_a_register_of_others(nodes: Nodes) -> None:
    nodes.register()
    for conf in ({}, {"is_host": False}, {"endpoint": "etcd://127.0.0.1:1"}):
        with pytest.raises(ConfigError, match=r"is shared: this node does not host it"):
            nodes.node(1, 1, run_id="none", **conf)
    assert nodes.meet(nodes.node(1, 1, run_id="a name"))[0].world_size == 1


def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no name is found."""

    async def call(*_: object) -> None:
        raise PeerUnreachableError("a.site:1", "unknown host", unknown_host=True)

    monkeypatch.setattr(RegisterSession, "get", call)
    monkeypatch.setattr(RegisterSession, "compare_and_set", call)


def test_a_name_that_was_found_before_is_waited_for(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pod that is replaced has no address for a while."""
    nodes.register()
    node = nodes.node(1, 1, is_host=False)
    nodes.meet(node)
    with monkeypatch.context() as patch:
        unreachable(patch)
        again = nodes.join(node)
        wait_for(lambda: "This node tries for another" in caplog.text)
    assert again.result(LIMIT).world_size == 1


def test_a_name_in_a_cluster_is_waited_for_from_the_start(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.register()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    node = nodes.node(1, 1, is_host=False)
    with monkeypatch.context() as patch:
        unreachable(patch)
        early = nodes.join(node)
        with pytest.raises(TimeoutError):
            early.result(1.0)
    assert early.result(LIMIT).world_size == 1


def test_the_node_with_the_local_address_of_the_endpoint_hosts_the_register(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine has another address, as behind a port that a container publishes."""
    monkeypatch.setattr(handler, "is_own", lambda _: False)
    options = RendezvousParameters("averaging", nodes.endpoint, "job", 1, 1, local_addr="127.0.0.1", **QUICK)
    node = create_handler(options)
    try:
        assert node.next_rendezvous().world_size == 1
    finally:
        node.shutdown()


def test_tls_and_a_token(nodes: Nodes, tmp_path: Path) -> None:
    tokens, tls = token_file(tmp_path), dict[str, Any](write(tmp_path, "127.0.0.1"))
    conf = {**tls, "token_file": tokens}
    infos = nodes.meet(nodes.node(2, **conf), nodes.node(2, **conf))
    assert {info.world_size for info in infos} == {2}
    with pytest.raises(RendezvousConnectionError, match="the register refuses this node"):
        nodes.node(2, **tls).next_rendezvous()
    with pytest.raises(RendezvousConnectionError, match="TLS"):
        nodes.node(2, token_file=tokens, join_timeout=1).next_rendezvous()


def test_errors_say_at_once_what_to_do(nodes: Nodes) -> None:
    with pytest.raises(ConfigError, match="--rdzv-id has 201 bytes"):
        nodes.node(run_id="x" * 201)
    with pytest.raises(RendezvousConnectionError, match="unknown host"):
        nodes.node(endpoint="nowhere.invalid:1", insecure=True).next_rendezvous()
    with pytest.raises(RendezvousConnectionError, match=r"no register answers at .*`averaging register --listen`"):
        nodes.node(is_host=False, join_timeout=1).next_rendezvous()
    nodes.register()
    with pytest.raises(RendezvousTimeoutError, match="fewer than 2 nodes came"):
        nodes.node(2, run_id="alone", join_timeout=1).next_rendezvous()
    one = nodes.node(1, 1)
    nodes.meet(one)
    with pytest.raises(RendezvousStateError, match=r"in use by another job \(--nnodes=1:1"):
        nodes.node(3, 3).next_rendezvous()
    one.shutdown()
    with pytest.raises(RendezvousClosedError, match="has ended"):
        nodes.node(1, 1).next_rendezvous()

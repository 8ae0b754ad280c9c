"""Master and model workers on real sockets: the requests of a master, 10,000 of them, tokens, strangers."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging import Peer, TLSFiles
from averaging.errors import CallRefusedError, ConfigError, WorkerError
from averaging.rl.workers import (
    Average,
    Compute,
    DatasetSpec,
    Handle,
    MasterWorker,
    ModelWorker,
    ParamRealloc,
    Payload,
    Plan,
)
from averaging.rl.workers.plan import Model
from averaging.rl.workers.requests import ATTACH, FETCH_DATA, REQUEST, decode_payload, encode_payload
from averaging.rpc import Credentials, EventLoopThread, RpcChannel, RpcMethod, read_credentials
from averaging.security.credentials import local_credentials
from averaging.wire.workers_pb2 import Attach, FetchDataRequest, Request
from tests.support.certificates import TOKEN, write
from tests.workers.backends import Actor, Log, Recorded, Reward, dataset, ppo

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


class Site:
    """Two actors and a reward, each in a thread."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.log = Log()
        self.endpoints: dict[str, str] = {}
        self.workers: dict[str, ModelWorker] = {}

    def start(
        self, name: str, credentials: Credentials | None = None, save_folder: Path | None = None, **backends: Any
    ) -> None:
        worker = ModelWorker(
            name, backends, listen="127.0.0.1:0", dataset=dataset(), credentials=credentials, save_folder=save_folder
        )
        thread = EventLoopThread(worker, name)
        self._stack.callback(thread.close)
        self.workers[name] = worker
        self.endpoints[name] = worker.endpoint

    def start_ppo(self, credentials: Credentials | None = None) -> None:
        for name in ("a0", "a1"):
            self.start(name, credentials, actor=Actor(name, self.log))
        self.start("r0", credentials, reward=Reward("r0", self.log))

    def plan(self, **options: Any) -> Plan:
        return ppo(self.endpoints, ["a0", "a1"], ["r0"], **options)

    def master(self, **options: Any) -> MasterWorker:
        master = MasterWorker(options.pop("plan", None) or self.plan(), attach_timeout=20.0, **options)
        self._stack.callback(master.close)
        return master


@pytest.fixture
def site() -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(stack)


def test_ppo_with_hooks(site: Site) -> None:
    site.start_ppo()
    reference = Recorded("x0", site.log)
    site.start("x0", ref=reference)
    hooks = (Average(every=2), ParamRealloc(source="actor", target="ref", eta=0.5))
    plan = site.plan(train_hooks=hooks, models=(Model("ref", ("x0",)),))
    with site.master(plan=plan) as master:
        results = list(master.run(4))
    assert [result.step for result in results] == [1, 2, 3, 4]
    assert results[3].stats["actor_train"]["average/members"] == 2
    assert torch.allclose(reference.weight, torch.full((3,), 0.5 * 4 + 0.25 * 3 + 0.125 * 2 + 0.0625 * 1))
    # Computations of a worker share one thread, which is not that of its event loop.
    assert site.log.threads == {f"computations of {name}" for name in ("a0", "a1", "r0", "x0")}


def test_the_requests_of_a_master(site: Site) -> None:
    site.start_ppo()
    actors = ["actor@dp0-tp0-pp0", "actor@dp1-tp0-pp0"]
    with site.master() as master:
        configs = [{"hidden": 3, "rank": 0}, {"hidden": 3, "rank": 1}]
        assert master.call(actors, Handle.MODEL_CONFIG) == configs
        assert master.call(actors, Handle.MODEL_CONFIG, no_syn=False) == configs
        assert master.spec() == [DatasetSpec(1, 32)] * 2
        fetched = master.call(["a0", "a1"], Handle.FETCH, [{"count": 2}] * 2)
        assert [one["ids"] for one in fetched] == [["sample-0", "sample-2"], ["sample-1", "sample-3"]]
        assert [one["dp_rank"] for one in fetched] == [0, 1]
        assert fetched[0]["seqlens"] == [1, 3]
        again = master.call(["a0"], Handle.FETCH, [{"count": 32}])
        assert again[0]["ids"] == [f"sample-{n}" for n in range(4, 64, 2)]  # ids already known are skipped
        assert master.call(["a0", "a1"], Handle.CLEAR_DATA_CACHE, [{"ids": ["sample-0"]}] * 2) == [None, None]
        ids = master.request(actors, Handle.INITIALIZE, [Compute("actor", "actor", 2)] * 2)
        assert master.poll(ids) is None  # it waits for flush
        assert master.call(["a0", "a1"], Handle.FLUSH) == [1, 1]
        assert [reply.data for reply in master.gather(ids)] == [0, 0]
        with pytest.raises(ConfigError, match="was taken already"):
            master.gather(ids)
        single = master.post(Payload("a0", Handle.SPEC, master.new_id()))
        [reply] = master.gather([single])
        assert reply.data == {"n_datasets": 1, "dataset_size": 32}
        blocked = master.post(Payload(actors[0], Handle.GENERATE, master.new_id(), data=Compute("g", "actor")))
        with pytest.raises(TimeoutError, match="1 of 1 replies are missing: of a0"):
            master.gather([blocked], timeout=0.05)
        master.call(["a0"], Handle.FLUSH)
        with pytest.raises(WorkerError, match="generate of actor@dp0-tp0-pp0 has failed at a0") as error:
            master.gather([blocked])
        assert (error.value.worker, error.value.request) == ("a0", "generate")
        first = master.request(["a0", "a1", "r0"], Handle.SPEC)
        while len(taken := master.poll_batch()) < 3:
            first += master.request(["a0"], Handle.SPEC)
        assert {one.request_id for one in taken} <= set(first)
        with pytest.raises(ConfigError, match="1 handlers got data for 2"):
            master.call(["a0"], Handle.SPEC, [None, None])


def test_requests_and_replies_that_cannot_be_sent_fail_alone(site: Site) -> None:
    site.start_ppo()
    replies: list[Any] = [{"a": object()}, {"a": "x" * 20_000_000}]
    site.workers["a0"]._executor.backends["actor"].model_config = replies.pop  # type: ignore[method-assign]
    with site.master() as master:
        for data, reason in (
            ({"ids": object()}, "it cannot be sent: Encoding objects of type object"),
            ({"count": 1 << 70}, "it cannot be sent: can't serialize ints"),
            ({"ids": ["x" * 1000] * 20_000}, "it has .* bytes, and .* can be sent"),
        ):
            for no_syn in (True, False):
                with pytest.raises(WorkerError, match=f"(fetch|syn) of a0 has failed at a0: {reason}"):
                    master.call(["a0"], Handle.FETCH, [data], no_syn=no_syn)
        for _ in range(2):
            with pytest.raises(WorkerError, match="model_config of actor.* has failed at a0: its reply is lost: it "):
                master.call(["actor@dp0-tp0-pp0"], Handle.MODEL_CONFIG)
        assert not master.lost
        assert [result.step for result in master.run(1)] == [1]


def test_the_coroutines_of_a_master(site: Site) -> None:
    site.start_ppo()
    with site.master() as master:

        async def main() -> None:
            specs = await asyncio.gather(*(master.call_async(["a0", "r0"], Handle.SPEC) for _ in range(20)))
            assert all([spec["dataset_size"] for spec in one] == [32, 0] for one in specs)
            ids = master.request(["a0", "a1"], Handle.SPEC)
            assert [reply.request_id for reply in await master.gather_async(ids)] == ids
            ids = master.request(["a0", "a1"], Handle.SPEC)
            found = {(await master.poll_async(ids)).request_id for _ in ids}
            assert found == set(ids)
            actors = ["actor@dp0-tp0-pp0", "actor@dp1-tp0-pp0"]
            waiting = [master.request(actors, Handle.EMPTY, [Compute("none", "actor")] * 2) for _ in range(40)]
            gathered = [asyncio.create_task(master.gather_async(ids)) for ids in waiting]  # more than any pool
            assert await master.call_async(["a0", "a1"], Handle.FLUSH) == [40, 40]
            with pytest.raises(WorkerError, match="'actor' at a[01] is not initialized"):
                await gathered[0]
            await asyncio.wait(gathered)
            assert all(isinstance(task.exception(), WorkerError) for task in gathered)
            with pytest.raises(WorkerError, match="knows no request 'dance'"):
                await master.call_async(["a0"], "dance")

        asyncio.run(main())


def test_tls(site: Site, tmp_path: Path) -> None:
    """The tensors between workers are encrypted too: they have the same channels."""
    mine, others = (tmp_path / name for name in ("mine", "others"))
    for directory, authority in ((mine, "run"), (others, "other")):
        directory.mkdir()
        files = write(directory, "127.0.0.1", of=authority)
        tls = TLSFiles(files["tls_ca"], files["tls_cert"], files["tls_key"])
        if authority == "run":
            known = read_credentials(tls=tls)
        else:
            strange = read_credentials(tls=tls)
    site.start_ppo(known)
    with site.master(credentials=known) as master:
        assert len(list(master.run(2))) == 2
    for wrong in (None, strange):
        with pytest.raises(WorkerError, match="cannot be reached"):
            MasterWorker(site.plan(), credentials=wrong, attach_timeout=1.0)


async def test_what_strangers_send() -> None:
    async with AsyncExitStack() as stack:
        worker = ModelWorker("a0", {"actor": Actor("a0", Log())}, listen="127.0.0.1:0")
        await stack.enter_async_context(worker)
        mine = local_credentials("workers")
        channel = await stack.enter_async_context(RpcChannel(worker.endpoint, credentials=mine))

        async def attached(name: str, placement: bytes) -> Any:
            return await stack.enter_async_context(
                aclosing(channel.stream(ATTACH, Attach(master="m", worker=name, placement=placement)))
            )

        assert (await channel.call(REQUEST, Request(), 20.0)).stale
        with pytest.raises(CallRefusedError, match="no Placement"):
            await anext(await attached("a0", b"\xc1"))
        assert (await anext(await attached("b", b"\x80"))).refused.startswith("this is 'a0', not 'b'")
        session = (await anext(await attached("a0", b"\x80"))).session
        with pytest.raises(CallRefusedError, match="no Payload"):
            await channel.call(REQUEST, Request(session=session, payload=b"\xc1"), 20.0)
        payload = encode_payload(Payload("a0", "x", "1"))
        reply = await channel.call(REQUEST, Request(session=session, payload=payload), 20.0)
        assert "knows no request 'x'" in decode_payload(reply.payload).error


@pytest.mark.parametrize("method", [ATTACH, REQUEST, FETCH_DATA])
async def test_without_credentials_only_this_user_is_served(method: RpcMethod[Any, Any], tmp_path: Path) -> None:
    """Another user of the machine can connect, and does not have the token."""
    other = tmp_path / "token"
    other.touch(mode=0o600)
    other.write_text(TOKEN)
    async with ModelWorker("a0", {"actor": Actor("a0", Log())}, listen="127.0.0.1:0") as worker:
        for credentials in (Credentials(), read_credentials(token_file=other)):
            async with RpcChannel(worker.endpoint, credentials=credentials) as channel:
                request = method.request.FromString(b"")
                with pytest.raises(CallRefusedError, match="(requires a|accept this peer's) token"):
                    await answer(channel, method, request)


async def answer(channel: RpcChannel, method: RpcMethod[Any, Any], request: Any) -> Any:
    if not method.replies_stream:
        return await channel.call(method, request, 20.0)
    async with aclosing(channel.stream(method, request)) as replies:
        return await anext(replies)


def test_a_hook_saves_only_below_the_folder_of_the_worker(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path)
    shard = "actor@dp0-tp0-pp0"

    def save(master: MasterWorker, path: str) -> None:
        request = Payload(shard, Handle.EMPTY, master.new_id(), data=Compute("save", "actor"))
        request.post_hooks, request.post_hook_data = ["save"], [path]
        ids = [master.post(request), *master.request(["a0"], Handle.FLUSH)]
        master.gather(ids)

    site.start("a0", actor=Actor("a0", site.log), save_folder=folder)
    site.start("a1", actor=Actor("a1", site.log))
    site.start("r0", reward=Reward("r0", site.log))
    with site.master() as master:
        master.initialize()
        for path in ("step-1", str(folder / "step-2" / "x")):
            save(master, path)
        for path in ("../x", str(tmp_path / "x"), "a/../../x", "out/x", "/etc/passwd", "a\0b", str(folder) + "-2"):
            with pytest.raises(WorkerError, match=r"is not below .*ckpt, the folder|is no path"):
                save(master, path)
        shard = "actor@dp1-tp0-pp0"
        request = Payload(shard, Handle.EMPTY, master.new_id(), data=Compute("save", "actor"))
        request.post_hooks, request.post_hook_data = ["save"], ["x"]
        ids = [master.post(request), *master.request(["a1"], Handle.FLUSH)]
        with pytest.raises(WorkerError, match=r"a1 has no folder for 'x'; give ModelWorker\(save_folder=…\)"):
            master.gather(ids)
    saved = [line[2] for line in site.log.lines if line[1] == "actor.save"]
    assert saved == [str(folder / "step-1"), str(folder / "step-2" / "x")]


async def test_a_peer_serves_a_worker_on_its_port(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(TOKEN)
    worker = ModelWorker("a0", {})
    async with worker, Peer([torch.zeros(1)], run_id="demo", token_file=tokens, services=[worker]) as peer:
        request = FetchDataRequest(caller="b")
        async with (
            RpcChannel(peer.endpoint, credentials=read_credentials(token_file=tokens)) as channel,
            aclosing(channel.stream(FETCH_DATA, request)) as replies,
        ):
            assert [reply async for reply in replies] == []
        async with RpcChannel(peer.endpoint) as channel:
            with pytest.raises(CallRefusedError, match="token"):
                async with aclosing(channel.stream(FETCH_DATA, request)) as replies:
                    await anext(replies)
    with pytest.raises(ConfigError, match="no server of its own"):
        _ = worker.endpoint

"""Master and model workers on virtual time: order, hooks, deadlocks between sites, silence, restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import torch

from averaging import Peer, Receipt
from averaging.errors import ConfigError, WorkerError
from averaging.rl.workers import (
    Average,
    Backend,
    Call,
    Compute,
    Evaluate,
    Handle,
    HookName,
    Model,
    ModelWorker,
    Offload,
    ParamRealloc,
    Payload,
    Plan,
    SampleBatch,
    Save,
    Topology,
)
from averaging.rl.workers.backend import check_outputs
from averaging.rl.workers.data_manager import OwnerTracker
from averaging.rl.workers.master_worker import StepRunner
from averaging.rl.workers.plan import Hook
from averaging.rl.workers.requests import RequestClient
from averaging.testing import virtual_time
from tests.support.swarm import Swarm
from tests.workers.backends import Actor, Log, Recorded, Reward, dataset, ppo
from tests.workers.memory_workers import MemoryWorkers


class Slow(Actor):
    def __init__(self, worker: str, log: Log, seconds: float, step: int) -> None:
        super().__init__(worker, log)
        self.seconds, self.step = seconds, step

    async def generate(self, batch: SampleBatch, step: int) -> Any:  # type: ignore[override]
        await asyncio.sleep(self.seconds * (step == self.step))
        return Actor.generate(self, batch, step)


class Site:
    """The workers of one site in memory."""

    def __init__(self) -> None:
        self.network = MemoryWorkers()
        self.log = Log()
        self.workers: dict[str, ModelWorker] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Site:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def start(self, name: str, **backends: Backend) -> ModelWorker:
        """Starts a worker, or starts it again."""
        worker = ModelWorker(name, backends, dataset=dataset(), save_folder="/saved", connect=self.network.connect)
        self.workers[name] = await self._stack.enter_async_context(worker)
        self.network.serve(f"{name}:1", worker)
        return worker

    async def start_ppo(self, slow: float = 0.0, step: int = 1) -> None:
        """Two actors and a reward. In one step the actors take so many seconds."""
        for name in ("a0", "a1"):
            await self.start(name, actor=Slow(name, self.log, slow, step) if slow else Actor(name, self.log))
        await self.start("r0", reward=Reward("r0", self.log))

    def plan(self, *train_hooks: Hook, **options: Any) -> Plan:
        return ppo(self.endpoints, ["a0", "a1"], ["r0"], train_hooks=train_hooks, **options)

    @property
    def endpoints(self) -> dict[str, str]:
        return {name: f"{name}:1" for name in self.workers}

    @asynccontextmanager
    async def master(
        self, plan: Plan, *, attach: bool = True
    ) -> AsyncGenerator[tuple[RequestClient, StepRunner], None]:
        tracker = OwnerTracker()
        client = RequestClient(plan, self.network.connect, tracker.remove_worker)
        async with client:
            await client.attach(10.0)
            yield client, StepRunner(plan, client, tracker)


def simulated(scenario: Callable[[Site], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Makes a test of what happens at the workers of one site."""

    async def main() -> None:
        async with Site() as site:
            await scenario(site)
        assert site.network.calls == 0

    return lambda: virtual_time.run(main())


async def until_lost(client: RequestClient, worker: str, lost: bool = True) -> None:
    """Waits until a worker is lost, or attached again."""
    link = client.links[worker]
    while (link.lost is not None) is not lost:
        await link.changed.wait()


def post(client: RequestClient, handler: str, handle: str, call: str, *hooks: str, mesh: int = 1) -> str:
    """Posts a blocking request with hooks that need no data."""
    request = Payload(handler, handle, client.new_id(), data=Compute(call, call, mesh))
    request.post_hooks, request.post_hook_data = list(hooks), [None] * len(hooks)
    return client.post(request)


@simulated
async def test_ppo(site: Site) -> None:
    await site.start_ppo()
    async with site.master(site.plan()) as (client, runner):
        await runner.initialize()
        results = [await runner.step() for _ in range(3)]
        assert len(client) == 0
        # What the last requests have not told yet is all that a worker remembers.
        assert all(len(worker._book) <= 4 for worker in site.workers.values())
    assert [result.step for result in results] == [1, 2, 3]
    samples = [sample for result in results for sample in result.samples]
    assert len(samples) == len(set(samples)) == 24
    # The prompts are n, n + 1, …; the answers of step s are larger by s - 1; the reward is their sum.
    for result in results:
        numbers = [int(sample.partition("-")[2]) for sample in result.samples]
        rewards = [sum(range(n, n + 1 + n % 5)) + (result.step - 1) * (1 + n % 5) for n in numbers]
        assert result.stats["actor_train"]["reward"] == pytest.approx(sum(rewards) / 8)
    for worker in ("a0", "a1"):
        assert site.log.kinds(worker) == ["actor.initialize", *["actor.generate", "actor.train_step"] * 3]
    assert site.log.kinds("r0") == ["reward.initialize", *["reward.inference"] * 3]
    trained = [line for line in site.log.lines if line[1] == "actor.train_step"]
    assert sorted(sample for line in trained for sample in line[2:]) == sorted(samples)


@simulated
async def test_hooks_run_in_order(site: Site) -> None:
    await site.start_ppo()
    hooks = (Evaluate(), Average(every=2), Save(path="ckpt/{step}", every=2), Offload())
    async with site.master(site.plan(*hooks)) as (_, runner):
        await runner.initialize()
        results = [await runner.step() for _ in range(2)]
    assert results[0].stats["actor_train"]["evaluate/step"] == 1
    assert "average/members" not in results[0].stats["actor_train"]
    assert results[1].stats["actor_train"]["average/members"] == 2
    step = ["actor.generate", "actor.train_step", "actor.evaluate"]
    second = [*step, "actor.average", "actor.save", "actor.offload"]
    assert site.log.kinds("a0") == ["actor.initialize", *step, "actor.offload", *second]
    assert ("a0", "actor.save", "/saved/ckpt/2") in site.log.lines


@simulated
async def test_all_pre_hooks_run_before_the_first_computation_and_replies_come_one_by_one(site: Site) -> None:
    release = asyncio.Event()

    class Waiting(Recorded):
        async def inference(self, batch: SampleBatch, step: int) -> dict[str, Any]:
            if self.shard.model == "b":
                await release.wait()
            return {"x": [torch.zeros(1)] * len(batch)}

    await site.start("w0", a=Waiting("w0", site.log), b=Waiting("w0", site.log))
    await site.start("w1", a=Waiting("w1", site.log))
    models = (Model("a", ("w0",)), Model("b", ("w0",)))
    plan = Plan(site.endpoints, models, (Call("a", "a", "inference", ("prompt",), ("x",)),), 1, ("prompt",))
    async with site.master(plan) as (client, runner):
        await runner.initialize()
        await client.call(["w0"], Handle.FETCH, [{"count": 1}])
        waits = Payload("b@dp0-tp0-pp0", Handle.INFERENCE, client.new_id(), data=Compute("b", "b"))
        # Its data comes from a worker that does not have it yet.
        step = {"comm_type": "bcast", "root": "w1", "srcs": ["w1"], "dsts": ["w0"], "ids": [["s"]], "keys": ["k"]}
        waits.pre_hooks, waits.pre_hook_data = ["data_transfer"], [[step]]
        second = client.post(waits)
        first = post(client, "a@dp0-tp0-pp0", Handle.INFERENCE, "a")
        client.request(["w0"], Handle.FLUSH)
        await asyncio.sleep(10.0)
        assert [client.poll([first]), client.poll([second])] == [None, None]
        data = site.workers["w1"]._executor.data
        data.update(SampleBatch(["s"], {"k": [torch.ones(2)]}))
        reply = await client.poll_async([first, second])
        assert reply.request_id == first
        assert client.poll_batch([second]) == []
        release.set()
        assert (await client.gather([second]))[0].data["keys"] == []


class Averaging(Backend):
    """Joins a round of its model with the other sites."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.receipts: list[Receipt] = []

    async def train_step(self, batch: SampleBatch, step: int) -> dict[str, float]:
        return {}

    async def average(self) -> dict[str, float]:
        receipt = await self.peer.average()
        self.receipts.append(receipt)
        return {"members": len(receipt.members)}


def test_two_sites_enter_their_rounds_in_the_same_order() -> None:
    """Actor and critic average after a train step. Their requests arrive in opposite order at the sites."""
    swarms = {"actor": Swarm(1), "critic": Swarm(2)}

    def peer(site: int, model: str) -> Peer:
        tensor = torch.full((3,) if model == "actor" else (4,), float(site))
        return swarms[model].peer(f"{model}-{site}:1", [tensor], group_wait=5.0, round_timeout=20.0, group_size=2)

    async def run_site(number: int, order: Sequence[str]) -> list[list[Receipt]]:
        async with Site() as site, AsyncExitStack() as stack:
            backends = {model: Averaging(await stack.enter_async_context(peer(number, model))) for model in swarms}
            await site.start("w0", **backends)
            models = (Model("actor", ("w0",)), Model("critic", ("w0",)))
            calls = (Call("actor_train", "actor", "train_step", ("prompt",)),)
            async with site.master(Plan(site.endpoints, models, calls, 1, ("prompt",))) as (client, runner):
                await runner.initialize()
                # At one site the actor's mesh is the larger one, at the other the critic's.
                shards = {model: (f"{model}@dp0-tp0-pp0", 1 + (order[0] == model)) for model in order}
                ids = [
                    post(client, shard, Handle.TRAIN_STEP, model, HookName.AVERAGE, mesh=mesh)
                    for model, (shard, mesh) in shards.items()
                ]
                client.request(["w0"], Handle.FLUSH)
                await client.gather(ids)
            return [backend.receipts for backend in backends.values()]

    async def main() -> float:
        sites = await asyncio.gather(run_site(0, ["actor", "critic"]), run_site(1, ["critic", "actor"]))
        assert [[len(receipt.members) for receipt in of_model] for site in sites for of_model in site] == [[2]] * 4
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) < 6.0
    assert [swarm.network.errors for swarm in swarms.values()] == [[], []]


@simulated
async def test_param_realloc(site: Site) -> None:
    """From two actors to references at the same workers and at another one."""
    actors, references = {}, {}
    for name in ("a0", "a1"):
        actors[name], references[name] = Actor(name, site.log), Recorded(name, site.log)
        await site.start(name, actor=actors[name], ref=references[name])
    references["r0"] = Recorded("r0", site.log)
    await site.start("r0", reward=Reward("r0", site.log), ref=references["r0"])
    for reference in references.values():
        reference.weight += 8
    ref = Model("ref", ("a0", "a1", "r0"))
    hook = ParamRealloc(source="actor", target="ref", eta=0.25, every=2)
    async with site.master(site.plan(hook, models=(ref,))) as (_, runner):
        await runner.initialize()
        await runner.step()
        assert all(float(reference.weight[0]) == 8 for reference in references.values())
        await runner.step()
    assert [float(actor.weight[0]) for actor in actors.values()] == [2, 2]
    for reference in references.values():
        assert torch.equal(reference.weight, torch.full((3,), 0.25 * 2 + 0.75 * 8))
    for worker in site.workers.values():
        assert len(worker._executor.data) == 0


@simulated
async def test_param_realloc_into_the_model_that_makes_the_call(site: Site) -> None:
    await site.start_ppo()
    site.workers["a0"]._executor.backends["actor"].weight += 4  # type: ignore[attr-defined]
    source = Recorded("r0", site.log)
    source.weight += 40
    await site.start("x0", best=source)
    hook = ParamRealloc(source="best", target="actor", eta=0.5)
    async with site.master(site.plan(hook, models=(Model("best", ("x0",)),))) as (_, runner):
        await runner.initialize()
        await runner.step()
    weights = [float(site.workers[name]._executor.backends["actor"].weight[0]) for name in ("a0", "a1")]  # type: ignore[attr-defined]
    assert weights == [0.5 * 40 + 0.5 * 5, 0.5 * 40 + 0.5 * 1]


@simulated
async def test_only_dp_heads_give_output_and_all_shards_of_a_rank_get_the_same_input(site: Site) -> None:
    seen: dict[str, list[list[int]]] = {}

    class Shard(Recorded):
        async def generate(self, batch: SampleBatch, step: int) -> dict[str, Any]:
            seen[self.worker] = [tensor.tolist() for tensor in batch["prompt"]]
            return {"answer": [tensor + (0 if self.shard.is_dp_head else 1000) for tensor in batch["prompt"]]}

        async def train_step(self, batch: SampleBatch, step: int) -> dict[str, float]:
            return {"largest": max(float(tensor.max()) for tensor in batch["answer"])}

    names = [f"w{n}" for n in range(8)]
    for name in names:
        await site.start(name, actor=Shard(name, site.log))
    await site.start("r0", reward=Reward("r0", site.log))
    plan = Plan(
        site.endpoints,
        (Model("actor", tuple(names), Topology(dp=2, tp=2, pp=2)), Model("reward", ("r0",))),
        ppo({"x": "127.0.0.1:1"}, ["x"], ["x"]).calls,
        8,
        ("prompt",),
    )
    async with site.master(plan) as (_, runner):
        await runner.initialize()
        result = await runner.step()
    assert result.stats["actor_train"]["largest"] < 1000
    assert [seen[name] for name in names] == [seen["w0"]] * 4 + [seen["w4"]] * 4
    assert seen["w0"] != seen["w4"]


@simulated
async def test_a_silent_worker_is_lost(site: Site) -> None:
    await site.start_ppo(slow=60.0, step=2)  # longer than any deadline: a long computation is no silence
    async with site.master(site.plan()) as (client, runner):
        await runner.initialize()
        await runner.step()
        step = asyncio.create_task(runner.step())
        await asyncio.sleep(5.0)
        frozen = asyncio.get_running_loop().time()
        site.network.freeze("r0:1")
        await until_lost(client, "r0")
        assert 28.0 < asyncio.get_running_loop().time() - frozen < 31.0
        assert "silent for 30 s, deadline 30 s = stall_timeout" in str(client.links["r0"].lost)
        with pytest.raises(WorkerError, match="r0 at r0:1 is lost") as error:
            await step
        assert error.value.worker == "r0"
        # Nothing is lost: when the worker answers again, the step runs for the same samples.
        site.network.thaw("r0:1")
        await asyncio.sleep(20.0)
        assert client.links["r0"].lost is None
        result = await runner.step()
        assert result.step == 2


@simulated
async def test_a_broken_connection_loses_no_request_and_repeats_none(site: Site) -> None:
    await site.start_ppo(slow=3.0)
    async with site.master(site.plan()) as (client, runner):
        await runner.initialize()
        step = asyncio.create_task(runner.step())
        for _ in range(5):
            await asyncio.sleep(1.0)
            for name in ("a0", "a1", "r0"):
                site.network.break_streams(f"{name}:1")
        result = await step
        assert len(result.samples) == 8
        assert len(client) == 0
    for worker in ("a0", "a1"):
        assert site.log.kinds(worker) == ["actor.initialize", "actor.generate", "actor.train_step"]


@simulated
async def test_a_worker_that_comes_back_takes_the_parameters_of_another_rank(site: Site) -> None:
    await site.start_ppo()
    models = (Model("actor", ("a0", "a1"), replicated=True), Model("reward", ("r0",)))
    plan = Plan(site.endpoints, models, site.plan().calls, 8, ("prompt",))
    async with site.master(plan) as (client, runner):
        await runner.initialize()
        await runner.step()
        site.network.kill("a1:1")
        await until_lost(client, "a1")
        again = Actor("a1", site.log)
        await site.start("a1", actor=again)
        await until_lost(client, "a1", False)
        result = await runner.step()
        assert result.step == 2
        assert torch.equal(again.weight, torch.full((3,), 2.0))
        # If both come back, the first goes on with its own parameters, and not with those of the other new process.
        both = {name: Actor(name, site.log) for name in ("a0", "a1")}
        both["a1"].weight += 7
        for name, actor in both.items():
            site.network.kill(f"{name}:1")
            await until_lost(client, name)
            await site.start(name, actor=actor)
        for name in both:
            await until_lost(client, name, False)
        assert (await runner.step()).step == 3
        assert [actor.weight.tolist() for actor in both.values()] == [[1.0] * 3] * 2


@simulated
async def test_syn_and_ack_all_or_none(site: Site) -> None:
    await site.start_ppo()
    async with site.master(site.plan()) as (client, _):
        data = [Compute("actor", "actor", 2)] * 2
        actors = ["actor@dp0-tp0-pp0", "actor@dp1-tp0-pp0"]
        ids = await client.request_async(actors, Handle.INITIALIZE, data, no_syn=False)
        client.request(["a0", "a1"], Handle.FLUSH)
        assert [reply.data for reply in await client.gather(ids)] == [0, 0]
        specs = await client.call(actors, Handle.MODEL_CONFIG, no_syn=False)
        assert specs == [{"hidden": 3, "rank": 0}, {"hidden": 3, "rank": 1}]
        site.network.freeze("a1:1")
        for _ in range(2):  # it is lost during the first request, and before the second one
            with pytest.raises(WorkerError, match="a1 at a1:1 is lost: silent"):
                async with asyncio.timeout(60.0):
                    await client.request_async(actors, Handle.TRAIN_STEP, data, no_syn=False)
        assert await client.call(["a0"], Handle.FLUSH) == [0]
        assert len(site.workers["a0"]._book) <= 1
        site.network.thaw("a1:1")


@simulated
async def test_clear_errors(site: Site) -> None:
    await site.start_ppo()
    wrong = ppo({"a0": "a0:1", "a1": "r0:1", "r0": "r0:1"}, ["a0", "a1"], ["r0"])
    with pytest.raises(WorkerError, match="a1 refuses this master: this is 'r0', not 'a1'; correct"):
        async with site.master(wrong):
            pass
    with pytest.raises(WorkerError, match="a0 has no backend of model 'reward'; it has actor"):
        async with site.master(ppo({"a0": "a0:1"}, ["a0"], ["a0"])):
            pass
    with pytest.raises(
        WorkerError, match=r"x \(x:1: connection refused\) cannot be reached within 10 s; start it, or correct"
    ):
        async with site.master(ppo(site.endpoints | {"x": "x:1"}, ["x"], ["r0"])):
            pass
    async with site.master(site.plan()) as (client, runner):
        with pytest.raises(ConfigError, match="'ghost' is neither a worker nor a shard"):
            await client.call(["ghost"], Handle.SPEC)
        with pytest.raises(WorkerError, match="holds no part of a dataset"):
            await client.call(["r0"], Handle.FETCH, [{"count": 1}])
        request = post(client, "reward@dp0-tp0-pp0", Handle.TRAIN_STEP, "reward")
        client.request(["r0"], Handle.FLUSH)
        with pytest.raises(WorkerError, match="'reward' at r0 is not initialized; send initialize"):
            await client.gather([request])
        await runner.initialize()
        request = post(client, "reward@dp0-tp0-pp0", Handle.TRAIN_STEP, "reward")
        client.request(["r0"], Handle.FLUSH)
        with pytest.raises(WorkerError, match="Reward, the backend of 'reward', has no method 'train_step'"):
            await client.gather([request])
        assert (await runner.step()).step == 1
    async with site.master(site.plan(batch_size=65)) as (_, runner):
        await runner.initialize()
        with pytest.raises(WorkerError, match="no further samples at a0, a1: a step needs 65, and 64 are there"):
            await runner.step()


@simulated
async def test_a_master_that_starts_again_goes_on_with_what_the_workers_hold(site: Site) -> None:
    reached = asyncio.Event()

    class Reached(Reward):
        async def inference(self, batch: SampleBatch, step: int) -> Any:  # type: ignore[override]
            if step == 3 and not reached.is_set():
                reached.set()
                await asyncio.sleep(1.0)
            return Reward.inference(self, batch, step)

    for name in ("a0", "a1"):
        await site.start(name, actor=Actor(name, site.log))
    await site.start("r0", reward=Reached("r0", site.log))
    async with site.master(site.plan()) as (_, runner):
        await runner.initialize()
        for _ in range(2):
            await runner.step()
        unfinished = asyncio.create_task(runner.step())
        await reached.wait()
        unfinished.cancel()
        await asyncio.wait([unfinished])
    async with site.master(site.plan()) as (_, runner):
        await runner.initialize()
        assert runner.step_number == 2
        result = await runner.step()
        assert result.step == 3
    initialized = [line for line in site.log.lines if line[1].endswith("initialize")]
    assert len(initialized) == 3
    trained = [sample for line in site.log.lines if line[1] == "actor.train_step" for sample in line[2:]]
    assert len(trained) == len(set(trained)) == 24
    numbers = sorted(int(sample.partition("-")[2]) for sample in trained)
    assert numbers == list(range(24))  # none was skipped


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({}, "Wrong.generate returned no 'answer'"),
        ({"answer": [torch.zeros(1)]}, "4 samples have 1 tensors 'answer'; give one each"),
        ({"answer": [1, 2, 3, 4]}, "something else than tensors for 'answer'"),
        ([], "must return a mapping of names to tensors"),
    ],
)
def test_a_backend_that_returns_something_else(result: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_outputs(SampleBatch("abcd", {}), ["answer"], result, "Wrong.generate")

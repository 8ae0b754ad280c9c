"""Which requests go together, and between which new weights are taken."""

import asyncio

import torch
from hypothesis import given, strategies as st

from averaging.engine import GenerationJob
from averaging.engine.engine import Engine, next_batch
from averaging.engine.messages import CompletionRequest
from tests.engine.engines import CountingModel


def job(
    prompts: tuple[tuple[int, ...], ...] = ((1, 2),),
    n: int = 1,
    max_tokens: int = 3,
    temperature: float = 1.0,
    seed: int | None = None,
    network: str = "a",
) -> GenerationJob:
    asked = CompletionRequest(model="m", prompt="", n=n, temperature=temperature, seed=seed)
    return GenerationJob(asked=asked, prompts=prompts, max_tokens=max_tokens, network=network)


JOBS = st.lists(
    st.builds(
        job,
        prompts=st.lists(st.lists(st.just(1), min_size=1, max_size=20).map(tuple), min_size=1, max_size=2).map(tuple),
        n=st.integers(1, 4),
        max_tokens=st.integers(1, 20),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.sampled_from([None, None, None, 7]),
        network=st.sampled_from("abc"),
    ),
    max_size=8,
)


@given(JOBS, st.sets(st.sampled_from("abc")))
def test_a_batch_has_the_oldest_of_a_network_whose_turn_it_is_and_fits(
    waiting: list[GenerationJob], last: set[str]
) -> None:
    batch = next_batch(waiting, last, 8, 40)
    assert bool(batch) == bool(waiting)
    if batch:
        assert batch[0] is next((each for each in waiting if each.network not in last), waiting[0])
        assert len(set(map(id, batch))) == len(batch)
        assert len({each.sampling for each in batch}) == 1
        assert sum(each.sequences for each in batch) <= 8
        assert max(each.longest for each in batch) + max(each.max_tokens for each in batch) <= 40
        assert len(batch) == 1 or all(each.asked.seed is None for each in batch)


async def test_weights_that_arrive_during_a_batch_make_the_next_one() -> None:
    model, first, second = CountingModel(4), job(), job()
    model.go.clear()
    async with Engine(model, batch=4, context=40, queue=8) as engine:
        running = engine.submit(first)
        assert await asyncio.to_thread(model.begun.wait, 30.0)
        loading = asyncio.create_task(engine.load({"w": torch.ones(1)}, 5))
        await asyncio.sleep(0)  # so that it has begun
        waiting = engine.submit(second)
        model.go.set()
        for pieces in (running, waiting):
            assert len([piece async for piece in pieces]) == 3
        assert await loading == 0
    assert (first.version, second.version) == (4, 5)

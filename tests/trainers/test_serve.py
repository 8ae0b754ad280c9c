"""`averaging serve` with the real transformers and the real client of OpenAI."""

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from averaging import WeightPublisher
from averaging.engine import EngineServer, load_model
from averaging.errors import ConfigError, StateError, TensorError
from averaging.rpc import RpcServer
from averaging.weights import FollowerOptions
from tests.engine.language_models import language_model, save_language_model
from tests.support.processes import averaging_process
from tests.weights.test_weights import Publishing

pytestmark = pytest.mark.integrations

EXACT: Any = {"return_token_ids": True}


@asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncGenerator[AsyncOpenAI, None]:
    async with (
        EngineServer(load_model(folder, bare="follow" in options), name="tiny", **options) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        yield client


@torch.no_grad()
def logprobs_of(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """The model's log-probability of each token after the prompt."""
    logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)


async def test_the_client_gets_the_tokens_and_their_logprobs_exactly(tmp_path: Path) -> None:
    model = save_language_model(tmp_path / "tiny")
    async with serving(tmp_path / "tiny") as client:
        # Prompts of different lengths at once, so that they are padded to one batch.
        questions = ["2 + 2 =", "How are you?", "ä"]
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="tiny",
                    messages=[{"role": "user", "content": question}],
                    max_tokens=6,
                    n=2,
                    logprobs=True,
                    temperature=0.7,
                    top_p=0.9,
                    extra_body=EXACT,
                )
                for question in questions
            )
        )
        for question, answer in zip(questions, answers, strict=True):
            extra: Any = answer
            assert bytes_of(extra.prompt_token_ids) == f"u:{question}\na:"
            for choice in answer.choices:
                tokens = choice.token_ids
                content = choice.logprobs.content
                given = torch.tensor([each.logprob for each in content])
                torch.testing.assert_close(given, logprobs_of(model, extra.prompt_token_ids, tokens))
                assert bytes_of(tokens, keep_end=False) == choice.message.content
        greedy = await client.completions.create(
            model="tiny", prompt=[[1, 2, 3], [4]], max_tokens=5, temperature=0, logprobs=0, extra_body=EXACT
        )
        for prompt, choice in zip([[1, 2, 3], [4]], greedy.choices, strict=True):
            own = model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False)[0].tolist()
            assert choice.token_ids == own[len(prompt) :]


def bytes_of(tokens: list[int], *, keep_end: bool = True) -> str:
    from tests.engine.language_models import byte_tokenizer

    text: str = byte_tokenizer().decode(tokens, skip_special_tokens=not keep_end)
    return text


async def test_seeds_repeat_streams_agree_and_stop_strings_end(tmp_path: Path) -> None:
    save_language_model(tmp_path / "tiny")
    async with serving(tmp_path / "tiny") as client:
        asked: Any = {"model": "tiny", "prompt": "abc", "max_tokens": 40, "seed": 5, "extra_body": EXACT}
        whole = (await client.completions.create(**asked)).choices[0]
        assert (await client.completions.create(**asked)).choices[0].text == whole.text
        other = await client.completions.create(**(asked | {"seed": 6}))
        assert other.choices[0].text != whole.text
        chunks = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
        assert [t for c in chunks for t in c.choices[0].token_ids] == whole.token_ids
        stop = whole.text[5:7]
        ended = (await client.completions.create(**asked, stop=[stop, "never there"])).choices[0]
        assert ended.text == whole.text[: whole.text.index(stop)]
        assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
        token = whole.token_ids[3]
        body = EXACT | {"stop_token_ids": [token]}
        ended = (await client.completions.create(**(asked | {"extra_body": body}))).choices[0]
        assert ended.finish_reason == "stop"
        ids: Any = ended
        assert ids.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
        # Without a seed, two processes do not sample alike: torch begins each with the same state.
        torch.manual_seed(0)
        free = [await client.completions.create(model="tiny", prompt="abc", max_tokens=40) for _ in range(2)]
        assert free[0].choices[0].text != free[1].choices[0].text


async def test_each_answer_names_the_version_of_the_run_that_made_it(tmp_path: Path) -> None:
    save_language_model(tmp_path / "tiny", seed=0)
    (tmp_path / "tiny" / "model.safetensors").unlink()  # all weights come from the run
    publisher = WeightPublisher(dtype=torch.bfloat16)
    models = {version: language_model(seed=version).bfloat16().float() for version in (1, 2)}
    async with RpcServer("127.0.0.1:0", [publisher]) as publishing:
        await publisher.publish(models[1].state_dict(), 1)
        follow = FollowerOptions(join=[publishing.endpoint], run_id="", listen=None)
        async with serving(tmp_path / "tiny", follow=follow) as client:
            for version, model in models.items():
                if version > 1:
                    await publisher.publish(model.state_dict(), version)
                while True:
                    answer: Any = await client.completions.create(
                        model="tiny", prompt=[7, 8], max_tokens=4, logprobs=0, extra_body=EXACT
                    )
                    if answer.weight_version == str(version):
                        break
                given = torch.tensor(answer.choices[0].logprobs.token_logprobs)
                torch.testing.assert_close(given, logprobs_of(model, [7, 8], answer.choices[0].token_ids))
            with pytest.raises(NotFoundError, match="there is no model 'other'"):
                await client.completions.create(model="other", prompt="a")
            assert [each.id async for each in client.models.list()] == ["tiny"]


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), "float32"), (float("-inf"), "float32"), (70000.0, "float16")]
)
def test_values_that_are_not_finite_in_the_model_are_not_loaded(tmp_path: Path, value: float, dtype: str) -> None:
    save_language_model(tmp_path / "tiny")
    model: Any = load_model(tmp_path / "tiny", dtype=dtype)
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    bad = {name: tensor.float() + 0.5 for name, tensor in before.items()}
    next(reversed(bad.values())).view(-1)[-1] = value
    with pytest.raises(StateError, match="has a value that is not finite"):
        model.load(bad, 7)
    assert model.version is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.model.state_dict().items())


@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_model_that_computes_no_numbers_does_not_answer(tmp_path: Path, temperature: int) -> None:
    save_language_model(tmp_path / "tiny")
    model: Any = load_model(tmp_path / "tiny")
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.fill_(float("nan"))
    async with EngineServer(model, name="tiny") as server, httpx.AsyncClient(base_url=server.url) as client:
        asked = {"model": "tiny", "prompt": "a", "temperature": temperature}
        answer = await client.post("/v1/completions", json=asked)
        assert (answer.status_code, "not numbers" in answer.text) == (500, True)


def test_what_cannot_be_served_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model(tmp_path)
    model = save_language_model(tmp_path / "tiny")
    with pytest.raises(ConfigError, match="cannot be served on cuda"):
        load_model(tmp_path / "tiny", device="cuda:9")
    served = load_model(tmp_path / "tiny")
    state = model.state_dict()
    before = {name: tensor.clone() for name, tensor in served.model.state_dict().items()}  # type: ignore[attr-defined]
    wrong = dict(state) | {"model.norm.weight": torch.zeros(5)}
    changed = {name: tensor + 1 for name, tensor in wrong.items()}
    with pytest.raises(TensorError, match=r"'model.norm.weight' is \[5\] in the run and \[32\]"):
        served.load(changed, 1)
    with pytest.raises(TensorError, match="'head'"):
        served.load({"head": torch.zeros(1)}, 1)
    for name, tensor in served.model.state_dict().items():  # type: ignore[attr-defined]
        assert torch.equal(tensor, before[name])
    assert served.load({f"module.{name}": tensor for name, tensor in state.items() if "norm" in name}, 1) > 0
    (tmp_path / "tiny" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        load_model(tmp_path / "tiny")
    bare = load_model(tmp_path / "tiny", bare=True)
    with pytest.raises(TensorError, match="neither the run nor"):
        bare.load({"model.norm.weight": state["model.norm.weight"]}, 1)
    untied = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    assert bare.load(untied, 1) == 0


def test_the_command_serves_follows_and_ends(tmp_path: Path) -> None:
    base = tmp_path / "tiny"
    model = save_language_model(base, template=None)
    publisher = WeightPublisher(model)
    publisher.publish_now(version=3)
    given = ("--listen", "127.0.0.1:0", "--batch", "2")
    with (
        Publishing(publisher) as endpoint,
        averaging_process("serve", str(base), "--follow", endpoint, *given) as server,
    ):
        url = server.expect("ready")["url"]
        assert server.expect("version")["of_folder"] == 0
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        answer: Any = client.completions.create(model="tiny", prompt="hi", max_tokens=2)
        assert (answer.model, answer.weight_version) == ("tiny", "3")
        with pytest.raises(BadRequestError, match="no chat template"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
        with pytest.raises(BadRequestError, match="more than 2"):
            client.completions.create(model="tiny", prompt="a", n=3)
        assert httpx.get(f"{url}/weight_info", trust_env=False).json()["weight_version"] == "3"
        server.signal(signal.SIGINT)
        server.expect("done")
        assert server.wait() == 0
        assert server.stderr == ""

"""Unchanged environments, trainer and tests of atroposlib with our server."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from averaging.rl.feed import BatchFeed
from tests.feed.feeds import Feed, registration
from tests.interop.atropos import ENVIRONMENT, PYTHON, program, site_packages
from tests.support.certificates import TOKEN, token_file
from tests.support.ports import free_port

pytestmark = pytest.mark.interop

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([PYTHON, str(HERE / "tiny_model.py"), str(folder)], check=True, env=ENVIRONMENT, timeout=110)
    return folder


@pytest.fixture
def token(tmp_path: Path) -> Path:
    return token_file(tmp_path)


@pytest.fixture
def feed(tmp_path: Path, token: Path) -> Iterator[Feed]:
    with Feed(tmp_path / "feed.sqlite", "--token-file", str(token)) as feed:
        yield feed


def with_password(feed: Feed) -> str:
    return feed.url.replace("://", f"://any:{TOKEN}@")


@pytest.mark.timeout(300)
def test_an_environment_and_our_trainer(feed: Feed, token: Path, model: Path) -> None:
    """Two environments of different group sizes, one with a reservation; the server is killed once."""
    steps = 6
    run = registration(16, max_token_len=512, num_steps=steps)
    with BatchFeed(feed.url, run, poll=0.05, token_file=token) as batches:
        batches._register()
        batches._request_batch()  # environments can register from now on
        script = str(HERE / "original_environment.py")
        environments = [
            program(script, with_password(feed), str(model), str(steps), "4", "0.5"),
            program(script, with_password(feed), str(model), str(steps), "2"),
        ]
        sizes: dict[int, int] = {}
        try:
            for number in range(1, steps + 1):
                batch = next(batches)
                assert (batch.step, batch.sequences) == (number, 16)
                of = {0: 0, 1: 0}
                for group in batch.groups:
                    of[group["env_id"]] += len(group["tokens"])
                    sizes[group["env_id"]] = len(group["tokens"])
                    assert (
                        len(group["tokens"][0]) == len(group["masks"][0]) == len(group["inference_logprobs"][0]) == 102
                    )
                reserved = next(e for e, size in sizes.items() if size == 4)
                assert of[reserved] >= 8
                if number == 3:
                    feed.kill()
                    feed.start()
            for environment in environments:
                out, _ = environment.communicate(timeout=200)
                assert "the environment has ended" in out, out[-3000:]
        finally:
            for environment in environments:
                environment.kill()
                environment.communicate()


@pytest.mark.timeout(300)
def test_the_example_trainer(feed: Feed, model: Path, tmp_path: Path) -> None:
    """The trainer trains the tiny model. It cannot restart vLLM, which is not installed, and continues."""
    environment = program(str(HERE / "original_environment.py"), with_password(feed), str(model), "100", "4")
    trainer = program(
        *("-m", "example_trainer.grpo", "--model-name", str(model), "--atropos-url", with_password(feed)),
        *("--device", "cpu"),
        *("--training-steps", "3", "--batch-size", "4", "--gradient-accumulation-steps", "2", "--seq-len", "128"),
        *("--optimizer", "adamw", "--save-path", str(tmp_path / "saved"), "--vllm-port", str(free_port())),
        *("--log-dir", str(tmp_path / "logs")),
    )
    try:
        out, _ = trainer.communicate(timeout=250)
        assert trainer.returncode == 0, out[-5000:]
        assert "Registered with Atropos API" in out
        assert len(re.findall(r"Loss: -?\d+\.\d+, Grad norm: \d+\.\d+", out)) == 3
        assert "Training finished." in out
        assert list((tmp_path / "saved").iterdir())
        feed.process.drain()
        assert {event["sequences"] for event in feed.process.events("batch")} == {8}
        assert [event["step"] for event in feed.process.events("batch")][:3] == [1, 2, 3]
    finally:
        for each in (trainer, environment):
            each.kill()
            each.communicate()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["test_api_messages_handling", "test_api_compression", "test_api_legacy"])
def test_the_api_tests_of_atroposlib(name: str, tmp_path: Path) -> None:
    """They run as copies with another port, at which our server listens, so that theirs cannot start."""
    port = free_port()
    helpers = tmp_path / "helpers_of_the_api.py"
    for source, target in ((name, tmp_path / f"{name}.py"), ("api_test_utils", helpers)):
        text = (site_packages() / "atroposlib" / "tests" / f"{source}.py").read_text()
        assert "8000" in text
        text = text.replace("8000", str(port)).replace("atroposlib.tests.api_test_utils", helpers.stem)
        target.write_text(text)
    with Feed(tmp_path / "feed.sqlite", listen=f"localhost:{port}"):
        tests = program(
            "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path / f"{name}.py")
        )
        out, _ = tests.communicate(timeout=250)
        assert tests.returncode == 0, out[-6000:]
        assert re.search(r"\d+ passed", out)
        assert "failed" not in out.splitlines()[-1]

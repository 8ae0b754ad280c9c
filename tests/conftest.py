"""Settings of all tests."""

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import averaging.transport.grpc  # noqa: F401  (before grpc, for which it chooses the engine, whichever test comes first)

pytest_plugins = ["tests.support.alone", "tests.support.fixtures"]

# Machines that run tests are slow and shared: an example, and the drawing of it, may take as long as they take.
settings.register_profile(
    "averaging",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("averaging")

ENDING: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


def no_longer_ignored() -> list[str]:
    """Gives signals that are ignored their defaults again, because processes that tests start and end inherit that."""
    ignored = [number for number in ENDING if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, ENDING[number])
    return [number.name for number in ignored]


no_longer_ignored()  # by the shell, which has what it starts in the background ignore Ctrl+C, or by nohup


@pytest.fixture(autouse=True)
def no_signal_is_ignored() -> Iterator[None]:
    """A test that leaves one ignored, as calls of `main` do, has all later processes ignore it."""
    yield
    assert not no_longer_ignored()


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokens that processes of one user share belong to the tests, and not to who runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


HERE = Path(__file__).parent
ONLY_WITH = {
    **{folder: (folder,) for folder in ("deploy", "etcd", "gpu", "network", "optimizers", "slurm", "vllm")},
    "trainers": ("integrations", "posttrain"),
    "dashboard/test_browser_page.py": ("browser",),
    "rollouts/test_rollouts_command.py": ("integrations",),
    "rollouts/test_served_rollouts.py": ("integrations",),
    "rollouts/test_verifiers_rollouts.py": ("integrations",),
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Looks at these only with `-m` and one of their markers: what they need is not there for the other tests."""
    path = collection_path.relative_to(HERE) if collection_path.is_relative_to(HERE) else Path()
    markers = ONLY_WITH.get(path.as_posix()) or ONLY_WITH.get(path.parts[0] if path.parts else "")
    return True if markers and config.option.markexpr not in markers else None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A seed that can be told, another one each time unless it is given; and a count of what was drawn from it."""
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.randrange(2**32))


def pytest_report_header(config: pytest.Config) -> str:
    """What to give to see the same examples again."""
    return f"--hypothesis-seed={config.option.hypothesis_seed}"

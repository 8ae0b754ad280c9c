"""Fixtures of the integration tests."""

import gc
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.foreign.driver import Foreign, ForeignProcess, compile_seed
from tests.support.complaints import complaints
from tests.support.grpc_fakes import LANE
from tests.support.processes import Workers
from tests.support.training import Run


@pytest.fixture
def nothing_is_left_behind(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No task is lost, and neither gRPC nor asyncio has logged a complaint."""
    yield
    gc.collect(1)
    records = caplog.get_records("call")
    assert complaints(record for record in records if record.name.startswith(("asyncio", "grpc"))) == []


@pytest.fixture(params=["grpc", "direct"])
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test over both lanes: transports of `grpc_fakes`, also in child processes, send parts over this one."""
    monkeypatch.setenv(LANE, request.param)
    return str(request.param)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def workers(stack: ExitStack) -> Workers:
    """Starts peers in processes of their own, and ends them."""
    return Workers(stack)


@pytest.fixture
def start(nothing_is_left_behind: None) -> Iterator[Callable[[], Run]]:
    """Makes runs of averagers and ends them."""
    runs: list[Run] = []

    def make() -> Run:
        runs.append(Run())
        return runs[-1]

    yield make
    for run in runs:
        run.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("the averager")]


@pytest.fixture(scope="session")
def compiled_seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the foreign protos are, compiled."""
    compiled = tmp_path_factory.mktemp("seed")
    compile_seed(compiled)
    return compiled


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def foreign_process(compiled_seed: Path) -> AsyncGenerator[ForeignProcess, None]:
    """The process of the foreign peers; its pipes belong to the session's event loop, so the tests must run there."""
    process = await ForeignProcess.start(compiled_seed)
    try:
        yield process
    finally:
        await process.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def foreign(foreign_process: ForeignProcess) -> AsyncGenerator[Foreign, None]:
    """Foreign peers, all of them gone at the end of the test."""
    peers = Foreign(foreign_process)
    yield peers
    await peers.call("reset")

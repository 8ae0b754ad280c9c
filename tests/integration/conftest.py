"""Fixtures of the integration tests."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, Iterator

import pytest
import pytest_asyncio

from tests.integration.foreign import Foreign, ForeignProcess, compile_seed


@pytest.fixture
def nothing_is_left_behind(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No task is lost, and neither gRPC nor asyncio has logged a complaint."""
    yield
    gc.collect(1)
    complaints = [record for record in caplog.get_records("call") if record.name.startswith(("asyncio", "grpc"))]
    assert not [record.getMessage() for record in complaints if record.levelname in {"WARNING", "ERROR", "CRITICAL"}]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def foreign_process(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ForeignProcess, None]:
    """The process of the foreign peers; tests that use it run in the session's event loop, since its pipes belong there."""
    compiled = tmp_path_factory.mktemp("seed")
    compile_seed(compiled)
    process = await ForeignProcess.start(compiled)
    yield process
    await process.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def foreign(foreign_process: ForeignProcess) -> AsyncGenerator[Foreign, None]:
    """Foreign peers, all of them gone at the end of the test."""
    peers = Foreign(foreign_process)
    yield peers
    await peers.call("reset")

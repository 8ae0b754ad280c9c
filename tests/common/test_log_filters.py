"""Errors that grpcio causes and that mean nothing are not logged; all others are."""

import asyncio
import errno
import logging
from collections.abc import Callable

import pytest

from averaging.transport.grpc.error_mapping import POLLER, quieten


def raising(error: Exception, name: str) -> Callable[[], None]:
    """A function of that name that raises, as the frames of Cython have their class in the name."""

    def raises() -> None:
        raise error

    raises.__code__ = raises.__code__.replace(co_name=name)
    return raises


@pytest.mark.parametrize(
    ("error", "name", "logged"),
    [
        (OSError(errno.EBADF, "Bad file descriptor"), f"grpc._cython.cygrpc.{POLLER}", False),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), f"grpc._cython.cygrpc.{POLLER}", False),
        (OSError(errno.EBADF, "Bad file descriptor"), "read_something", True),
        (RuntimeError("Event loop is closed"), f"grpc._cython.cygrpc.{POLLER}", False),
        (RuntimeError("Event loop is closed"), "read_something", True),
        (ValueError("a bug"), f"grpc._cython.cygrpc.{POLLER}", True),
    ],
)
async def test_a_late_wake_up_of_grpc_is_not_logged(
    error: Exception, name: str, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    quieten()
    loop = asyncio.get_running_loop()
    loop.call_soon(raising(error, name))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    records = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert bool(records) is logged
    caplog.clear()

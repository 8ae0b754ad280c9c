"""Tests that are coroutines in virtual time."""

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from averaging.testing import virtual_time

P = ParamSpec("P")


def in_virtual_time(scenario: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Makes a test of a coroutine function, whose arguments are fixtures and parameters."""

    @functools.wraps(scenario)
    def test(*args: P.args, **kwargs: P.kwargs) -> None:
        virtual_time.run(scenario(*args, **kwargs))

    return test

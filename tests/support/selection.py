"""What `make test` runs of a test with many cases. `make test-long` runs all of them."""

import os
from collections.abc import Iterable
from typing import Any

import pytest

THOROUGH = bool(os.environ.get("LONG_TESTS"))


def rest_is_long(values: Iterable[Any], everyday: int = 1) -> list[Any]:
    """Arguments of `parametrize`: all after the first `everyday` ones are marked as long."""
    listed = list(values)
    rest = [value if isinstance(value, tuple) else (value,) for value in listed[everyday:]]
    return listed[:everyday] + [pytest.param(*value, marks=pytest.mark.long) for value in rest]


def one_in(count: int, values: Iterable[Any]) -> list[Any]:
    """Arguments of `parametrize`: of each `count` in a row, all but the first are marked as long."""
    listed = list(values)
    return [value for first in range(0, len(listed), count) for value in rest_is_long(listed[first : first + count])]


def examples(count: int) -> int:
    """The number of examples of a hypothesis test: an eighth of `count` in the everyday run."""
    return count if THOROUGH else count // 8

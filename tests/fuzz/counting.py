"""Reports at the end of the run how many inputs were fuzzed in all of its processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

KEY = "fuzzed_inputs"


class FuzzedInputs:
    """A pytest plugin; an xdist worker sends its count to the controller."""

    def __init__(self) -> None:
        self._count = 0
        self._counted: set[Callable[..., Any]] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Counts each example of a test in this directory."""
        for item in items:
            drawn = getattr(getattr(item, "obj", None), "hypothesis", None)
            if drawn is None or item.path.parent.name != "fuzz" or drawn.inner_test in self._counted:
                continue
            drawn.inner_test = self._counting(drawn.inner_test)
            self._counted.add(drawn.inner_test)

    def _counting(self, test: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(test)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._count += inputs_in((*args, *kwargs.values()))
            return test(*args, **kwargs)

        return counted

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Called at the end of a worker."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[KEY] = self._count

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Called in the controller at the end of each worker."""
        self._count += getattr(node, "workeroutput", {}).get(KEY, 0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the count."""
        if self._count:
            terminalreporter.write_line(f"fuzzed {self._count} inputs")


def inputs_in(drawn: tuple[object, ...]) -> int:
    """The number of inputs in one example: the messages, streams or calls in its lists, and at least one."""
    return max(1, sum(len(value) for value in drawn if isinstance(value, list)))

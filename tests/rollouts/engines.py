"""A fake engine in a process of its own, which can be killed and started again, and a trainer that takes batches."""

import threading
from contextlib import ExitStack
from typing import Any, Self

import httpx

from averaging.rl.feed import Batch, BatchFeed
from tests.feed.feeds import registration
from tests.support.ports import free_address
from tests.support.processes import JsonProcess


class EngineProcess:
    """`tests.rollouts.fake_engine` as a context manager."""

    def __init__(self, **settings: Any) -> None:
        self._listen, self._settings = free_address(), settings
        self._stack = ExitStack()
        self.url = f"http://{self._listen}"
        self.start()

    def start(self) -> None:
        self._process = self._stack.enter_context(
            JsonProcess("python", "-m", "tests.rollouts.fake_engine", self._listen)
        )
        self._process.expect("ready")
        self.control(**self._settings)

    def control(self, **settings: Any) -> dict[str, Any]:
        """Changes settings. Returns what was asked so far."""
        reply = httpx.post(f"{self.url}/control", json=settings, trust_env=False)
        answer: dict[str, Any] = reply.raise_for_status().json()
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class Weights:
    """What a trainer reports as its newest version."""

    def __init__(self, version: int | None) -> None:
        self.version = version


class Trainer:
    """Takes batches of `size` sequences in a thread while it is entered."""

    def __init__(self, url: str, size: int, version: int | None = None, max_token_len: int = 0) -> None:
        self.weights = Weights(version)
        self.batches: list[Batch] = []
        self._changed = threading.Condition()
        registered = registration(size, max_token_len=max_token_len, num_steps=-1)
        self._feed = BatchFeed(url, registered, weights=self.weights, poll=0.05)
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._ended = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._feed.close()
        self._thread.join(60)

    def _take(self) -> None:
        try:
            for batch in self._feed:
                with self._changed:
                    self.batches.append(batch)
                    self._changed.notify_all()
        except Exception:  # of a connection that was closed
            if not self._ended:
                raise

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of all batches."""
        return [group for batch in self.batches for group in batch.groups]

    def wait(self, number: int, timeout: float = 60.0) -> list[dict[str, Any]]:
        """Waits for so many groups."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.groups) >= number, timeout), self.batches
            return self.groups

"""`FeedEnvironment`: the side of those who post scored data."""

from __future__ import annotations

import time
import uuid
from types import TracebackType
from typing import Any, Self

import msgspec

from averaging.errors import FeedError, FeedRefusedError
from averaging.feed.client import Connection
from averaging.feed.messages import EnvStatus, Registered, RegisterEnv, ScoredData


class _Status(msgspec.Struct, frozen=True):
    status: str


class FeedEnvironment:
    """Posts groups to a feed, each exactly once whatever happens to the server meanwhile.

    It may be used by several threads. In asyncio code call it with `asyncio.to_thread`.

    Args:
        url: of the server, "http://HOST:PORT" or "https://HOST:PORT".
        told: what the environment tells about itself.
        start_patience: seconds to wait for a trainer to start; None waits without end.
        options: `token_file`, `tls_ca`, `tls_cert`, `tls_key`, `timeout`, `patience`, `max_bytes` of `Connection`.

    Attributes:
        registered: what the server answered to the registration; None before it.

    Raises:
        ConfigError: an argument cannot work.
    """

    def __init__(self, url: str, told: RegisterEnv, *, start_patience: float | None = None, **options: Any) -> None:
        self._connection = Connection(url, **options)
        self._told, self._start_patience = told, start_patience
        self.registered: Registered | None = None

    def register(self) -> Registered:
        """Registers, as soon as a trainer has asked for its first batch; what the server tells of the run.

        Raises:
            FeedRefusedError: the server refuses this environment.
            FeedUnreachableError: it gave no usable answer for `patience`.
            FeedError: no trainer has started within `start_patience`.
        """
        began = time.monotonic()
        while True:
            reply = self._connection.retried(
                lambda: self._connection.once("POST", "/register-env", Registered, told=self._told)
            )
            if reply.status == "success":
                self.registered = reply
                return reply
            if self._start_patience is not None and time.monotonic() - began > self._start_patience:
                raise FeedError(
                    f"{self._connection.url} has no trainer after {self._start_patience:g} s: {reply.status}"
                )
            time.sleep(1.0)

    def post(self, *groups: ScoredData, key: str | None = None) -> None:
        """Posts groups, all of them or none; registers first if need be. When it returns the server keeps them.

        A post is repeated until it is acknowledged, and a server of this library takes it once. A queue that is full is
        waited for.

        Args:
            groups: their `env_id` is filled in.
            key: names these groups for a day. Give the same to a repetition after this process was restarted.

        Raises:
            FeedRefusedError: the server refuses them; none was taken.
            FeedUnreachableError: it did not acknowledge them for `patience`; post them again with the same `key`.
        """
        key = key or uuid.uuid4().hex
        registered = self.registered or self.register()
        try:
            self._post(groups, registered, key)
        except FeedRefusedError as error:
            if error.status != 404:
                raise
            self._post(groups, self.register(), key)  # the server was reset, and knows no environment any more

    def status(self) -> EnvStatus:
        """How far the run is, and how much waits.

        Raises:
            FeedRefusedError: the server does not know this environment.
            FeedUnreachableError: it gave no usable answer for `patience`.
        """
        told = {"env_id": (self.registered or self.register()).env_id}
        return self._connection.retried(lambda: self._connection.once("GET", "/status-env", EnvStatus, told=told))

    def close(self) -> None:
        """Leaves: nothing is reserved for this environment any more. What it has posted stays."""
        try:
            if self.registered is not None:
                told = {"env_id": self.registered.env_id}
                self._connection.once("POST", "/disconnect-env", _Status, told=told)
        except FeedError:
            pass  # a server that cannot be reached has nothing to be told
        finally:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _post(self, groups: tuple[ScoredData, ...], registered: Registered, key: str) -> None:
        told = [msgspec.structs.replace(group, env_id=registered.env_id) for group in groups]
        path, content = ("/scored_data", told[0]) if len(told) == 1 else ("/scored_data_list", told)
        headers = {"Idempotency-Key": key}
        self._connection.retried(lambda: self._connection.once("POST", path, _Status, told=content, headers=headers))

"""`FeedEnvironment`: the client of an environment."""

from __future__ import annotations

import logging
import time
import uuid
from types import TracebackType
from typing import Any, Self

import msgspec

from averaging.errors import FeedError, FeedRefusedError, printable
from averaging.rl.feed.client import Connection
from averaging.rl.feed.messages import EnvStatus, Registered, RegisterEnv, ScoredData

logger = logging.getLogger(__name__)

REGISTER_INTERVAL = 1.0
"""Seconds between two requests to register while no trainer has started."""


class _EnvironmentStatus(msgspec.Struct, frozen=True):
    status: str


class FeedEnvironment:
    """Posts groups to a feed. The server takes each exactly once, even if it is restarted meanwhile.

    Several threads may use one object. In asyncio code call its methods with `asyncio.to_thread`.

    Args:
        url: the server, "http://HOST:PORT" or "https://HOST:PORT".
        config: the name, sizes and weight of this environment.
        start_timeout: seconds to wait until a trainer has started; None waits without limit.
        key: secret that identifies this environment. A process that is restarted with the same `config` and key takes
            its old place at once. None makes a new one; then it takes the place once the server finds it silent.
        options: `token_file`, `tls_ca`, `tls_cert`, `tls_key`, `timeout`, `retry_timeout`, `max_bytes` of `Connection`.

    Attributes:
        registered: the server's answer to the registration; None before it.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self,
        url: str,
        config: RegisterEnv,
        *,
        start_timeout: float | None = None,
        key: str | None = None,
        **options: Any,
    ) -> None:
        self._connection = Connection(url, **options)
        self._config, self._start_timeout = config, start_timeout
        self._headers = {"Environment-Key": key or uuid.uuid4().hex}
        self.registered: Registered | None = None

    def register(self) -> Registered:
        """Registers as soon as a trainer has asked for its first batch. Returns the server's answer.

        Raises:
            FeedRefusedError: the server refuses this environment.
            FeedUnreachableError: the server gave no usable answer for `retry_timeout`.
            FeedError: no trainer has started within `start_timeout`.
        """
        began = time.monotonic()
        while True:
            reply = self._connection.request(
                "POST", "/register-env", Registered, body=self._config, headers=self._headers
            )
            if reply.status == "success":
                self.registered = reply
                if reply.warning:
                    logger.warning("%s says: %s", self._connection.url, printable(reply.warning))
                return reply
            if self._start_timeout is not None and time.monotonic() - began > self._start_timeout:
                raise FeedError(
                    f"{self._connection.url} has no trainer after {self._start_timeout:g} s: {reply.status}"
                )
            time.sleep(REGISTER_INTERVAL)

    def post(self, *groups: ScoredData, key: str | None = None) -> None:
        """Posts all of the groups or none, and registers first if needed. The server has stored them on return.

        A post is repeated until the server has acknowledged it, and while the queue is full. A server of this library
        takes it once.

        Args:
            groups: their `env_id` is filled in.
            key: identifies these groups for 24 hours. If this process may be restarted and repeat a post, give the same
                key each time.

        Raises:
            FeedRefusedError: the server refuses them; it took none.
            FeedUnreachableError: the server did not acknowledge them for `retry_timeout`; post them again with the same
                `key`.
        """
        key = key or uuid.uuid4().hex
        registered = self.registered or self.register()
        try:
            self._post(groups, registered, key)
        except FeedRefusedError as error:
            if error.status != 404:
                raise
            self._post(groups, self.register(), key)  # the server was reset, and has forgotten this environment

    def status(self) -> EnvStatus:
        """Returns the step of the run and the sizes of the queue.

        Raises:
            FeedRefusedError: the server does not know this environment.
            FeedUnreachableError: the server gave no usable answer for `retry_timeout`.
        """
        body = {"env_id": (self.registered or self.register()).env_id}
        return self._connection.request("GET", "/status-env", EnvStatus, body=body)

    def close(self) -> None:
        """Disconnects, which ends the reservation of this environment. The posted groups stay."""
        try:
            if self.registered is not None:
                body = {"env_id": self.registered.env_id}
                self._connection.request_once(
                    "POST", "/disconnect-env", _EnvironmentStatus, body=body, headers=self._headers
                )
        except FeedError:
            pass  # a server that does not answer is not worth waiting for
        finally:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _post(self, groups: tuple[ScoredData, ...], registered: Registered, key: str) -> None:
        filled = [msgspec.structs.replace(group, env_id=registered.env_id) for group in groups]
        path, body = ("/scored_data", filled[0]) if len(filled) == 1 else ("/scored_data_list", filled)
        self._connection.request("POST", path, _EnvironmentStatus, body=body, headers={"Idempotency-Key": key})

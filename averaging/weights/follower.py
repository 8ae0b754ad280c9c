"""`WeightFollower`: keeps a model at the newest version that a publisher has published."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Self

import torch

from averaging.common import plain_state
from averaging.config import FilePath, TLSFiles
from averaging.errors import ClosedError
from averaging.metrics import CERTIFICATE_METRICS, MetricsListener, Samples, certificate_samples, counter, gauge
from averaging.rpc import Credentials, EventLoopThread, read_credentials
from averaging.tensors import in_thread
from averaging.weights.layout import WeightSpec
from averaging.weights.parts import check_own, part_of, write_part
from averaging.weights.receiver import FollowerOptions, ModelReceiver
from averaging.weights.snapshot import DividedSnapshot, WeightSnapshot

LOOK_SECONDS = 0.5  # interval at which the staleness is looked at

FOLLOWER_METRICS = (
    gauge("follower_version", "Version in the model, file or engine; missing before the first, or if it is unknown."),
    gauge(
        "follower_partial_version", "Version of which a part may be in the engine, which is paused; missing if none is."
    ),
    gauge("follower_newest_version", "Newest version that a publisher has announced; missing before the first."),
    gauge(
        "follower_staleness_seconds",
        "Seconds since a newer version became known or the publisher was lost; 0 if neither.",
    ),
    gauge("follower_staleness_versions", "Newest known version minus that in the model or in the file."),
    gauge("follower_connected", "Whether a publisher is connected: 1 or 0."),
    counter(
        "follower_bytes",
        "Bytes of weights received, and handed on to other followers (sent).",
        "direction",
        known=(("sent",), ("received",)),
    ),
    *CERTIFICATE_METRICS,
)


def follower_samples(
    receiver: ModelReceiver, credentials: Credentials, version: int | None, versions_behind: int, seconds: float
) -> Samples:
    announced = receiver.announced
    return {
        **({} if version is None else {"averaging_follower_version": version}),
        **({} if announced is None else {"averaging_follower_newest_version": announced.version}),
        "averaging_follower_staleness_seconds": seconds,
        "averaging_follower_staleness_versions": versions_behind,
        "averaging_follower_connected": float(receiver.connected),
        "averaging_follower_bytes_total": {("sent",): receiver.bytes_sent, ("received",): receiver.bytes_received},
        **certificate_samples(credentials),
    }


@dataclass(frozen=True, slots=True)
class Staleness:
    """How old the weights in the model are."""

    versions: int = 0  # the newest known version minus that in the model; 0 if none is known
    seconds: float = 0.0  # since a newer version became known or the publisher was lost; 0 if neither


class StalenessWatch:
    def __init__(self) -> None:
        self._since: float | None = None

    def look(self, now: float, applied: int | None, newest: int | None, *, connected: bool) -> Staleness:
        """Returns the staleness at `now` (seconds of a monotonic clock), with these versions in the model and known."""
        versions = 0
        if newest is not None and (applied is None or newest > applied):
            versions = newest - (-1 if applied is None else applied)
        if connected and not versions:
            self._since = None
        elif self._since is None:
            self._since = now
        return Staleness(versions, 0.0 if self._since is None else now - self._since)


class WeightFollower:
    """Keeps a model at the newest version that a `WeightPublisher` has published.

    ```python
    with WeightFollower(policy, join=["a.example:4222"], run_id="demo") as weights:
        weights.update(timeout=60)  # waits for the first version
        while True:
            weights.update()
            rollout(policy)
    ```

    A thread of its own receives each new version beside the model, and verifies it. `update` copies the newest complete
    version into the model, so that the model never has parts of two versions. If other threads use the model meanwhile,
    they do so inside `with weights.locked():`. In asyncio code, `async with WeightFollower(…) as weights` and
    `async for version in weights` do the same.

    It receives only what changed since the version that it has, and hands on what it has to other followers. It takes
    the memory of two to three copies of the weights beside the model. If the publisher is lost, it tries to reach it or
    another one of `join` again, for as long as it is open. The version never goes back.

    Args:
        model: A module, with or without wrappers, or tensors by name. They are overwritten in place, on any device. If
            `fully_shard` divides it, each rank follows for itself and receives only the parts that it holds.
        join: Addresses HOST:PORT of publishers of one model. They are tried in this order.
        run_id: The run whose weights are followed; empty for any.
        listen: `host:port` at which this follower hands on versions; None if it does not. One that listens on loopback
            does not either, unless all publishers are on loopback.
        advertise: `host:port` at which other followers reach this one, if that differs.
        tls: Certificates.
        token_file: File with the run's tokens.
        insecure: Whether other machines may connect to `listen` without TLS.
        join_timeout: Seconds within which a publisher must answer at the start.
        metrics_listen: `host:port` for /metrics, /healthz and /readyz, see docs/operate/prometheus.md.

    Attributes:
        version: The version in the model; None before the first.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        join: Sequence[str],
        run_id: str = "",
        listen: str | None = "127.0.0.1:0",
        advertise: str | None = None,
        tls: TLSFiles | None = None,
        token_file: FilePath | None = None,
        insecure: bool = False,
        join_timeout: float = 10.0,
        metrics_listen: str | None = None,
    ) -> None:
        self._model, self._join = model, join
        options = FollowerOptions(
            join=tuple(join) if not isinstance(join, str) else join,
            run_id=run_id,
            credentials=read_credentials(tls=tls, token_file=token_file, insecure=insecure),
            listen=listen,
            advertise=advertise,
            join_timeout=join_timeout,
        )
        self._receiver = ModelReceiver(options, self._own_specs)
        self._watch = StalenessWatch()
        self._credentials = options.credentials
        self._metrics = MetricsListener(
            metrics_listen, "the follower of weights", FOLLOWER_METRICS, self._sample, self._not_ready
        )
        self._lock, self._look_lock = threading.RLock(), threading.Lock()
        self._thread: EventLoopThread | None = None
        self.version: int | None = None

    def __repr__(self) -> str:
        return f"<WeightFollower of {', '.join(self._join)}, version {self.version}>"

    def __enter__(self) -> Self:
        """Connects to a publisher.

        Raises:
            StateError: No publisher answered in time, or none of those that did publishes weights.
            TensorError: The weights are those of another model; the error names the first tensor that differs.
            TransportError: The publishers refuse this follower, for example because of another run or token.
            ListenError: It cannot listen on its address.
        """
        self._thread = EventLoopThread(self._following(), "the follower of weights")
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await in_thread(self.__enter__)

    async def __aexit__(self, *error: object) -> None:
        await in_thread(self.close)

    def close(self) -> None:
        """Ends following. The model keeps its weights. A second call does nothing."""
        if self._thread is not None:
            self._thread.close()

    @property
    def newest(self) -> int | None:
        """The newest version that a publisher has announced; None before the first."""
        announced = self._receiver.announced
        return None if announced is None else announced.version

    @property
    def digest(self) -> bytes | None:
        """The digest of the newest version that was received, see `WeightPublisher.digest`."""
        received = self._receiver.newest
        return None if received is None else received.manifest.digest

    @property
    def staleness(self) -> Staleness:
        with self._look_lock:  # not the other one, since the application may hold that for long
            return self._watch.look(time.monotonic(), self.version, self.newest, connected=self._receiver.connected)

    @property
    def metrics_endpoint(self) -> str:
        """The address of /metrics, /healthz and /readyz; empty without `metrics_listen`."""
        return self._metrics.endpoint

    @property
    def bytes_received(self) -> int:
        """Bytes of weights received so far."""
        return self._receiver.bytes_received

    @property
    def bytes_sent(self) -> int:
        """Bytes of weights handed on to other followers so far."""
        return self._receiver.bytes_sent

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, the weights do not change, unless this thread calls `update`."""
        with self._lock:
            yield

    def update(self, timeout: float = 0.0) -> bool:
        """Copies the newest complete version into the model, if the model does not have it.

        Args:
            timeout: Seconds to wait for a newer version if there is none yet.

        Returns:
            Whether there was something new.

        Raises:
            TensorError: The publisher now publishes another model.
            ProtocolViolationError: All publishers announce something malformed.
            ClosedError: The follower is not running.
        """
        thread = self._running()
        if self._pending() is None and timeout > 0:
            thread.run(self._receiver.wait_newer(self.version, timeout))
        return self._apply()

    async def __aiter__(self) -> AsyncGenerator[int, None]:
        """Updates the model and yields the version, for each newest one. Versions that come faster are left out.

        Raises:
            AveragingError: As `update`.
        """
        while True:
            self._running()
            await self._receiver.wait_newer(self.version, LOOK_SECONDS)
            if await in_thread(self._apply) and self.version is not None:
                yield self.version

    def _running(self) -> EventLoopThread:
        if self._thread is None:
            raise ClosedError("this follower is not running; use it inside `with` or `async with`")
        self._thread.check()
        return self._thread

    def _pending(self) -> WeightSnapshot | DividedSnapshot | None:
        newest = self._receiver.newest
        if newest is None or (self.version is not None and newest.manifest.version <= self.version):
            return None
        return newest

    def _apply(self) -> bool:
        with self._lock, torch.no_grad():
            received = self._pending()
            if received is None:
                if self._receiver.failure is not None:
                    raise self._receiver.failure
                return False
            # Before anything is written, since the application may have changed the model.
            own = {spec.name: (spec, tensor) for spec, tensor in self._own()}
            divided = isinstance(received, DividedSnapshot)
            for each in received.snapshots if isinstance(received, DividedSnapshot) else (received,):
                check_own([spec for spec, _ in own.values()], each.manifest, is_part=divided)
            for spec, part in received.parts():
                if spec.name in own:
                    mine, tensor = own[spec.name]
                    write_part(tensor, mine, part, spec)
            self.version = received.manifest.version
        return True

    def _own(self) -> list[tuple[WeightSpec, torch.Tensor]]:
        """What the model holds here: whole tensors, or parts of divided ones."""
        state = self._model.state_dict() if isinstance(self._model, torch.nn.Module) else self._model
        plain = plain_state(state)
        return [part_of(name, tensor) for name, tensor in plain.items() if isinstance(tensor, torch.Tensor)]

    def _own_specs(self) -> list[WeightSpec]:
        return [spec for spec, _ in self._own()]

    @asynccontextmanager
    async def _following(self) -> AsyncGenerator[None, None]:
        # A task looks at the staleness, so that it is known since when the weights are old.
        async with self._metrics, self._receiver:
            watching = asyncio.create_task(self._keep_looking())
            try:
                yield
            finally:
                watching.cancel()
                await asyncio.wait({watching})

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            _ = self.staleness

    def _sample(self) -> Samples:
        stale = self.staleness
        return follower_samples(self._receiver, self._credentials, self.version, stale.versions, stale.seconds)

    def _not_ready(self) -> str:
        return "no version is in the model yet" if self.version is None else ""

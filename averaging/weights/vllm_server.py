"""Has a vLLM server load versions, through its HTTP routes for weight transfer.

The server's workers follow a publisher of this process with the backend of `averaging.integrations.vllm`. The publisher
has one version at a time, so that all workers of an engine load the same one.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from averaging.common import is_loopback, parse_address
from averaging.errors import ConfigError, StateError
from averaging.rpc import Credentials, RpcServer
from averaging.weights.engine_servers import TIMEOUT, ServedEngine
from averaging.weights.publisher import WeightPublisher
from averaging.weights.snapshot import WeightSnapshot

VLLM_PAUSES = ("wait", "keep", "abort")  # what happens to requests in progress when an update begins; vLLM's names


class VllmServer(ServedEngine):
    """One server, and the publisher that its workers follow, while it is entered, as an async context manager.

    The server is at `url`. Its workers reach the publisher at `listen` or `advertise`, with loopback only on this
    machine; `init_info` is what they need besides, see `averaging.integrations.vllm.AveragingInitInfo`.
    """

    start_server = (
        'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "averaging"}\', with '
        "averaging installed beside it"
    )

    def __init__(
        self,
        url: str,
        listen: str,
        *,
        advertise: str | None = None,
        credentials: Credentials | None = None,
        init_info: dict[str, Any] | None = None,
        pause: str = "wait",
    ) -> None:
        super().__init__(url)
        if not is_loopback(self._host) and is_loopback(parse_address(advertise or listen)[0]):
            raise ConfigError(
                f"the engine at {self._host} cannot reach {advertise or listen}; give --listen an address of this "
                "machine that it can reach, and --tls-* or --insecure"
            )
        self._pause, self._init_info = pause, init_info or {}
        self._publisher = WeightPublisher(bases=1)
        self._server = RpcServer(listen, [self._publisher], advertise=advertise, credentials=credentials)
        self._initialized = False

    async def __aenter__(self) -> Self:
        self.endpoint = (await self._server.__aenter__()).endpoint
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, traceback)
        await self._server.__aexit__(kind, error, traceback)

    async def load(self, snapshot: WeightSnapshot, folder: Path | None = None) -> None:
        """Has all workers load a version, and the server name it in `/weight_info`, or raises StateError.

        If a worker may have loaded a part, the server stays paused, and `/weight_info` says so. The next call begins
        anew, also with a server that was started again.
        """
        version = snapshot.manifest.version
        self._publisher.publish_snapshot(snapshot)
        initialized, self._initialized = self._initialized, False
        if not initialized:
            await self._post("init_weight_transfer_engine", {"init_info": {"join": [self.endpoint], **self._init_info}})
        # A process before this one may have been ended in the middle of an update.
        resumes = self.partial is None and not await self._is_paused()
        try:
            await self._post("pause", parameters={"mode": self._pause, "clear_cache": "true"})
            await self._post("start_weight_update")
            resumes, self.version, self.partial = False, None, version
            try:
                update = {"version": version, "timeout": TIMEOUT}
                await self._post("update_weights", {"update_info": update})
            except StateError as error:
                # Workers that have loaded it wait for the end of the update; the others refuse it, and then the server
                # leaves the name of the version as it was.
                unknown = f"unknown: a part of {version}"
                for route, body in (
                    ("finish_weight_update", {"weight_version": unknown}),
                    ("update_weight_version", {"new_version": unknown}),
                ):
                    with suppress(StateError):
                        await self._post(route, body)
                raise StateError(f"{error}; it stays paused until all workers have a whole version") from None
            await self._post("finish_weight_update", {"weight_version": str(version)})
            resumes, self.version, self.partial = True, version, None
        finally:
            if resumes:
                await self._post("resume")
        self._initialized = True

    async def _is_paused(self) -> bool:
        """Whether the server is paused already; False if it has no route that tells."""
        try:
            answer = await self._client.get("/is_paused")
        except self._failures:
            return False  # the next request says why
        return answer.is_success and '"is_paused":true' in answer.text.replace(" ", "")

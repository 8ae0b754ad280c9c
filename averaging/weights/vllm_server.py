"""Has a vLLM server load versions, through its HTTP routes for weight transfer.

The server's workers follow a publisher of this process with the backend of `averaging.integrations.vllm`. The publisher
has one version at a time, so that all workers of an engine load the same one.
"""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from averaging.common import chosen_proxy, is_loopback, parse_address, proxy_for
from averaging.errors import ConfigError, StateError, printable
from averaging.rpc import Credentials, RpcServer
from averaging.weights.publisher import WeightPublisher
from averaging.weights.snapshot import WeightSnapshot

VLLM_PAUSES = ("wait", "keep", "abort")  # what happens to requests in progress when an update begins; vLLM's names

START_SERVER = (
    'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "averaging"}\', with averaging '
    "installed beside it"
)

MAX_ANSWER = 2000  # characters of an error that are shown
TIMEOUT = 600.0  # seconds for one request to the server


class VllmServer:
    """One server, and the publisher that its workers follow, while it is entered, as an async context manager.

    The server is at `url`. Its workers reach the publisher at `listen` or `advertise`, with loopback only on this
    machine; `init_info` is what they need besides, see `averaging.integrations.vllm.AveragingInitInfo`.
    """

    version: int | None = None  # that all workers have; None before the first, and while it is unknown
    partial: int | None = None  # the version of which some workers may have a part; None if all have all of one

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
        try:
            import httpx
        except ImportError:
            raise ConfigError("a vLLM server is called with httpx; run in the checkout: pip install '.[rl]'") from None
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"the engine's address {url!r:.200} is no URL: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"the engine's address must be http://HOST:PORT, not {url!r:.200}")
        if not is_loopback(parsed.host) and is_loopback(parse_address(advertise or listen)[0]):
            raise ConfigError(
                f"the engine at {parsed.host} cannot reach {advertise or listen}; give --listen an address of this "
                "machine that it can reach, and --tls-* or --insecure"
            )
        self.url, self._pause, self._init_info = url.rstrip("/"), pause, init_info or {}
        self._publisher = WeightPublisher(bases=1)
        self._server = RpcServer(listen, [self._publisher], advertise=advertise, credentials=credentials)
        self._client = httpx.AsyncClient(
            base_url=self.url, timeout=TIMEOUT, trust_env=False, proxy=proxy_for(parsed.host, chosen_proxy())
        )
        self._failures = httpx.HTTPError
        self._initialized = False

    @property
    def endpoint(self) -> str:  # of the publisher
        return self._server.endpoint

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.aclose()
        await self._server.__aexit__(kind, error, traceback)

    async def load(self, snapshot: WeightSnapshot) -> None:
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
                # Workers that have loaded it wait for the end of the update; the others refuse it.
                with suppress(StateError):
                    await self._post("finish_weight_update", {"weight_version": f"unknown: a part of {version}"})
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

    async def _post(
        self, route: str, body: dict[str, Any] | None = None, parameters: dict[str, str] | None = None
    ) -> None:
        try:
            answer = await self._client.post(f"/{route}", json=body, params=parameters)
        except self._failures as error:
            reason = printable(str(error) or type(error).__name__)
            raise StateError(f"the engine {self.url} does not answer: {reason}; check that it is up") from None
        if answer.status_code == 404:
            raise StateError(f"{self.url} has no route /{route}; {START_SERVER}")
        if not answer.is_success:
            text = printable(answer.text[:MAX_ANSWER])
            raise StateError(f"{self.url} answered /{route} with {answer.status_code}: {text}")

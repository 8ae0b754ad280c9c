"""Has servers of engines load versions, through their HTTP routes. `VllmServer` and `AdapterServer` are two others."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from averaging.common import chosen_proxy, proxy_for
from averaging.errors import ConfigError, StateError, printable
from averaging.weights.snapshot import WeightSnapshot

MAX_ANSWER = 2000  # characters of an error that are shown
TIMEOUT = 600.0  # seconds for one request to the server


class ServedEngine:
    """One server at `url`, while it is entered, as an async context manager."""

    version: int | None = None  # that all workers have; None before the first, and while it is unknown
    partial: int | None = None  # the version of which some workers may have a part; None if all have all of one
    endpoint = ""  # at which it hands on versions; empty if it does not
    start_server = ""  # what to do if the server lacks a route

    def __init__(self, url: str) -> None:
        try:
            import httpx
        except ImportError:
            raise ConfigError("an engine is called with httpx; run in the checkout: pip install '.[rl]'") from None
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"the engine's address {url!r:.200} is no URL: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"the engine's address must be http://HOST:PORT, not {url!r:.200}")
        self.url, self._host = url.rstrip("/"), parsed.host
        # A connection for each request: a server may close one after an error, while the next request is on its way.
        self._client = httpx.AsyncClient(
            base_url=self.url,
            timeout=TIMEOUT,
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
            proxy=proxy_for(parsed.host, chosen_proxy()),
        )
        self._failures = httpx.HTTPError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def load(self, snapshot: WeightSnapshot, folder: Path | None) -> None:
        """Has the server load a version, or raises StateError. `folder` is an absolute path with a copy, or None."""
        raise NotImplementedError

    async def _post(
        self, route: str, body: dict[str, Any] | None = None, parameters: dict[str, str] | None = None
    ) -> None:
        await self._ask("POST", route, json=body, params=parameters)

    async def _ask(self, method: str, route: str, **given: Any) -> Any:
        """The server's answer, an httpx.Response."""
        try:
            answer = await self._client.request(method, f"/{route}", **given)
        except self._failures as error:
            reason = printable(str(error) or type(error).__name__)
            raise StateError(f"the engine {self.url} does not answer: {reason}; check that it is up") from None
        if answer.status_code == 404 and '"error"' not in answer.text:  # no answer of the route itself
            raise StateError(f"{self.url} has no route /{route}; {self.start_server}")
        if not answer.is_success:
            text = printable(answer.text[:MAX_ANSWER])
            raise StateError(f"{self.url} answered /{route} with {answer.status_code}: {text}")
        return answer


SGLANG_PAUSES = {"wait": None, "keep": "retract", "abort": "abort"}
"""SGLang's names of what happens to requests in progress. Without a pause an update waits for their end by itself."""


class SglangServer(ServedEngine):
    """A server of SGLang, whose workers read each version from its folder, a path that must be theirs too."""

    start_server = "the server must be SGLang 0.5 or newer"

    def __init__(self, url: str, *, pause: str = "wait") -> None:
        super().__init__(url)
        self._pause = SGLANG_PAUSES[pause]

    async def load(self, snapshot: WeightSnapshot, folder: Path | None) -> None:
        """As `ServedEngine.load`. If an update fails, the server stays paused until it has a whole version."""
        if folder is None:
            raise ConfigError("SGLang reads a version from its folder")
        version = snapshot.manifest.version
        await self._ask("GET", "model_info")  # before anything changes, since it may be away
        if self._pause is not None:
            await self._post("pause_generation", {"mode": self._pause})
        self.version, self.partial = None, version
        try:
            # It empties its prefix cache too.
            update = {"model_path": str(folder), "weight_version": str(version)}
            await self._post("update_weights_from_disk", update)
        except StateError as error:
            # It may have gone back to the weights before, or some workers may have the new ones.
            with suppress(StateError):
                await self._post("pause_generation", {"mode": "retract"})
            raise StateError(f"{error}; it stays paused until it has a whole version") from None
        await self._post("continue_generation", {})
        self.version, self.partial = version, None

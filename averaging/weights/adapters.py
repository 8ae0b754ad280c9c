"""Has a server load each version of a published adapter beside the versions before."""

from __future__ import annotations

import re
from pathlib import Path

from averaging.common import adapter_versions
from averaging.errors import ConfigError, StateError
from averaging.weights.engine_servers import ServedEngine
from averaging.weights.snapshot import WeightSnapshot

ADAPTER_NAME = re.compile(r"[\w.-]{1,100}", re.ASCII)

ADAPTER_ROUTES = {"vllm": "v1/", "sglang": ""}  # of which engine, and what is before the names of its routes
START_SERVER = {
    "vllm": "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora --max-lora-rank RANK",
    "sglang": "start it with --enable-lora --max-lora-rank RANK --lora-target-modules all",
}


class AdapterServer(ServedEngine):
    """A server of vLLM or SGLang that has an adapter under a new name for each version: NAME-12, NAME-13.

    A request that has begun keeps the adapter that it names. The newest `keep` versions stay, and older ones are
    unloaded; their folders must stay longer, because the engine reads them again for requests in progress.
    """

    def __init__(self, url: str, *, kind: str, name: str, keep: int) -> None:
        super().__init__(url)
        if not ADAPTER_NAME.fullmatch(name):
            raise ConfigError(f"an adapter's name has up to 100 letters, digits, dots, - and _; {name!r:.200} does not")
        self._name, self._keep, self._routes = name, keep, ADAPTER_ROUTES[kind]
        self.start_server = START_SERVER[kind]
        self._loaded = set[int]()  # by this process

    async def load(self, snapshot: WeightSnapshot, folder: Path | None) -> None:
        """As `ServedEngine.load`. Whatever fails, the server has the versions before."""
        if folder is None:
            raise ConfigError("an engine reads an adapter from its folder")
        version, there = snapshot.manifest.version, await self._versions()
        if version in there - self._loaded:  # of a process before, and perhaps of another run
            await self._unload(version)
        if version not in there & self._loaded:
            body = {"lora_name": f"{self._name}-{version}", "lora_path": str(folder)}
            await self._post(f"{self._routes}load_lora_adapter", body)
        self._loaded.add(version)
        self.version = version
        kept = sorted(each for each in there | {version} if each <= version)[-self._keep :]
        for old in sorted(there - set(kept)):
            await self._unload(old)

    async def _versions(self) -> set[int]:
        try:
            models = (await self._ask("GET", "v1/models")).json()["data"]
            return set(adapter_versions(self._name, [str(model["id"]) for model in models]))
        except (ValueError, KeyError, TypeError):
            raise StateError(f"the answer of {self.url}/v1/models is not that of an engine") from None

    async def _unload(self, version: int) -> None:
        await self._post(f"{self._routes}unload_lora_adapter", {"lora_name": f"{self._name}-{version}"})

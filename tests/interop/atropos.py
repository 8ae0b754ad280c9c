"""atroposlib: its server in a separate process, its library, and programs that run in its virtual environment.

`make test-feed` creates that environment and sets FEED_PYTHON to its Python.
"""

import importlib.util
import os
import subprocess
import time
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import httpx

from tests.support.ports import free_port
from tests.support.processes import DEADLINE

ROOT = Path(__file__).parents[2]

PYTHON = os.environ.get("FEED_PYTHON", str(ROOT / ".venv-feed" / "bin" / "python"))

ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "CUDA_VISIBLE_DEVICES": ""}


def site_packages() -> Path:
    return next(Path(PYTHON).parent.parent.glob("lib/python3*/site-packages"))


@cache
def library() -> ModuleType:
    """Loads `atroposlib.api.utils`, which forms batches and imports nothing else of atroposlib."""
    spec = importlib.util.spec_from_file_location("atropos_utils", site_packages() / "atroposlib" / "api" / "utils.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class RunApi:
    """`run-api` as a context manager. It can be killed, and started again at the same address."""

    def __init__(self) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        command = [PYTHON, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + DEADLINE
        while True:
            try:
                self.get("/info")
                return
            except httpx.TransportError:
                assert self._process.poll() is None, "run-api has ended"
                assert time.monotonic() < deadline, "run-api does not answer"
                time.sleep(0.05)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=DEADLINE)

    def post(self, path: str, body: object) -> Any:
        return httpx.post(self.url + path, json=body, timeout=DEADLINE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def program(*arguments: str) -> subprocess.Popen[str]:
    """Starts a program in the virtual environment of atroposlib."""
    out = subprocess.PIPE
    return subprocess.Popen([PYTHON, *arguments], stdout=out, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)

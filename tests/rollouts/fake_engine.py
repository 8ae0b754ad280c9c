"""An engine as `averaging rollouts` sees it: `python -m tests.rollouts.fake_engine ADDRESS`. Tests choose its answers.

It answers each prompt with the token after its last digit, as a model that is not sure: only some of the answers are
right. Tests change what it does with `POST /control`.
"""

import asyncio
import json
import random
import sys
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from averaging.http_server import HttpServer, listening
from tests.rollouts.text_models import END, IDS

DIGITS = {IDS[str(digit)]: IDS[str((digit + 1) % 10)] for digit in range(10)}


class FakeEngine:
    """The state of the engine.

    Attributes:
        set: what `/control` has changed: version (None: unknown), tells (whether answers have the version), delay
            (seconds), version_after (the version from the middle of each answer on), status (of refused requests),
            truncated, right (how often the answer is right), routeless (no /weight_info), adapter (the
            name of one, loaded as NAME-VERSION beside the base).
    """

    def __init__(self) -> None:
        self.set: dict[str, Any] = {"version": 1, "tells": True, "delay": 0.0, "right": 0.5}
        self.asked: list[dict[str, Any]] = []
        self.most = self.running = 0
        self.random = random.Random(0)

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append({"body": body, "token": request.headers.get("authorization")})
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.set["delay"])
            if status := self.set.get("status"):
                return JSONResponse({"error": {"message": "told to refuse"}}, status_code=status)
            return JSONResponse(self._answer(body))
        finally:
            self.running -= 1

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        digit = next((token for token in reversed(body["prompt"]) if token in DIGITS), IDS["0"])
        word = DIGITS[digit] if self.random.random() < self.set["right"] else IDS["no"]
        tokens = [word] * body["max_tokens"] if self.set.get("truncated") else [word, IDS[END]]
        reason = "length" if self.set.get("truncated") else "stop"
        choice = {"index": 0, "token_ids": tokens, "finish_reason": reason, "text": ""}
        answer = {"id": "1", "choices": [{**choice, "logprobs": {"token_logprobs": [-0.25] * len(tokens)}}]}
        version = self.set["version"]
        if (after := self.set.get("version_after")) is not None:
            self.set["version"] = after
        return answer | ({"weight_version": str(version)} if self.set["tells"] and version is not None else {})

    async def weight_info(self, request: Request) -> Response:
        if self.set.get("routeless"):
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        version = self.set["version"]
        return JSONResponse({"weight_version": None if version is None else str(version)})

    async def models(self, request: Request) -> Response:
        models = [{"id": "tiny", "root": self.set.get("root"), "max_model_len": 1024}]
        if adapter := self.set.get("adapter"):
            models.append({"id": f"{adapter}-{self.set['version']}", "root": "/folder", "max_model_len": None})
        return JSONResponse({"data": models})

    async def control(self, request: Request) -> Response:
        self.set |= await request.json()
        return JSONResponse({"asked": self.asked[-50:], "requests": len(self.asked), "most": self.most})


async def main(address: str) -> None:
    engine = FakeEngine()
    routes = [
        Route("/v1/completions", engine.complete, methods=["POST"]),
        Route("/v1/models", engine.models),
        Route("/weight_info", engine.weight_info),
        Route("/control", engine.control, methods=["POST"]),
    ]
    with listening(address) as listener:
        async with HttpServer(Starlette(routes=routes), listener, connections=200, seconds=60.0) as server:
            print(json.dumps({"event": "ready", "url": f"http://{address}"}), flush=True)
            await server.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

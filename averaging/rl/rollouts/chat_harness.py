"""The agent of environments that bring none: it asks the model for one reply, in this process, and has no tools.

`null` of verifiers does the same as a program, for which packages are installed. Importing this imports verifiers.
"""

from __future__ import annotations

import functools
import ssl
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

MAX_ERROR = 2000  # characters of an error that a trace keeps


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Sends the conversation as it is, and ends with the model's reply."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Asks for one reply at verifiers' endpoint, which keeps the tokens."""
        body = {"model": ctx.model, "messages": self._messages(data)}
        headers = {"Authorization": f"Bearer {secret}"}
        # Without a limit of time, because the engine may be away for long.
        async with httpx.AsyncClient(timeout=None, trust_env=False, verify=_tls()) as client:  # noqa: S113
            reply = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        return vf.ProgramResult(exit_code=not reply.is_success, stdout="", stderr=reply.text[:MAX_ERROR])

    def _messages(self, data: vf.TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        before = [] if system is None else [vf.SystemMessage(content=system)]
        asked = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
        return [message_to_wire(message) for message in (*before, *asked)]


__all__ = ["ChatHarness"]

"""What others write, such as reasons, names and run ids, is one printable line of limited length in errors and logs."""

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import pytest
import torch

from averaging import Peer
from averaging.errors import MAX_TEXT, AveragingError, JoinError
from averaging.protocol.messages import AveragingData, Digest, JoinRequest, MessageCode, Record, Rumour, WireTensor
from averaging.transport.grpc import GrpcTransport

EVIL = "\x1b[2J\x1b]0;owned\x07\r\nroot: all is well\u202e" * 300


def is_harmless(text: str) -> bool:
    return text.isprintable() and len(text) <= 2 * MAX_TEXT


class Rude(grpc.GenericRpcHandler):
    """Refuses every call in its own words."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, EVIL[:2000])

        return grpc.stream_stream_rpc_method_handler(refuse)


async def test_the_text_of_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "averaging")
    server = grpc.aio.server(handlers=[Rude()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with pytest.raises(JoinError) as told:
            async with Peer([torch.ones(1)], run_id="run", join=[f"127.0.0.1:{port}"], join_timeout=0.3):
                pass
    finally:
        await server.stop(None)
    assert is_harmless(str(told.value))
    assert "root: all is well" in str(told.value)
    assert all(is_harmless(record.getMessage()) for record in caplog.records)


async def test_the_names_and_ids_of_a_caller(caplog: pytest.LogCaptureFixture) -> None:
    """Each call is refused; neither what the peer logs nor what it answers holds what a terminal would obey."""
    caplog.set_level(logging.DEBUG, "averaging")
    words: list[str] = []
    transport = GrpcTransport("127.0.0.1:0", max_message_bytes=8 << 20)
    await transport.bind()
    async with Peer([torch.ones(1)], run_id="run") as peer:
        name = EVIL[:200]
        record = Record(name, name, b"", 5, time.time() + 60, owner=b"x" * 32, signature=b"y" * 64, claimed=5)
        endpoint = peer.endpoint

        async def parts() -> AsyncGenerator[AveragingData, None]:
            yield AveragingData(MessageCode.PART_FOR_AVERAGING, b"g", name, WireTensor(b"", (0,), EVIL))

        async def first(replies: AsyncGenerator[Any, None]) -> object:
            async with aclosing(replies):
                return await anext(replies, None)

        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: first(transport.exchange(endpoint, Digest(EVIL, name, 1))),
            lambda: first(transport.subscribe(endpoint, Digest("run", name, 1))),
            lambda: transport.push(endpoint, EVIL, (Rumour(record),)),
            lambda: transport.push(endpoint, "run", (Rumour(record),)),
            lambda: first(transport.join_group(endpoint, JoinRequest(name, b"h", 2e9))),
            lambda: first(transport.aggregate_part(endpoint, parts())),
        ]
        for call in calls:
            try:
                words.append(repr(await call()))
            except AveragingError as error:
                words.append(str(error))
        assert EVIL[:200] not in peer.peers
        assert all(map(is_harmless, peer.peers))
    await transport.close()
    assert all(map(is_harmless, words)), words
    assert all(is_harmless(record.getMessage()) for record in caplog.records)

"""A peer written from the protocol page and the seed's proto alone, without imports from the library.

Messages are dicts of the fields that are set, with codes as names.
"""

import asyncio
import random
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from importlib import import_module
from typing import Any

import grpc
import numpy as np

from tests.foreign import states
from tests.foreign.rounds import Round
from tests.foreign.states import Message

pb: Any = import_module("averaging_pb2")
rpc: Any = import_module("averaging_pb2_grpc")


def as_dict(message: Any) -> Message:
    """The fields of a protobuf message that are set."""
    fields: Message = {}
    for field, value in message.ListFields():
        if field.message_type is not None:
            fields[field.name] = as_dict(value)
        elif field.enum_type is not None:
            known = field.enum_type.values_by_number.get(value)
            fields[field.name] = known.name if known else value
        else:
            fields[field.name] = list(value) if field.name in _LISTS else value
    return fields


_LISTS = {"size", "ordered_group_endpoints", "gathered"}


class Peer:
    """One foreign peer; a test calls its public methods from another process."""

    def __init__(self) -> None:
        self._endpoint = f"client::{uuid.uuid4()}"
        self._server: Any = None
        self._channels: dict[str, Any] = {}
        self._joins: dict[str, Any] = {}
        self._calls: set[Any] = set()
        self._requests: asyncio.Queue[Message] = asyncio.Queue()
        self._answers: dict[str, asyncio.Queue[Message]] = {}
        self._rounds: dict[bytes, asyncio.Future[Round]] = {}
        self._streams: asyncio.Queue[Message] = asyncio.Queue()
        self._replies: list[Message] | None = None
        self._hangs = False
        self._state: list[Message] = []

    async def serve(self, host: str) -> str:
        """Listens, and returns its endpoint at `host`. Without this call the peer is a client."""
        self._server = grpc.aio.server()
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._endpoint = f"{host}:{port}"
        rpc.add_DecentralizedAveragingServicer_to_server(self, self._server)
        await self._server.start()
        return self._endpoint

    async def name(self) -> str:
        """Returns its endpoint."""
        return self._endpoint

    async def close(self) -> None:
        """Closes all connections at once."""
        for channel in self._channels.values():
            await channel.close()
        if self._server is not None:
            await self._server.stop(None)

    def _channel(self, endpoint: str) -> Any:
        if endpoint not in self._channels:
            self._channels[endpoint] = grpc.aio.insecure_channel(endpoint)
        return self._channels[endpoint]

    def _stub(self, endpoint: str) -> Any:
        return rpc.DecentralizedAveragingStub(self._channel(endpoint))

    # As a follower

    async def ask(self, leader: str, **fields: Any) -> Message:
        """Sends a join request and returns the first reply. `fields` override those of an ordinary request."""
        request = {"endpoint": self._endpoint, "client_mode": self._server is None, "gather": b""} | fields
        self._joins[leader] = self._stub(leader).rpc_join_group(pb.JoinRequest(**request))
        return await self.next_message(leader)

    async def next_message(self, leader: str) -> Message:
        """Returns the next reply of that leader; an empty one at the end of the stream."""
        message = await self._joins[leader].read()
        return {} if message is grpc.aio.EOF else as_dict(message)

    async def leave(self, leader: str) -> None:
        self._joins.pop(leader).cancel()

    # As a leader

    async def next_request(self) -> Message:
        return await self._requests.get()

    async def pending_requests(self) -> int:
        """Returns the number of join requests that `next_request` has not returned."""
        return self._requests.qsize()

    async def answer(self, follower: str, **message: Any) -> None:
        """Replies to that request. Every code except ACCEPTED ends the stream."""
        self._answers[follower].put_nowait(message)

    async def begin(self, group: Message) -> None:
        """Sends BEGIN_ALLREDUCE to all members."""
        for name in group["ordered_group_endpoints"]:
            if name != self._endpoint:
                await self.answer(name, code="BEGIN_ALLREDUCE", **group)

    async def lead(self, size: int, gather: bytes) -> Message:
        """Accepts all requests until the group has `size` members, begins it in random order, and returns it."""
        gathered = {self._endpoint: gather}
        while len(gathered) < size:
            request = await self.next_request()
            gathered[request["endpoint"]] = request["gather"]
            await self.answer(request["endpoint"], code="ACCEPTED")
        order = random.sample(list(gathered), size)
        group = {
            "group_id": random.randbytes(20),
            "ordered_group_endpoints": order,
            "gathered": [gathered[name] for name in order],
        }
        await self.begin(group)
        return group

    async def rpc_join_group(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        answers = self._answers[request.endpoint] = asyncio.Queue()
        self._requests.put_nowait(as_dict(request))
        while True:
            message = pb.MessageFromLeader(**await answers.get())
            yield message
            if message.code != pb.ACCEPTED:
                return

    # In a round

    async def average(self, group: Message, schema: Message, tensors: list[bytes]) -> list[bytes]:
        """Takes part in a round, and returns its tensors after it."""
        round_ = self._round(group, schema, tensors)
        self._future(round_.group_id).set_result(round_)
        await round_.begin()
        async with asyncio.TaskGroup() as tasks:
            for reducer in round_.reducers():
                tasks.create_task(self._send_all(round_, reducer))
            tasks.create_task(round_.served.wait())
        return [tensor.tobytes() for tensor in round_.after]

    async def _send_all(self, round_: Round, reducer: str) -> None:
        expected = len(round_.parts_of[reducer])
        replies = await self.send(reducer, round_.messages(reducer))
        if len(replies) != expected:
            raise ValueError(f"{reducer} answered {len(replies)} of {expected} parts: {replies[-1:]}")
        for number, reply in enumerate(replies):
            round_.take_reply(reducer, number, reply)

    async def messages(self, reducer: str, group: Message, schema: Message, tensors: list[bytes]) -> list[Message]:
        return self._round(group, schema, tensors).messages(reducer)

    async def send(self, reducer: str, messages: Sequence[Message | bytes], ends: bool = True) -> list[Message]:
        """Sends these messages unchecked and returns all replies. With `ends`, it closes its side of the stream."""
        call = self._channel(reducer).stream_stream(
            "/DecentralizedAveraging/rpc_aggregate_part",
            request_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
            response_deserializer=pb.AveragingData.FromString,
        )()

        async def write() -> None:
            for message in messages:
                await call.write(message if isinstance(message, bytes) else pb.AveragingData(**message))
            if ends:
                await call.done_writing()

        writing = asyncio.create_task(write())
        self._calls.add(call)
        try:
            return [as_dict(reply) async for reply in call]
        finally:
            self._calls.discard(call)
            writing.cancel()
            await asyncio.wait({writing})
            if not writing.cancelled():
                writing.exception()  # a reducer may refuse before all is written

    async def break_off(self) -> None:
        """Cancels all streams on which it sends."""
        for call in self._calls:
            call.cancel()

    async def answer_parts(self, replies: list[Message] | None, hangs: bool = False) -> None:
        """Answers streams of parts with these replies; with None, correctly. With `hangs`, they never end."""
        self._replies, self._hangs = replies, hangs

    async def next_stream(self) -> Message:
        """Returns the first message, without its tensor, of the next incoming stream of parts."""
        return await self._streams.get()

    async def rpc_aggregate_part(self, requests: AsyncIterator[Any], context: Any) -> AsyncGenerator[Any, None]:
        messages = (as_dict(request) async for request in requests)
        first = await anext(messages, None)
        if first is None:
            return
        self._streams.put_nowait({name: value for name, value in first.items() if name != "tensor_part"})
        if self._replies is not None:
            for reply in self._replies:
                yield pb.AveragingData(**reply)
            if self._hangs:
                await asyncio.Event().wait()
            return
        if first["code"] != "PART_FOR_AVERAGING":
            return
        round_ = await self._future(first["group_id"])
        async for reply in round_.serve(first, messages):
            yield pb.AveragingData(**reply)

    def _round(self, group: Message, schema: Message, tensors: list[bytes]) -> Round:
        return Round(self._endpoint, group, schema, [np.frombuffer(tensor, schema["dtype"]) for tensor in tensors])

    def _future(self, group_id: bytes) -> asyncio.Future[Round]:
        return self._rounds.setdefault(group_id, asyncio.get_running_loop().create_future())

    # State

    async def offer(self, messages: list[Message], hangs: bool = False) -> None:
        """Answers every download with these messages. With `hangs`, it never ends the stream."""
        self._state, self._hangs = messages, hangs

    async def rpc_download_state(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        for message in self._state:
            yield pb.DownloadData(**message)
        if self._hangs:
            await asyncio.Event().wait()

    async def download(self, donor: str) -> Message:
        """Downloads the state of `donor`, and reads it with its metadata and without."""
        call = self._stub(donor).rpc_download_state(pb.DownloadRequest())
        messages = [as_dict(message) async for message in call]
        return {"state": states.read(messages), "plain": states.read_without_metadata(messages)}

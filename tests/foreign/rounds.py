"""One all-reduce at a foreign member: its messages, its replies and its result."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import numpy as np

from tests.foreign import buffers, split
from tests.foreign.states import Message


class Round:
    """A round of `group` at the member `endpoint`.

    Args:
        group: the fields of BEGIN_ALLREDUCE.
        schema: `shapes`, `dtype`, `compression`, `part_size_bytes` and `reply` (average or delta).
        tensors: flat, one per shape.
    """

    def __init__(self, endpoint: str, group: Message, schema: Message, tensors: list[buffers.Array]) -> None:
        self.group_id: bytes = group["group_id"]
        self.endpoint = endpoint
        endpoints = group["ordered_group_endpoints"]
        members = [split.unpack_gather(*pair) for pair in zip(endpoints, group["gathered"], strict=True)]
        self.members = dict(zip(endpoints, members, strict=True))
        self.compression: str = schema["compression"]
        self.delta = schema["reply"] == "delta"
        self.before = tensors
        self.after = [tensor.copy() for tensor in tensors]
        lengths = [int(np.prod(shape)) for shape in schema["shapes"]]
        self.dtype = np.dtype(schema["dtype"])
        per_element = buffers.BYTES_PER_ELEMENT.get(self.compression, self.dtype.itemsize)
        per_part = int(schema["part_size_bytes"] / per_element)
        by_member = split.parts(lengths, per_part, split.shares(members))
        self.parts_of = dict(zip(endpoints, by_member, strict=True))
        self.own_parts = self.parts_of[endpoint]
        self.sends = self.members[endpoint].mode != split.AUXILIARY
        senders = [m.endpoint for m in members if m.mode != split.AUXILIARY and m.endpoint != endpoint]
        self._missing = [set(senders) for _ in self.own_parts]
        self._arrived: list[dict[str, buffers.Array]] = [{} for _ in self.own_parts]
        self._averaged = [asyncio.Event() for _ in self.own_parts]
        self._average: list[buffers.Array] = [np.empty(0) for _ in self.own_parts]
        self._unserved = set(senders) if self.own_parts else set()
        self.served = asyncio.Event()

    # As a sender

    def reducers(self) -> list[str]:
        """Returns the other members to which this one sends parts."""
        others = [name for name, parts in self.parts_of.items() if parts and name != self.endpoint]
        return others if self.sends else []

    def messages(self, reducer: str) -> list[Message]:
        """Returns the messages of this member to `reducer`."""
        packed = [buffers.pack(self._local(part), self.compression) for part in self.parts_of[reducer]]
        messages: list[Message] = [{"tensor_part": tensor} for tensor in packed]
        messages[0] |= {"code": "PART_FOR_AVERAGING", "group_id": self.group_id, "endpoint": self.endpoint}
        return messages

    def take_reply(self, reducer: str, number: int, reply: Message) -> None:
        """Adopts the reply to part `number`; raises ValueError if it is invalid."""
        if set(reply) != {"code", "tensor_part"} or reply["code"] != "AVERAGED_PART":
            raise ValueError(f"reply {number} of {reducer} is {reply.get('code')} with {sorted(reply)}")
        tensor, part = reply["tensor_part"], self.parts_of[reducer][number]
        if tensor.get("compression", "NONE") != self.compression or tensor["size"] != [part.stop - part.start]:
            raise ValueError(f"reply {number} of {reducer} has {tensor.get('compression')} and size {tensor['size']}")
        self._adopt(part, buffers.unpack(tensor))

    # As a reducer

    async def begin(self) -> None:
        """Averages the parts for which no other member sends anything."""
        for number in range(len(self.own_parts)):
            self._average_if_complete(number)
        if not self._unserved:
            self.served.set()

    async def serve(self, first: Message, messages: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
        """Answers the stream of one sender, part by part."""
        sender = first["endpoint"]
        for number in range(len(self.own_parts)):
            message = await anext(messages) if number else first
            self._arrived[number][sender] = buffers.unpack(message["tensor_part"])
            self._missing[number].remove(sender)
            self._average_if_complete(number)
            await self._averaged[number].wait()
            values = self._average[number] - self._arrived[number][sender] if self.delta else self._average[number]
            yield {"code": "AVERAGED_PART", "tensor_part": buffers.pack(values, self.compression)}
        self._unserved.discard(sender)
        if not self._unserved:
            self.served.set()

    def _average_if_complete(self, number: int) -> None:
        if self._missing[number] or self._averaged[number].is_set():
            return
        part = self.own_parts[number]
        arrived = dict(self._arrived[number])
        if self.sends:
            arrived[self.endpoint] = self._local(part)
        weights = {name: self.members[name].weight for name in arrived}
        summed = sum(weights[name] * values.astype(np.float64) for name, values in arrived.items())
        average = np.asarray(summed / sum(weights.values()), dtype=self.dtype)
        self._average[number] = average
        self._averaged[number].set()
        if self.sends and self.delta:
            self._adopt(part, average - self._local(part))
        elif self.sends:
            self._adopt(part, buffers.unpack(buffers.pack(average, self.compression)))

    def _local(self, part: split.Part) -> buffers.Array:
        return self.before[part.tensor][part.start : part.stop]

    def _adopt(self, part: split.Part, values: buffers.Array) -> None:
        piece = self.after[part.tensor][part.start : part.stop]
        piece[:] = piece + values if self.delta else values

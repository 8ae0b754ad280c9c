"""The process of the foreign peers.

Reads calls from stdin, as msgpack arrays [number, peer, method, arguments]. Writes [number, result, error] to stdout
when a call has ended. The first call of a peer creates it. With an empty peer, the call is for the process itself. The
compiled protos must be on PYTHONPATH. The process exits at the end of stdin.
"""

import asyncio
import sys
from typing import Any

import msgpack

from tests.foreign import split, states
from tests.foreign.peer import Peer
from tests.foreign.states import Message


class Control:
    """Runs the calls from stdin."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Runs until the end of stdin."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        frames = msgpack.Unpacker(max_buffer_size=0)
        while data := await reader.read(1 << 16):
            frames.feed(data)
            for number, peer, method, arguments in frames:
                task = asyncio.create_task(self._do(number, peer, method, arguments))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _do(self, number: int, peer: str, method: str, arguments: dict[str, Any]) -> None:
        result, failure = None, None
        try:
            if peer:
                found = self._peers.setdefault(peer, Peer())
                result = await getattr(found, method)(**arguments)
            else:
                result = await getattr(self, method)(**arguments)
        except (Exception, asyncio.CancelledError) as error:
            failure = f"{type(error).__name__}: {error}"
        sys.stdout.buffer.write(msgpack.packb([number, result, failure]))
        sys.stdout.buffer.flush()

    async def reset(self) -> None:
        """Closes all peers and cancels their calls."""
        peers, self._peers = list(self._peers.values()), {}
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        for peer in peers:
            await peer.close()

    async def imported(self) -> list[str]:
        """The imported modules of the library, of which there should be none."""
        return [name for name in sys.modules if name.partition(".")[0] in ("averaging", "torch")]

    async def split(self, lengths: list[int], per_part: int, shares: list[float]) -> list[list[int]]:
        return [[part.stop - part.start for part in own] for own in split.parts(lengths, per_part, shares)]

    async def pack_state(self, **arguments: Any) -> list[Message]:
        return states.pack(**arguments)

    async def next_bits(self, **arguments: Any) -> str:
        """The group bits that a member has after a round."""
        return split.next_bits(**arguments)


if __name__ == "__main__":
    asyncio.run(Control().run())

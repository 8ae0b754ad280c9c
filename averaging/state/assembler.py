"""Puts a download of a state together again and verifies it, also over several attempts. No I/O. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from averaging.errors import StateError
from averaging.protocol.messages import Buffer, DownloadData, Resume, WireTensor
from averaging.protocol.schema import Schema
from averaging.state.manifest import (
    DTYPE_NAMES,
    STATE_DTYPES,
    Described,
    can_skip,
    covered,
    max_items,
    nbytes_of,
    read_manifest,
    resume_at,
)
from averaging.state.packing import State
from averaging.state.throughput import PER_TENSOR

Check = Callable[[Mapping[str, Any]], None]
"""Called with the user dict of a state before its tensors come; raises StateError if it cannot be taken over."""

MAX_GROWTH = 16
"""A state may hold so many times the bytes of the averaged tensors (plus 64 MiB) before it is refused."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What identifies a state as several donors can have it: the version, and the averaged tensors with their digests.

    What the application adds (optimizer statistics, say) may differ from peer to peer and is not in it.
    """

    version: int
    tensors: tuple[tuple[torch.dtype, tuple[int, ...], bytes], ...]

    def __str__(self) -> str:
        digests = b"".join(digest for _, _, digest in self.tensors)
        return f"version {self.version} with digest {hashlib.sha256(digests).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor of which only the first `filled` bytes have come; nothing is known of their worth."""

    tensor: Described
    buffer: bytearray
    filled: int


@dataclass(frozen=True, slots=True)
class Held:
    """What of a state is there, so that it need not be read again.

    Attributes:
        announced: all tensors of that state.
        tensors: those that were read whole and verified.
        cut: the one in which its download ended.
    """

    announced: tuple[Described, ...] = ()
    tensors: Mapping[Described, torch.Tensor] = field(default_factory=dict)
    cut: Cut | None = None

    @property
    def nbytes(self) -> int:
        """What is there."""
        return nbytes_of(list(self.tensors)) + (self.cut.filled if self.cut else 0)

    @property
    def offset(self) -> int:
        """How many of the state's first bytes are there."""
        offset = 0
        for tensor in self.announced:
            if tensor not in self.tensors:
                return offset + (self.cut.filled if self.cut and self.cut.tensor == tensor else 0)
            offset += tensor.nbytes
        return offset

    @property
    def resume(self) -> Resume | None:
        """What a donor is told of it; None if there is nothing to be told."""
        return resume_at(self.announced, self.offset) if self.offset else None


class _Filling:
    """A tensor of which bytes come, or are yet to come.

    Args:
        buffer: for its bytes; None if the tensor is held, so that they are passed over.
        filled: bytes that an earlier attempt has read into it.

    Attributes:
        filled: bytes by now.
        taken_over: those of the earlier attempt.
        opened: whether its first message has come.
    """

    def __init__(self, tensor: Described, buffer: bytearray | None, filled: int = 0) -> None:
        self.tensor, self.buffer = tensor, buffer
        self.filled = self.taken_over = filled
        self.opened = False
        self._chunks_left = 0

    def open(self, chunks: int) -> None:
        """Its first message has come, and tells in how many chunks it comes."""
        self.opened, self._chunks_left = True, max(1, chunks)

    def add(self, piece: Buffer) -> bool:
        """Takes a chunk. Returns whether it was the last."""
        end = self.filled + len(piece)
        self._chunks_left -= 1
        if end > self.tensor.nbytes or self._chunks_left < 0:
            raise StateError(f"tensor {self.tensor.name!r} is longer than announced")
        if self.buffer is not None:
            self.buffer[self.filled : end] = piece
        self.filled = end
        return end == self.tensor.nbytes and not self._chunks_left


def accept_all(_: Mapping[str, Any]) -> None:
    """A check that refuses nothing."""


class StateAssembler:
    """Puts a download together again and verifies it. No I/O.

    Args:
        schema: of the tensors that the downloader averages; the state must begin with the same. None takes any tensors.
        max_bytes: what the state may hold at most; if None, `MAX_GROWTH` times the bytes of the schema plus 64 MiB.
        held: what need not be read again where a state has the very same; its cut tensor is written on.
        expected: refuses any other state.
        at_least: refuses a state of a version below that.
        check: see `Check`.

    Attributes:
        started: whether the metadata has come.
        version: of the state, as announced.
        nbytes: of all tensors, as announced; 0 before the first message.
        received: bytes of tensors so far, with those that were left out.
        spliced: whether a tensor of which the first bytes were held did not match its digest. Nothing is wrong with the
            donor then, as far as can be told.
        outdated: whether the version that is announced is below `at_least`.

    Raises:
        StateError: from every method, if the state is not what it says or not what is needed.
    """

    def __init__(
        self,
        schema: Schema | None,
        max_bytes: int | None = None,
        held: Held | None = None,
        expected: Fingerprint | None = None,
        at_least: float = 0.0,
        check: Check = accept_all,
    ) -> None:
        self._schema, self._check = schema, check
        self._before, self._expected, self._at_least = held or Held(), expected, at_least
        own_bytes = schema.nbytes if schema else 0
        self._max_bytes = MAX_GROWTH * own_bytes + (64 << 20) if max_bytes is None else max_bytes
        self.version = 0
        self.nbytes = 0  # counted once: who shows progress asks for it with every message
        self.received = 0
        self.spliced = False
        self.outdated = False
        self._user: Mapping[str, Any] = {}
        self._announced: tuple[Described, ...] = ()
        self._done: list[torch.Tensor] = []
        self._filling: _Filling | None = None
        self.started = False

    @property
    def whole(self) -> bool:
        """Whether all that was announced is there and verified."""
        return self.started and self._filling is None and len(self._done) == len(self._announced)

    @property
    def count(self) -> int:
        """How many tensors are announced."""
        return len(self._announced)

    @property
    def left(self) -> int:
        """Bytes still to come, and `PER_TENSOR` for each tensor that is not there yet."""
        return self.nbytes - self.received + PER_TENSOR * (len(self._announced) - len(self._done))

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of the state, as announced."""
        compared = self._announced[: len(self._schema.tensors)] if self._schema else self._announced
        return Fingerprint(self.version, tuple((dtype, shape, digest) for _, dtype, shape, digest in compared))

    @property
    def held(self) -> Held:
        """What is there of this state."""
        before = self._before.tensors
        tensors = {tensor: before[tensor] for tensor in self._announced if tensor in before}
        tensors |= zip(self._announced, self._done, strict=False)
        cut, filling = None, self._filling
        if filling is not None and filling.buffer is not None and 0 < filling.filled < len(filling.buffer):
            cut = Cut(filling.tensor, filling.buffer, filling.filled)
        return Held(self._announced, tensors, cut)

    def feed(self, message: DownloadData) -> None:
        """Takes the next message of the stream."""
        if not self.started:
            self.started = True
            self._read_metadata(message.metadata)
        if (wire := message.tensor_part) is None:
            return
        if wire.dtype:
            self._start_tensor(wire)
        self._add_chunk(wire.buffer)

    def finish(self) -> State:
        """The whole state, once the stream has ended."""
        if not self.started:
            raise StateError("it shares no state")
        if not self.whole:
            raise StateError(f"its stream ended after {len(self._done)} of {len(self._announced)} tensors")
        names = (tensor.name for tensor in self._announced)
        return State(self.version, dict(zip(names, self._done, strict=True)), self._user)

    def _read_metadata(self, packed: bytes) -> None:
        manifest = read_manifest(packed, max_items(self._schema))
        self.version, self._user, self._announced = manifest.version, manifest.user, manifest.tensors
        self.nbytes = nbytes_of(self._announced)
        self.outdated = float(self.version) < self._at_least  # a float is what discovery tells
        if self.outdated:
            declared = f"{self._at_least:.0f} as it has declared"
            raise StateError(f"it has version {self.version}, not {declared}; it was probably started anew")
        self._check_announced()
        self._check(manifest.user)
        if manifest.skipped:
            self._skip(manifest.skipped)

    def _check_announced(self) -> None:
        announced, own = self._announced, self._schema.tensors if self._schema else ()
        if len(announced) < len(own):
            raise StateError(f"it has {len(announced)} tensors, this peer {len(own)}")
        for (name, dtype, shape, _), spec in zip(announced, own, strict=False):
            if (dtype, shape) != (spec.torch_dtype, spec.shape):
                there, here = (
                    f"{DTYPE_NAMES[d]}{list(s)}" for d, s in ((dtype, shape), (spec.torch_dtype, spec.shape))
                )
                raise StateError(f"its tensor {name!r} is {there}, here {spec.name!r} is {here}")
        if self.nbytes > self._max_bytes:
            raise StateError(f"it announces {self.nbytes} bytes, more than the {self._max_bytes} of max_bytes")
        if self._expected is not None and self.fingerprint != self._expected:
            raise StateError(f"it has {self.fingerprint} now, not {self._expected} as when it was compared with others")

    def _skip(self, skipped: int) -> None:
        """The donor leaves out what is held."""
        before = self._before
        if skipped != before.offset or can_skip(self._announced, before.resume) != skipped:
            raise StateError(f"it left out {skipped} bytes that this peer does not have")
        whole, inside = covered(self._announced, skipped)
        for tensor in self._announced[:whole]:
            if (known := before.tensors.get(tensor)) is not None:
                self._done.append(known)
            else:  # it has no bytes
                self._complete(_Filling(tensor, bytearray()))
        if inside and before.cut is not None:
            self._filling = _Filling(self._announced[whole], before.cut.buffer, inside)
        self.received = skipped

    def _start_tensor(self, wire: WireTensor) -> None:
        if self._filling is not None and self._filling.opened:
            raise StateError(f"tensor {len(self._done)} is cut short")
        if len(self._done) == len(self._announced):
            raise StateError("it sent more tensors than it announced")
        tensor = self._announced[len(self._done)]
        if (STATE_DTYPES.get(wire.dtype), tuple(wire.size)) != (tensor.dtype, tensor.shape) or wire.compression:
            raise StateError(f"tensor {tensor.name!r} came as {wire.dtype} {list(wire.size)}, not as announced")
        if self._filling is None:
            known = tensor in self._before.tensors
            self._filling = _Filling(tensor, None if known else bytearray(tensor.nbytes))
        self._filling.open(wire.chunks)

    def _add_chunk(self, piece: Buffer) -> None:
        filling = self._filling
        if filling is None or not filling.opened:
            raise StateError("a chunk came that belongs to no tensor")
        last = filling.add(piece)
        self.received += len(piece)
        if last:
            self._complete(filling)

    def _complete(self, filling: _Filling) -> None:
        self._filling = None
        tensor, buffer = filling.tensor, filling.buffer
        if buffer is None:
            self._done.append(self._before.tensors[tensor])
        elif hashlib.sha256(buffer).digest() != tensor.digest:
            self.spliced = filling.taken_over > 0
            whence = f"; its first {filling.taken_over} bytes came in an earlier attempt" if self.spliced else ""
            raise StateError(f"tensor {tensor.name!r} does not match its digest{whence}")
        else:
            flat = (
                torch.frombuffer(buffer, dtype=tensor.dtype)
                if buffer
                else torch.empty(0, dtype=tensor.dtype, device="cpu")
            )
            self._done.append(flat.reshape(tensor.shape))

"""Assembles and verifies a downloaded state, which may come from several interrupted downloads. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from averaging.common import first_moved_name, first_other_name, spelled
from averaging.errors import ProtocolViolationError, StateError
from averaging.protocol import Buffer, DownloadData, Resume, WireTensor
from averaging.state.manifest import (
    State,
    StateTensor,
    can_skip,
    covered,
    read_manifest,
    resume_at,
)
from averaging.tensors import Schema, TensorBuffer, all_finite, nbytes_of

Check = Callable[[Mapping[str, Any]], None]
"""Called with the user dict of a state before its tensors arrive. Raises StateError to refuse the state."""

MAX_GROWTH = 16
"""Default limit on the size of a state: this many times the bytes of the averaged tensors, plus 64 MiB."""


def largest_state(schema: Schema | None) -> int:
    return MAX_GROWTH * (schema.nbytes if schema else 0) + (64 << 20)


@dataclass(frozen=True, slots=True)
class PartialTensor:
    """A tensor of which only the first `filled` bytes were received. They are not verified.

    A later download appends to the same `data`.
    """

    tensor: StateTensor
    data: bytearray
    filled: int


@dataclass(frozen=True, slots=True)
class ReceivedState:
    """The received part of a state, kept so that it need not be downloaded again."""

    announced: tuple[StateTensor, ...] = ()  # all of that state
    tensors: Mapping[StateTensor, torch.Tensor] = field(default_factory=dict)  # received completely and verified
    partial: PartialTensor | None = None  # in which the download was interrupted

    @property
    def nbytes(self) -> int:
        return nbytes_of(list(self.tensors)) + (self.partial.filled if self.partial else 0)

    @property
    def offset(self) -> int:
        """Bytes received without a gap from the beginning of the state."""
        offset = 0
        for tensor in self.announced:
            if tensor not in self.tensors:
                return offset + (self.partial.filled if self.partial and self.partial.tensor == tensor else 0)
            offset += tensor.nbytes
        return offset

    @property
    def resume(self) -> Resume:
        """The request to a donor to begin at `offset`, and to send several small tensors in a message."""
        resume = resume_at(self.announced, self.offset) if self.offset else Resume()
        return replace(resume, joins=True)


@dataclass(frozen=True, slots=True)
class StateLimits:
    """Which states are refused."""

    # largest accepted state; by default `MAX_GROWTH` times the bytes of the schema plus 64 MiB
    max_bytes: int | None = None
    check: Check = lambda _: None  # callback, see `Check`
    finite: bool = False  # whether a state with NaN or infinity in a tensor is refused


class StateAssembler:
    """Assembles the messages of one download into a state and verifies them.

    The state must begin with the tensors of `schema`; None accepts any. What came in `earlier` downloads is reused
    where this state has the same, and continued. A state with a version below `min_version` is refused. Every method
    raises a StateError if the state is inconsistent or not acceptable.
    """

    def __init__(
        self,
        schema: Schema | None,
        limits: StateLimits | None = None,
        earlier: ReceivedState | None = None,
        min_version: float = 0.0,
    ) -> None:
        limits = limits or StateLimits()
        self._schema, self._check, self._finite = schema, limits.check, limits.finite
        self._before, self._min_version = earlier or ReceivedState(), min_version
        self._max_bytes = largest_state(schema) if limits.max_bytes is None else limits.max_bytes
        self.version = 0  # as announced
        self.nbytes = 0  # of all tensors; computed once, because progress displays read it after every message
        self.received = 0  # bytes of tensors, including those that the donor skipped
        # A tensor did not match its digest whose first bytes came from an earlier download: this donor may be right.
        self.mixed_sources = False
        self.outdated = False  # the version is below `min_version`
        self._user: Mapping[str, Any] = {}
        self._announced: tuple[StateTensor, ...] = ()
        self._done: list[torch.Tensor] = []
        self._incoming: TensorBuffer | None = None  # of the next tensor, once its first bytes are here
        self._resumed: bytearray | None = None  # the first bytes of the next tensor, from an earlier download
        self.started = False

    @property
    def complete(self) -> bool:
        return self.started and len(self._done) == len(self._announced)

    @property
    def count(self) -> int:
        return len(self._announced)

    @property
    def kept(self) -> ReceivedState:
        """The part of this state that was received."""
        before = self._before.tensors
        tensors = {tensor: before[tensor] for tensor in self._announced if tensor in before}
        tensors |= zip(self._announced, self._done, strict=False)
        data = self._resumed if self._incoming is None else self._incoming.data
        partial = None
        if data and len(data) < self._announced[len(self._done)].nbytes:
            partial = PartialTensor(self._announced[len(self._done)], data, len(data))
        return ReceivedState(self._announced, tensors, partial)

    def feed(self, message: DownloadData) -> None:
        """Processes the next message of the stream."""
        if not self.started:
            self.started = True
            self._read_metadata(message.metadata)
        if (wire := message.tensor_part) is None:
            return
        if wire.dtype:
            self._start_tensor(wire)
        if self._incoming is None:
            self._add_joined(wire.buffer)
        else:
            self._add_chunk(self._incoming, wire.buffer)

    def finish(self) -> State:
        """Returns the state after the end of the stream."""
        if not self.started:
            raise StateError("it shares no state")
        if not self.complete:
            raise StateError(f"its stream ended after {len(self._done)} of {len(self._announced)} tensors")
        names = (tensor.name for tensor in self._announced)
        return State(self.version, dict(zip(names, self._done, strict=True)), self._user)

    def _read_metadata(self, packed: bytes) -> None:
        manifest = read_manifest(packed)
        self.version, self._user, self._announced = manifest.version, manifest.user, manifest.tensors
        self.nbytes = nbytes_of(self._announced)
        self.outdated = float(self.version) < self._min_version  # donors declare the version as a float
        if self.outdated:
            declared = f"{self._min_version:.0f} as declared"
            raise StateError(f"it has version {self.version}, not {declared}; it was probably restarted")
        self._check_announced(manifest.named)
        self._check(manifest.user)
        if manifest.skipped:
            self._skip(manifest.skipped)

    def _check_announced(self, named: bool) -> None:
        announced, own = self._announced, self._schema.tensors if self._schema else ()
        if len(announced) < len(own):
            lacking = own[len(announced)].name
            hint = "; give all peers of the run model=model, or none" if lacking.startswith("buffer/") else ""
            raise StateError(f"it has {len(announced)} tensors, this peer has {len(own)} ({lacking!r} only here{hint})")
        for tensor, spec in zip(announced, own, strict=False):
            if (tensor.dtype, tensor.shape) != (spec.dtype, spec.shape):
                raise StateError(
                    f"its tensor {tensor.name!r} is {tensor.dtype}{list(tensor.shape)}, "
                    f"here {spec.name!r} is {spec.dtype}{list(spec.shape)}"
                )
        ours, theirs = [spec.name for spec in own], [tensor.name for tensor in announced[: len(own)]]
        if other := (first_other_name if named else first_moved_name)(ours, theirs):
            raise StateError(
                f"it averages {other[1]!r} where this peer has {other[0]!r}; use the same model, with its parameters "
                "and buffers in the same order"
            )
        if self.nbytes > self._max_bytes:
            raise StateError(
                f"it announces {self.nbytes} bytes, more than the {self._max_bytes} of {spelled('max_bytes')}"
            )

    def _skip(self, skipped: int) -> None:
        """Takes the bytes that the donor skipped from the earlier download."""
        before = self._before
        if skipped != before.offset or can_skip(self._announced, before.resume) != skipped:
            raise StateError(f"it skipped {skipped} bytes that this peer does not have")
        whole, inside = covered(self._announced, skipped)
        for tensor in self._announced[:whole]:
            known = before.tensors.get(tensor)
            # An empty tensor was not received.
            self._done.append(self._verified(tensor, bytearray()) if known is None else known)
        if inside and before.partial is not None:
            data = before.partial.data
            # Another download from the same beginning may have gone on, and even have made a tensor of the bytes.
            self._resumed = data if len(data) == inside else data[:inside]
        self.received = skipped

    def _start_tensor(self, wire: WireTensor) -> None:
        if self._incoming is not None:
            raise StateError(f"tensor {self._announced[len(self._done)].name!r} is incomplete")
        if self.complete:
            raise StateError("it sent more tensors than it announced")
        tensor = self._announced[len(self._done)]
        if (wire.dtype, tuple(wire.size)) != (tensor.dtype, tensor.shape) or wire.compression:
            raise StateError(f"tensor {tensor.name!r} came as {wire.dtype} {list(wire.size)}, not as announced")
        data = None if tensor in self._before.tensors else bytearray() if self._resumed is None else self._resumed
        self._incoming = TensorBuffer(tensor.nbytes, data, max(1, wire.chunks))

    def _add_joined(self, piece: Buffer) -> None:
        """Takes a message with one or several whole tensors, which it does not describe."""
        place, count = 0, len(self._done)
        while not self.complete and self._resumed is None:
            tensor = self._announced[len(self._done)]
            if place + tensor.nbytes > len(piece):
                break
            before = self._before.tensors.get(tensor)
            data = bytearray(piece[place : place + tensor.nbytes])
            self._done.append(self._verified(tensor, data) if before is None else before)
            place += tensor.nbytes
        if place < len(piece) or len(self._done) == count:
            raise StateError("it sent a chunk that belongs to no tensor")
        self.received += place

    def _add_chunk(self, incoming: TensorBuffer, piece: Buffer) -> None:
        tensor = self._announced[len(self._done)]
        try:
            complete = incoming.add(piece)
        except ProtocolViolationError as error:
            raise StateError(f"tensor {tensor.name!r} does not fit its announcement: {error}") from None
        self.received += len(piece)
        if complete:
            data, self._incoming = incoming.data, None
            self._done.append(self._before.tensors[tensor] if data is None else self._verified(tensor, data))
            self._resumed = None

    def _verified(self, tensor: StateTensor, data: bytearray) -> torch.Tensor:
        """The tensor of these bytes, after their check."""
        if hashlib.sha256(data).digest() != tensor.digest:
            self.mixed_sources = bool(self._resumed)
            source = "; its first bytes came from an earlier download" if self._resumed else ""
            raise StateError(f"tensor {tensor.name!r} does not match its digest{source}")
        values = tensor.over(data)
        if self._finite and values.is_floating_point() and not all_finite(values):
            allow = spelled("non_finite", "allow")
            raise StateError(f"its tensor {tensor.name!r} holds NaN or infinity; {allow} takes it over")
        return values

"""Copies between the dataclasses of the library and the messages of the wire, by the names of their fields.

`MessageCopier` derives from the types of a dataclass and from the descriptor of a message how each field is copied and
checked; a `Rule` says what the types do not. `AVERAGING_DATA` and `DOWNLOAD_DATA` carry tensors; all other messages are
in `methods`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from types import NoneType
from typing import Any, Generic, Protocol, Self, TypeVar, get_args, get_origin, get_type_hints

import torch
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from averaging.errors import ConfigError, ProtocolViolationError
from averaging.protocol import TENSOR_COMPRESSION, AveragingData, CompressionType, DownloadData, WireTensor
from averaging.tensors import (
    AVERAGED_DTYPES,
    STATE_DTYPES,
    Codec,
    Raw,
    TensorBuffer,
    check_size,
    chunks_of,
    decoder,
    dtype_name,
    encode,
)
from averaging.transport.grpc.channel_options import MAX_DIMENSIONS, check_count
from averaging.wire import averaging_pb2, runtime_pb2
from averaging.wire.runtime_pb2 import CompressionType as WireCompression, Tensor as TensorMessage

Content = TypeVar("Content")


class _Bulk(Protocol):
    @property
    def tensor_part(self) -> WireTensor | None: ...

    def with_tensor(self, tensor: WireTensor | None) -> Self: ...

    def __hash__(self) -> int: ...


Bulk = TypeVar("Bulk", bound=_Bulk)


@dataclass(frozen=True, slots=True)
class Rule:
    """What the types of a field do not say."""

    most: int | None = None  # maximum number of items, which is checked before Python objects are made of them
    items: str = ""  # name of the items in the error
    select: Callable[[Any], Any] | None = None  # returns what is copied of the field's value on the wire
    # converts the value of the dataclass after it was read; raises ProtocolViolationError if it is invalid
    read: Callable[[Any], Any] | None = None
    write: Callable[[Any], Any] | None = None  # converts the value of the dataclass before it is written
    copier: MessageCopier[Any] | None = None  # for the messages in this field, if their own fields have rules


_NO_RULE = Rule()

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    read: Callable[[Message], Any]
    write: Callable[[Any], Any]


class MessageCopier(Generic[Content]):
    """Encodes and decodes the objects of one type as one kind of message; a `MessageType`.

    Fields have the same names on both sides; others are left out, or have their default. Enums are checked, `X | None`
    is an absent field (an empty one, if the wire does not tell them apart), and other messages must be present.

    Args:
        kind: A dataclass. Or a tuple of fixed length, whose items are the message's fields in order; NoneType for a
            message without content; and any other type for a message with one field.
        wire: The generated class.
        rules: By the name of the field.
    """

    def __init__(self, kind: type[Content], wire: type[Message], **rules: Rule) -> None:
        self.DESCRIPTOR = wire.DESCRIPTOR
        self._wire = wire
        self._take, self._make, hints = _shape(kind, list(wire.DESCRIPTOR.fields_by_name))
        name = getattr(kind, "__name__", wire.DESCRIPTOR.name)
        self._fields = [
            _field(name, descriptor, hints[field], rules.get(field, _NO_RULE))
            for field, descriptor in wire.DESCRIPTOR.fields_by_name.items()
            if field in hints
        ]

    def SerializeToString(self, content: Content, /) -> bytes:  # noqa: N802 - protobuf's name
        return self.write(content).SerializeToString()

    def FromString(self, raw: bytes, /) -> Content:  # noqa: N802 - protobuf's name
        return self.read(self._wire.FromString(raw))

    def write(self, content: Content) -> Message:
        values = self._take(content)
        return self._wire(**{field.name: field.write(values[field.name]) for field in self._fields})

    def read(self, message: Any) -> Content:
        content: Content = self._make(self._values(message))
        return content

    def _values(self, message: Message) -> dict[str, Any]:
        return {field.name: field.read(message) for field in self._fields}


def _shape(kind: Any, fields: list[str]) -> tuple[Callable[[Any], Values], Callable[[Values], Any], Values]:
    if kind is NoneType:
        return lambda _: {}, lambda _: None, {}
    make: Callable[..., Any] = kind
    if is_dataclass(kind):
        hints = {name: hint for name, hint in get_type_hints(kind).items() if name in fields}
        getters = {name: attrgetter(name) for name in hints}
        return lambda content: {name: get(content) for name, get in getters.items()}, lambda v: make(**v), hints
    if get_origin(kind) is tuple and Ellipsis not in (items := get_args(kind)):
        return (
            lambda content: dict(zip(fields, content, strict=True)),
            lambda v: tuple(v.values()),
            dict(zip(fields, items, strict=True)),
        )
    (only,) = fields
    return lambda content: {only: content}, lambda v: v[only], {only: kind}


def _field(kind: str, descriptor: Any, hint: Any, rule: Rule) -> _Field:
    name, optional = descriptor.name, NoneType in get_args(hint)
    if optional:
        (hint,) = set(get_args(hint)) - {NoneType}
    pairs = get_origin(hint) is not None and issubclass(get_origin(hint), Mapping)
    if pairs:
        hint = tuple[tuple[get_args(hint)], ...]  # type: ignore[misc]
    repeated = get_origin(hint) is tuple and get_args(hint)[-1] is Ellipsis
    read, write = _item(kind, descriptor, get_args(hint)[0] if repeated else hint, rule)
    present = _presence(kind, descriptor, optional=optional) if not repeated else None
    whole = dict if pairs else tuple

    def read_field(message: Message) -> Any:
        if present is not None and not present(message):
            return None
        value = getattr(message, name)
        if rule.most is not None:
            check_count(value, rule.most, rule.items)
        if rule.select is not None:
            value = rule.select(value)
        if read is not None:
            value = whole(map(read, value)) if repeated else read(value)
        elif repeated:
            value = tuple(value)
        return value if rule.read is None else rule.read(value)

    def write_field(value: Any) -> Any:
        if value is None:
            return None
        if rule.write is not None:
            value = rule.write(value)
        if pairs:
            value = value.items()
        if write is None:
            return value
        return map(write, value) if repeated else write(value)

    return _Field(name, read_field, write_field)


Convert = Callable[[Any], Any]


def _item(kind: str, descriptor: Any, hint: Any, rule: Rule) -> tuple[Convert | None, Convert | None]:
    if descriptor.message_type is not None:
        copier = rule.copier or MessageCopier(hint, GetMessageClass(descriptor.message_type))
        return copier.read, copier.write
    if isinstance(hint, type) and issubclass(hint, Enum) and rule.read is None:
        return lambda value: _enum(hint, value, kind), None
    return None, None


def _presence(kind: str, descriptor: Any, *, optional: bool) -> Callable[[Message], bool] | None:
    name, message = descriptor.name, descriptor.message_type is not None

    def present(wire: Message) -> bool:
        return wire.HasField(name) if descriptor.has_presence else bool(getattr(wire, name))

    def required(wire: Message) -> bool:
        if not wire.HasField(name):
            raise ProtocolViolationError(f"a {kind} without a {name}")
        return True

    return present if optional else required if message else None


def _enum(kind: type[Enum], value: object, owner: str) -> Enum:
    try:
        return kind(value)
    except ValueError:
        words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in kind.__name__).strip()
        raise ProtocolViolationError(f"a {owner} with the unknown {words} {value!r}") from None


# Tensors


def _check_chunks(chunks: int) -> int:
    if chunks < 0:
        raise ProtocolViolationError(f"a tensor in {chunks} chunks")
    return chunks


TENSOR = MessageCopier(
    WireTensor,
    runtime_pb2.Tensor,
    buffer=Rule(write=bytes),
    size=Rule(MAX_DIMENSIONS, "dimensions"),
    chunks=Rule(read=_check_chunks),
)


_BUFFER = runtime_pb2.Tensor.DESCRIPTOR.fields_by_name["buffer"].number


class TensorCopier(MessageCopier[Bulk]):
    """Copies messages with a `tensor_part`. Encoding copies its buffer once, where protobuf makes three copies."""

    def __init__(self, kind: type[Bulk], wire: type[Message]) -> None:
        super().__init__(kind, wire, tensor_part=Rule(copier=TENSOR))
        self._number = wire.DESCRIPTOR.fields_by_name["tensor_part"].number
        self._outer = lru_cache(maxsize=16)(super().SerializeToString)
        self._head = lru_cache(maxsize=256)(self._encode_head)

    def SerializeToString(self, content: Bulk, /) -> bytes:  # noqa: N802 - protobuf's name
        outer, tensor = self._outer(content.with_tensor(None)), content.tensor_part
        if tensor is None:
            return outer
        return b"".join((outer, self._head(tensor.with_buffer(b""), len(tensor.buffer)), tensor.buffer))

    def _encode_head(self, tensor: WireTensor, nbytes: int) -> bytes:
        """Encodes a tensor up to its buffer, its last field. All parts of one size have the same head."""
        inner = TENSOR.SerializeToString(tensor) + (_length_prefix(_BUFFER, nbytes) if nbytes else b"")
        return _length_prefix(self._number, len(inner) + nbytes) + inner


def _length_prefix(field: int, nbytes: int) -> bytes:  # what precedes the content of a field: two varints
    encoded = bytearray()
    for value in (field << 3 | 2, nbytes):
        while value > 0x7F:
            encoded.append(value & 0x7F | 0x80)
            value >>= 7
        encoded.append(value)
    return bytes(encoded)


class _AveragingDataCopier(TensorCopier[AveragingData]):
    """Keeps the encoded message in the object, since one average goes to every sender."""

    def SerializeToString(self, content: AveragingData, /) -> bytes:  # noqa: N802 - protobuf's name
        if not content.encoded:
            content.encoded.append(super().SerializeToString(content))
        return content.encoded[0]


AVERAGING_DATA = _AveragingDataCopier(AveragingData, averaging_pb2.AveragingData)

DOWNLOAD_DATA = TensorCopier(DownloadData, averaging_pb2.DownloadData)


CHUNK_BYTES = 4 << 20  # default maximum bytes of a tensor in one message

_INTEGERS = {name: Raw(name, dtype) for name, dtype in STATE_DTYPES.items() if name not in AVERAGED_DTYPES}


def tensor_messages(
    tensor: torch.Tensor, compression: CompressionType | str = CompressionType.NONE, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[TensorMessage]:
    """Encodes a dense tensor of any shape and device as one or more messages, to be read by a `TensorReader` in order.

    Args:
        tensor: A tensor of one of `STATE_DTYPES`. Integers and bool are never compressed.
        compression: As the option `compression` of a peer.
        chunk_bytes: Maximum bytes of the tensor in one message.

    Raises:
        ConfigError: The dtype cannot be sent, or there is no such compression.
    """
    name, code = dtype_name(tensor.dtype), TENSOR_COMPRESSION.check("compression", compression)
    if name not in STATE_DTYPES:
        raise ConfigError(f"{tensor.dtype} cannot be sent; {', '.join(STATE_DTYPES)} can")
    tensor = tensor.detach().cpu()
    if name in _INTEGERS:
        wire = WireTensor(_INTEGERS[name].pack(tensor), tuple(tensor.shape), name)
    else:
        wire = encode(tensor, code)
    for chunk in chunks_of(wire, chunk_bytes):
        yield TensorMessage(
            buffer=bytes(chunk.buffer),
            size=chunk.size,
            dtype=chunk.dtype,
            compression=WireCompression.ValueType(chunk.compression),
            chunks=chunk.chunks if chunk.chunks > 1 else 0,
        )


class TensorReader:
    """Decodes tensors from the messages of `tensor_messages`.

    The first message of a tensor gives its size, dtype and compression, and so the bytes that it takes. A message with
    more bytes or chunks than fit is refused. Memory is taken as bytes arrive, not when they are announced.

    Args:
        max_bytes: Maximum bytes of one tensor on the wire; larger ones are refused at their first message.
    """

    def __init__(self, max_bytes: int = 1 << 32) -> None:
        self._max_bytes = max_bytes
        self._wire: WireTensor | None = None
        self._buffer = TensorBuffer(0, bytearray())

    @property
    def complete(self) -> bool:
        return self._wire is None

    def read(self, message: TensorMessage) -> torch.Tensor | None:
        """Returns the tensor that is complete with this message, or None if more messages follow.

        The tensor is new and on the CPU. Its dtype is the one that was sent, or float32 if it was compressed.

        Raises:
            ProtocolViolationError: The message is not the next one of a tensor, or the tensor is malformed or large.
        """
        if self._wire is None:
            self._wire = self._begin(message)
        elif message.size or message.dtype:
            raise ProtocolViolationError("a tensor begins before the last chunk of the one before")
        buffer = self._buffer
        if buffer.nbytes and not message.buffer:
            raise ProtocolViolationError(f"a tensor of {buffer.nbytes} bytes with an empty chunk")
        if not buffer.add(message.buffer):
            return None
        wire, self._wire = replace(self._wire, buffer=memoryview(buffer.data or b"")), None
        return _decode(wire)

    def _begin(self, first: TensorMessage) -> WireTensor:
        """Checks what the first message of a tensor announces."""
        size = tuple(check_count(first.size, MAX_DIMENSIONS, "dimensions"))
        wire = WireTensor(b"", size, first.dtype, first.compression)
        nbytes, chunks = _codec(wire).nbytes(size), max(1, first.chunks)
        if nbytes > self._max_bytes:
            raise ProtocolViolationError(f"a tensor of {nbytes} bytes, more than {self._max_bytes} bytes")
        if first.chunks < 0 or chunks > max(1, nbytes):
            raise ProtocolViolationError(f"a tensor of {nbytes} bytes in {first.chunks} chunks")
        self._buffer = TensorBuffer(nbytes, bytearray(), chunks)
        return wire


def _codec(wire: WireTensor) -> Codec:
    raw = _INTEGERS.get(wire.dtype)
    if raw is None or wire.compression != CompressionType.NONE:
        return decoder(wire)
    check_size(wire.size)
    return raw


def _decode(wire: WireTensor) -> torch.Tensor:
    """Decodes a tensor of the right length, which may share the memory of its buffer."""
    if wire.dtype == "bool":  # bytes other than 0 and 1 are no bools
        return _INTEGERS["uint8"].unpack(wire.buffer, wire.size) != 0
    return _codec(wire).unpack(wire.buffer, wire.size)

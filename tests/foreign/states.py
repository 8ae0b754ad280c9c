"""Writes the messages of a state, and reads them in the two ways that the protocol allows."""

import hashlib
from math import prod
from typing import Any

import msgpack

Message = dict[str, Any]

CHUNK_BYTES = 100_000

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int64": 8, "uint8": 1}


def pack(tensors: list[Message], version: int, user: Any, *, in_hex: bool, apart: bool) -> list[Message]:
    """The messages of a state.

    Args:
        tensors: dicts of `name`, `shape` and `buffer`, the bytes of float32.
        in_hex: digests as text instead of bytes.
        apart: the metadata is a separate message before all chunks.
    """
    digests = [hashlib.sha256(tensor["buffer"]) for tensor in tensors]
    metadata = {
        "version": version,
        "tensors": [[tensor["name"], "float32", tensor["shape"]] for tensor in tensors],
        "digest": [digest.hexdigest() if in_hex else digest.digest() for digest in digests],
        "user": user,
    }
    messages: list[Message] = [{}] if apart else []
    for tensor in tensors:
        buffer = tensor["buffer"]
        pieces = [buffer[at : at + CHUNK_BYTES] for at in range(0, len(buffer), CHUNK_BYTES)] or [b""]
        first = {"buffer": pieces[0], "dtype": "float32", "size": tensor["shape"], "chunks": len(pieces)}
        messages += [{"tensor_part": first}, *({"tensor_part": {"buffer": piece}} for piece in pieces[1:])]
    messages[0]["metadata"] = msgpack.packb(metadata)
    return messages


def read(messages: list[Message]) -> Message:
    """Reads a state with its metadata; raises ValueError if they do not match."""
    if not messages:
        return {}
    metadata = msgpack.unpackb(messages[0]["metadata"])
    if any("metadata" in message for message in messages[1:]):
        raise ValueError("metadata in more than one message")
    tensors = _assemble(messages)
    sent = [(tensor["dtype"], tensor["shape"]) for tensor in tensors]
    if sent != [(dtype, shape) for _, dtype, shape in metadata["tensors"]]:
        raise ValueError(f"announced {metadata['tensors']}, sent {sent}")
    if [hashlib.sha256(tensor["buffer"]).digest() for tensor in tensors] != metadata["digest"]:
        raise ValueError("a digest is wrong")
    named = {name: tensor for (name, _, _), tensor in zip(metadata["tensors"], tensors, strict=True)}
    return {"version": metadata["version"], "user": metadata["user"], "tensors": named}


def read_without_metadata(messages: list[Message]) -> list[Message]:
    """Reads the tensors of a state as versions of 2021 do, without metadata."""
    return _assemble([{name: value for name, value in m.items() if name != "metadata"} for m in messages])


def _assemble(messages: list[Message]) -> list[Message]:
    tensors: list[Message] = []
    missing = 0
    for message in messages:
        chunk = message["tensor_part"]
        if chunk.get("dtype"):
            if missing or chunk.get("compression"):
                raise ValueError("a tensor is cut short or compressed")
            missing = chunk["chunks"]
            tensors.append({"dtype": chunk["dtype"], "shape": chunk.get("size", []), "buffer": b""})
        elif set(chunk) - {"buffer"}:
            raise ValueError(f"a chunk carries {sorted(chunk)}")
        missing -= 1
        tensors[-1]["buffer"] += chunk.get("buffer", b"")
    sizes = [prod(tensor["shape"]) * ITEM_BYTES[tensor["dtype"]] for tensor in tensors]
    if missing or sizes != [len(tensor["buffer"]) for tensor in tensors]:
        raise ValueError("a tensor has another length than its shape")
    return tensors

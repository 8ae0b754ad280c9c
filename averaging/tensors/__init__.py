"""Tensors as peers exchange them: what they look like, the codes that turn them into bytes, digests, and a lock.

Read in this order: `manifest` (dtypes, descriptions and their checks, bytes in pieces), `schema` (what all members of a
round must have alike), `shared_tensors` (tensors that the training thread and the event loop both use), `compression`
(encode and decode by code number).
"""

from averaging.tensors.compression import Codec, Raw, bytes_per_element, decode, decode_as, decoder, encode
from averaging.tensors.manifest import (
    AVERAGED_DTYPES,
    DTYPES,
    STATE_DTYPES,
    WEIGHT_DTYPES,
    TensorBuffer,
    TensorInfo,
    check_size,
    check_tensors,
    chunks_of,
    copy_to_cpu,
    dtype_name,
    nbytes_of,
    objection_to,
    pieces_of,
    view_memory,
)
from averaging.tensors.schema import Schema, TensorSpec, describe, first_difference
from averaging.tensors.shared_tensors import (
    SharedTensors,
    Write,
    all_finite,
    digest_of_tensors,
    finite_as,
    in_thread,
    offload,
    sharing_memory,
)

__all__ = [
    "AVERAGED_DTYPES",
    "DTYPES",
    "STATE_DTYPES",
    "WEIGHT_DTYPES",
    "Codec",
    "Raw",
    "Schema",
    "SharedTensors",
    "TensorBuffer",
    "TensorInfo",
    "TensorSpec",
    "Write",
    "all_finite",
    "bytes_per_element",
    "check_size",
    "check_tensors",
    "chunks_of",
    "copy_to_cpu",
    "decode",
    "decode_as",
    "decoder",
    "describe",
    "digest_of_tensors",
    "dtype_name",
    "encode",
    "finite_as",
    "first_difference",
    "in_thread",
    "nbytes_of",
    "objection_to",
    "offload",
    "pieces_of",
    "sharing_memory",
    "view_memory",
]

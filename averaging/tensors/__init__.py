"""Tensors as peers exchange them: their schema, the codes that turn them into bytes, their digests, and a lock.

Read in this order: `schema` (what all members of a round must have alike), `shared_tensors` (tensors that the training
thread and the event loop both use), `compression` (encode and decode by code number), `codec` (what a code implements),
`half_precision` and `quantised` (the codes).
"""

from averaging.tensors.codec import Codec, check_size
from averaging.tensors.compression import bytes_per_element, decode, decode_as, decoder, encode
from averaging.tensors.half_precision import Raw
from averaging.tensors.schema import DTYPES, ReplyForm, Schema, TensorSpec, describe, first_difference
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
    "DTYPES",
    "Codec",
    "Raw",
    "ReplyForm",
    "Schema",
    "SharedTensors",
    "TensorSpec",
    "Write",
    "all_finite",
    "bytes_per_element",
    "check_size",
    "decode",
    "decode_as",
    "decoder",
    "describe",
    "digest_of_tensors",
    "encode",
    "finite_as",
    "first_difference",
    "in_thread",
    "offload",
    "sharing_memory",
]

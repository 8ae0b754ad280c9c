"""Tensors as peers exchange them: what they look like, the codes that turn them into bytes, digests, and a lock.

Read in this order: `manifest` (dtypes, descriptions and their checks, bytes in pieces), `schema` (what all members of a
round must have alike), `staging` (between devices and the host), `shared_tensors` (tensors that the training thread
and the event loop both use), `compression` (encode and decode by code number), `sparse` (only some elements of each
block).
"""

from averaging.tensors.compression import (
    Codec as Codec,
    Raw as Raw,
    codec_of as codec_of,
    decode as decode,
    decode_slices as decode_slices,
    decoder as decoder,
    encode as encode,
    encode_slices as encode_slices,
)
from averaging.tensors.manifest import (
    AVERAGED_DTYPES as AVERAGED_DTYPES,
    DTYPES as DTYPES,
    STATE_DTYPES as STATE_DTYPES,
    WEIGHT_DTYPES as WEIGHT_DTYPES,
    TensorBuffer as TensorBuffer,
    TensorInfo as TensorInfo,
    check_size as check_size,
    check_tensors as check_tensors,
    chunks_of as chunks_of,
    dtype_name as dtype_name,
    nbytes_of as nbytes_of,
    objection_to as objection_to,
    pieces_of as pieces_of,
    view_memory as view_memory,
)
from averaging.tensors.schema import (
    Schema as Schema,
    TensorSpec as TensorSpec,
    describe as describe,
    first_difference as first_difference,
)
from averaging.tensors.shared_tensors import (
    OBJECTS_AT_ONCE as OBJECTS_AT_ONCE,
    SharedTensors as SharedTensors,
    Write as Write,
    all_finite as all_finite,
    digest_of_tensors as digest_of_tensors,
    finite_as as finite_as,
    first_not_finite as first_not_finite,
    in_thread as in_thread,
    offload as offload,
    sharing_memory as sharing_memory,
)
from averaging.tensors.sparse import (
    BlockLayout as BlockLayout,
    Contribution as Contribution,
    EncodedUnion as EncodedUnion,
    SparsePart as SparsePart,
    SparseTensor as SparseTensor,
    VisibleTensor as VisibleTensor,
    combine as combine,
    decode_top_k as decode_top_k,
    decode_union as decode_union,
    decode_visible as decode_visible,
    encode_union as encode_union,
    top_k_nbytes as top_k_nbytes,
    union_limit as union_limit,
    visible_limit as visible_limit,
)
from averaging.tensors.staging import (
    HostCopies as HostCopies,
    StagedTensor as StagedTensor,
    copy_to_cpu as copy_to_cpu,
    copy_to_host as copy_to_host,
    finish as finish,
    host_memory as host_memory,
    is_on_device as is_on_device,
    sent as sent,
)

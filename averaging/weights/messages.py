"""The methods of `averaging.weights.v1.Weights`, and manifests as messages."""

from __future__ import annotations

from averaging.common import CLIENT_PREFIX, is_count, is_endpoint
from averaging.errors import ProtocolViolationError
from averaging.rpc import RpcMethod
from averaging.weights.layout import (
    DIGEST_BYTES,
    MAX_SHARDS,
    Shard,
    WeightLayout,
    WeightManifest,
    WeightSpec,
    check_layout,
)
from averaging.wire import weights_pb2 as wire

FOLLOW = RpcMethod(
    "/averaging.weights.v1.Weights/Follow",
    wire.FollowRequest,
    wire.Version,
    replies_stream=True,
    max_request_bytes=4096,
)
FETCH = RpcMethod(
    "/averaging.weights.v1.Weights/Fetch", wire.FetchRequest, wire.Reply, replies_stream=True, max_request_bytes=1 << 20
)

NOTHING_YET = wire.Version()
"""The first message of a publisher that has no version yet."""


def version_message(manifest: WeightManifest) -> wire.Version:
    """Encodes a manifest."""
    return wire.Version(
        version=manifest.version,
        digest=manifest.digest,
        piece_bytes=manifest.layout.piece_bytes,
        tensors=[
            wire.Tensor(name=spec.name, dtype=spec.dtype, shape=spec.shape, whole=spec.whole, offset=spec.offset)
            for spec in manifest.layout.tensors
        ],
        piece_digests=b"".join(manifest.piece_digests),
        shards=[wire.Shard(endpoint=shard.endpoint, digest=shard.digest) for shard in manifest.shards],
    )


def read_version(message: wire.Version, max_bytes: int, known: WeightLayout | None = None) -> WeightManifest | None:
    """Decodes and checks a manifest from another peer.

    Args:
        message: the message.
        max_bytes: largest accepted state.
        known: the layout of an earlier version; it is reused if the new one is equal.

    Returns:
        The manifest; None if the publisher has no version yet.

    Raises:
        ProtocolViolationError: it is malformed, too large, or its digest does not match.
    """
    if not message.digest:
        return None
    specs = [
        WeightSpec(each.name, each.dtype, tuple(each.shape), tuple(each.whole), tuple(each.offset))
        for each in message.tensors
    ]
    layout = check_layout(specs, message.piece_bytes, max_bytes)
    if known is not None and layout == known:
        layout = known
    if not is_count(message.version):
        raise ProtocolViolationError(f"version {message.version}")
    joined = message.piece_digests
    if len(joined) != DIGEST_BYTES * layout.count:
        raise ProtocolViolationError(f"{len(joined)} bytes of digests for {layout.count} pieces")
    digests = tuple(joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES))
    manifest = WeightManifest(message.version, layout, digests, _read_shards(message))
    if manifest.shards and manifest.shards[0].digest != manifest.digest:
        raise ProtocolViolationError(f"version {message.version}, which is not the first of its own parts")
    if manifest.digest != message.digest:
        raise ProtocolViolationError(f"the digest of version {message.version} does not match its pieces")
    return manifest


def _read_shards(message: wire.Version) -> tuple[Shard, ...]:
    if len(message.shards) > MAX_SHARDS:
        raise ProtocolViolationError(f"{len(message.shards)} parts; at most {MAX_SHARDS} are accepted")
    shards = tuple(Shard(each.endpoint, each.digest) for each in message.shards)
    if any(len(shard.digest) != DIGEST_BYTES for shard in shards):
        raise ProtocolViolationError(f"version {message.version} with a part without a digest")
    for number, shard in enumerate(shards):
        if (number or shard.endpoint) and (not is_endpoint(shard.endpoint) or shard.endpoint.startswith(CLIENT_PREFIX)):
            raise ProtocolViolationError(f"part {number} at {shard.endpoint[:80]!r}, which is no address")
    return shards

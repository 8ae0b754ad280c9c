"""The gRPC methods of `averaging.synchronizer.v1.Synchronizer`, for both sides, and the checks of what they carry."""

from __future__ import annotations

from averaging.common import parse_address
from averaging.errors import ConfigError, ProtocolViolationError
from averaging.rl.synchronizer.coordination import RunningStatus
from averaging.rl.synchronizer.state_stream import MAX_PART_BYTES
from averaging.rpc import RpcMethod, check_named
from averaging.wire import synchronizer_pb2 as wire

_SERVICE = "/averaging.synchronizer.v1.Synchronizer/"

MAX_EXPLORERS = 10_000
"""Explorers of one member."""

GET_STATUS = RpcMethod(f"{_SERVICE}GetStatus", wire.Request, wire.Status)
ATTEND = RpcMethod(
    f"{_SERVICE}Attend",
    wire.FromModule,
    wire.ToModule,
    requests_stream=True,
    replies_stream=True,
    max_request_bytes=MAX_PART_BYTES,
    max_reply_bytes=MAX_PART_BYTES,
)
SET_TRAINER_STATUS = RpcMethod(f"{_SERVICE}SetTrainerStatus", wire.StatusRequest, wire.Done)
TRAINER_REQUIRES_WEIGHT_SYNC = RpcMethod(f"{_SERVICE}TrainerRequiresWeightSync", wire.Request, wire.TrainerReply)
SET_EXPLORER_STATUS = RpcMethod(f"{_SERVICE}SetExplorerStatus", wire.StatusRequest, wire.Done)
EXPLORER_REQUIRES_SYNC = RpcMethod(f"{_SERVICE}ExplorerRequiresSync", wire.Request, wire.ExplorerReply)
SET_MODEL_STATE_DICT = RpcMethod(
    f"{_SERVICE}SetModelStateDict",
    wire.StatePart,
    wire.Version,
    requests_stream=True,
    max_request_bytes=MAX_PART_BYTES,
)
GET_MODEL_STATE_DICT = RpcMethod(
    f"{_SERVICE}GetModelStateDict",
    wire.Request,
    wire.StatePart,
    replies_stream=True,
    max_reply_bytes=MAX_PART_BYTES,
)
GET_STATE_DICT_META = RpcMethod(f"{_SERVICE}GetStateDictMeta", wire.Request, wire.Meta, max_reply_bytes=MAX_PART_BYTES)
WAIT_NEW_MODEL_STATE_DICT = RpcMethod(f"{_SERVICE}WaitNewModelStateDict", wire.WaitRequest, wire.WaitReply)
NOTIFY_NO_NEW_MODEL_STATE_DICT = RpcMethod(f"{_SERVICE}NotifyNoNewModelStateDict", wire.Request, wire.Done)
GET_LATEST_MODEL_VERSION = RpcMethod(f"{_SERVICE}GetLatestModelVersion", wire.Request, wire.Version)
GET_LATEST_MODEL_PATH = RpcMethod(f"{_SERVICE}GetLatestModelPath", wire.PathRequest, wire.Path)
SETUP_WEIGHT_SYNC_GROUP = RpcMethod(
    f"{_SERVICE}SetupWeightSyncGroup", wire.GroupRequest, wire.Done, max_request_bytes=MAX_PART_BYTES
)
COORDINATE_WEIGHT_SYNC_SETUP = RpcMethod(f"{_SERVICE}CoordinateWeightSyncSetup", wire.TimeoutRequest, wire.Done)
COORDINATE_WEIGHT_SYNC_TEARDOWN = RpcMethod(f"{_SERVICE}CoordinateWeightSyncTeardown", wire.Request, wire.Done)
READY_TO_NCCL_SYNC = RpcMethod(f"{_SERVICE}ReadyToNcclSync", wire.ReadyRequest, wire.WaitReply)

STATUSES: dict[RunningStatus, wire.RunningStatus.ValueType] = {
    RunningStatus.RUNNING: wire.RUNNING,
    RunningStatus.REQUIRE_SYNC: wire.REQUIRE_SYNC,
    RunningStatus.STOPPED: wire.STOPPED,
}
_FROM_WIRE = {number: status for status, number in STATUSES.items()}


def status_from(number: wire.RunningStatus.ValueType) -> RunningStatus:
    """Returns the status with this number in messages.

    Raises:
        ProtocolViolationError: There is none.
    """
    status = _FROM_WIRE.get(number)
    if status is None:
        raise ProtocolViolationError(f"status {number}; give RUNNING, REQUIRE_SYNC or STOPPED")
    return status


async def address_from(host: str, port: int) -> tuple[str, int]:
    """Returns a host and a port, named by another process, at which a weight sync group meets.

    Loopback is allowed: all members may be on one machine, and torch's store sends nothing that others choose.

    Raises:
        ProtocolViolationError: They are malformed, or no process can be there.
    """
    endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        parse_address(endpoint)
        await check_named(endpoint, loopback=True)
    except (ConfigError, ProtocolViolationError) as error:
        raise ProtocolViolationError(f"the address of a weight sync group: {error}") from None
    if not port:
        raise ProtocolViolationError("the address of a weight sync group has port 0")
    return host, port

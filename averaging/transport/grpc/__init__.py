# ruff: noqa: E402 - the environment of gRPC is set before it is imported
"""The gRPC transport, with the health, reflection and channelz services for tools such as grpcurl."""

import os
from importlib import metadata

# gRPC reads these once, when it is first imported. Values set by the user take precedence.
_SETTINGS = {
    # The default logs a line for every connection that another peer closes. Callers get an error where it matters.
    "GRPC_VERBOSITY": "ERROR",
    # The default starts threads in every forked process, which sometimes crash. Workers of data loaders need none.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    # The default asks the name servers itself and keeps what /etc/hosts had. This one asks the system at each dial, as
    # other programs do: a pod that comes back has another address under its old name.
    "GRPC_DNS_RESOLVER": "native",
}
if tuple(map(int, metadata.version("grpcio").split(".")[:2])) <= (1, 85):  # later releases may not know these names
    # The newer engine moves each read and write to another thread: 10 to 15 % slower (docs/design/performance.md).
    _SETTINGS["GRPC_EXPERIMENTS"] = "-event_engine_client,-event_engine_listener"
_ours = _SETTINGS.keys() - os.environ.keys()
os.environ.update({name: _SETTINGS[name] for name in _ours})

from averaging.transport.grpc.authentication import claim_checker as claim_checker
from averaging.transport.grpc.channel_options import (
    CONNECT_SECONDS as CONNECT_SECONDS,
    HANDSHAKE_SECONDS as HANDSHAKE_SECONDS,
    IDLE_SECONDS as IDLE_SECONDS,
    KEEPALIVE_SECONDS as KEEPALIVE_SECONDS,
    SILENCE_SECONDS as SILENCE_SECONDS,
    SMALL_BYTES as SMALL_BYTES,
    WRITE_BYTES_PER_SECOND as WRITE_BYTES_PER_SECOND,
    WRITE_SECONDS as WRITE_SECONDS,
)
from averaging.transport.grpc.channels import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES, RpcChannel as RpcChannel
from averaging.transport.grpc.conversion import (
    AVERAGING_DATA as AVERAGING_DATA,
    MessageCopier as MessageCopier,
    TensorReader as TensorReader,
    tensor_messages as tensor_messages,
)
from averaging.transport.grpc.dialling import Dialling as Dialling, check_listen as check_listen
from averaging.transport.grpc.etcd import EtcdCluster as EtcdCluster
from averaging.transport.grpc.methods import GET_SCHEMA as GET_SCHEMA, GET_STATUS as GET_STATUS, RECORD as RECORD
from averaging.transport.grpc.transport import GrpcTransport as GrpcTransport
from averaging.wire.runtime_pb2 import Tensor

TensorMessage = Tensor


for _name in _ours:
    del os.environ[_name]

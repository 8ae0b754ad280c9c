"""The transport on real sockets: gRPC with health, reflection and channelz, for peers and for people with grpcurl."""

import os
from importlib import metadata

# gRPC reads these once, when it is first imported; a choice of the user's own counts.
_CHOICES = {
    # By default it writes a line for every connection that another peer ends; what matters of that reaches the caller
    # as an error.
    "GRPC_VERBOSITY": "ERROR",
    # By default it starts threads in every forked process, which crash now and then; workers of data loaders need none.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
if tuple(map(int, metadata.version("grpcio").split(".")[:2])) <= (1, 85):  # a later one may not know the names
    # Its newer engine hands every read and write to another thread: 10 to 15 % slower (docs/design/performance.md).
    _CHOICES["GRPC_EXPERIMENTS"] = "-event_engine_client,-event_engine_listener"
_ours = _CHOICES.keys() - os.environ.keys()
os.environ.update({name: _CHOICES[name] for name in _ours})

from averaging.transport.grpc.transport import GrpcTransport  # noqa: E402

for _name in _ours:
    del os.environ[_name]

__all__ = ["GrpcTransport"]

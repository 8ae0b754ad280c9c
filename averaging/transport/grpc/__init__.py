"""The transport on real sockets: gRPC with health, reflection and channelz, for peers and for people with grpcurl."""

import os

# gRPC reads these once, when it is first imported; a choice of the user's own counts.
_CHOICES = {
    # By default it writes a line for every connection that another peer ends; what matters of that reaches the caller
    # as an error.
    "GRPC_VERBOSITY": "ERROR",
    # By default it starts threads in every forked process, which crash now and then; workers of data loaders need none.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
_ours = _CHOICES.keys() - os.environ.keys()
os.environ.update({name: _CHOICES[name] for name in _ours})

from averaging.transport.grpc.transport import GrpcTransport  # noqa: E402

for _name in _ours:
    del os.environ[_name]

__all__ = ["GrpcTransport"]

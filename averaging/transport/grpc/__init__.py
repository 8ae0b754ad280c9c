"""The transport on real sockets: gRPC with health, reflection and channelz, for peers and for people with grpcurl."""

import os

# gRPC reads this once, when it is first imported. By default it writes a line for every connection that another peer
# ends; what matters of that reaches the caller as an error.
_own_choice = os.environ.get("GRPC_VERBOSITY")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from averaging.transport.grpc.transport import GrpcTransport  # noqa: E402

if _own_choice is None:
    del os.environ["GRPC_VERBOSITY"]

__all__ = ["GrpcTransport"]
